#!/usr/bin/env python3
"""Third: the shapes that are next: larger heads, long sequences, large vocabularies, states in host memory.

    tools/device_hour/next_shapes.py [--small] [FOLDER]
"""

from hour import SMALL, SMALL_VOCAB, Hour, milliseconds

CUDA = ["--nproc", "1", "--set", "device.kind=cuda", "--set", "precision.compute=bf16"]


def sets(**keys):
    """Options of the command line; `model__seq` is the key model.seq."""
    return [word for key, value in keys.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


LONG = ["examples/gpt2_124m.toml", *CUDA]
LONG += sets(model__layers=4, model__hidden=4096, model__heads=32, model__seq=8192, model__vocab=128256, batch__global=1, batch__micro=1) + SMALL + SMALL_VOCAB
SHORT = ["examples/gpt2_124m.toml", *CUDA, *sets(model__seq=1024, batch__global=4)]


def bench(hour, name, seconds, options, steps=5, **variables):
    command = [hour.phalanx, "bench", "step", *options, "--steps", str(steps), "--warmup", "3", "--json"]
    return hour.json(name, seconds, command, **variables)


def long_sequences(hour):
    report, fault = bench(hour, "long", 120, LONG)
    advice = "larger slices of logits; attention backward over 60 ms: other instructions for long sequences"
    hour.figure("4 layers x 4096, 32 heads of 128, sequence 8192, vocabulary 128256", fault or 1e3 * report["step_s_median"], "ms", 200, 270, advice)
    if report:
        for name, low, high in (("attention", 10, 13), ("attention_backward", 35, 47), ("vocabulary_statistics", 15, 40), ("adamw", 15, 19)):
            hour.figure(f"of it {name}", milliseconds(report, name), "ms", low, high, "profile it with ncu")


def host_updates(hour):
    for name, options in (
        ("states in host memory, updated there", sets(parallel__zero=1, memory__optimizer="host", memory__update="host")),
        ("states in host memory, updated on the card", sets(parallel__zero=1, memory__optimizer="host", memory__update="device")),
        ("selective checkpointing, 16 sequences", sets(memory__checkpointing="selective", batch__global=16)),
    ):
        report, fault = bench(hour, name.replace(" ", "-"), 80, SHORT + options + SMALL + SMALL_VOCAB)
        told = fault or f"{1e3 * report['step_s_median']:.1f} ms, waiting {1e3 * report['exposed_s']:.1f} ms, {report['arena_bytes']} bytes planned"
        hour.row(name, told, "", "the time of waits says what to overlap next")


def heads(hour):
    """Two choices of the head, whose bits differ: slices of logits (device.slice_mb), and odd classes apart (PHALANX_CUDA_SPLITS_ODD)."""
    for shape, options, ways in (
        ("GPT-2 124M", SHORT, ((64, "on"), (512, "on"), (512, "off"))),
        ("vocabulary 128256", LONG, ((64, "on"),)),
    ):
        for slice_mb, odd in ways:
            name = f"{shape}: slices of {slice_mb} MiB, odd classes apart {odd}"
            options_here = options + sets(device__slice_mb=slice_mb) + SMALL + SMALL_VOCAB
            report, fault = bench(hour, f"head-{shape[:5]}-{slice_mb}-{odd}".replace(" ", "-"), 80, options_here, PHALANX_CUDA_SPLITS_ODD=odd)
            told = fault or f"{1e3 * report['step_s_median']:.2f} ms, {report['arena_bytes']} bytes planned"
            hour.row(name, told, "512 faster than 64", "the slower way: say so in docs/cuda.md and change the default")


if __name__ == "__main__":
    hour = Hour("Shapes that are next")
    for part in (long_sequences, heads, host_updates):
        part(hour)
    hour.end()
