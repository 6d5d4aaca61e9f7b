"""Prints the tables of docs/memory.md: textbook, plan and measurement of every ZeRO stage.

    cargo build --release
    python tools/memory_table.py target/release/phalanx               # in MiB, on 1, 2 and 4 ranks
    python tools/memory_table.py target/release/phalanx --placements  # in bytes per parameter, on 1, 2, 4 and 8 ranks

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


def placements(phalanx):
    """Bytes per parameter in bf16 with AdamW, in each memory: formula / plan / measured."""
    print("| ranks | stage | placement | parameters | gradients | optimizer | elsewhere: parameters | optimizer |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "memory.toml"
        config.write_text(CONFIG)
        for ranks in (1, 2, 4, 8):
            for stage in range(4):
                for placement in ("device", "host", "nvme"):
                    run = pathlib.Path(folder) / f"run-{ranks}-{stage}-{placement}"
                    placed_row(phalanx, config, (ranks, stage, placement), folder, run)


def placed_row(phalanx, config, case, folder, run):
    ranks, stage, placement = case
    keys = [f"parallel.zero={stage}", "precision.compute=bf16", f"memory.placement={placement}"]
    if placement == "nvme":
        keys.append(f"memory.nvme_path={folder}")
    options = ["--nproc", str(ranks), *(word for key in keys for word in ("--set", key))]
    subprocess.run([phalanx, "train", config, "--run", run, "--quiet", *options], check=True, capture_output=True)
    plan = json.loads((run / "plan.json").read_text())
    memory = json.loads((run / "memory.json").read_text())
    away = {"device": None, "host": "host", "nvme": "disk"}[placement]
    share = [each / ranks if stage >= least else each for each, least in ((2, 3), (4, 2), (12, 1))]
    moved = [away is not None and stage == 3, away is not None]
    formula = [0 if moved[0] else share[0], share[1], 0 if moved[1] else share[2]]
    formula += [share[0] if moved[0] else 0, share[2] if moved[1] else 0]

    def figures(source):
        rank = max(source["ranks"], key=lambda rank: rank["device"]["peak_bytes"])
        held = [rank["device"]["categories"][name] for name in CATEGORIES[:3]]
        other = rank[away]["categories"] if away else {"parameters": 0, "optimizer": 0}
        return [each / plan["parameters"] for each in [*held, other["parameters"], other["optimizer"]]]

    planned, measured = figures(plan), figures(memory)
    assert planned == measured, f"{case}: {planned}, {measured}"

    def cell(of):
        return " / ".join(f"{each:.2f}" for each in of) if of[1] else "-"

    cells = [cell(of) for of in zip(formula, planned, measured)]
    print("|", " | ".join([str(ranks), str(stage), placement, *cells]), "|", flush=True)


if __name__ == "__main__":
    (placements if "--placements" in sys.argv else main)(sys.argv[1])
