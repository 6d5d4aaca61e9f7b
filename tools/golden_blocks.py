"""Blocks of NF4 by bitsandbytes and of Q8_0 by gguf, the oracle of crates/cpu/tests/cpu/blocks.rs.

    python3 -m venv ../golden && ../golden/bin/pip install torch safetensors bitsandbytes gguf
    ../golden/bin/python tools/golden_blocks.py

It writes crates/cpu/tests/goldens/blocks.safetensors (fixed seed):

    input        numbers of many sizes; among them groups of zeros, of exact midpoints of NF4's codes, and of halves of Q8_0's scale
    nf4.codes    bitsandbytes' codes, two a byte, the first in the high half
    nf4.scales   its scales, before they are quantised again
    nf4.error    root mean square by which the numbers of the second half move when it quantises their scales again
    q8_0         gguf's groups: a scale in f16 and 32 whole numbers
"""

from pathlib import Path

import bitsandbytes.functional as bnb
import gguf
import numpy
import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).resolve().parent.parent / "crates/cpu/tests/goldens/blocks.safetensors"


def main():
    torch.manual_seed(1)
    # Two blocks of 4,096 elements in groups of 64: one whose groups differ by factors of up to 1,000, and one as weights are.
    x = torch.randn(128, 64)
    x[:64] *= 10 ** torch.linspace(-3, 0, 64)[torch.randperm(64), None]
    x[3] = 0
    code = bnb.get_4bit_type("nf4", device="cpu")
    middles = (code[1:] + code[:-1]) / 2
    x[5, 0], x[5, 1:16] = 1, middles
    x[6, 0], x[6, 1:64] = -127, torch.arange(63) - 31.5
    x = x.flatten()
    codes, once = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4")
    half, twice = bnb.quantize_4bit(x[4096:], blocksize=64, quant_type="nf4", compress_statistics=True)
    scales = [once.absmax[64:], bnb.dequantize_blockwise(twice.absmax, twice.state2) + twice.offset]
    one, two = (code[indices(half)].reshape(64, 64) * scale[:, None] for scale in scales)
    q8_0 = gguf.quants.quantize(x.numpy().reshape(-1, 64), gguf.GGMLQuantizationType.Q8_0)
    tensors = {
        "input": x,
        "nf4.codes": codes.flatten(),
        "nf4.scales": once.absmax,
        "nf4.error": (two - one).square().mean().sqrt().reshape(1),
        "q8_0": torch.from_numpy(numpy.ascontiguousarray(q8_0).flatten()),
    }
    save_file(tensors, GOLDEN)
    print({name: list(tensor.shape) for name, tensor in tensors.items()}, float(tensors["nf4.error"]))


def indices(codes):
    """The code of each element."""
    codes = codes.flatten().int()
    return torch.stack([codes >> 4, codes & 15], 1).flatten()


if __name__ == "__main__":
    main()
