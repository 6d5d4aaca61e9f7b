"""Prints the tables of docs/results/bytes.md: textbook, plan and measurement of every ZeRO stage.

    cargo build --release
    python tools/memory_table.py target/release/phalanx               # in MiB, on 1, 2 and 4 ranks
    python tools/memory_table.py target/release/phalanx --placements  # in bytes per parameter, on 1 to 8 ranks

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


# Of the table of placements: the name of a case, its keys, and where parts that leave the device lie.
CASES = {
    "device": ([], None),
    "in place": (["precision.accumulate=bf16", "memory.gradients_in_place=true"], None),
    "host": (["memory.placement=host"], "host"),
    "nvme": (["memory.placement=nvme"], "disk"),
}


def placements(phalanx):
    """Bytes per parameter in bf16 with AdamW, in each memory: formula / plan / measured."""
    parts = ["parameters", "gradients", "optimizer"]
    print("|", " | ".join(["ranks", "stage", "placement", *parts, *(f"elsewhere: {part}" for part in parts)]), "|")
    print("|" + "---|" * 9)
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "memory.toml"
        config.write_text(CONFIG)
        for ranks in (1, 2, 4, 8):
            for stage in range(4):
                for name in CASES:
                    run = pathlib.Path(folder) / f"run-{ranks}-{stage}-{name}"
                    placed_row(phalanx, config, (ranks, stage, name), folder, run)


def placed_row(phalanx, config, case, folder, run):
    ranks, stage, name = case
    keys, away = CASES[name]
    keys = [f"parallel.zero={stage}", "precision.compute=bf16", *keys]
    if away == "disk":
        keys.append(f"memory.nvme_path={folder}")
    options = ["--nproc", str(ranks), *(word for key in keys for word in ("--set", key))]
    subprocess.run([phalanx, "train", config, "--run", run, "--quiet", *options], check=True, capture_output=True)
    plan = json.loads((run / "plan.json").read_text())
    memory = json.loads((run / "memory.json").read_text())
    bytes_each = (2, 0 if name == "in place" else 4, 12)
    share = [each / ranks if stage >= least else each for each, least in zip(bytes_each, (3, 2, 1))]
    # Below stage 3, every rank keeps whole parameters on the device.
    moved = [away is not None and (part > 0 or stage == 3) for part in range(3)]
    formula = [0 if leaves else each for each, leaves in zip(share, moved)]
    # What leaves is the part that this rank updates.
    share[1] = bytes_each[1] / ranks if stage >= 1 else bytes_each[1]
    formula += [each if leaves else 0 for each, leaves in zip(share, moved)]

    def figures(source):
        rank = max(source["ranks"], key=lambda rank: rank["device"]["peak_bytes"])
        memories = [rank["device"], rank[away] if away else None]
        held = [m["categories"][part] if m else 0 for m in memories for part in CATEGORIES[:3]]
        return [each / plan["parameters"] for each in held]

    planned, measured = figures(plan), figures(memory)
    assert planned == measured, f"{case}: {planned}, {measured}"

    def cell(of):
        return " / ".join(f"{each:.2f}" for each in of) if any(of) else "-"

    cells = [cell(of) for of in zip(formula, planned, measured)]
    print("|", " | ".join([str(ranks), str(stage), name, *cells]), "|", flush=True)


if __name__ == "__main__":
    (placements if "--placements" in sys.argv else main)(sys.argv[1])
