"""GPT-2 124M in bf16 with torch.compile, for right_and_fast.py: prints the time of a step and the peak of memory as JSON.

Parameters, optimizer and precision are those of the run beside it: f32 master weights, bf16 products (autocast), AdamW (fused),
4 sequences of 1024 random tokens.
"""

import argparse
import json
import sys
import time

try:
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
except ModuleNotFoundError as missing:
    sys.exit(f"{sys.executable} has no module {missing.name}: install PyTorch with CUDA for it (pip install torch)")

LAYERS, HIDDEN, HEADS, SEQ, BATCH, STEPS, WARMUP = 12, 768, 12, 1024, 4, 10, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        batch, seq, _ = x.shape
        heads = self.qkv(self.ln_1(x)).view(batch, seq, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, seq, HIDDEN))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.blocks, self.ln = nn.Sequential(*[Block() for _ in range(LAYERS)]), nn.LayerNorm(HIDDEN)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight
        logits = F.linear(self.ln(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.reshape(-1))


def step_of(vocab):
    """Times training steps; tokens of the batch are random."""
    torch.manual_seed(1)
    model = torch.compile(GPT2(vocab).cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    batch = torch.randint(vocab, (BATCH, SEQ + 1), device="cuda")
    for step in range(WARMUP + STEPS):
        if step == WARMUP:
            torch.cuda.synchronize()
            start = time.perf_counter()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / STEPS
    peak = torch.cuda.max_memory_allocated()
    return {"step_ms": 1e3 * seconds, "tokens_per_s": BATCH * SEQ / seconds, "peak_bytes": peak, "torch": torch.__version__}


def median_ms(call):
    """Milliseconds of a call, by the events of the card."""
    times = []
    for _ in range(20):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        call()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return sorted(times)[len(times) // 2]


def head_products():
    """The two products of the gradient of logits, by rows and classes; rows of 50304 elements lie behind each other in every case."""
    found = {}
    for rows in (640, 4096):
        for classes in (50257, 50256, 50304):
            logits = torch.randn(rows, 50304, device="cuda", dtype=torch.bfloat16)[:, :classes]
            table = torch.randn(50304, HIDDEN, device="cuda", dtype=torch.bfloat16)[:classes]
            x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
            dx, dw = median_ms(lambda: logits @ table), median_ms(lambda: logits.T @ x)
            found[f"{rows} rows of {classes} classes"] = f"dx {dx:.3f} ms, dw {dw:.3f} ms"
    return found


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--vocab", type=int, default=50257, help="classes")
    arguments.add_argument("--head", action="store_true", help="time the products of the head instead")
    arguments = arguments.parse_args()
    print(json.dumps(head_products() if arguments.head else step_of(arguments.vocab)))
