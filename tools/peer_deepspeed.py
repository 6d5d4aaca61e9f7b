"""Losses of DeepSpeed and of Phalanx, from the same config.json, the same initial folder and the same tokens.

How to run it, from the root of the repository and in an environment outside it, with a C++ compiler and ninja on the PATH
(DeepSpeed compiles its optimizer for the processor at the first run):

    ../golden/bin/pip install torch transformers safetensors deepspeed==0.19.8 ninja
    PATH=$PWD/../golden/bin:$PATH python tools/peer_deepspeed.py --phalanx target/debug/phalanx --table losses.md
    PATH=$PWD/../golden/bin:$PATH python tools/peer_deepspeed.py --write

Each case is twenty steps of the tiny GPT-2 in crates/models/tests/golden/gpt2 on 8 sequences of 16 tokens a step. `--write` stores
crates/program/tests/golden/deepspeed/ (tokens.bin, ids of u16; cases.json), which a test of the program trains and compares with:
DeepSpeed's losses, rates and loss scales, and for each case the losses of the same steps in double precision (of a model whose
parameters are rounded to the type anew in every step) with DeepSpeed's greatest distance from them (`error`). In 16 bits it is the
greater one of two runs, with attention written out and fused: they round in different places, as any other implementation does.
Weight decay is that of matrices alone on both sides: DeepSpeed gets its parameters in two groups, as Trainer passes them.
"""

import argparse
import copy
import json
import os
import subprocess
import tempfile
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from transformers import GPT2LMHeadModel

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "crates" / "models" / "tests" / "golden" / "gpt2"
GOLDEN = ROOT / "crates" / "program" / "tests" / "golden" / "deepspeed"
VOCAB, SEQ, STEPS, BATCH = 67, 16, 20, 8
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ADAMW = {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def config(stage: int, **more) -> dict:
    optimizer = {"type": more.pop("optimizer", "AdamW"), "params": ADAMW}
    return {"train_batch_size": BATCH, "optimizer": optimizer, "zero_optimization": {"stage": stage}} | more


def warmup(kind: str, **params) -> dict:
    return {"scheduler": {"type": kind, "params": {"warmup_num_steps": 5, "warmup_max_lr": ADAMW["lr"]} | params}}


def cases() -> dict[str, tuple[int, dict]]:
    """name -> number of ranks, configuration"""
    f16 = {"enabled": True, "initial_scale_power": 12}
    skips = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3}
    all = {}
    for ranks in (1, 2):
        for stage in range(4):
            all[f"f32, stage {stage}, {ranks} rank(s)"] = ranks, config(stage)
        for stage in range(1, 4):
            all[f"bf16, stage {stage}, {ranks} rank(s)"] = ranks, config(stage, bf16={"enabled": True})
            all[f"f16, stage {stage}, {ranks} rank(s)"] = ranks, config(stage, fp16=f16)
    sums = {"train_micro_batch_size_per_gpu": 2}
    all |= {
        "f32, two micro-batches": (2, config(2, **sums)),
        "bf16, summed in bf16": (2, config(2, bf16={"enabled": True}, **sums)),
        "bf16, summed in f32": (2, config(2, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}, **sums)),
        "f16, summed in f16": (2, config(2, fp16=f16, **sums)),
        "Adam": (1, config(1, optimizer="Adam")),
        "clipping 0.25": (1, config(0, gradient_clipping=0.25)),
        "no clipping": (1, config(1, gradient_clipping=0.0)),
        "WarmupLR": (1, config(0, **warmup("WarmupLR"))),
        "WarmupLR, linear": (1, config(2, **warmup("WarmupLR", warmup_type="linear"))),
        "WarmupDecayLR": (1, config(1, **warmup("WarmupDecayLR", total_num_steps=STEPS))),
        "WarmupDecayLR, linear": (2, config(3, **warmup("WarmupDecayLR", total_num_steps=STEPS, warmup_type="linear"))),
        "WarmupCosineLR": (1, config(1, scheduler={"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5, "total_num_steps": STEPS}})),
        "f16, skipped steps, stage 1": (1, config(1, fp16=skips)),
        "f16, skipped steps, stage 2": (1, config(2, fp16=skips | {"hysteresis": 1})),
        "f16, skipped steps, stage 3": (1, config(3, fp16=skips | {"consecutive_hysteresis": True})),
    }
    return all


# At stage 0 their 16-bit optimizers are others, which are shown in the table and not reproduced.
SHOWN = {
    "bf16, stage 0": (1, config(0, bf16={"enabled": True})),
    "f16, stage 0": (1, config(0, fp16={"enabled": True, "initial_scale_power": 12})),
}


def tokens() -> torch.Tensor:
    """[STEPS * BATCH * SEQ + 1], int64: t -> 3 t + 5 mod VOCAB, but one in four at random: there is something to learn."""
    generator = torch.Generator().manual_seed(46)
    count = STEPS * BATCH * SEQ + 1
    all, random = torch.randint(0, VOCAB, (count,), generator=generator), torch.rand(count, generator=generator) < 0.25
    for t in range(1, count):
        all[t] = all[t] if random[t] else (3 * all[t - 1] + 5) % VOCAB
    return all


def sequences(stream: torch.Tensor, step: int) -> torch.Tensor:
    """[BATCH, SEQ + 1]: the windows of a step, each with the token behind it"""
    first = step * BATCH * SEQ
    return torch.stack([stream[first + row * SEQ : first + row * SEQ + SEQ + 1] for row in range(BATCH)])


def loss_of(model, rows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), rows[:, 1:].flatten())


def groups(model) -> list[dict]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    return [{"params": matrices}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]


def deepspeed_case(rank: int, ranks: int, config: dict, attention: str) -> dict:
    import deepspeed

    model = GPT2LMHeadModel.from_pretrained(MODEL, attn_implementation=attention).float().train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=copy.deepcopy(config))
    micro, count = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    stream, out = tokens(), {"losses": [], "rates": [], "scales": [], "skipped": [], "norms": []}
    for step in range(STEPS):
        rows = sequences(stream, step)
        out["rates"].append(engine.get_lr()[0])
        out["scales"].append(float(getattr(engine.optimizer, "cur_scale", 1.0)))
        skipped, mean = engine.skipped_steps, torch.zeros(1)
        for m in range(count):
            first = (m * ranks + rank) * micro
            loss = loss_of(engine, rows[first : first + micro])
            engine.backward(loss)
            engine.step()
            mean += loss.detach().float() / (count * ranks)
        torch.distributed.all_reduce(mean)
        out["losses"].append(mean.item())
        out["skipped"].append(engine.skipped_steps > skipped)
        out["norms"].append(float(engine.get_global_grad_norm() or 0.0))
    engine.destroy()
    return out


def deepspeed_ranks(rank: int, ranks: int, port: int, all: dict, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    torch.set_num_threads(1)
    import deepspeed
    import logging

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # DeepSpeed asks for instructions of f16; PyTorch computes without them, too.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed("gloo")
    results = {}
    for name, config in all.items():
        kinds = ["eager", "sdpa"] if any(kind in config for kind in TYPES) else ["eager"]
        results[name] = [deepspeed_case(rank, ranks, config, kind) for kind in kinds]
        if rank == 0:
            print(f"DeepSpeed: {name}", flush=True)
    if rank == 0:
        Path(folder, f"{ranks}.json").write_text(json.dumps(results))


def deepspeed_losses(all: dict) -> dict[str, list[dict]]:
    """Runs of each case: one in f32, two in 16 bits"""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({ranks for ranks, _ in all.values()}):
            own = {name: config for name, (of, config) in all.items() if of == ranks}
            mp.spawn(deepspeed_ranks, args=(ranks, 29650 + ranks, own, folder), nprocs=ranks)
            results |= json.loads(Path(folder, f"{ranks}.json").read_text())
    return results


def exact_losses(config: dict, run: dict, halves: bool) -> list[float]:
    """The same steps in double precision, of the rates and skips of a run of DeepSpeed.

    With `halves`, gradients of a step behind which the loss scale doubles are half of what they are: DeepSpeed's ZeRO divides
    them by the scale of the next step (`step` updates the scale before `unscale_and_clip_grads` reads it).
    """
    dtype = next((dtype for kind, dtype in TYPES.items() if kind in config), torch.float64)
    master = GPT2LMHeadModel.from_pretrained(MODEL, attn_implementation="eager").double().train()
    low, stream, losses = copy.deepcopy(master), tokens(), []
    clip, betas = config.get("gradient_clipping", 1.0), tuple(ADAMW["betas"])
    optimizer = torch.optim.AdamW(groups(master), lr=1.0, betas=betas, eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"], foreach=False)
    for step in range(STEPS):
        with torch.no_grad():
            for p, wide in zip(low.parameters(), master.parameters(), strict=True):
                p.copy_(wide.to(dtype))
        low.zero_grad()
        loss = loss_of(low, sequences(stream, step))
        loss.backward()
        losses.append(loss.item())
        if run["skipped"][step]:
            continue
        for p, wide in zip(low.parameters(), master.parameters(), strict=True):
            wide.grad = p.grad
        if halves and run["scales"][step + 1 : step + 2] == [2 * run["scales"][step]]:
            torch._foreach_mul_([p.grad for p in master.parameters()], 0.5)
        if clip:
            torch.nn.utils.clip_grad_norm_(master.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = run["rates"][step]
        optimizer.step()
    return losses


def phalanx_metrics(program: Path, folder: Path, ranks: int, config: dict) -> list[dict]:
    (folder / "ds_config.json").write_text(json.dumps(config))
    (folder / "my.toml").write_text(
        f'[model]\ninit = "{MODEL}"\nseq = {SEQ}\n[data]\ntokens = "tokens.bin"\norder = "sequential"\nvalidation = 0.0\nunusual_tokens = true\n'
        f"[train]\nsteps = {STEPS}\nthreads = 1\n"
    )
    (folder / "tokens.bin").write_bytes(tokens().to(torch.uint16).numpy().tobytes())
    words = [program.resolve(), "train", "my.toml", "--deepspeed", "ds_config.json", "--nproc", str(ranks), "--run", "run", "--quiet"]
    subprocess.run(words, cwd=folder, check=True, stderr=subprocess.DEVNULL)
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def farthest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def table(results: list[dict], program: Path) -> str:
    lines = ["| case | ranks | last loss | DeepSpeed from double | Phalanx from double | Phalanx from DeepSpeed | skipped steps |", "|---|---|---|---|---|---|---|"]
    for case in results:
        with tempfile.TemporaryDirectory() as folder:
            ours = phalanx_metrics(program, Path(folder), case["ranks"], case["config"])
        losses = [line["loss"] for line in ours]
        skipped = [line["step"] for line in ours if line.get("skipped")]
        theirs = [step + 1 for step, of in enumerate(case["skipped"]) if of]
        scales = [line.get("loss_scale", 1.0) for line in ours]
        is_shown = case["name"] in SHOWN
        alike = "the same" if is_shown or (skipped, scales) == (theirs, case["scales"]) else f"{theirs} there, {skipped} here; scales {case['scales']} there, {scales} here"
        far = [farthest(case["losses"], case["exact"]), farthest(losses, case["exact"]), farthest(losses, case["losses"])]
        far = " | ".join(f"{of:.1e}" for of in far)
        rates = farthest([line["lr"] for line in ours], case["rates"])
        assert rates < 1e-9 or is_shown, f"{case['name']}: rates differ by {rates}"
        lines.append(f"| {case['name']} | {case['ranks']} | {case['losses'][-1]:.4f} | {far} | {len(theirs) if alike == 'the same' else alike} |")
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--phalanx", type=Path, help="the program, which runs each case, too")
    parser.add_argument("--table", type=Path, help="where the table of differences goes")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--write", action="store_true", help="store the golden losses")
    args = parser.parse_args()
    torch.set_num_threads(1)
    every = {name: case for name, case in (cases() | SHOWN).items() if args.only in name}
    results = []
    for name, runs in deepspeed_losses(every).items():
        ranks, config = every[name]
        exact, theirs = (exact_losses(config, runs[0], halves) for halves in (False, True))
        assert all(run["skipped"] == runs[0]["skipped"] for run in runs), f"{name}: another attention skips other steps"
        error = max(farthest(run["losses"], theirs) for run in runs)
        results.append({"name": name, "ranks": ranks, "config": config, **runs[0], "exact": exact, "error": error})
        print(f"{name}: {error:.1e} from double; norms {min(runs[0]['norms']):.3f} to {max(runs[0]['norms']):.3f}", flush=True)
    import deepspeed

    if args.write:
        GOLDEN.mkdir(parents=True, exist_ok=True)
        (GOLDEN / "tokens.bin").write_bytes(tokens().to(torch.uint16).numpy().tobytes())
        kept = [case for case in results if case["name"] not in SHOWN]
        lines = [json.dumps({key: case[key] for key in ("name", "ranks", "config", "losses", "rates", "scales", "skipped", "exact", "error")}) for case in kept]
        (GOLDEN / "cases.json").write_text(f'{{"deepspeed": "{deepspeed.__version__}", "cases": [\n' + ",\n".join(lines) + "\n]}\n")
    if args.phalanx:
        text = table(results, args.phalanx)
        if args.table:
            args.table.write_text(text)


if __name__ == "__main__":
    main()
