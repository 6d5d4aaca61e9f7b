//! Damages a file of a run folder, and then runs a command that may read it.
//!
//! The command must give the same result as on the undamaged folder, or name the damaged file: in a refusal, or in a
//! message that it resumes from an older checkpoint. A refusal changes nothing in the folder.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::hostile::Random;
use crate::reliability::command::{Ended, Invocation};
use crate::reliability::folder::{self, Listing};
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World, walk};

/// Steps of a prepared run; its checkpoints are of half of them and of all.
const STEPS: u64 = 8;

/// Steps to which it is resumed.
const MORE: u64 = 12;

/// A prepared run: name, and what it sets beside the configuration.
const RUNS: [(&str, &[&str]); 4] = [
    ("alone", &[]),
    ("sharded", &["parallel.data=2", "parallel.zero=2"]),
    ("striped", &["parallel.tensor=2"]),
    ("bytes", &["data.tokenizer=byte"]),
];

/// Files of this one replace those of the others: another text with as many characters, another rate.
const OTHER: (&str, &[&str]) = ("other", &["data.text=other.txt", "optimizer.lr=3e-3", "train.seed=9"]);

/// Files that a run which has started writes into its folder, besides checkpoints.
const REWRITTEN: [&str; 6] =
    ["config.toml", "checksums.json", "given.toml", "plan.json", "memory.json", "metrics.jsonl"];

/// Every second one resumes, which reads the most.
const COMMANDS: [&str; 6] = ["resume", "sample", "resume", "inspect", "resume", "export"];

const DAMAGES: [&str; 11] = [
    "flip a bit",
    "zero a span",
    "cut",
    "cut at a line end",
    "grow",
    "delete",
    "replace by another run's",
    "empty",
    "replace by a folder",
    "replace by a FIFO",
    "replace by a link to itself",
];

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    // All combinations within 264 cases, and every damage within the first eleven.
    let (name, sets) = RUNS[number % RUNS.len()];
    let damage = DAMAGES[number % DAMAGES.len()];
    let command = COMMANDS[(number + number / (RUNS.len() * DAMAGES.len())) % COMMANDS.len()];
    let (file, result) = match try_one(world, name, sets, command, damage, random) {
        Ok((file, result)) => (file, result),
        Err(error) => ("preparation".to_string(), Err(error)),
    };
    let detail = format!("{damage}: {file} of the run \"{name}\", then {command}");
    Trial::new(kind(Path::new(&file)), detail, result)
}

/// A row of the table: the file's name, or what rank files have in common.
fn kind(file: &Path) -> String {
    match file.extension().and_then(|ending| ending.to_str()) {
        Some("safetensors") => "rank files".to_string(),
        _ => file.file_name().unwrap_or_default().to_string_lossy().into_owned(),
    }
}

/// The damaged file, and whether the command kept the rule.
fn try_one(
    world: &World,
    name: &str,
    sets: &[&str],
    command: &str,
    damage: &str,
    random: &mut Random,
) -> Result<(String, Result<(), String>), String> {
    let prepared = prepared(world, name, sets)?;
    let other = self::prepared(world, OTHER.0, OTHER.1)?;
    let expected = expected(world, name, &prepared, command)?;
    let case = world.case()?;
    let run = case.take(&prepared, "r")?;
    let files = walk(&run);
    let mut kinds: Vec<String> = files.iter().map(|path| kind(path)).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let chosen = random.pick(&kinds);
    let of_kind: Vec<_> = files.iter().filter(|path| kind(path) == *chosen).collect();
    let path = *random.pick(&of_kind);
    let file = path.strip_prefix(&run).expect("a file of the run").display().to_string();
    let replacement = other.join("r").join(&file);
    apply(damage, path, &replacement, random).map_err(|error| format!("{damage}: {file}: {error}"))?;
    let before = folder::listing(&run);
    let ended = perform(&case, command)?;
    Ok((file.clone(), judge(&case, command, &file, &ended, &before, &expected)))
}

/// A run of eight steps in the folder `r`.
fn prepared(world: &World, name: &str, sets: &[&str]) -> Result<PathBuf, String> {
    world.prepared(&format!("damage-{name}"), |folder| {
        let steps = format!("train.steps={STEPS}");
        let mut words = vec!["train", "small.toml", "--run", "r", "--quiet", "--set", &steps];
        words.extend(["--set", "train.save_every=4", "--set", "train.eval_every=4"]);
        words.extend(sets.iter().flat_map(|set| ["--set", set]));
        Invocation::new(world.program(), folder, words).run()?.success()
    })
}

fn words(command: &str) -> Vec<String> {
    let steps = format!("train.steps={MORE}");
    let words: &[&str] = match command {
        "resume" => &["train", "--run", "r", "--resume", "--quiet", "--set", &steps],
        "sample" => &["sample", "r", "--prompt", "rank", "--tokens", "8", "--json"],
        "inspect" => &["inspect", "r", "--verify", "--json"],
        _ => &["export", "r", "--out", "hf", "--json"],
    };
    words.iter().map(|word| word.to_string()).collect()
}

fn perform(case: &Case<'_>, command: &str) -> Result<Ended, String> {
    case.phalanx(words(command)).run()
}

/// Output of a command: numbers of the run, text, or files.
#[derive(Clone, PartialEq)]
struct Given {
    losses: Vec<(u64, String)>,
    text: String,
    files: Listing,
}

fn given(folder: &Path, command: &str, stdout: &str) -> Given {
    let run = folder.join("r");
    let mut given = Given { losses: Vec::new(), text: String::new(), files: Listing::new() };
    match command {
        "resume" => {
            given.losses = folder::losses(&run).into_iter().filter(|(step, _)| *step > STEPS).collect();
            given.files = folder::parameters(&run, MORE);
        }
        // What lies beside the checkpoint, the numbers of the log among it, is shown as it is.
        "inspect" => {
            let json: Value = serde_json::from_str(stdout).unwrap_or_default();
            given.text = json["checkpoint"].to_string();
        }
        "sample" => given.text = stdout.to_string(),
        _ => given.files = folder::listing(&folder.join("hf")),
    }
    given
}

/// Returns the output of the command on the undamaged folder, which is computed once.
fn expected(world: &World, name: &str, prepared: &Path, command: &str) -> Result<Given, String> {
    let kept = world.prepared(&format!("expected-{name}-{command}"), |folder| {
        folder::copy(&prepared.join("r"), &folder.join("r")).map_err(|error| error.to_string())?;
        let ended = Invocation::new(world.program(), folder, words(command)).run()?;
        ended.success()?;
        fs::write(folder.join("stdout"), &ended.stdout).map_err(|error| error.to_string())
    })?;
    let stdout = fs::read_to_string(kept.join("stdout")).map_err(|error| error.to_string())?;
    Ok(given(&kept, command, &stdout))
}

fn judge(
    case: &Case<'_>,
    command: &str,
    file: &str,
    ended: &Ended,
    before: &Listing,
    expected: &Given,
) -> Result<(), String> {
    ended.orderly()?;
    let after = folder::listing(&case.path("r"));
    // A resume writes these anew when it starts, and this damage may be found by a rank that loads or saves, which leaves flight records.
    let started = command == "resume" && ended.stderr.contains("step(s) were done");
    let kept = |listing: &Listing| {
        let mut listing = listing.clone();
        listing.retain(|name, _| {
            !started || !(REWRITTEN.contains(&name.as_str()) || folder::is_of_failure(name))
        });
        listing
    };
    let may_write = ended.code == Some(0) && command == "resume";
    let difference = folder::difference(&kept(before), &kept(&after));
    if let Some(difference) = difference.filter(|_| !may_write) {
        return ended.wrong(&format!("changed the run folder: {difference}"));
    }
    let names = named_in(file, &ended.stderr);
    if ended.code != Some(0) {
        return if names { Ok(()) } else { ended.wrong(&format!("refused without naming {file}")) };
    }
    // Beside a whole older checkpoint a damaged one may be left out, when that is said.
    if names || given(case.root(), command, &ended.stdout) == *expected {
        return Ok(());
    }
    ended.wrong(&format!("accepted the damaged {file} in silence and gave other results"))
}

/// Returns whether a message names a file of the run: by its name, or for a checkpoint by its folder.
fn named_in(file: &str, message: &str) -> bool {
    let mut parts = file.rsplit('/');
    let name = parts.next().is_some_and(|name| message.contains(name));
    name || parts.next().is_some_and(|folder| message.contains(folder))
}

/// Damages the file at `path`.
fn apply(damage: &str, path: &Path, replacement: &Path, random: &mut Random) -> std::io::Result<()> {
    let mut bytes = fs::read(path)?;
    let at = random.below(bytes.len());
    match damage {
        "flip a bit" => bytes[at] ^= 1 << random.below(8),
        "zero a span" => {
            let end = (at + 1 + random.below(64)).min(bytes.len());
            bytes[at..end].fill(0);
        }
        "cut" => bytes.truncate(at),
        "cut at a line end" => {
            let ends: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at] == b'\n').collect();
            bytes.truncate(if ends.is_empty() { at } else { *random.pick(&ends) + 1 });
        }
        "grow" => {
            let count = 1 + random.below(64);
            bytes.extend(random.bytes(count));
        }
        "replace by another run's" if replacement.exists() => bytes = fs::read(replacement)?,
        "empty" | "replace by another run's" => bytes.clear(),
        _ => {
            fs::remove_file(path)?;
            return match damage {
                "replace by a folder" => fs::create_dir(path),
                "replace by a FIFO" => {
                    let kind = rustix::fs::FileType::Fifo;
                    let mode = rustix::fs::Mode::from_raw_mode(0o644);
                    Ok(rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, 0)?)
                }
                "replace by a link to itself" => std::os::unix::fs::symlink(path, path),
                _ => Ok(()),
            };
        }
    }
    fs::write(path, bytes)
}
