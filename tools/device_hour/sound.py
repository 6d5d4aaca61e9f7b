#!/usr/bin/env python3
"""Second: the tests of operations and of training on the card, and the sanitizers of the toolkit on what is small.

    tools/device_hour/sound.py [--small] [FOLDER]
"""

import functools
import os
import re
from pathlib import Path

from hour import ROOT, SMALL, TOOLS, Hour
from right_and_fast import GPT2

# Test programs: their package, the tests, seconds, and cards without which they check nothing. The first compiles all programs first, on
# all cores; with --small, those of its test one by one.
LONGEST_S = 300 if SMALL else 150
TESTS = [
    ("operations", "cuda", ["attention"] if SMALL else [], LONGEST_S, 1),
    ("train", "train", ["cuda::losses"] if SMALL else ["cuda::"], LONGEST_S, 1),
    ("train", "train", ["cards::two_ranks"] if SMALL else ["cards::"], 60, 2),
]

# Seconds that each sanitizer may take.
SANITIZERS = {"memcheck": 120, "racecheck": 100, "initcheck": 60}


@functools.cache
def variables(hour):
    """Variables by which test programs find the libraries that `phalanx doctor` finds, and the number of cards."""
    cards, paths = hour.machine()
    files = {name: Path(path) for name, path in paths.items() if Path(path).is_absolute()}
    given = {f"PHALANX_{name}": str(file) for name, file in files.items() if name in ("NVRTC", "NCCL")}
    folders = [str(file.parent) for file in files.values()] + [os.environ.get("LD_LIBRARY_PATH", "")]
    return cards, given | {"LD_LIBRARY_PATH": ":".join(filter(None, folders))}


def tests(hour):
    cards, found = variables(hour)
    for name, package, only, seconds, needed in TESTS:
        row = f"tests `{' '.join([name, *only])}`"
        if cards < needed:
            hour.row(row, f"{'not run' if cards else 'FAILED'}: {cards} of {needed} cards", "all pass")
            continue
        command = [str(TOOLS / name), *only, "--test-threads", "1", "--nocapture"]
        text, fault = hour.run("-".join([name, *only]), seconds, command, ROOT / "crates" / package, **found)
        result = re.findall(r"test result: (.*?); finished", text)
        told = fault or (result or ["FAILED: no result"])[-1]
        # A test that lacks something passes, and says so.
        skipped = re.findall(r": skipped: (.*)", (hour.out / f"{'-'.join([name, *only])}.err").read_text()) if result else []
        if skipped:
            told += f"; {'' if needed > 1 else 'FAILED: '}{len(skipped)} of them checked nothing: {skipped[0]}"
        hour.row(row, told, "all pass", "a wrong number ends work on speed: run the test alone under memcheck")


def sanitizer(hour, tool):
    _, found = variables(hour)
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", str(TOOLS / "operations"), "attention", "operations_on_rows"]
    text, fault = hour.run(tool, SANITIZERS[tool], command, ROOT / "crates/cuda", **found)
    summary = re.findall(r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*", text)
    told = f"{fault}; {summary[-1]}" if fault and summary else fault or (summary or ["silent"])[-1]
    hour.row(f"compute-sanitizer, {tool}", told, "0 errors", "the output names kernel and line")


def memory_and_races(hour):
    sanitizer(hour, "memcheck")
    sanitizer(hour, "racecheck")


def counters(hour):
    step = [hour.phalanx, "bench", "step", *GPT2, "--steps", "1", "--warmup", "3"]
    command = ["ncu", "--clock-control", "none", "--set", "basic", "-k", "regex:attention|vocabulary_stat|layer_norm", "-s", "60", "-c", "12", *step]
    text, fault = hour.run("ncu", 90, command, PHALANX_CUDA_GRAPHS="off")
    hour.row("ncu on twelve launches", fault or f"{len(text.splitlines())} lines in ncu.txt", "a table for each", "shared memory over 80 % busy, or stalls on barriers?")


def unwritten_memory(hour):
    sanitizer(hour, "initcheck")


if __name__ == "__main__":
    Hour("Sound").play(tests, memory_and_races, counters, unwritten_memory)
