//! Files of a user where a run or an output wants to write: under the names of a run, in its folders, beside it.
//!
//! Every command keeps the user's files, and everything around them, byte for byte. If the name is one that a run
//! writes, the command refuses it by this name; under any other name, the command does its work.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::hostile::Random;
use crate::reliability::command::Ended;
use crate::reliability::folder::{self, Listing};
use crate::reliability::names::{RUN_NAMES, SETUP_FILES};
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

/// Names that no run writes.
const ADDED: [&str; 8] = [
    "notes.txt",
    "checkpoints/notes.txt",
    "checkpoints/step-4/notes.txt",
    "checkpoints/step-6.tmp/notes.txt",
    "checkpoints/step-4.replaced/notes.txt",
    "logs/notes.txt",
    "flight/notes.json",
    "mine/config.toml",
];

const KINDS: [&str; 5] =
    ["a file", "a folder", "a link to a file", "a link to a folder", "a link to nothing"];

/// Folder that holds the user's file.
const FOLDERS: [&str; 3] = ["a user's folder", "an interrupted start", "a run"];

/// Commands that meet the user's file. `OUT` stands for its path.
const COMMANDS: [(&str, &[&str]); 10] = [
    ("train", &["train", "small.toml", "--run", "d", "--quiet", "--set", "train.steps=10"]),
    ("train on two ranks", &["train", "small.toml", "--run", "d", "--nproc", "2", "--set", "train.steps=10"]),
    (
        "train --resume",
        &["train", "small.toml", "--run", "d", "--resume", "--set", "train.steps=10", "--quiet"],
    ),
    (
        "launch",
        &["launch", "--hosts", "2", "--nproc", "1", "small.toml", "--run", "d", "--set", "train.steps=10"],
    ),
    ("import", &["import", "hf", "--run", "d"]),
    ("tokenize --force", &["tokenize", "text.txt", "--force", "--out", "OUT"]),
    ("export --force", &["export", "r", "--force", "--out", "OUT"]),
    ("plan --text", &["plan", "small.toml", "--schedule", "--text", "OUT"]),
    ("plan --svg", &["plan", "small.toml", "--schedule", "--svg", "OUT"]),
    (
        "resume with other tokens",
        &["train", "--run", "d", "--resume", "--data", "other.txt", "--set", "train.steps=10"],
    ),
];

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let state = FOLDERS[number % FOLDERS.len()];
    let (command, words) = COMMANDS[(number / FOLDERS.len()) % COMMANDS.len()];
    let own: &[&str] = match state {
        "a run" => &[".next/server.js", ".ready/config.toml"],
        "an interrupted start" => &SETUP_FILES,
        _ => &RUN_NAMES,
    };
    let name = if random.chance(0.7) { *random.pick(own) } else { *random.pick(&ADDED) };
    let kind = *random.pick(&KINDS);
    let detail = format!("{command}: {kind}, {name} in {state}");
    let result = world.case().and_then(|case| try_one(&case, state, (name, kind), (command, words)));
    Trial::new(format!("{state}: {command}"), detail, result)
}

fn try_one(
    case: &Case<'_>,
    state: &str,
    (name, kind): (&str, &str),
    (command, words): (&str, &[&str]),
) -> Result<(), String> {
    let prepared = case.world.run_and_model()?;
    for given in ["r", "hf"] {
        case.take(&prepared, given)?;
    }
    match state {
        "a run" => {
            folder::copy(&prepared.join("r"), &case.path("d")).map_err(|error| error.to_string())?;
        }
        "an interrupted start" => {
            fs::create_dir(case.path("d")).map_err(|error| error.to_string())?;
            for file in &SETUP_FILES {
                let copied = fs::copy(prepared.join("r").join(file), case.path("d").join(file));
                copied.map_err(|error| format!("{file}: {error}"))?;
            }
        }
        _ => fs::create_dir(case.path("d")).map_err(|error| error.to_string())?,
    }
    let path = case.path("d").join(name);
    put(&path, kind, case).map_err(|error| format!("{kind} {name}: {error}"))?;
    let before = everything(case.root());
    let out = format!("d/{name}");
    let ended = case.phalanx(words.iter().map(|word| word.replace("OUT", &out))).run()?;
    let writes_there = words.contains(&"OUT");
    judge(&ended, (state, name, kind), (command, writes_there), &before, &everything(case.root()))
}

fn judge(
    ended: &Ended,
    (state, name, kind): (&str, &str, &str),
    (command, writes_there): (&str, bool),
    before: &Listing,
    after: &Listing,
) -> Result<(), String> {
    ended.orderly()?;
    if ended.code != Some(0) {
        if let Some(difference) = folder::difference(before, after) {
            return ended.wrong(&format!("was refused and changed something: {difference}"));
        }
        let first = name.split('/').next().unwrap_or(name);
        let is_met = RUN_NAMES.contains(&name) || writes_there;
        // Without a configuration, what is no run cannot be resumed, whatever lies in it.
        let is_no_run = command == "resume with other tokens";
        return match !is_met || ended.stderr.contains(&format!("d/{first}")) || is_no_run {
            true => Ok(()),
            false => ended.wrong(&format!("was refused without naming d/{first}")),
        };
    }
    // Only a run's own names in its folder, and a folder for an export, may change.
    let is_users = |path: &str| {
        let in_folder = path.strip_prefix("d/");
        in_folder.is_none_or(|below| below == name || below.starts_with(&format!("{name}/"))) && path != "d"
    };
    let of_user = |listing: &Listing| -> Listing {
        listing
            .iter()
            .filter(|(path, _)| is_users(path))
            .map(|(path, what)| (path.clone(), what.clone()))
            .collect()
    };
    let is_replaced = command == "export --force";
    if !is_replaced && let Some(difference) = folder::difference(&of_user(before), &of_user(after)) {
        return ended.wrong(&format!("changed what is the user's: {difference}"));
    }
    match state == "a user's folder" && RUN_NAMES.contains(&name) && !writes_there {
        true => ended.wrong(&format!("started where {kind} has the name {name}")),
        false => Ok(()),
    }
}

/// Puts the user's file at `path`.
fn put(path: &Path, kind: &str, case: &Case<'_>) -> std::io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    if path.symlink_metadata().is_ok() {
        fs::remove_file(path)?;
    }
    let around = case.path("around");
    fs::create_dir_all(&around)?;
    fs::write(around.join("precious"), "precious\n")?;
    match kind {
        "a folder" => fs::create_dir(path).and_then(|()| fs::write(path.join("precious"), "precious\n")),
        "a link to a file" => symlink(around.join("precious"), path),
        "a link to a folder" => symlink(&around, path),
        "a link to nothing" => symlink(around.join("nothing"), path),
        _ => fs::write(path, "# precious\n"),
    }
}

/// Everything below a folder, locks too unless a run has written them.
fn everything(root: &Path) -> Listing {
    let mut listing = folder::listing(root);
    for path in ["d/.lock", "r/.lock"] {
        if let Ok(text) = fs::read(root.join(path))
            && !text.starts_with(b"lock of a Phalanx run")
        {
            listing.insert(path.to_string(), format!("file {}", blake3::hash(&text)));
        }
    }
    listing
}
