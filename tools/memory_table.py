"""Prints the table of docs/memory.md: textbook, plan and measurement of every ZeRO stage on 1, 2 and 4 ranks.

    cargo build --release
    python tools/memory_table.py target/release/phalanx

Trains one step of each configuration in a temporary folder, on this repository's text; needs nothing but Python.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

CONFIG = """
[model]
layers = 8
hidden = 256
heads = 4
seq = 128
[data]
text = ["README.md", "ARCHITECTURE.md"]
validation = 0.0
[batch]
global = 8
[train]
steps = 1
threads = 1
"""

CATEGORIES = ["parameters", "gradients", "optimizer", "activations", "communication", "workspace"]


def mib(number):
    return f"{number / 2**20:.2f}"


def main(phalanx):
    print("| ranks | stage | | parameters | gradients | optimizer | activations | communication | workspace | peak |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "memory.toml"
        config.write_text(CONFIG)
        for ranks in (1, 2, 4):
            for stage in range(4):
                row(phalanx, config, ranks, stage, pathlib.Path(folder) / f"run-{ranks}-{stage}")


def row(phalanx, config, ranks, stage, run):
    options = ["--nproc", str(ranks), "--set", f"parallel.zero={stage}"]
    subprocess.run([phalanx, "train", config, "--run", run, "--quiet", *options], check=True, capture_output=True)
    plan = json.loads((run / "plan.json").read_text())
    memory = json.loads((run / "memory.json").read_text())
    parameters = 4 * plan["parameters"]
    shard = [parameters / ranks if stage >= least else parameters for least in (3, 2, 1)]
    textbook = [mib(shard[0]), mib(shard[1]), mib(2 * shard[2])]
    print("|", " | ".join([str(ranks), str(stage), "textbook", *textbook, "", "", "", ""]), "|")
    for source_name, source in (("plan", plan), ("measured", memory)):
        # The rank that needs most; all need the same.
        device = max((rank["device"] for rank in source["ranks"]), key=lambda d: d["peak_bytes"])
        categories = [mib(device["categories"][name]) for name in CATEGORIES]
        print("| | |", " | ".join([source_name, *categories, mib(device["peak_bytes"])]), "|")
    assert [r["device"] for r in plan["ranks"]] == [r["device"] for r in memory["ranks"]], "peak == plan"


if __name__ == "__main__":
    main(sys.argv[1])
