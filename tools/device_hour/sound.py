#!/usr/bin/env python3
"""Second: the tests of operations and of training on the card, and the sanitizers of the toolkit on what is small.

    tools/device_hour/sound.py [--small] [FOLDER]
"""

import re

from hour import TOOLS, Hour
from right_and_fast import GPT2

# What each sanitizer looks for, and seconds that it may take.
SANITIZERS = [("memcheck", 120), ("racecheck", 100), ("initcheck", 60)]


def tests(hour):
    for name, tests in (("operations", []), ("train", ["cuda::"])):
        if not (TOOLS / name).exists():
            hour.row(f"tests `{name}`", f"not run: {TOOLS / name} does not exist", "all pass", "run prepare.sh first")
            continue
        text, fault = hour.run(name, 150, [str(TOOLS / name), *tests, "--test-threads", "1"])
        result = re.findall(r"test result: (.*?); finished", text)
        hour.row(f"tests `{name}`", fault or (result or ["no result"])[-1], "all pass", "a wrong number ends work on speed")


def sanitizers(hour):
    for tool, seconds in SANITIZERS:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", str(TOOLS / "operations"), "attention", "operations_on_rows"]
        text, fault = hour.run(tool, seconds, command)
        summary = re.findall(r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*", text)
        hour.row(f"compute-sanitizer, {tool}", fault or (summary or ["silent"])[-1], "0 errors", "the output names kernel and line")


def counters(hour):
    step = [hour.phalanx, "bench", "step", *GPT2, "--steps", "1", "--warmup", "3"]
    command = ["ncu", "--clock-control", "none", "--set", "basic", "-k", "regex:attention|vocabulary_stat|layer_norm", "-s", "60", "-c", "12", *step]
    text, fault = hour.run("ncu", 90, command, PHALANX_CUDA_GRAPHS="off")
    hour.row("ncu on twelve launches", fault or f"{len(text.splitlines())} lines in ncu.txt", "a table for each", "shared memory over 80 % busy, or stalls on barriers?")


if __name__ == "__main__":
    hour = Hour("Sound")
    for part in (tests, sanitizers, counters):
        part(hour)
    hour.end()
