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

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

from golden_bert import write
from model_goldens import nowhere_trivial

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


def inputs(data) -> dict[str, torch.Tensor]:
    mask = (torch.arange(SEQ) < data["lengths"][:, None]).long()
    return {"input_ids": data["tokens"], "token_type_ids": data["types"], "attention_mask": mask}


def forward(model, data):
    """logits [rows, classes], mean cross entropy []"""
    logits = model(**inputs(data)).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return logits, F.cross_entropy(wide, data["targets"])


def own_loss(model, data):
    """The loss that transformers computes"""
    return model(**inputs(data), labels=data["targets"]).loss


if __name__ == "__main__":
    write(GOLDEN, build, batch(), forward, own_loss, BUDGET_BYTES)
