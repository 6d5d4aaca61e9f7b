"""Golden values of a tiny Hugging Face BERT, the oracle of crates/models/tests/goldens.rs.

How to run it, from the root of the repository and in an environment outside it:

    python3 -m venv ../golden && ../golden/bin/pip install torch transformers safetensors
    ../golden/bin/python tools/golden_bert.py

It writes crates/models/tests/golden/bert/ (f32 where no other type is named, dropout 0, one thread, fixed seeds):

    config.json, model.safetensors
                          a BertForMaskedLM, as `save_pretrained` writes it; the decoder is tied and not stored
    forward.safetensors   tokens [4, 24] i32; types [4, 24] i32, the token types: 0, then 1 from a place that differs from
                          sequence to sequence; targets [4, 24] i32, the token that was there at the 4 positions of each
                          sequence that are predicted, -1 elsewhere;
                          logits [16, 96] of the predicted positions, in order; loss [1], their mean cross entropy;
                          grad.<name>, d loss / d <name>, for each parameter, those of query, key and value as one
                          (`...attention.self.qkv.weight` [96, 32], `.bias` [96]: concatenated in that order)
    forward_bf16.safetensors, forward_f16.safetensors
                          logits, loss, grad.<name> in double precision (stored as f32) of the model whose parameters
                          are rounded to the type; error.<name> [2], how far PyTorch itself is that computes in the
                          type: greatest error over the tensor's greatest value, and root mean square of both

In 16 bits the loss is taken from logits widened to f32; in f16 it is multiplied by 2^16 before backward, and gradients
are divided by it. Each error is the greater one of two runs, with attention written out and fused
(`scaled_dot_product_attention`): they round in different places, as any other implementation does.

The exact gradient of the keys' bias is 0, since softmax does not see it; what is computed is rounding noise. As a third
of a packed parameter it is held to the size of the other two.

The last lines printed say how far f32 PyTorch is from the same work in double: what a tolerance in a test has to allow
for.
"""

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM

from model_goldens import LOW, distance, forward_golden, low_forward_golden, nowhere_trivial, save, tell_sizes

GOLDEN = Path(__file__).resolve().parent.parent / "crates" / "models" / "tests" / "golden" / "bert"
VOCAB, BATCH, SEQ, POSITIONS, PREDICTED, MASK = 96, 4, 24, 32, 4, 95
BUDGET_BYTES = 440 << 10  # what the repository carries of these


def build() -> BertForMaskedLM:
    torch.manual_seed(21)
    config = BertConfig(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=64, vocab_size=VOCAB,
        max_position_embeddings=POSITIONS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=None,
        attn_implementation="eager",
    )
    return nowhere_trivial(BertForMaskedLM(config))


def batch() -> dict[str, torch.Tensor]:
    """tokens, types, targets, each [BATCH, SEQ] int64; targets are -100 where nothing is predicted"""
    generator = torch.Generator().manual_seed(5)
    original = torch.randint(0, MASK, (BATCH, SEQ), generator=generator)
    border = torch.randint(6, SEQ - 6, (BATCH, 1), generator=generator)
    types = (torch.arange(SEQ) >= border).long()
    tokens, targets = original.clone(), torch.full((BATCH, SEQ), -100)
    for row in range(BATCH):
        predicted = torch.randperm(SEQ, generator=generator)[:PREDICTED]
        targets[row, predicted] = original[row, predicted]
        tokens[row, predicted[: PREDICTED - 1]] = MASK  # the last one stays as it is
    return {"tokens": tokens, "types": types, "targets": targets}


def forward(model, data):
    """logits [predicted, VOCAB], mean cross entropy []"""
    logits = model(input_ids=data["tokens"], token_type_ids=data["types"]).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return logits[data["targets"] >= 0], F.cross_entropy(wide.flatten(0, 1), data["targets"].flatten())


def packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same, query, key and value as one"""
    out = {}
    for name, t in tensors.items():
        if ".self.query." in name:
            parts = [tensors[name.replace("query", part)] for part in ("query", "key", "value")]
            out[name.replace("query", "qkv")] = torch.cat(parts)
        elif ".self.key." not in name and ".self.value." not in name:
            out[name] = t
    return out


def own_loss(model, data):
    """The loss that transformers computes"""
    return model(input_ids=data["tokens"], token_type_ids=data["types"], labels=data["targets"]).loss


def write(golden: Path, build, data: dict[str, torch.Tensor], forward, own_loss, budget: int) -> None:
    """Writes the files of the model that `build` makes, of less than `budget` bytes, and tells how far f32 and 16 bits are"""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    golden.mkdir(parents=True, exist_ok=True)
    model = build()
    exact = copy.deepcopy(model).double()

    model.save_pretrained(golden)
    (golden / "generation_config.json").unlink(missing_ok=True)
    stored = load_file(golden / "model.safetensors")
    parameters = dict(model.named_parameters())  # a tied parameter is listed once
    assert stored.keys() == parameters.keys(), stored.keys() ^ parameters.keys()
    assert all(torch.equal(stored[k], parameters[k]) for k in stored)

    f32, f64 = (forward_golden(forward, m, data, pack=packed) for m in (model, exact))
    assert f64["logits"].dtype == torch.float64
    assert torch.equal(own_loss(model, data).reshape(1), f32["loss"]), "the loss is the one of transformers"
    numbers = {name: t.clamp(min=-1).int() for name, t in data.items()}
    save(golden / "forward.safetensors", numbers | f32)
    low = {}
    for name, (dtype, loss_scale) in LOW.items():
        low[name] = low_forward_golden(forward, model, data, dtype, loss_scale, packed)
        save(golden / f"forward_{name}.safetensors", low[name])

    tell_sizes(set(golden.iterdir()), budget)
    count = sum(p.numel() for p in parameters.values())
    print(f"{count} parameters in {len(parameters)} tensors; loss {f32['loss'].item():.6f}")
    for what, prefix in (("logits", "logits"), ("loss", "loss"), ("gradients", "grad.")):
        print(f"f32 from double, {what}: {distance(f32, f64, prefix)}")
    for name, errors in low.items():
        worst = torch.stack([t for key, t in errors.items() if key.startswith("error.grad.")]).amax(0).tolist()
        logits = errors["error.logits"].tolist()
        print(f"{name} from double, greatest and root mean square: logits {logits[0]:.1e} {logits[1]:.1e},", end=" ")
        print(f"worst gradient {worst[0]:.1e} {worst[1]:.1e}")


if __name__ == "__main__":
    write(GOLDEN, build, batch(), forward, own_loss, BUDGET_BYTES)
