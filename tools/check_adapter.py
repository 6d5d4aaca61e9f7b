"""Checks that PEFT computes with an exported adapter what transformers does with the merged export of the same run.

    phalanx export runs/tuned --out adapter
    phalanx export runs/tuned --out merged --merge
    python tools/check_adapter.py BASE adapter merged

BASE is the folder of model.init. The script needs torch, transformers and peft.
"""

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5  # of the largest logit: f32 sums in another order


def logits(model, tokens):
    with torch.no_grad():
        return model.eval()(input_ids=tokens, use_cache=False).logits


def main(base_path, adapter, merged_path):
    base = AutoModelForCausalLM.from_pretrained(base_path, dtype=torch.float32)
    tables = json.loads((Path(adapter) / "adapter_config.json").read_text()).get("trainable_token_indices") or {}
    rows = max([base.config.vocab_size] + [indices[-1] + 1 for indices in tables.values()])
    if rows > base.config.vocab_size:
        base.resize_token_embeddings(rows, mean_resizing=False)
    longest = min(getattr(base.config, "max_position_embeddings", 64), 64)
    tokens = torch.randint(0, base.config.vocab_size, (2, longest), generator=torch.Generator().manual_seed(1))
    without = logits(base, tokens)
    with_adapter = logits(PeftModel.from_pretrained(base, adapter), tokens)
    merged = logits(AutoModelForCausalLM.from_pretrained(merged_path, dtype=torch.float32), tokens)
    largest = merged.abs().max()
    apart, learned = ((with_adapter - other).abs().max() / largest for other in (merged, without))
    print(f"logits of PEFT and of the merged model within {apart:.1e} of the largest; the adapter changes {learned:.1e}")
    assert apart < TOLERANCE < learned


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
