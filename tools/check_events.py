"""Reads the event file of a run with TensorBoard, and compares it with the run's metrics.jsonl.

    phalanx train examples/quickstart.toml --run runs/watched --set metrics.sinks=tensorboard
    python tools/check_events.py runs/watched

Every number of every line must be a scalar of its step and time, and nothing else may be there. Needs the package tensorboard.
"""

import json
import sys
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STAMP = {"step", "time_s", "elapsed_s"}


def expected(run):
    """Name -> list of (step, time, value), of the lines of metrics.jsonl."""
    scalars = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        evaluation = "val_loss" in record
        for name, value in record.items():
            if name in STAMP or isinstance(value, list) or value is None or (evaluation and name in ("windows", "targets")):
                continue
            name = f"val_{name}" if evaluation and name != "val_loss" else name
            scalars.setdefault(name, []).append((record["step"], record["time_s"], float(np.float32(value))))
    return scalars


def main(path):
    run = Path(path)
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    wanted = expected(run)
    assert set(events.Tags()["scalars"]) == set(wanted), (events.Tags()["scalars"], sorted(wanted))
    for name, values in wanted.items():
        found = [(event.step, event.wall_time, event.value) for event in events.Scalars(name)]
        assert found == values, (name, found[:3], values[:3])
    (text,) = events.Tensors("config")
    shown = text.tensor_proto.string_val[0].decode()
    config = "".join(f"    {line}\n" for line in (run / "config.toml").read_text().splitlines())
    assert shown == config, shown
    print(f"{run}: {sum(map(len, wanted.values()))} scalars of {len(wanted)} names, and the configuration, as TensorBoard reads them")


main(sys.argv[1])
