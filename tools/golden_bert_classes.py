"""Golden values of a tiny Hugging Face BERT with a class head, the oracle of crates/models/tests/classes.rs.

How to run it: as golden_bert.py. It writes crates/models/tests/golden/bert_classes/ (f32 where no other type is named, dropout 0,
one thread, fixed seeds):

    config.json, model.safetensors
                          a BertForSequenceClassification of three classes, as `save_pretrained` writes it
    forward.safetensors   tokens [4, 20] i32, of rows of unequal length, behind which are other tokens; types [4, 20] i32, the token
                          types: 0, then 1 from a place that differs from row to row; lengths [4] i32; targets [4] i32, a class each;
                          logits [4, 3]; loss [1], their mean cross entropy; grad.<name>, d loss / d <name>, for each parameter,
                          those of query, key and value as one
    forward_bf16.safetensors, forward_f16.safetensors
                          as those of golden_bert.py

The last lines printed say how far f32 PyTorch is from the same work in double: what a tolerance in a test has to allow for.
"""

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

from golden_bert import packed
from model_goldens import LOW, distance, forward_golden, low_forward_golden, nowhere_trivial, save, tell_sizes

GOLDEN = Path(__file__).resolve().parent.parent / "crates" / "models" / "tests" / "golden" / "bert_classes"
VOCAB, SEQ, POSITIONS, LENGTHS, LABELS = 40, 20, 24, [20, 13, 3, 18], ["bad", "fair", "good"]
BUDGET_BYTES = 200 << 10  # what the repository carries of these


def build() -> BertForSequenceClassification:
    torch.manual_seed(22)
    config = BertConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32, vocab_size=VOCAB,
        max_position_embeddings=POSITIONS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=None,
        id2label=dict(enumerate(LABELS)), label2id={name: number for number, name in enumerate(LABELS)},
        attn_implementation="eager",
    )
    return nowhere_trivial(BertForSequenceClassification(config))


def batch() -> dict[str, torch.Tensor]:
    """tokens, types [rows, SEQ], lengths, targets [rows], int64"""
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(0, VOCAB, (len(LENGTHS), SEQ), generator=generator)
    lengths = torch.tensor(LENGTHS)
    types = (torch.arange(SEQ) >= (lengths[:, None] + 1) // 2).long()
    targets = torch.tensor([2, 0, 1, 2])
    return {"tokens": tokens, "types": types, "lengths": lengths, "targets": targets}


def forward(model, data):
    """logits [rows, classes], mean cross entropy []"""
    mask = (torch.arange(SEQ) < data["lengths"][:, None]).long()
    logits = model(input_ids=data["tokens"], token_type_ids=data["types"], attention_mask=mask).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return logits, F.cross_entropy(wide, data["targets"])


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    GOLDEN.mkdir(parents=True, exist_ok=True)
    model = build()
    exact = copy.deepcopy(model).double()
    model.save_pretrained(GOLDEN)
    data = batch()
    f32, f64 = (forward_golden(forward, m, data, pack=packed) for m in (model, exact))
    mask = (torch.arange(SEQ) < data["lengths"][:, None]).long()
    whole = model(input_ids=data["tokens"], token_type_ids=data["types"], attention_mask=mask, labels=data["targets"]).loss
    assert torch.equal(whole.reshape(1), f32["loss"]), "the loss is the one of transformers"
    save(GOLDEN / "forward.safetensors", {name: t.int() for name, t in data.items()} | f32)
    low = {}
    for name, (dtype, loss_scale) in LOW.items():
        low[name] = low_forward_golden(forward, model, data, dtype, loss_scale, packed)
        save(GOLDEN / f"forward_{name}.safetensors", low[name])

    tell_sizes(set(GOLDEN.iterdir()), BUDGET_BYTES)
    print(f"loss {f32['loss'].item():.6f}, logits of at most {f32['logits'].abs().max().item():.2f}")
    for what, prefix in (("logits", "logits"), ("loss", "loss"), ("gradients", "grad.")):
        print(f"f32 from double, {what}: {distance(f32, f64, prefix)}")
    for name, golden in low.items():
        worst = torch.stack([t for key, t in golden.items() if key.startswith("error.grad.")]).amax(0).tolist()
        logits = golden["error.logits"].tolist()
        print(f"{name} from double, greatest and root mean square: logits {logits[0]:.1e} {logits[1]:.1e},", end=" ")
        print(f"worst gradient {worst[0]:.1e} {worst[1]:.1e}")


if __name__ == "__main__":
    main()
