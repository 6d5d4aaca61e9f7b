"""What the scripts of an hour on a card share: commands with time limits, and one table of what was measured and expected.

Each script runs for at most ten minutes, needs what `prepare.sh` has built (or a `phalanx` named by PHALANX) and the machine's
Python 3, and no network. Full outputs go to the folder that is its argument, or OUT, or a new temporary folder. With --small, the
models are as small as the emulator of the driver needs them, and the figures mean nothing.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TOOLS = ROOT / "target" / "device_hour"

# Seconds that a script takes at most.
LONGEST_S = 590

# Where programs are; the toolkit's may not be in PATH.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"])

arguments = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("folder", nargs="?", metavar="FOLDER", help="where full outputs go")
arguments.add_argument("--small", action="store_true", help="models and tests that an emulator of the driver can run")
ARGUMENTS = arguments.parse_args()

# With --small: options that make every model small, and the vocabulary of one whose tokenizer is not used.
SMALL, SMALL_VOCAB = [], []
if ARGUMENTS.small:
    small = ["layers=1", "hidden=64", "heads=2", "seq=32"]
    SMALL = [word for key in small for word in ("--set", f"model.{key}")] + ["--set", "batch.global=2", "--set", "batch.micro=1"]
    SMALL_VOCAB = ["--set", "model.vocab=512"]


class Hour:
    """The commands of a script, and the rows of its table."""

    def __init__(self, title):
        self.title = title
        self.until = time.monotonic() + LONGEST_S
        self.rows = []
        self.torch_fault = None
        given = ARGUMENTS.folder or os.environ.get("OUT")
        self.out = Path(given or tempfile.mkdtemp(prefix="device-hour-")).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.phalanx = os.environ.get("PHALANX", str(TOOLS / "phalanx"))
        if not Path(self.phalanx).exists():
            sys.exit(f"{self.phalanx} does not exist: run tools/device_hour/prepare.sh on a machine with Rust first, or name a binary by PHALANX")

    def run(self, name, seconds, command, folder=ROOT, **variables):
        """Runs a command in a folder for at most so many seconds; returns its standard output, and what went wrong or None."""
        left = min(seconds, self.until - time.monotonic())
        if left < 5:
            return "", "not run: the ten minutes were over"
        program = shutil.which(command[0], path=PATH)
        if program is None:
            return "", f"not run: {command[0]} was not found"
        print(f"running: {name} (at most {left:.0f} s)", file=sys.stderr, flush=True)
        files = [self.out / f"{name}.{end}" for end in ("txt", "err")]
        with files[0].open("w") as out, files[1].open("w") as err:
            process = subprocess.Popen(
                [program, *command[1:]], cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env={**os.environ, **variables},
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(timeout=left)
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
                # With what it has started, which would use the card beside the next command.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if isinstance(stopped, KeyboardInterrupt):
                    raise
                return files[0].read_text(errors="replace"), f"FAILED: not done after {left:.0f} s"
        text, said = (file.read_text(errors="replace") for file in files)
        if code == 0:
            return text, None
        lines = (said.strip() or text.strip() or "no output").splitlines()
        told = next((line for line in lines if line.startswith("error")), lines[-1])
        return text, f"FAILED (exit {code}): {told[:300]}"

    def json(self, name, seconds, command, **variables):
        """As `run`, of a command that prints one JSON value."""
        text, fault = self.run(name, seconds, command, **variables)
        try:
            return json.loads(text), fault
        except ValueError:
            return None, fault or f"FAILED: {name}.txt is no JSON"

    def torch(self, name, seconds, arguments):
        """Runs the peer in PyTorch, where the machine's Python has it."""
        probe = "import torch; assert torch.cuda.is_available(), 'torch finds no card'"
        if self.torch_fault is None:
            _, fault = self.run("torch", 60, [sys.executable, "-c", probe])
            self.torch_fault = f"not run: {sys.executable} has no torch with CUDA: {fault.removeprefix('FAILED ')}" if fault else ""
        if self.torch_fault:
            return None, self.torch_fault
        return self.json(name, seconds, [sys.executable, str(Path(__file__).with_name("torch_peer.py")), *arguments])

    def machine(self):
        """What the machine has, as `phalanx doctor --json` tells it: the number of cards, and the files of libraries by their names."""
        report, fault = self.json("machine", 60, [self.phalanx, "doctor", "--json"])
        if fault:
            self.row("doctor", fault)
        found = (report or {}).get("gpus", {})
        return len(found.get("cards", [])), {library["name"]: library["path"] for library in found.get("libraries", []) if library["path"]}

    def row(self, measure, measured, expected="", advice=""):
        """Adds a row as it is. `advice`: what to do where the figure is not as expected."""
        self.rows.append((measure, str(measured), expected, advice))

    def figure(self, measure, value, unit, low, high, advice):
        """Adds a figure that is expected between two bounds; a string is a fault."""
        expected = f"{low:g} to {high:g} {unit}"
        if value is None or isinstance(value, str):
            self.row(measure, value or "not measured", expected, advice)
        else:
            fits = low <= value <= high
            self.row(measure, f"{value:.4g} {unit}", expected, "" if fits else f"**differs**: {advice}")

    def play(self, *parts):
        """Runs the parts one after the other, whatever becomes of each, and prints the table; the exit code says whether one failed.

        Ctrl-C and SIGTERM end the command that runs, and the table has what was measured before.
        """
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        for part in parts:
            try:
                part(self)
            except KeyboardInterrupt:
                self.row(f"{part.__name__.replace('_', ' ')}, and what follows", "FAILED: interrupted", "", "run it again")
                break
            except Exception as error:
                told = f"FAILED: {type(error).__name__}: {error}"
                self.row(part.__name__.replace("_", " "), told, "", "an output that this script does not understand: read it in the folder below")
        self.end()

    def end(self):
        small = ", with --small: the figures mean nothing" if SMALL else ""
        lines = [f"## {self.title}{small}", "", "| measure | measured | expected | what to do |", "|---|---|---|---|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in self.rows]
        lines += ["", f"Full outputs: {self.out}"]
        table = "\n".join(lines)
        (self.out / "table.md").write_text(table + "\n")
        print(table)
        sys.exit(any("FAILED" in row[1] for row in self.rows))


def shapes(report, names):
    """Milliseconds of a step by kernel and shape, of the kernels whose names begin with one of these."""
    entries = [kernel for kernel in report["profile_of_rank_0"]["kernels"] if kernel["name"].startswith(names)]
    return {(kernel["name"], kernel["flops"], kernel["bytes"]): 1e3 * kernel["s"] for kernel in entries}


def kernels(report, name):
    """The entries of a `bench step --json` report of one kernel, the most operations a call first."""
    entries = [kernel for kernel in report["profile_of_rank_0"]["kernels"] if kernel["name"] == name]
    return sorted(entries, key=lambda kernel: -(kernel["flops"] or kernel["bytes"]))


def milliseconds(report, name, largest=False):
    """Milliseconds of a step in one kernel, or in that with the largest shape alone."""
    entries = kernels(report, name)
    return 1e3 * sum(kernel["s"] for kernel in (entries[:1] if largest else entries)) if entries else None


def libraries(text):
    """The lines of `phalanx doctor` on driver, cards and libraries."""
    return [re.split(r" {2,}", line, maxsplit=1) for line in text.splitlines() if re.match(r"(CUDA driver|GPU|NVRTC|cuBLASLt|NCCL|device\.kind)", line)]
