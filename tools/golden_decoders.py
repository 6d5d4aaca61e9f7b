"""Golden values of tiny decoders of the families of Llama, the oracle of crates/models/tests/goldens.rs.

How to run it, from the root of the repository and in an environment outside it:

    python3 -m venv ../golden && ../golden/bin/pip install torch transformers safetensors
    ../golden/bin/python tools/golden_decoders.py

It writes crates/models/tests/golden/decoders/<variant>/ (dropout 0, one thread, fixed seeds), for each of VARIANTS:

    config.json, model.safetensors
                          the model, as `save_pretrained` writes it, in f32
    forward.safetensors   tokens [3, 17] i32; logits [3, 16, 40] of tokens[:, :16]; loss [1], the mean cross entropy against
                          tokens[:, 1:]; grad.<name>, d loss / d <name>, for each parameter: in double precision, stored as f32;
                          error.<name> [1], the greatest error of PyTorch in f32, over the tensor's greatest value
    forward_bf16.safetensors, forward_f16.safetensors
                          as golden_gpt2.py says
    adamw.safetensors     of the variants of ADAMW_VARIANTS, 20 steps as golden_gpt2.py says: tokens [20, 4, 17] i32; losses [20],
                          grad_norms [20], final.<name> in double precision, stored as f32; error.<name> [1] of each, the greatest
                          error of PyTorch in f32

transformers computes rotary angles in f32 in a model of any type. Here they are computed in double from the formulas of the papers,
and compared with those of transformers. In 16 bits, cos and sin are rounded to the type, as transformers does.
"""

import copy
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from model_goldens import LOW, adamw_golden, forward_golden, low_forward_golden, nowhere_trivial, save, tell_sizes

GOLDEN = Path(__file__).resolve().parent.parent / "crates" / "models" / "tests" / "golden" / "decoders"
VOCAB, BATCH, SEQ = 40, 3, 16
BUDGET_BYTES = 5 << 19  # what the repository carries of these
SMALL = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "vocab_size": VOCAB, "max_position_embeddings": SEQ, "attention_dropout": 0.0, "pad_token_id": None, "bos_token_id": 0,
    "eos_token_id": 0, "rope_theta": 100.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 2.0, "beta_slow": 0.5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0, "original_max_position_embeddings": 8}
GEMMA3 = {
    "num_hidden_layers": 3, "hidden_size": 24, "head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 12, "rope_local_base_freq": 10.0,
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.25], "long_factor": [1.5, 3.0]}
VARIANTS = {
    "llama": ("llama", {}),
    "llama_tied_llama3": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "rope_scaling": LLAMA3}),
    "llama_biases_linear": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama_yarn": ("llama", {"head_dim": 8, "num_key_value_heads": 4, "rope_scaling": YARN}),
    "llama_gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-2}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {"sliding_window": None}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "gemma3_text": ("gemma3_text", GEMMA3),
    "ministral": ("ministral", {"head_dim": 8, "sliding_window": 3}),
    "phi3": ("phi3", {"head_dim": 8, "partial_rotary_factor": 0.5, "sliding_window": 5}),
    "phi3_longrope": ("phi3", {"original_max_position_embeddings": 8, "rope_scaling": LONGROPE}),
}
ADAMW_VARIANTS = "llama", "llama_tied_llama3", "qwen3"


def frequencies(config, rope: dict) -> tuple[torch.Tensor, float]:
    """Radians from one position to the next of each pair of a head, in double, and the factor of cos and sin"""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = int(width * rope.get("partial_rotary_factor", 1.0))
    theta, kind = rope["rope_theta"], rope["rope_type"]
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    if kind == "default":
        return torch.tensor(plain, dtype=torch.float64), 1.0
    original = rope.get("original_max_position_embeddings")
    if kind == "longrope":
        divisors = rope["long_factor" if original < SEQ else "short_factor"]
        found = [f / divisor for f, divisor in zip(plain, divisors, strict=True)]
        stretched = config.max_position_embeddings / original
        return torch.tensor(found, dtype=torch.float64), math.sqrt(1 + math.log(stretched) / math.log(original))
    factor = rope["factor"]
    if kind == "linear":
        return torch.tensor(plain, dtype=torch.float64) / factor, 1.0
    if kind == "llama3":
        low, high, found = rope["low_freq_factor"], rope["high_freq_factor"], []
        for f in plain:
            share = min(max((original * f / (2 * math.pi) - low) / (high - low), 0), 1)
            found.append((1 - share) * f / factor + share * f)
        return torch.tensor(found, dtype=torch.float64), 1.0
    assert kind == "yarn", kind
    entry = [width * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta)) for turns in (rope["beta_fast"], rope["beta_slow"])]
    first, last = max(math.floor(entry[0]), 0), min(math.ceil(entry[1]), width - 1)
    last = last + 0.001 if last == first else last
    shares = [min(max((i - first) / (last - first), 0), 1) for i in range(width // 2)]
    found = [(1 - share) * f + share * f / factor for f, share in zip(plain, shares, strict=True)]
    return torch.tensor(found, dtype=torch.float64), 0.1 * math.log(factor) + 1


class Rotary(torch.nn.Module):
    """cos and sin of all positions, computed in double, in the type of x"""

    def __init__(self, config, theirs):
        super().__init__()
        self.of_kind = {}
        for kind in getattr(theirs, "layer_types", [None]):  # Gemma's layers of each kind have frequencies of their own
            rope, prefix = (config.rope_parameters[kind], f"{kind}_") if kind else (config.rope_parameters, "")
            own, factor = self.of_kind[kind] = frequencies(config, rope)
            theirs(torch.zeros(1), torch.arange(SEQ)[None], *filter(None, [kind]))  # those of longrope depend on the length
            torch.testing.assert_close(own.float(), getattr(theirs, f"{prefix}inv_freq"), rtol=2e-6, atol=0)
            assert abs(factor - getattr(theirs, f"{prefix}attention_scaling")) < 1e-6

    def forward(self, x, position_ids, kind=None):
        own, factor = self.of_kind[kind]
        angles = position_ids[..., None].double() * own
        both = torch.cat([angles, angles], dim=-1)
        return (both.cos() * factor).to(x.dtype), (both.sin() * factor).to(x.dtype)


def build(family: str, keys: dict):
    torch.manual_seed(22)
    config = AutoConfig.for_model(family, **{**SMALL, **keys})
    config._attn_implementation = "eager"
    model = nowhere_trivial(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    return model


def forward(model, tokens):
    """tokens [batch, SEQ + 1] -> logits [batch, SEQ, VOCAB], mean cross entropy []"""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return logits, F.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten())


def run_golden(model, exact) -> dict[str, torch.Tensor]:
    """20 steps of AdamW in double, and how far those in f32 are; trains copies of both"""
    tokens = torch.randint(0, VOCAB, (20, 4, SEQ + 1), generator=torch.Generator().manual_seed(7))
    f32, f64 = (adamw_golden(forward, copy.deepcopy(m), tokens) for m in (model, exact))
    errors = {f"error.{name}": (f32[name] - t).abs().max().float().reshape(1) for name, t in f64.items()}
    return {"tokens": tokens.int()} | {name: t.float() for name, t in f64.items()} | errors


def main() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for variant, (family, keys) in VARIANTS.items():
        folder = GOLDEN / variant
        folder.mkdir(parents=True, exist_ok=True)
        model = build(family, keys)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        model.model.rotary_emb = Rotary(model.config, model.model.rotary_emb)
        exact = copy.deepcopy(model).double()
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(5))
        f32, f64 = (forward_golden(forward, m, tokens) for m in (model, exact))
        assert f64["logits"].dtype == torch.float64
        far = {name: ((f32[name] - t).abs().max() / t.abs().max()).float().reshape(1) for name, t in f64.items()}
        golden = {"tokens": tokens.int()} | {name: t.float() for name, t in f64.items()}
        save(folder / "forward.safetensors", golden | {f"error.{name}": error for name, error in far.items()})
        for name, (dtype, loss_scale) in LOW.items():
            save(folder / f"forward_{name}.safetensors", low_forward_golden(forward, model, tokens, dtype, loss_scale))
        if variant in ADAMW_VARIANTS:
            save(folder / "adamw.safetensors", run_golden(model, exact))
        worst = max(error.item() for name, error in far.items() if name.startswith("grad."))
        count = sum(p.numel() for p in model.parameters())
        print(f"{variant}: {count} parameters, loss {f64['loss'].item():.6f}; f32 from double: {far['logits'].item():.1e}, gradients {worst:.1e}")
        print("   ", json.dumps({key: value for key, value in model.config.to_dict().items() if "rope" in key or "layer" in key or "window" in key}))
    tell_sizes({path for path in GOLDEN.rglob("*") if path.is_file()}, BUDGET_BYTES)


if __name__ == "__main__":
    main()
