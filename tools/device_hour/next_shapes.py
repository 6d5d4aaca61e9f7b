#!/usr/bin/env python3
"""Third: the shapes that are next: larger heads, long sequences, large vocabularies, states in host memory.

    tools/device_hour/next_shapes.py [--small] [FOLDER]
"""

import re

from hour import SMALL, SMALL_VOCAB, Hour, milliseconds, shapes

CUDA = ["--set", "device.kind=cuda", "--set", "precision.compute=bf16"]

# What cuBLASLt computes, by the beginning of names, and how many algorithms `PHALANX_CUBLAS_ALGORITHM` knows.
PRODUCTS, ALGORITHMS = ("linear",), 8


def sets(**keys):
    """Options of the command line; `model__seq` is the key model.seq."""
    return [word for key, value in keys.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


LONG = ["examples/gpt2_124m.toml", *CUDA]
LONG += sets(model__layers=4, model__hidden=4096, model__heads=32, model__seq=8192, model__positions=8192, model__vocab=128256, batch__global=1, batch__micro=1) + SMALL + SMALL_VOCAB
SHORT = ["examples/gpt2_124m.toml", *CUDA, *sets(model__seq=1024, batch__global=4), *SMALL, *SMALL_VOCAB]


def file_name(name):
    return re.sub(r"[^A-Za-z0-9]+", "-", name)


def bench(hour, name, seconds, options, nproc=1, **variables):
    command = [hour.phalanx, "bench", "step", *options, "--nproc", str(nproc), "--steps", "5", "--warmup", "3", "--json"]
    return hour.json(file_name(name), seconds, command, **variables)


def told(report):
    return f"{1e3 * report['step_s_median']:.2f} ms, waiting {1e3 * report['exposed_s']:.2f} ms, {report['arena_bytes']} bytes planned"


def head(report):
    """Milliseconds of the head: the vocabulary's kernels, and the gradients of the largest shape."""
    gradients = [milliseconds(report, name, largest=True) for name in ("linear_input_gradient", "linear_weight_gradient")]
    return sum(shapes(report, ("vocabulary",)).values()) + sum(filter(None, gradients))


def kernels(hour):
    """Compiles all kernels on all cores, which a step would do one after the other."""
    if not SMALL:
        _, fault = hour.run("kernels", 170, [hour.phalanx, "doctor", "--kernels"])
        hour.row("kernels beside the processor's", fault or "done", "done", "see right_and_fast.py")


def long_sequences(hour):
    report, fault = bench(hour, "long", 120, LONG)
    advice = "larger slices of logits; attention backward over 60 ms: other instructions for long sequences"
    hour.figure("4 layers x 4096, 32 heads of 128, sequence 8192, vocabulary 128256", fault or 1e3 * report["step_s_median"], "ms", 200, 270, advice)
    if report:
        for name, low, high in (("attention", 10, 13), ("attention_backward", 35, 47), ("adamw", 15, 19)):
            hour.figure(f"of it {name}", milliseconds(report, name), "ms", low, high, "profile it with ncu")
        hour.figure("of it the head", head(report), "ms", 45, 70, "100 to 125 is what slices of 64 MiB should take: see them below")


def heads(hour):
    """Two choices of the head, whose bits differ: slices of logits (device.slice_mb), and odd classes apart (PHALANX_CUDA_SPLITS_ODD)."""
    for shape, options, ways in (
        ("GPT-2 124M", SHORT, ((64, "on"), (512, "on"), (512, "off"))),
        ("vocabulary 128256", LONG, ((64, "on"),)),
    ):
        for slice_mb, odd in ways:
            name = f"{shape}: slices of {slice_mb} MiB, odd classes apart {odd}"
            report, fault = bench(hour, name, 80, options + sets(device__slice_mb=slice_mb), PHALANX_CUDA_SPLITS_ODD=odd)
            measured = fault or f"{told(report)}; the head {head(report):.2f} ms"
            hour.row(name, measured, "512 faster than 64", "the slower way: say so in docs/cuda.md and change the default")


def algorithms(hour):
    """How much the fastest of cuBLASLt's algorithms for each shape saves, where the first is taken."""
    times = {}
    for number in range(1, ALGORITHMS + 1):
        report, fault = bench(hour, f"algorithm {number}", 40, SHORT, PHALANX_CUBLAS_ALGORITHM=str(number))
        if fault:
            hour.row(f"algorithm {number} of cuBLASLt for each product", fault)
            continue
        for shape, ms in shapes(report, PRODUCTS).items():
            times.setdefault(shape, {})[number] = ms
    times = {shape: ms for shape, ms in times.items() if 1 in ms}
    if not times:
        return
    first = sum(shape[1] for shape in times.values())
    best = sum(min(shape.values()) for shape in times.values())
    most = sorted(times.items(), key=lambda pair: min(pair[1].values()) - pair[1][1])[:3]
    gains = [f"{name} of {flops:.3g} operations: {ms[1]:.3f}, {min(ms.values()):.3f} with {min(ms, key=ms.get)}" for (name, flops, _), ms in most]
    measured = f"{first:.2f} ms with the first, {best:.2f} with the fastest of each shape ({'; '.join(gains)})"
    hour.row("products of GPT-2 124M by cuBLASLt's algorithms", measured, "0.3 to 0.5 ms less", "more: choose algorithms by time")


def decoders(hour):
    """Decoders by their published shapes, 4 sequences of 1,024 tokens."""
    for arch, size in (("qwen3", "qwen3-0.6b"), ("llama", "llama3.2-1b")):
        shape = ["examples/decoder.toml", *CUDA, *sets(model__arch=arch, model__seq=1024, batch__global=4, batch__micro=4)]
        report, fault = bench(hour, size, 80, [*shape, *(SMALL + sets(model__kv_heads=1, model__head_dim=32) if SMALL else sets(model__size=size))])
        hour.row(f"{size}, 4 x 1024", fault or f"{told(report)}; {report['tokens_per_s']:.0f} tokens/s, {report['mfu'] or 0:.3f} of the bf16 limit")
        if report:
            most = sorted(((ms, name) for (name, _, _), ms in shapes(report, "").items()), reverse=True)[:6]
            hour.row(f"{size}: its longest kernels by shape, ms", "; ".join(f"{name} {ms:.2f}" for ms, name in most))


def host_updates(hour):
    for name, options in (
        ("states in host memory, updated there", sets(parallel__zero=1, memory__optimizer="host", memory__update="host")),
        ("states in host memory, updated on the card", sets(parallel__zero=1, memory__optimizer="host", memory__update="device")),
        ("selective checkpointing, 16 sequences", sets(memory__checkpointing="selective", batch__global=16)),
    ):
        report, fault = bench(hour, name, 80, SHORT + options)
        hour.row(name, fault or told(report), "", "the time of waits says what to overlap next")


def several_cards(hour):
    """What NCCL takes of a card, and how long sums take in pieces of a quarter of device.slice_mb."""
    cards, _ = hour.machine()
    if cards < 2:
        return hour.row("two cards by NCCL, pieces of 16 and 128 MiB, a pipeline", f"not run: {cards} card", "", "this needs a machine with two")
    # A pipeline of two stages has two layers at least.
    options = [word.replace("layers=1", "layers=2") for word in SHORT] + sets(device__communication="nccl")
    for name, more in (
        ("two cards, data parallel, ZeRO-2, pieces of 16 MiB", sets(parallel__zero=2, device__slice_mb=64)),
        ("two cards, data parallel, ZeRO-2, pieces of 128 MiB", sets(parallel__zero=2, device__slice_mb=512)),
        ("two cards, a pipeline", sets(parallel__pipeline=2)),
    ):
        log = str(hour.out / f"{file_name(name)}.%p.nccl")
        report, fault = bench(hour, name, 60, options + more, nproc=2, NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=log)
        said = "" if fault else (hour.out / f"{file_name(name)}.err").read_text()
        taken = re.findall(r"rank 0: NCCL takes .*", said)
        measured = fault or f"{told(report)}; {taken[-1] if taken else 'NCCL takes nothing'}"
        hour.row(name, measured, "less waiting with larger pieces; less than planned", "more than planned: communicator_bytes of crates/cuda/src/nccl.rs")


if __name__ == "__main__":
    Hour("Shapes that are next").play(kernels, long_sequences, heads, decoders, algorithms, host_updates, several_cards)
