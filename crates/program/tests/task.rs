//! The task that ranks are given: of any length, and not for other users to read.

use crate::rig;
use std::process::{Output, Stdio};

use crate::rig::{Home, ranks};
use phalanx_collectives::HostJob;
use phalanx_testing::process;
use rustix::process::Signal;

/// One argument of a program holds at most 128 KiB, all of them 2 MiB.
#[test]
fn a_task_may_be_longer_than_an_argument() {
    let home = Home::new();
    let prompt = "step ".repeat(60_000);
    let texts: Vec<String> =
        (0..2000).map(|i| format!("a-folder-with-a-long-name/text-{i:05}.txt")).collect();
    std::fs::create_dir(home.path("a-folder-with-a-long-name")).unwrap();
    texts.iter().for_each(|text| home.write(text, "chunk rank shard gather reduce step plan arena\n"));
    let config = String::from_utf8(home.read("small.toml")).unwrap();
    let list = texts.iter().map(|text| format!("\"{text}\"")).collect::<Vec<_>>().join(", ");
    let config = config.replace("text = [\"text.txt\"]", &format!("text = [{list}]"));
    home.write("long.toml", format!("{config}sample = \"{prompt}\"\n"));
    let args = ["train", "long.toml", "--run", "r", "--nproc", "2", "--quiet", "--set", "train.steps=1"];
    home.run(&args).ok();
}

#[test]
fn the_command_line_of_a_rank_shows_its_number_and_no_configuration() {
    let home = Home::new();
    let sets = ["--set", "train.steps=1000000", "--set", "train.sample=\"a secret prompt\""];
    let child = home.start(&[&["train", "small.toml", "--run", "r", "--nproc", "2"], &sets[..]].concat());
    home.wait_for_step("r", 2);
    let started = ranks(child.id());
    assert_eq!(started.len(), 2);
    for (rank, pid) in started {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
        let (line, name) = (read("cmdline").replace('\0', " "), read("comm"));
        assert!(line.starts_with(&format!("phalanx rank {rank} ")) && line.len() < 100, "{line}");
        assert!(!line.contains("secret") && !line.contains('{'), "{line}");
        assert_eq!(name.trim(), format!("phalanx-rank-{rank}"));
    }
    rig::signal(child.id() as i32, Signal::INT);
    rig::finish(child);
}

/// A rank that planned for itself would not notice a change in the launcher's plan.
#[test]
fn a_rank_follows_the_plan_of_the_launcher_and_makes_none() {
    let home = Home::new();
    let args = ["train", "small.toml", "--run", "r", "--nproc", "2", "--set", "train.steps=1000000"];
    let launcher = home.start(&args);
    home.wait_for_step("r", 2);
    let task = task_of(launcher.id());
    rig::signal(launcher.id() as i32, Signal::INT);
    rig::finish(launcher);

    let planned = "\"name\":\"batch.tokens\"";
    let text = String::from_utf8_lossy(&task).into_owned();
    assert!(text.contains(planned), "the task comes with the plan of each allocation");
    // Same length as before, because the head of the file holds the offset of each plan.
    let other = planned.replace("batch.tokens", "batch.others");
    for ended in run_ranks(&home, &replaced(&task, planned.as_bytes(), other.as_bytes())) {
        let stderr = String::from_utf8_lossy(&ended.stderr);
        let words = ["differs from its plan", "(batch.tokens)", "(batch.others)"];
        assert!(!ended.status.success() && words.iter().all(|word| stderr.contains(word)), "{stderr}");
    }
}

/// The memory file that a launcher hands to its ranks.
fn task_of(launcher: u32) -> Vec<u8> {
    let descriptors = std::fs::read_dir(format!("/proc/{launcher}/fd")).unwrap();
    let is_task = |path: &std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("memfd:phalanx-task"))
    };
    let file = descriptors.map(|entry| entry.unwrap().path()).find(is_task).expect("a task");
    std::fs::read(file).unwrap()
}

/// Two ranks of a job with this task, as a launcher starts them.
fn run_ranks(home: &Home, task: &[u8]) -> Vec<Output> {
    let mut job = HostJob::new(2).unwrap();
    let task = job.hand_over(task).unwrap().to_string();
    let fds = job.inherited_fds().iter().map(i32::to_string).collect::<Vec<_>>().join(",");
    let launcher = std::process::id().to_string();
    let start = |rank: &str| {
        let args = ["rank", rank, "--fds", &fds, "--launcher", &launcher, "--task-fd", &task];
        let mut command = home.command(&args);
        job.pass_to(&mut command);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let started = ["0", "1"].map(start);
    started.map(process::finish).into()
}

fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut changed = bytes.to_vec();
    let mut at = 0;
    while let Some(next) = changed[at..].windows(from.len()).position(|window| window == from) {
        at += next;
        changed[at..at + to.len()].copy_from_slice(to);
    }
    changed
}
