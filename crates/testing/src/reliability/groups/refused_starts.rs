//! Starts that are refused, and what others put into their folders meanwhile; starts that are killed while they prepare.
//!
//! A refused start leaves the folders around it as they were, with everything that others have put there. A killed one is said and
//! taken over by the next, which reaches the end with the bits of an undisturbed run, and keeps what others have put there.

use std::fs;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::hostile::Random;
use crate::reliability::folder::{self, Listing};
use crate::reliability::mesh::ALONE;
use crate::reliability::phase::pause;
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

/// Why a start is refused.
const CAUSES: [(&str, &[&str]); 9] = [
    ("too little memory", &["--set", "memory.limit_mb=0.1"]),
    ("a text that is missing", &["--data", "missing.txt"]),
    ("a batch that does not divide", &["--set", "batch.micro=3"]),
    ("text that is too short", &["--data", "text.txt", "--set", "model.seq=9000"]),
    ("tokens that are missing", &["--set", "data.text=[]", "--set", "data.tokens=missing.bin"]),
    ("a tokenizer that is missing", &["--set", "data.tokenizer=missing.json"]),
    ("a model that is missing", &["--set", "model.init=missing"]),
    (
        "a disk folder that is missing",
        &["--set", "memory.optimizer=nvme", "--set", "memory.nvme_path=missing"],
    ),
    ("more ranks than the batch has sequences", &["--nproc", "16"]),
];

/// Path of the run folder.
const RUNS: [&str; 4] = ["a/b/c", "runs/c", "c", "there/c"];

/// Files that others create meanwhile, relative to the run folder.
const PUT: [&str; 6] =
    ["notes.txt", "../notes.txt", "tokens.bin", ".next/notes.txt", "checkpoints/notes.txt", "mine/x"];

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let run = RUNS[number % RUNS.len()];
    let put = *random.pick(&PUT);
    let is_killed = number % 5 == 4;
    let (cause, more) = CAUSES[(number / RUNS.len()) % CAUSES.len()];
    let fault = if is_killed { "SIGKILL while a start prepares" } else { cause };
    let detail = format!("{fault}: --run {run}, others put {put} there");
    let try_one = |case: Case<'_>| {
        fs::create_dir(case.path("there")).map_err(|error| error.to_string())?;
        // Longer to prepare, so that others have the time.
        case.write("long.txt", fs::read(case.path("text.txt")).unwrap_or_default().repeat(200))?;
        match is_killed {
            true => killed(&case, run, put, random),
            false => refused(&case, (run, put), more, random),
        }
    };
    Trial::new(fault, detail, world.case().and_then(try_one))
}

/// Waits for the folder that a start makes, a random moment more, and then puts a file of others there, if the folder still is.
/// Returns the names that must stay.
fn put_meanwhile(
    running: &mut crate::reliability::command::Running,
    run: &Path,
    put: &str,
    random: &mut Random,
) -> Result<(), String> {
    running.wait_for(Duration::from_secs(5), || run.exists());
    pause(Duration::from_micros(random.below(20_000) as u64));
    let path = run.join(put);
    // Folders are made only below what is there.
    let made = path.parent().is_none_or(|parent| parent.is_dir() || fs::create_dir(parent).is_ok());
    if made && path.symlink_metadata().is_err() {
        let _ = fs::write(&path, "precious\n");
    }
    Ok(())
}

fn refused(
    case: &Case<'_>,
    (run, put): (&str, &str),
    more: &[&str],
    random: &mut Random,
) -> Result<(), String> {
    let before = folder::listing(case.root());
    let words = ["train", "small.toml", "--run", run, "--data", "long.txt"];
    let words =
        [&words[..if more.contains(&"--data") || more.contains(&"data.text=[]") { 4 } else { 6 }], more]
            .concat();
    let mut running = case.phalanx(words).start()?;
    put_meanwhile(&mut running, &case.path(run), put, random)?;
    let ended = running.finish();
    ended.refusal(&[])?;
    let after = folder::listing(case.root());
    // What the start has made is gone; what others have put there stays, with the folders that hold it.
    let is_others = |path: &String| case.root().join(path).is_dir() || is_precious(&case.root().join(path));
    let more: Listing = after
        .iter()
        .filter(|(path, _)| !before.contains_key(*path))
        .map(|(a, b)| (a.clone(), b.clone()))
        .collect();
    if let Some(left) = more.keys().find(|path| !is_others(path)) {
        return ended.wrong(&format!("left {left} behind"));
    }
    let holds = |folder: &String| more.keys().any(|path| path.starts_with(&format!("{folder}/")));
    let is_empty =
        |path: &&String| case.root().join(path).is_dir() && !holds(path) && !path.ends_with("/mine");
    if let Some(left) = more.keys().find(is_empty) {
        return ended.wrong(&format!("left the empty folder {left} behind"));
    }
    let kept: Listing = after.into_iter().filter(|(path, _)| before.contains_key(path)).collect();
    folder::difference(&before, &kept)
        .map_or(Ok(()), |difference| ended.wrong(&format!("changed something: {difference}")))
}

fn is_precious(path: &Path) -> bool {
    fs::read(path).is_ok_and(|bytes| bytes == b"precious\n")
}

/// A start that is killed while it prepares, and the next one.
fn killed(case: &Case<'_>, run: &str, put: &str, random: &mut Random) -> Result<(), String> {
    let reference = case.world.reference(&ALONE)?;
    let words = |data: &[&str]| {
        let words: Vec<String> = ALONE
            .train(&["--quiet"])
            .into_iter()
            .map(|word| if word == "r" { run.to_string() } else { word })
            .collect();
        words.into_iter().chain(data.iter().map(|word| word.to_string())).collect::<Vec<_>>()
    };
    let mut running = case.phalanx(words(&["--data", "long.txt"])).start()?;
    running.wait_for(Duration::from_secs(5), || case.path(run).exists());
    pause(Duration::from_micros(random.below(60_000) as u64));
    if let Some(pid) = Pid::from_raw(running.pid()) {
        // It may have ended.
        let _ = kill_process(pid, Signal::KILL);
    }
    running.finish().bounded()?;
    if folder::losses(&case.path(run)).is_empty() {
        // A name that no start writes: those are the cases of the group of users' files.
        let path = case.path(run).join("notes.txt");
        if put == "notes.txt" && case.path(run).is_dir() {
            fs::write(&path, "precious\n").map_err(|error| error.to_string())?;
        }
        let is_left = fs::read_dir(case.path(run)).is_ok_and(|names| {
            names.flatten().any(|name| !matches!(name.file_name().to_str(), Some(".lock" | "notes.txt")))
        });
        let ended = case.phalanx(words(&[])).run()?;
        ended.success()?;
        if is_left && !ended.stderr.contains("start") {
            return ended.wrong("took an interrupted start over in silence");
        }
        if put == "notes.txt" && path.exists() && !is_precious(&path) {
            return ended.wrong("changed notes.txt");
        }
        let _ = fs::remove_file(&path);
        return reference.is_equal(&case.path(run));
    }
    Ok(())
}
