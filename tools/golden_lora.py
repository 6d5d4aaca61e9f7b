"""Golden values of adapters that PEFT trains, the oracle of crates/train/tests/lora.rs.

How to run it, from the root of the repository and in an environment outside it:

    python3 -m venv ../golden && ../golden/bin/pip install torch transformers peft safetensors
    ../golden/bin/python tools/golden_lora.py

It writes crates/models/tests/golden/lora/<variant>/ (one thread, fixed seeds), for each of VARIANTS; the models are those of
golden_decoders.py and golden_gpt2.py:

    adapter_config.json, adapter_model.safetensors (not of pissa)
                          the adapter before the first step, as `save_pretrained` of PEFT writes it, in f32; no part of it is zero
    adamw.safetensors     20 steps as golden_gpt2.py says: tokens [20, 4, 17] i32; losses [20], grad_norms [20], final.<name> of the
                          adapter in double precision, stored as f32; error.<name> [1] of each, the greatest error of PyTorch in f32.
                          Of pissa no parameters: singular vectors have any sign, which losses and norms do not know
"""

import copy
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from golden_decoders import SEQ, Rotary, forward
from model_goldens import adamw_golden, save, tell_sizes

GOLDEN = Path(__file__).resolve().parent.parent / "crates" / "models" / "tests" / "golden"
NEW_TOKENS = 3
BUDGET_BYTES = 1 << 18  # what the repository carries of these
VARIANTS = {
    "llama": ("decoders/llama", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"]}),
    "qwen3": ("decoders/qwen3", {"r": 2, "lora_alpha": 3, "target_modules": "all-linear", "use_rslora": True}),
    "dora-qwen3": ("decoders/qwen3", {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_dora": True}),
    "dora-gpt2": ("gpt2", {"r": 2, "lora_alpha": 2, "target_modules": ["c_attn"], "use_dora": True, "fan_in_fan_out": True}),
    "pissa-llama": ("decoders/llama", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": "pissa"}),
    "pissa-gpt2": ("gpt2", {"r": 3, "lora_alpha": 6, "target_modules": ["c_attn"], "init_lora_weights": "pissa", "fan_in_fan_out": True}),
    "tokens-llama": ("decoders/llama", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "new_tokens": ["embed_tokens", "lm_head"]}),
    "tokens-gpt2": ("gpt2", {"r": 2, "lora_alpha": 4, "target_modules": ["c_attn"], "new_tokens": ["wte"], "fan_in_fan_out": True}),
    "gpt2": ("gpt2", {"r": 3, "lora_alpha": 3, "target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
}


def build(base: str, keys: dict):
    torch.manual_seed(23)
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / base, attn_implementation="eager", dtype=torch.float32)
    if hasattr(model.model if hasattr(model, "model") else model, "rotary_emb"):
        model.model.rotary_emb = Rotary(model.config, model.model.rotary_emb)
    keys = dict(keys)
    if tables := keys.pop("new_tokens", []):
        rows = model.config.vocab_size
        model.resize_token_embeddings(rows + NEW_TOKENS, mean_resizing=False)
        keys["trainable_token_indices"] = {table: list(range(rows, rows + NEW_TOKENS)) for table in tables}
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **keys))
    with torch.no_grad():
        for name, p in model.named_parameters() if "init_lora_weights" not in keys else []:
            if "lora_B" in name or "magnitude" in name or "tokens_delta" in name:
                p.add_(torch.randn(p.shape) * 0.15)
    model.peft_config["default"].base_model_name_or_path = base
    return model.eval()


def file_name(parameter: str) -> str:
    tokens = parameter.replace(".token_adapter.trainable_tokens_delta.default", ".added.weight")
    return tokens.replace("_vector.default.weight", "_vector").replace(".default.", ".")


def run_golden(model) -> dict[str, torch.Tensor]:
    """20 steps of AdamW in double, and how far those in f32 are"""
    tokens = torch.randint(0, model.config.vocab_size, (20, 4, SEQ + 1), generator=torch.Generator().manual_seed(7))

    def run(model):
        golden = adamw_golden(forward, model, tokens)
        final = {k: v for k, v in golden.items() if "lora_" in k or "tokens_delta" in k}
        named = {file_name(k.replace("base_model.model.", "", 1)): v for k, v in final.items()}
        return {k: v for k, v in golden.items() if not k.startswith("final.")} | named

    f32, f64 = run(copy.deepcopy(model)), run(copy.deepcopy(model).double())
    errors = {f"error.{name}": (f32[name] - t).abs().max().float().reshape(1) for name, t in f64.items()}
    return {"tokens": tokens.int()} | {name: t.float() for name, t in f64.items()} | errors


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for variant, (base, keys) in VARIANTS.items():
        folder = GOLDEN / "lora" / variant
        folder.mkdir(parents=True, exist_ok=True)
        model = build(base, keys)
        golden = run_golden(model)
        if "init_lora_weights" in keys:
            golden = {name: t for name, t in golden.items() if "lora_" not in name}
        else:
            model.save_pretrained(folder, save_embedding_layers=False)
            (folder / "README.md").unlink(missing_ok=True)
        save(folder / "adamw.safetensors", golden)
        losses, error = golden["losses"], golden["error.losses"].item()
        print(f"{variant}: losses {losses[0].item():.6f} to {losses[-1].item():.6f}; f32 from double: {error:.1e}")
    tell_sizes({path for path in (GOLDEN / "lora").rglob("*") if path.is_file()}, BUDGET_BYTES)


if __name__ == "__main__":
    main()
