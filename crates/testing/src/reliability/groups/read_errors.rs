//! An error of the disk at every call that reads: `strace` makes one call on a file of the case fail with EIO.
//!
//! The command gives the result of an undisturbed one, or an error; and the same command, repeated without the fault, gives that
//! result. So nothing that was saved is lost, and no older checkpoint is taken in silence.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::hostile::Random;
use crate::reliability::command::{Ended, Invocation};
use crate::reliability::folder::{self, Listing};
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, PREPARED_STEPS, World};

/// Calls that read files, folders and what is known of them.
const CALLS: [&str; 7] = ["openat", "read", "pread64", "getdents64", "newfstatat", "statx", "readlink"];

/// Commands that read, with their names.
const COMMANDS: [(&str, &[&str]); 7] = [
    ("resume", &["train", "--run", "r", "--resume", "--quiet", "--set", "train.steps=10"]),
    ("start", &["train", "small.toml", "--run", "q", "--resume", "--quiet", "--set", "train.steps=4"]),
    ("sample", &["sample", "r", "--prompt", "rank", "--tokens", "4", "--json"]),
    ("inspect", &["inspect", "r", "--verify", "--json"]),
    ("export", &["export", "r", "--out", "new", "--force", "--json"]),
    ("import", &["import", "hf", "--run", "i"]),
    ("tokenize", &["tokenize", "text.txt", "other.txt", "--tokenizer", "char", "--out", "t.bin", "--force"]),
];

/// The last steps of `resume` and `start`.
const STEPS: [u64; 2] = [10, 4];

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let calls = match calls(world) {
        Ok(calls) => calls,
        Err(error) if error.starts_with("no strace") => return Trial::skipped(&error),
        Err(error) => return Trial::new("preparation", String::new(), Err(error)),
    };
    // Every call once, in turn, before any is tried again.
    let Some((at, call, nth)) = calls.get(number % calls.len().max(1)).copied() else {
        return Trial::new("preparation", String::new(), Err("no command reads anything".to_string()));
    };
    let (command, words) = COMMANDS[at];
    let detail = format!("{command}: {call} number {nth} fails with EIO");
    // Later rounds fail this call and all behind it.
    let rest = if number >= calls.len() && random.chance(0.5) { "+" } else { "" };
    let result = world
        .case()
        .and_then(|case| try_one(&case, (command, words), &format!("{call}:error=EIO:when={nth}{rest}")));
    Trial::new(format!("{command}: EIO"), detail, result)
}

fn try_one(case: &Case<'_>, (command, words): (&str, &[&str]), fault: &str) -> Result<(), String> {
    let prepared = case.world.run_and_model()?;
    for given in ["r", "hf"] {
        case.take(&prepared, given)?;
    }
    let expected = expected(case.world, command, words)?;
    let ended = traced(case.world, case.root(), words, &format!("-e inject={fault}"))?;
    ended.orderly()?;
    let given = |ended: &Ended| given(case.root(), command, &ended.stdout);
    if ended.code == Some(0) {
        return match given(&ended) == expected || ended.stderr.contains("Input/output error") {
            true => Ok(()),
            false => ended.wrong("succeeded in silence with another result"),
        };
    }
    let again = case.phalanx(words.iter().copied()).run()?;
    again.success()?;
    match given(&again) == expected {
        true => Ok(()),
        false => again.wrong("gave another result after the fault than without it"),
    }
}

/// Output of a command: losses and parameters, text, or files.
fn given(root: &Path, command: &str, stdout: &str) -> Listing {
    let of_run = |run: &str, step: u64| {
        let mut given = folder::parameters(&root.join(run), step);
        // An older checkpoint, which is said, is evaluated at other steps until then.
        let losses =
            folder::losses(&root.join(run)).into_iter().filter(|(at, _)| run != "r" || *at > PREPARED_STEPS);
        given.insert("losses".to_string(), format!("{:?}", losses.collect::<Vec<_>>()));
        given
    };
    let text = |text: String| Listing::from([("text".to_string(), text)]);
    match command {
        "resume" => of_run("r", STEPS[0]),
        "start" => of_run("q", STEPS[1]),
        "import" => of_run("i", 0),
        "sample" => text(stdout.to_string()),
        "inspect" => {
            text(serde_json::from_str::<Value>(stdout).unwrap_or_default()["checkpoint"].to_string())
        }
        "export" => folder::listing(&root.join("new")),
        _ => text(format!("{:?}", fs::read(root.join("t.bin")).map(|bytes| blake3::hash(&bytes)).ok())),
    }
}

/// Returns the output of the command without a fault, which is computed once.
fn expected(world: &World, command: &str, words: &[&str]) -> Result<Listing, String> {
    let kept = world.prepared(&format!("read-errors-{command}"), |folder| {
        let prepared = world.run_and_model()?;
        for given in ["r", "hf"] {
            folder::copy(&prepared.join(given), &folder.join(given)).map_err(|error| error.to_string())?;
        }
        let ended = Invocation::new(world.program(), folder, words.iter().copied()).run()?;
        ended.success()?;
        fs::write(folder.join("stdout"), &ended.stdout).map_err(|error| error.to_string())
    })?;
    let stdout = fs::read_to_string(kept.join("stdout")).map_err(|error| error.to_string())?;
    Ok(given(&kept, command, &stdout))
}

/// Every call of every command that reads something of the case: command, call, number of the call.
fn calls(world: &World) -> Result<Vec<(usize, &'static str, usize)>, String> {
    let kept = world.prepared("read-errors-calls", |folder| {
        let prepared = world.run_and_model()?;
        let mut text = String::new();
        for (at, (_, words)) in COMMANDS.iter().enumerate() {
            let root = folder.join(at.to_string());
            folder::copy(&prepared, &root).map_err(|error| error.to_string())?;
            let traced = traced(world, &root, words, "");
            let ended = traced.map_err(|error| format!("no strace, which makes calls fail: {error}"))?;
            if ended.code != Some(0) {
                return Err(format!("no strace, which makes calls fail: {}", ended.stderr));
            }
            let log = fs::read_to_string(root.join("log")).map_err(|error| error.to_string())?;
            for call in CALLS {
                let count = log.lines().filter(|line| line.contains(&format!(" {call}("))).count();
                text.push_str(&format!("{at} {call} {count}\n"));
            }
        }
        fs::write(folder.join("calls"), text).map_err(|error| error.to_string())
    });
    let kept = kept.map_err(|error| error.trim_start_matches("preparing read-errors-calls: ").to_string())?;
    let text = fs::read_to_string(kept.join("calls")).map_err(|error| error.to_string())?;
    let mut calls = Vec::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let known = CALLS.into_iter().find(|call| words.get(1) == Some(call));
        if let (Some(Ok(at)), Some(call), Some(Ok(count))) =
            (words.first().map(|at| at.parse()), known, words.get(2).map(|count| count.parse::<usize>()))
        {
            calls.extend((1..=count).map(|nth| (at, call, nth)));
        }
    }
    // The same order for every case.
    Random::of_case("read-errors", 0).shuffle(&mut calls);
    Ok(calls)
}

/// Runs a command below `strace`, which looks at calls on what is in `root` now, and on what the command makes there.
fn traced(world: &World, root: &Path, words: &[&str], fault: &str) -> Result<Ended, String> {
    let made = ["q", "i", "new", "t.bin"].map(str::to_string);
    let paths = folder::listing(root).into_keys().filter(|path| path != "log").chain(made);
    let paths: String = paths.map(|path| format!(" -P {path}")).collect();
    let before =
        format!("exec strace -qq -f --seccomp-bpf -o log -e trace={}{paths} {fault}", CALLS.join(","));
    // strace says on standard error what its paths resolve to.
    Invocation::new(world.program(), root, words.iter().copied()).in_shell(&before, "").run()
}
