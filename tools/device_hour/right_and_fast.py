#!/usr/bin/env python3
"""First: are the kernels right, and how fast is GPT-2 124M in bf16, beside PyTorch with torch.compile?

    tools/device_hour/right_and_fast.py [--small] [FOLDER]

Expected figures are those of one H200, measured, with some room; another card has others, and what fails counts on each.
"""

from hour import SMALL, SMALL_VOCAB, Hour, kernels, libraries, milliseconds, shapes

GPT2 = ["examples/gpt2_124m.toml", "--nproc", "1", "--set", "device.kind=cuda", "--set", "precision.compute=bf16"]
GPT2 += ["--set", "model.seq=1024", "--set", "batch.global=4", *SMALL, *SMALL_VOCAB]
QUICK = ["examples/quickstart.toml", "--set", "device.kind=cuda", "--set", "precision.compute=bf16", "--set", "data.text=README.md", *SMALL]

# Rates of `doctor --kernels` by the beginning of their names: per second, unit, from, to, what to do.
RATES = [
    ("copy", 1e12, "TB/s", 3.9, 4.3, "below 3.9 (H100: 2.8): another program uses the card, or it is throttled: give it back"),
    ("linear bf16", 1e12, "TFLOP/s", 380, 480, "see whether cuBLASLt was found"),
    ("attention bf16", 1e12, "TFLOP/s", 85, 210, "profile the kernel with ncu"),
    ("attention backward bf16", 1e12, "TFLOP/s", 90, 150, "profile the kernel with ncu"),
]

# Kernels of a step: name, the largest shape alone, from, to, what to do.
KERNELS = [
    ("linear_input_gradient", True, 0.4, 0.5, "over 1: extents that are no multiple of 8 (rows of PyTorch below), or too small slices"),
    ("linear_weight_gradient", True, 0.25, 0.35, "over 1: as the line above"),
    ("vocabulary_statistics", False, 1.0, 1.5, "over 1.6: a product with a pass of its own behind it"),
    ("attention", False, 0.3, 0.5, "profile the kernel with ncu"),
    ("attention_backward", False, 1.1, 1.6, "over 2: ncu; shared memory over 80 % busy: two blocks of rows a warp; else more warps"),
    ("adamw", False, 1.1, 2.0, "over 2: look for loads of 16 bytes in its machine code"),
    ("block_squares", False, 0.2, 1.2, "as the line above"),
    ("layer_norm_backward", False, 0.4, 1.0, "as the line above"),
]


def machine(hour):
    text, fault = hour.run("nvidia-smi", 30, ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"])
    hour.row("card, driver, memory, used", fault or text.strip(), "an idle card", "")
    text, fault = hour.run("doctor", 60, [hour.phalanx, "doctor"])
    for name, found in libraries(text):
        hour.row(name, found, "", "" if "missing" not in found else "the line names the package")
    if fault:
        hour.row("doctor", fault)


def comparisons(hour):
    report, fault = hour.json("kernels", 400 if SMALL else 170, [hour.phalanx, "doctor", "--kernels", "--json"])
    report = (report or {}).get("kernels", report)
    if report is None:
        return hour.row("kernels beside the processor's", fault, "all pass", "a wrong number ends work on speed")
    count = sum(group["comparisons"] for group in report["groups"])
    faults = report["faults"]
    told = f"{count} comparisons pass" if not faults else f"FAILED: {len(faults)} of {count}: {faults[0]}"
    hour.row("kernels beside the processor's", told, "all pass", "run sound.py on the group; a wrong number ends work on speed")
    for start, scale, unit, low, high, advice in RATES:
        rate = next((rate["per_s"] / scale for rate in report["rates"] if rate["name"].startswith(start)), None)
        hour.figure(start, rate, unit, low, high, advice)
    nccl = report["nccl"] or {}
    if nccl.get("bytes") is None:
        hour.row("NCCL, a communicator of one card", f"FAILED: {nccl['error']}" if nccl.get("error") else "not found", "passes")
    else:
        name = f"NCCL {nccl['version']} passes; memory of a communicator of one card"
        hour.figure(name, nccl["bytes"] / 2**20, "MiB", 0, 576, "over 576: communicator_bytes of crates/cuda/src/nccl.rs")
    hour.figure("memory of the driver", report["driver_bytes"] / 2**20, "MiB", 300, 640, "over 640: CONTEXT_BYTES of crates/cuda/src/factory.rs")
    if report["graphs"]:
        graphs = report["graphs"]
        name = f"memory of {graphs['graphs']} graphs of {graphs['launches']} launches"
        hour.figure(name, graphs["bytes"] / 2**20, "MiB", 1, 130, "over 130: GRAPH_BYTES of crates/cuda/src/factory.rs")


def steps(hour):
    bench = [hour.phalanx, "bench", "step", *GPT2, "--steps", "30", "--warmup", "5", "--json"]
    on, fault = hour.json("step", 100, bench)
    if fault:
        hour.row("GPT-2 124M, bf16, 4 x 1024", fault, "a step of 11 to 12.5 ms", "the error names the memory or the kernel")
        return
    hour.figure("GPT-2 124M, bf16, 4 x 1024: a step", 1e3 * on["step_s_median"], "ms", 11, 12.5, "see the kernels below")
    hour.row("tokens/s; share of the bf16 limit; launches", f"{on['tokens_per_s']:.0f}; {on['mfu'] or 0:.3f}; {on['launches_per_step_of_rank_0']}")
    for name, largest, low, high, advice in KERNELS:
        measured = milliseconds(on, name, largest)
        shape = f" of {kernels(on, name)[0]['calls']:g} calls, the largest shape" if largest and measured else ""
        hour.figure(f"{name}{shape}", measured, "ms", low, high, advice)
    times = {}
    for (name, _, _), ms in shapes(on, "").items():
        times[name] = times.get(name, 0) + ms
    most = sorted(times.items(), key=lambda pair: -pair[1])[:12]
    hour.row("ms of its kernels, the longest", "; ".join(f"{name} {ms:.2f}" for name, ms in most), "", "step.txt has each shape")
    off, fault = hour.json("step-without-graphs", 60, bench, PHALANX_CUDA_GRAPHS="off")
    saved = fault or 1e3 * (off["step_s_median"] - on["step_s_median"])
    hour.figure("what graphs save in a step", saved, "ms", 0.05, 0.6, "nothing saved: keep them off until it is explained")
    quick, fault = hour.json("quickstart-step", 60, [hour.phalanx, "bench", "step", *QUICK, "--nproc", "1", "--steps", "30", "--json"])
    hour.figure("quick start, a step", fault or 1e3 * quick["step_s_median"], "ms", 1.0, 2.2, "it is bound by launches: look at their number")


def training(hour):
    train = [hour.phalanx, "train", *QUICK, "--set", "train.steps=50", "--set", "data.max_skipped=1", "--set"]
    _, fault = hour.run("train", 60, [*train, "parallel.zero=0", "--nproc", "1", "--run", str(hour.out / "run")])
    said = "".join((hour.out / f"train.{end}").read_text() for end in ("txt", "err") if (hour.out / f"train.{end}").exists())
    memory = [line for line in said.splitlines() if "peak == plan" in line]
    hour.row("training the quick start", fault or "done", "done", "the error says what")
    hour.row("memory", memory[0].removeprefix("memory").strip() if memory else "not told", "peak == plan", "any difference is a defect: report it")
    doctor = (hour.out / "doctor.txt").read_text() if (hour.out / "doctor.txt").exists() else ""
    if sum(line.startswith("GPU ") and "none" not in line for line in doctor.splitlines()) < 2:
        return hour.row("two cards, by NCCL and through host memory", "not run: fewer than two cards", "the same losses", "")
    losses = []
    for way in ("nccl", "host"):
        run = hour.out / way
        more = ["parallel.zero=2", "--set", f"device.communication={way}", "--nproc", "2", "--run", str(run)]
        _, fault = hour.run(way, 45, [*train, *more])
        if fault:
            return hour.row(f"two cards, by {way}", fault, "the same losses", "")
        losses.append([line.split('"loss":')[1].split(",")[0] for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss":' in line])
    told = "the same losses" if losses[0] == losses[1] else "FAILED: other losses"
    hour.row("two cards, by NCCL and through host memory", told, "the same losses", "")


def peer(hour):
    for vocab, low, high in ((50257, 12, 21), (50304, 11, 24)):
        found, fault = hour.torch(f"torch-{vocab}", 100, ["--vocab", str(vocab)])
        hour.figure(f"PyTorch with torch.compile, vocabulary {vocab}: a step", fault or found["step_ms"], "ms", low, high, "publish what it is, both")
        if found:
            hour.row("its peak of memory; version", f"{found['peak_bytes']} bytes; torch {found['torch']}")
    found, fault = hour.torch("torch-head", 60, ["--head"])
    if fault:
        return hour.row("products of the head by extents", fault)
    for name, measured in found.items():
        hour.row(f"PyTorch, {name}", measured, "as long with 50257 as with 50256", "50257 slow: odd classes apart; slow at 640 rows, fast at 4096: larger slices")


if __name__ == "__main__":
    Hour("Right and fast").play(machine, comparisons, steps, training, peer)
