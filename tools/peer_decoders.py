#!/usr/bin/env python3
"""Training steps and sampling of transformers' Llama and Qwen3 on the processor, to compare `phalanx bench step` and `phalanx sample` with.

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=-1 MALLOC_ARENA_MAX=1 \
        python tools/peer_decoders.py step llama-mini --dtype bf16 [--compile]
    python tools/peer_decoders.py step qwen3-0.6b --dtype bf16 --lora 16
    python tools/peer_decoders.py sample llama-mini --dtype bf16 --tokens 200

The three variables keep PyTorch's freed memory mapped, which makes its steps 1.2 times as fast. A step is forward and backward of each
micro-batch (autocast in 16 bits, as PyTorch trains), clipping, fused AdamW on f32 weights. With `--lora` PEFT adapts all linear layers, over a
base in the type itself, with adapters in f32. `sample` is greedy, with the cache of `generate`, in the type itself. Prints one line of JSON;
`phalanx` prints the configuration that has the same shape. Needs torch and transformers, and peft for adapters.
"""

import argparse
import json
import resource
import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# The family, keys of transformers' configuration, sequences of a micro-batch, tokens of a sequence, and micro-batches of a step.
SHAPES = {
    "llama-mini": ("llama", dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, intermediate_size=1536, vocab_size=32000), 8, 256, 1),
    "qwen3-0.6b": ("qwen3", dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, intermediate_size=3072, vocab_size=151936, tie_word_embeddings=True), 1, 512, 4),
}  # fmt: skip
PHALANX = {
    "llama-mini": "model.arch=llama model.layers=8 model.hidden=512 model.heads=8 model.kv_heads=2 model.intermediate=1536 model.vocab=32000 model.seq=256 batch.global=8 batch.micro=8",
    "qwen3-0.6b": "model.arch=qwen3 model.size=qwen3-0.6b model.seq=512 batch.global=4 batch.micro=1",
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def model_of(shape, dtype):
    family, keys, _, seq, _ = SHAPES[shape]
    config = AutoConfig.for_model(family, **keys, max_position_embeddings=max(1024, seq))
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)


def step(args):
    """Median seconds of training steps, and the loss of the last."""
    _, keys, batch, seq, micro_batches = SHAPES[args.shape]
    micro_batches = args.micro_batches or micro_batches
    model = model_of(args.shape, DTYPES[args.dtype] if args.lora else torch.float32)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear"))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    network = torch.compile(model) if args.compile else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, fused=True)
    seconds = []
    for number in range(args.warmup + args.steps):
        batches = torch.randint(keys["vocab_size"], (micro_batches, batch, seq))
        start = time.perf_counter()
        for ids in batches:
            with torch.autocast("cpu", dtype=DTYPES[args.dtype], enabled=args.dtype != "f32"):
                loss = network(input_ids=ids, labels=ids).loss / micro_batches
            loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number >= args.warmup:
            seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    return {"step_s": median, "step_s_min": min(seconds), "tokens_per_s": micro_batches * batch * seq / median, "last_loss": loss.item() * micro_batches}


@torch.inference_mode()
def sample(args):
    """Seconds of a greedy continuation of eight tokens, the fastest of several."""
    model = model_of(args.shape, DTYPES[args.dtype]).eval()
    prompt = torch.randint(SHAPES[args.shape][1]["vocab_size"], (1, 8))
    seconds = []
    for _ in range(args.steps):
        start = time.perf_counter()
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=args.tokens, max_new_tokens=args.tokens, do_sample=False, pad_token_id=0)
        seconds.append(time.perf_counter() - start)
        assert ids.shape[1] == prompt.shape[1] + args.tokens
    return {"sample_s": min(seconds), "tokens_per_s": args.tokens / min(seconds)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "sample"])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed, or samples")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--micro-batches", type=int, metavar="N", help="micro-batches of a step, where others than the shape's: batch.global is as many times batch.micro")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank instead of all weights")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    found = {"step": step, "sample": sample}[args.what](args)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({**vars(args), **found, "resident_bytes": resident, "torch": torch.__version__, "phalanx": PHALANX[args.shape]}))


if __name__ == "__main__":
    main()
