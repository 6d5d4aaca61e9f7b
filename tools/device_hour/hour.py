"""What the scripts of an hour on a card share: commands with time limits, and one table of what was measured and expected.

Each script runs for at most ten minutes, needs what `prepare.sh` has built (or a `phalanx` named by PHALANX) and the machine's
Python 3, and no network. Full outputs go to the folder that is its argument, or OUT, or a new temporary folder. With --small, the
models are as small as the emulator of the driver needs them, and the figures mean nothing.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TOOLS = ROOT / "target" / "device_hour"

# Seconds that a script takes at most.
LONGEST_S = 590

# With --small: options that make every model small, and the vocabulary of one whose tokenizer is not used.
SMALL, SMALL_VOCAB = [], []
if "--small" in sys.argv:
    sys.argv.remove("--small")
    small = ["layers=1", "hidden=64", "heads=2", "seq=32"]
    SMALL = [word for key in small for word in ("--set", f"model.{key}")] + ["--set", "batch.global=2", "--set", "batch.micro=1"]
    SMALL_VOCAB = ["--set", "model.vocab=512"]


class Hour:
    """The commands of a script, and the rows of its table."""

    def __init__(self, title):
        self.title = title
        self.until = time.monotonic() + LONGEST_S
        self.rows = []
        given = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("OUT")
        self.out = Path(given or tempfile.mkdtemp(prefix="device-hour-")).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.phalanx = os.environ.get("PHALANX", str(TOOLS / "phalanx"))
        if not Path(self.phalanx).exists():
            sys.exit(f"{self.phalanx} does not exist: run tools/device_hour/prepare.sh on a machine with Rust first, or name a binary by PHALANX")

    def run(self, name, seconds, command, **variables):
        """Runs a command for at most so many seconds; returns its standard output, and what went wrong or None."""
        left = min(seconds, self.until - time.monotonic())
        if left < 5:
            return "", "not run: the ten minutes were over"
        print(f"running: {name} (at most {left:.0f} s)", file=sys.stderr, flush=True)
        files = [self.out / f"{name}.{end}" for end in ("txt", "err")]
        with files[0].open("w") as out, files[1].open("w") as err:
            try:
                code = subprocess.run(
                    command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=left, env={**os.environ, **variables}
                ).returncode
            except FileNotFoundError:
                return "", f"not run: {command[0]} was not found"
            except subprocess.TimeoutExpired:
                return files[0].read_text(errors="replace"), f"FAILED: not done after {left:.0f} s"
        text, said = (file.read_text(errors="replace") for file in files)
        if code == 0:
            return text, None
        last = (said.strip() or text.strip() or "no output").splitlines()[-1]
        return text, f"FAILED (exit {code}): {last[:200]}"

    def json(self, name, seconds, command, **variables):
        """As `run`, of a command that prints one JSON value."""
        text, fault = self.run(name, seconds, command, **variables)
        try:
            return json.loads(text), fault
        except ValueError:
            return None, fault or f"FAILED: {name}.txt is no JSON"

    def torch(self, name, seconds, arguments):
        """Runs the peer in PyTorch, where the machine's Python has it."""
        probe = "import torch; assert torch.cuda.is_available()"
        if subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode != 0:
            return None, "not run: this Python has no torch with CUDA"
        return self.json(name, seconds, [sys.executable, str(Path(__file__).with_name("torch_peer.py")), *arguments])

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

    def end(self):
        """Prints the table; the exit code says whether a command failed."""
        lines = [f"## {self.title}", "", "| measure | measured | expected | what to do |", "|---|---|---|---|"]
        lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in self.rows]
        lines += ["", f"Full outputs: {self.out}"]
        table = "\n".join(lines)
        (self.out / "table.md").write_text(table + "\n")
        print(table)
        sys.exit(any("FAILED" in row[1] for row in self.rows))


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
