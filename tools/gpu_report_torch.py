"""GPT-2 124M in bf16 with torch.compile, for tools/gpu_report.sh: prints tokens per second and the peak of memory.

Parameters, optimizer and precision are those of the run beside it: f32 master weights, bf16 products (autocast), AdamW (fused),
4 sequences of 1024 random tokens.
"""

import time

import torch
import torch.nn as nn
import torch.nn.functional as F

LAYERS, HIDDEN, HEADS, VOCAB, SEQ, BATCH, STEPS, WARMUP = 12, 768, 12, 50257, 1024, 4, 10, 5


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
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.blocks, self.ln = nn.Sequential(*[Block() for _ in range(LAYERS)]), nn.LayerNorm(HIDDEN)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions.weight
        logits = F.linear(self.ln(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits.view(-1, VOCAB).float(), targets.reshape(-1))


def main():
    torch.manual_seed(1)
    model = torch.compile(GPT2().cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    batch = torch.randint(VOCAB, (BATCH, SEQ + 1), device="cuda")
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
    print(f"{BATCH * SEQ / seconds:.0f} tokens/s, {1e3 * seconds:.1f} ms a step, peak {peak} bytes (torch {torch.__version__})")


if __name__ == "__main__":
    main()
