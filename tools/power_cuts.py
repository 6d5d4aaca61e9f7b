#!/usr/bin/env python3
"""Cuts the power of a training run, as far as a file system with a journal can tell, and lets the run resume.

Each trial makes an ext4 file system in a file, trains on it, and at a random moment stops the file system as a power cut does
(EXT4_IOC_SHUTDOWN without flushing its log): what is not yet on the disk is lost. The file system is then mounted again, which plays
its journal, and checked, and the run resumes. The rule:

- every checkpoint that was saved before a step that the metrics showed at the cut is there (a run saves after each step here);
- the run resumes without a word about damage, reaches its last step, and its losses and last checkpoint are those of a run without a cut;
- `inspect --verify` finds nothing, and no file of an interrupted start or save is left.

What the disk itself has taken stays and is in order: disks that lose or reorder what they have acknowledged are not played.

Needs root, Linux, mkfs.ext4 and a `phalanx`; where the system lacks or refuses one of them, it says so and tries nothing (exit code 77):

    cargo build --release && sudo tools/power_cuts.py target/release/phalanx --trials 80
"""

import argparse
import fcntl
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN, _IOR('X', 125, __u32)
WITHOUT_LOG = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH
SKIPPED = 77  # the exit code of a test that could not be tried
OWN_MOUNTS = "PHALANX_POWER_CUTS_OWN_MOUNTS"
STEPS = 12
LIMIT_S = 120
CONFIG = """[model]
layers = 2
hidden = 16
heads = 4
seq = 16
[data]
text = ["{text}"]
tokenizer = "char"
validation = 0.1
[batch]
global = 8
[schedule]
kind = "constant"
[train]
steps = {steps}
eval_every = 4
eval_samples = 8
save_every = 1
threads = 1
"""


def call(*words, **options):
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=LIMIT_S, **options)


def losses(run):
    """The figures of every step, as they are written; nothing of a line that is not whole."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [(line["step"], line.get("loss"), line.get("grad_norm"), line.get("val_loss")) for line in lines]


def parameters(run):
    """Hashes of the last checkpoint's tensors."""
    files = sorted((run / "checkpoints" / f"step-{STEPS}").glob("*.safetensors"))
    return [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]


def make(image):
    with open(image, "wb") as file:
        file.truncate(64 << 20)
    call("mkfs.ext4", "-q", "-F", str(image))


def mount(image, folder):
    call("mount", "-o", "loop", str(image), str(folder))


def cut(folder):
    """Nothing reaches the disk from here on."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", WITHOUT_LOG))
    finally:
        os.close(descriptor)


def trial(phalanx, config, root, ranks, expected, whole_s):
    """One cut; returns the step that was reached, or raises an AssertionError."""
    image, disk = root / "image", root / "disk"
    make(image)
    mount(image, disk)
    run, words = disk / "run", [phalanx, "train", str(config), "--nproc", str(ranks), "--quiet", "--run", str(disk / "run")]
    shown = 0
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        time.sleep(random.uniform(0, 1.1 * whole_s))
        shown = max([step for step, loss, *_ in losses(run) if loss is not None], default=0)
        cut(disk)
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait(timeout=LIMIT_S)
    for _ in range(100):
        if subprocess.run(["umount", str(disk)], capture_output=True, timeout=LIMIT_S).returncode == 0:
            break
        time.sleep(0.1)
    else:
        raise AssertionError("the file system stays in use")
    mount(image, disk)
    try:
        saved = [int(path.name[5:]) for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdigit()]
        newest = max(saved, default=0)
        assert newest >= shown - 1, f"step {shown} was shown, and the newest checkpoint is {newest}"
        ended = subprocess.run(words + ["--resume"], capture_output=True, text=True, timeout=LIMIT_S)
        assert ended.returncode == 0, f"resume ended with {ended.returncode}: {ended.stderr}"
        for word in ["damaged", "changed", "skipping", "missing"]:
            assert word not in ended.stderr, ended.stderr
        assert (losses(run), parameters(run)) == expected, "the resumed run has other numbers"
        call(phalanx, "inspect", str(run), "--verify")
        left = [path.name for path in run.rglob("*") if path.name.endswith(".tmp") or path.name in (".next", ".ready")]
        assert not left, f"left behind: {left}"
    finally:
        call("umount", str(disk))
    call("e2fsck", "-fn", str(image))
    return newest


def mount_for_this_process_alone():
    """Starts this script again in a mount namespace of its own: a copy of a mount elsewhere would keep its file system in use."""
    if os.geteuid() != 0:
        skip("it mounts file systems, which root alone may do")
    for word in ("mkfs.ext4", "e2fsck", "mount", "umount", "unshare"):
        if shutil.which(word) is None:
            skip(f"{word} is not installed")
    if OWN_MOUNTS not in os.environ:
        os.environ[OWN_MOUNTS] = "1"
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv])


def skip(why):
    print(f"power_cuts.py: nothing was tried: {why}")
    sys.exit(SKIPPED)


def try_to_mount(root):
    """Whether this system mounts and cuts a file system in a file at all."""
    try:
        make(root / "image")
        mount(root / "image", root / "disk")
        cut(root / "disk")
        call("umount", str(root / "disk"))
    except subprocess.CalledProcessError as error:
        skip(f"{' '.join(map(str, error.cmd))}: {error.stderr.strip()}")
    except OSError as error:
        skip(f"EXT4_IOC_SHUTDOWN: {error}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phalanx", help="the program")
    parser.add_argument("--trials", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    mount_for_this_process_alone()
    random.seed(args.seed)
    phalanx, failed, reached = os.path.abspath(args.phalanx), 0, []
    with tempfile.TemporaryDirectory(prefix="phalanx-power-cuts-") as folder:
        root = pathlib.Path(folder)
        (root / "disk").mkdir()
        try_to_mount(root)
        words = ["chunk", "rank", "shard", "gather", "reduce", "step", "plan", "arena"]
        (root / "text.txt").write_text(" ".join(words[(i * i + i // 7) % 8] for i in range(900)))
        config = root / "small.toml"
        config.write_text(CONFIG.format(text=root / "text.txt", steps=STEPS))
        whole = {}
        for ranks in (1, 2):
            run, began = root / f"whole-{ranks}", time.monotonic()
            call(phalanx, "train", str(config), "--nproc", str(ranks), "--quiet", "--run", str(run))
            whole[ranks] = ((losses(run), parameters(run)), time.monotonic() - began)
        for number in range(args.trials):
            ranks = 1 + number % 2
            expected, whole_s = whole[ranks]
            try:
                reached.append(trial(phalanx, config, root, ranks, expected, whole_s))
            except (AssertionError, subprocess.SubprocessError) as error:
                failed += 1
                print(f"trial {number} ({ranks} ranks): {error} {getattr(error, 'stderr', None) or ''}", flush=True)
    counts = {step: reached.count(step) for step in sorted(set(reached))}
    print(f"{args.trials} power cuts, {failed} failed; newest checkpoint at the cut: {counts}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
