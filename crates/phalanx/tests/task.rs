//! What ranks are told to do: of any length, and not for other users to read.

mod rig;

use rig::{Home, ranks};
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
    child.wait_with_output().unwrap();
}
