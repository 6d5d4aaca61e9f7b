//! State on disk: kills, disks that are too small, full or no disks, locked memory, several folders; and the benchmark of disks.
#![allow(clippy::print_stderr, reason = "a test that cannot run says why")]

use crate::rig;
use std::process::{Child, Stdio};

use crate::rig::{Ended, Home, lives, number, ranks, signal, wait};
use phalanx_system::host::kib_field;
use phalanx_testing::process;
use rustix::process::Signal;

/// Optimizer states and parameters on disk, under `disk`.
const ON_DISK: [&str; 8] = [
    "--set",
    "memory.optimizer=nvme",
    "--set",
    "memory.parameters=nvme",
    "--set",
    "parallel.zero=3",
    "--set",
    "memory.nvme_path=disk",
];

fn home() -> Home {
    let home = Home::new();
    std::fs::create_dir(home.path("disk")).unwrap();
    home
}

/// The names in a folder.
fn names(home: &Home, folder: &str) -> usize {
    std::fs::read_dir(home.path(folder)).unwrap().count()
}

#[test]
fn a_killed_run_leaves_nothing_on_disk_and_resumes_to_the_bit() {
    let home = home();
    for nproc in ["1", "2"] {
        let endless = ["train", "small.toml", "--run", "r", "--quiet", "--nproc", nproc];
        let endless = [&endless[..], &ON_DISK, &["--set", "train.steps=1000000"]].concat();
        let _ = std::fs::remove_dir_all(home.path("r"));
        let mut child = home.start(&endless);
        home.wait_for_step("r", 12);
        let started = ranks(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        wait("the ranks to end", || started.iter().all(|(_, pid)| !lives(*pid)));
        assert_eq!(names(&home, "disk"), 0);
        let steps = format!("train.steps={}", home.newest("r") + 9);
        home.run(&["train", "--run", "r", "--resume", "--set", &steps, "--quiet"]).ok();
        // The same without a disk.
        let whole = ["train", "small.toml", "--run", nproc, "--nproc", nproc, "--set", &steps, "--quiet"];
        home.run(&whole).ok();
        assert_eq!(home.losses("r"), home.losses(nproc));
        assert_eq!(names(&home, "disk"), 0);
    }
}

#[test]
fn folders_that_cannot_hold_the_state_are_refused_before_anything_is_written() {
    let home = home();
    home.write("file", "x");
    let train = ["train", "small.toml", "--run", "r", "--quiet"];
    for (path, words) in [
        ("missing", "give a folder that exists"),
        ("file", "this is a file; give a folder"),
        ("[\"disk\", \"missing\"]", "bytes in missing: "),
        ("[\"disk\", \"disk\"]", "names a folder twice"),
        ("[]", "needs memory.nvme_path"),
    ] {
        let set = format!("memory.nvme_path={path}");
        home.run(&[&train[..], &ON_DISK, &["--set", &set]].concat()).refused(&[words]);
        assert!(!home.path("r").exists(), "{path}");
    }
    let unused = ["--set", "memory.nvme_checksums=true"];
    home.run(&[&train[..], &unused].concat())
        .refused(&["memory.nvme_checksums = true: is for memory.placement"]);
}

#[test]
fn several_folders_and_checksums_change_no_bit() {
    let home = home();
    std::fs::create_dir(home.path("other")).unwrap();
    let train = |run: &str, more: &[&str]| {
        let args = ["train", "small.toml", "--run", run, "--nproc", "2"];
        home.run(&[&args[..], more].concat()).ok()
    };
    train("whole", &["--set", "parallel.zero=3"]);
    let more = ["--set", "memory.nvme_path=[\"disk\", \"other\"]", "--set", "memory.nvme_checksums=true"];
    let ended = train("striped", &[&ON_DISK[..], &more].concat());
    assert!(ended.stdout.contains("in files under disk and other, with checksums"), "{}", ended.stdout);
    assert_eq!(home.losses("whole"), home.losses("striped"));
    // As in a file.
    home.write("several.toml", String::from_utf8(home.read("striped/config.toml")).unwrap());
    let plan = home.run(&["plan", "several.toml"]).ok();
    assert!(plan.stdout.contains("in files under disk and other, with checksums"), "{}", plan.stdout);
}

/// Runs the program in a mount namespace in which `disk` is a file system in memory of so many bytes; `beside` runs in the
/// background of its shell. None where this user may not mount.
fn on_small_disk(home: &Home, size: &str, beside: &str, args: &[&str]) -> Option<Child> {
    let mount = format!("mount -t tmpfs -o size={size} none disk");
    let shell = |line: &str| {
        let mut command = process::command("unshare");
        command.args(["-m", "sh", "-c", line, "sh", env!("CARGO_BIN_EXE_phalanx")]).args(args);
        command.current_dir(home.path("")).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let tried = shell(&format!("{mount}; exit")).spawn().map(rig::finish);
    if tried.is_ok_and(|tried| tried.code != Some(0)) {
        eprintln!("skipped: this user may not mount a file system (unshare -m, tmpfs)");
        return None;
    }
    Some(shell(&format!("{mount}; {beside}\nexec \"$@\"")).spawn().unwrap())
}

#[test]
fn a_disk_that_is_too_small_is_refused_with_needed_and_free_bytes() {
    let home = home();
    let args = [&["train", "small.toml", "--run", "r", "--nproc", "2"][..], &ON_DISK].concat();
    let Some(child) = on_small_disk(&home, "256k", "", &args) else { return };
    let ended = rig::finish(child);
    let words =
        ["disk memory of ", " bytes in disk: ", " bytes are needed, 262144 are free", "free space there"];
    ended.refused(&words);
    assert!(!home.path("r").exists());
    let Some(child) = on_small_disk(&home, "64m", "", &args) else { return };
    let ended = rig::finish(child).ok();
    assert_eq!(ended.stderr.matches("disk is memory, not a disk (tmpfs)").count(), 1, "{}", ended.stderr);
}

#[test]
fn a_disk_that_others_fill_during_a_step_changes_nothing() {
    let home = home();
    let args =
        ["train", "small.toml", "--run", "r", "--nproc", "2", "--quiet", "--set", "train.steps=1000000"];
    let fill = "(until grep -q '\"step\":5,' r/metrics.jsonl 2>/dev/null; do sleep 0.02; done; \
                 dd if=/dev/zero of=disk/filler bs=4k 2>/dev/null; df disk > full; mv full filled) &";
    let Some(child) = on_small_disk(&home, "8m", fill, &[&args[..], &ON_DISK].concat()) else { return };
    wait("the disk to be full", || home.path("filled").exists());
    let full = String::from_utf8(home.read("filled")).unwrap();
    assert!(full.contains("100%"), "{full}");
    let step = home.metrics("r").last().unwrap()["step"].as_u64().unwrap();
    home.wait_for_step("r", step + 20);
    signal(child.id() as i32, Signal::INT);
    let ended = rig::finish(child);
    assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    let saved = home.newest("r");
    assert!(saved >= step + 20);
    let steps = format!("train.steps={saved}");
    home.run(&["train", "small.toml", "--run", "whole", "--nproc", "2", "--quiet", "--set", &steps]).ok();
    assert_eq!(home.losses("r"), home.losses("whole"));
}

/// Runs the program with a limit of locked memory, from which it is not exempt. None where that cannot be arranged.
fn with_memlock(home: &Home, kib: &str, args: &[&str]) -> Option<Ended> {
    let line = "ulimit -l \"$0\" && exec setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock \"$@\"";
    let run = |args: &[&str]| {
        let mut command = process::command("sh");
        command.args(["-c", line, kib]).args(args);
        command.current_dir(home.path("")).stdin(Stdio::null());
        rig::ended(command)
    };
    if run(&["true"]).code != Some(0) {
        eprintln!("skipped: this user may not give up the right to lock memory (setpriv)");
        return None;
    }
    Some(run(&[&[env!("CARGO_BIN_EXE_phalanx")], args].concat()))
}

#[test]
fn locked_memory_beyond_the_limit_is_refused_or_done_without() {
    let home = home();
    let on_host = ["train", "small.toml", "--set", "memory.optimizer=host", "--run"];
    let pinned = ["--set", "memory.pin_memory=true"];
    let Some(ended) = with_memlock(&home, "16", &[&on_host[..], &["r"], &pinned].concat()) else { return };
    ended.refused(&["memory.pin_memory = true", "(RLIMIT_MEMLOCK) is 16384", "ulimit -l unlimited"]);
    assert!(!home.path("r").exists());
    let device = ["--set", "device.kind=simulated"];
    for (run, more, noted) in [("auto", &[][..], 1), ("never", &["--set", "memory.pin_memory=false"][..], 0)]
    {
        let ended = with_memlock(&home, "16", &[&on_host[..], &[run], &device, more].concat()).unwrap().ok();
        let notes = ended.stderr.matches("host memory cannot be locked: a rank needs ").count();
        assert_eq!(notes, noted, "{run}: {}", ended.stderr);
    }
    assert_eq!(home.losses("auto"), home.losses("never"));
    // Memory that cannot be registered for transfers is used as it is.
    let on_disk = [&["train", "small.toml", "--quiet", "--run", "disk-run"][..], &ON_DISK].concat();
    with_memlock(&home, "16", &on_disk).unwrap().ok();
    home.run(&["train", "small.toml", "--quiet", "--run", "whole"]).ok();
    assert_eq!(home.losses("disk-run"), home.losses("whole"));
}

#[test]
fn pinned_host_memory_is_locked() {
    let home = home();
    for (more, min) in [(&["--set", "memory.pin_memory=true"][..], 100 << 10), (&[][..], 0)] {
        let args = ["train", "small.toml", "--run", "r", "--quiet", "--set", "train.steps=1000000"];
        let child = home.start(&[&args[..], &["--set", "memory.optimizer=host"], more].concat());
        home.wait_for_step("r", 2);
        let locked = kib_field(format!("/proc/{}/status", child.id()), "VmLck:").unwrap();
        signal(child.id() as i32, Signal::INT);
        let ended = rig::finish(child);
        assert_eq!(ended.code, Some(130), "{}", ended.stderr);
        assert!(if min == 0 { locked == 0 } else { locked >= min }, "{locked} bytes for {more:?}");
        std::fs::remove_dir_all(home.path("r")).unwrap();
    }
}

#[test]
fn the_rates_of_a_disk_are_measured() {
    let home = home();
    let bench = ["bench", "disk", "disk", "--size", "3MiB", "--rounds", "2"];
    let figures = home.run(&[&bench[..], &["--json"]].concat()).ok().json();
    for key in ["read_bytes_per_s", "write_bytes_per_s", "both_bytes_per_s"] {
        let rates = figures[0][key].as_array().unwrap();
        assert!(rates.len() == 2 && rates.iter().all(|rate| rate.as_f64().unwrap() > 0.0), "{key}");
    }
    assert_eq!(number(&figures[0], "bytes"), (3 << 20) as f64);
    if !figures[0]["fio"].is_null() {
        assert!(number(&figures[0]["fio"], "read_bytes_per_s") > 0.0);
    }
    std::fs::create_dir(home.path("other")).unwrap();
    let two =
        ["bench", "disk", "disk", "other", "--size", "3MiB", "--rounds", "1", "--checksums", "--no-fio"];
    let text = home.run(&two).ok().stdout;
    assert!(text.contains("disk + other") && text.matches("read and write").count() == 3, "{text}");
    assert_eq!([names(&home, "disk"), names(&home, "other")], [0, 0]);
    home.run(&["bench", "disk", "missing"]).refused(&["missing"]);
}

#[test]
fn predicted_times_count_the_measured_disk() {
    let home = home();
    let plan = |more: &[&str]| {
        home.run(&[&["plan", "small.toml", "--machine", "here", "--json"][..], more].concat())
    };
    let disk_s = |plan: Ended| plan.ok().json()["step_time"]["time"]["disk_s"].as_f64();
    assert!(disk_s(plan(&ON_DISK)).is_some_and(|seconds| seconds > 0.0));
    assert_eq!(disk_s(plan(&[])), Some(0.0));
}

/// A budget that nobody gave is that of the machine on which the run began: with less memory, more leaves for the disk.
#[test]
fn a_resumed_run_lowers_the_budget_that_it_filled_in_and_keeps_one_that_was_given() {
    let home = home();
    let model = ["model.hidden=128", "model.layers=6", "batch.global=2"].map(|key| ["--set", key]).concat();
    let auto = ["--set", "memory.placement=auto", "--set", "memory.nvme_path=disk"];
    let begin = |run: &str, more: &[&str]| {
        let args = ["train", "small.toml", "--run", run, "--quiet", "--set", "train.steps=2"];
        home.run(&[&args[..], &model, more].concat()).ok();
    };
    let resume = |run: &str, more: &[&str]| {
        let args = ["train", "--run", run, "--resume", "--set", "train.steps=4"];
        home.run(&[&args[..], more].concat())
    };
    let budget = |run: &str| {
        let config: toml::Table = toml::from_slice(&home.read(&format!("{run}/config.toml"))).unwrap();
        config["memory"]["device_budget_mb"].as_float().unwrap()
    };
    begin("r", &[&auto[..], &["--set", "memory.limit_mb=72"]].concat());
    let before = budget("r");
    resume("r", &["--set", "memory.limit_mb=41"]).ok();
    let after = budget("r");
    assert!(after < before, "{after} MiB and {before} before");
    // The same steps in device memory.
    begin("whole", &[]);
    resume("whole", &[]).ok();
    assert_eq!(home.losses("r"), home.losses("whole"));
    // Another placement needs no budget.
    let device = ["memory.limit_mb=200", "memory.placement=device"].map(|key| ["--set", key]).concat();
    let ended = resume("r", &device).ok();
    for left in ["memory.device_budget_mb of before left out: ", "memory.nvme_path of before left out: "] {
        assert!(ended.stderr.contains(left), "no {left:?} in: {}", ended.stderr);
    }
    // A budget that was given stays.
    let given = ["--set", "memory.limit_mb=72", "--set", "memory.device_budget_mb=18"];
    begin("given", &[&auto[..], &given].concat());
    resume("given", &["--set", "memory.limit_mb=41"]).refused(&["memory.limit_mb allows"]);
    assert_eq!(budget("given"), 18.0);
}
