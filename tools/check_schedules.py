"""Holds our pipeline schedules against PyTorch's own validator, simulator and generators.

    cargo run --release -p phalanx-plan --example schedules -- FOLDER
    python tools/check_schedules.py FOLDER

Each file is read as `_PipelineScheduleRuntime._load_csv` reads it. PyTorch then validates it (`_validate_schedule`),
adds the communication (`_add_send_recv`, `_add_wait_send`) and runs it dry (`_simulate_comms_compute`), which fails on
a deadlock. Where PyTorch has the same schedule, the order of each rank's actions must be the one that it generates;
it has none for `model` and `zb-h2`, and its picture of 1F1B numbers the last rank's forwards from 1, so that rank is
left out (in one forward, one backward it has no other order). The names are private: this was written for PyTorch 2.15.
With the folder `crates/plan/tests/schedules`, it checks that the schedule there is PyTorch's.

Prints how many were accepted, by schedule, and stops at the first that is refused.
"""

import csv
import pathlib
import re
import sys
import types

from torch.distributed.pipelining import schedules

COMPUTE = ("F", "B", "I", "W")

# Schedules that PyTorch does not generate.
WITHOUT_ORDER = ("model", "zb-h2")


def main(folder):
    accepted = {}
    files = sorted(pathlib.Path(folder).glob("*.csv"))
    if not files:
        sys.exit(f"{folder} has no schedules: write them with the example of phalanx-plan (see the docstring)")
    for path in files:
        name, ranks, micro_batches, chunks = parts(path)
        try:
            steps = run(path, ranks, micro_batches, chunks)
            same = same_order(path, name, ranks, micro_batches, chunks)
        except (AssertionError, KeyError, RuntimeError, ValueError) as problem:
            sys.exit(f"PyTorch refuses {path}: {problem}")
        count, most_steps, equal = accepted.get((name, chunks), (0, 0, 0))
        accepted[name, chunks] = (count + 1, max(most_steps, steps), equal + same)
    print("| schedule | chunks | accepted | in PyTorch's own order | most simulated steps |")
    print("|---|---|---|---|---|")
    for (name, chunks), (count, steps, same) in sorted(accepted.items()):
        print(f"| {name} | {chunks} | {count} | {'has none' if name in WITHOUT_ORDER else same} | {steps} |")


def parts(path):
    """Name, ranks, micro-batches and chunks of a file."""
    found = re.fullmatch(r"(.+)-p(\d+)-m(\d+)-v(\d+)", path.stem)
    if not found:
        sys.exit(f"{path} is not named NAME-pP-mM-vV.csv")
    return found[1], *map(int, found.groups()[1:])


def read(path):
    with open(path, newline="") as file:
        return {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(file))}


def computed_in(row):
    """A row without empty cells and communication, as text."""
    return [str(action) for action in row if action is not None and action.computation_type.value in COMPUTE]


def run(path, ranks, micro_batches, chunks):
    """Steps of PyTorch's dry run."""
    stages = ranks * chunks
    actions = read(path)
    computed = sum(len(computed_in(row)) for row in actions.values())
    placement = schedules._validate_schedule(actions, ranks, stages, micro_batches)
    lowered = schedules._add_send_recv(actions, placement.__getitem__, stages)
    lowered = schedules._add_wait_send(lowered)
    schedules._validate_send_waits(lowered)
    steps = schedules._simulate_comms_compute(lowered, placement.__getitem__, stages)
    done = sum(len(computed_in(row)) for row in steps.values())
    if done != computed:
        raise ValueError(f"{done} of {computed} actions were simulated")
    return max(map(len, steps.values()))


def same_order(path, name, ranks, micro_batches, chunks):
    """1 if PyTorch generates this order, 0 if it has no such schedule."""
    if name in WITHOUT_ORDER:
        return 0
    rows = theirs(name, ranks, micro_batches, chunks)
    for rank, ours in read(path).items():
        if name == "1f1b" and rank == ranks - 1:
            continue
        ours, expected = computed_in(ours), computed_in(rows[rank])
        if ours != expected:
            raise ValueError(f"rank {rank} runs {ours[:40]}, PyTorch's own schedule {expected[:40]}")
    return 1


def theirs(name, ranks, micro_batches, chunks):
    """PyTorch's schedule of that name, without the stages that its constructor asks for."""
    rounds = max(1, micro_batches // ranks)
    numbers = types.SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=chunks,
        num_stages=ranks * chunks,
        _num_stages=ranks * chunks,
        _n_microbatches=micro_batches,
        number_of_rounds=rounds,
        microbatches_per_round=micro_batches // rounds,
    )
    whole = {"gpipe": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
    if name in whole:
        return whole[name]._get_pipeline_order(numbers)
    by_rank = {
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zb-h1": schedules.ScheduleInterleavedZeroBubble,
        "interleaved-zero-bubble": schedules.ScheduleInterleavedZeroBubble,
        "zb-v": schedules.ScheduleZBVZeroBubble,
    }[name]
    return {rank: by_rank._calculate_single_rank_operations(numbers, rank) for rank in range(ranks)}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
