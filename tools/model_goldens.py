"""What golden_gpt2.py and golden_bert.py have in common.

`forward` is the script's own: model, data -> logits [..., vocab], mean cross entropy []. `pack` is what makes parameters
of transformers those of Phalanx: name -> tensor, to the same.
"""

import copy
from pathlib import Path

import torch
from safetensors.torch import save_file

MAX_NORM = 0.5  # of the runs of AdamW
LOW = {"bf16": (torch.bfloat16, 1.0), "f16": (torch.float16, 2.0**16)}  # type, loss scale


def nowhere_trivial(model):
    """The model, with no part that is trivial: attention is not uniform, biases are not 0, layer norms not 1 and 0."""
    model = model.float()
    with torch.no_grad():
        for _, p in model.named_parameters():
            p.add_(torch.randn(p.shape) * 0.15)
    return model.train()


def forward_golden(forward, model, data, loss_scale: float = 1.0, pack=dict) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits, loss = forward(model, data)
    (loss * loss_scale).backward()
    golden = {"logits": logits.detach(), "loss": loss.detach().reshape(1)}
    wide = torch.promote_types(logits.dtype, torch.float32)
    return golden | pack({f"grad.{name}": p.grad.to(wide) / loss_scale for name, p in model.named_parameters()})


def rounded(model, dtype: torch.dtype) -> dict:
    """Copies of the model with parameters rounded to `dtype`: one that computes in double, two that do in `dtype`."""
    copies = {}
    for how in ("exact", "eager", "sdpa"):
        copies[how] = copy.deepcopy(model).to(dtype)
        copies[how].set_attn_implementation("eager" if how == "exact" else how)
    copies["exact"].double()
    return copies


def low_forward_golden(forward, model, data, dtype: torch.dtype, loss_scale: float, pack=dict) -> dict[str, torch.Tensor]:
    """Logits, loss and gradients in double, and PyTorch's errors in `dtype`"""
    models = rounded(model, dtype)
    golden = forward_golden(forward, models.pop("exact"), data, pack=pack)
    errors = {f"error.{name}": torch.zeros(2) for name in golden}
    for low in models.values():
        for name, t in forward_golden(forward, low, data, loss_scale, pack).items():
            off, exact = t.double() - golden[name], golden[name]
            figures = [off.abs().max() / exact.abs().max(), root_mean_square(off) / root_mean_square(exact)]
            errors[f"error.{name}"] = torch.maximum(errors[f"error.{name}"], torch.stack(figures).float())
    return {name: t.float() for name, t in golden.items()} | errors


def adamw(model) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)


def adamw_golden(forward, model, tokens) -> dict[str, torch.Tensor]:
    """tokens [steps, batch, seq + 1]; trains `model` in place: losses and norms of each step, parameters after the last"""
    model.zero_grad()
    optimizer = adamw(model)
    losses, norms = [], []
    for batch in tokens:
        optimizer.zero_grad()
        _, loss = forward(model, batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).detach())
        optimizer.step()
        losses.append(loss.detach())
    golden = {"losses": torch.stack(losses), "grad_norms": torch.stack(norms)}
    return golden | {f"final.{name}": p.detach().clone() for name, p in model.named_parameters()}


def root_mean_square(t: torch.Tensor) -> torch.Tensor:
    return t.square().mean().sqrt()


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    for name, t in tensors.items():
        assert t.dtype in (torch.float32, torch.int32) and bool(t.isfinite().all()), name
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)


def distance(f32: dict[str, torch.Tensor], f64: dict[str, torch.Tensor], prefix: str) -> str:
    """The greatest |f32 - f64| under `prefix`, and the same over the greatest |f64| of its tensor."""
    names = [name for name in f64 if name.startswith(prefix)]
    far = [((f32[k].double() - f64[k]).abs().max().item(), f64[k].abs().max().item()) for k in names]
    return f"{max(d for d, _ in far):.2e} absolute, {max(d / m for d, m in far):.2e} of the tensor's greatest value"


def tell_sizes(paths: set[Path], budget: int) -> None:
    """Prints what each file takes; all must be less than `budget` bytes"""
    sizes = {path: path.stat().st_size for path in sorted(paths)}
    for path, size in sizes.items():
        print(f"{size:>8} bytes  {path.name}")
    total = sum(sizes.values())
    print(f"{total:>8} bytes  in all")
    assert total < budget, total
