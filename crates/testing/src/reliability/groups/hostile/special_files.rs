//! FIFOs, sockets, folders and devices where a regular file is expected: refused by name, without waiting or reading on.

use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;

use crate::hostile::Random;
use crate::reliability::groups::hostile::Attempt;
use crate::reliability::groups::pipes::prepared;
use crate::reliability::world::Case;

/// Paths of inputs, each with the command that reads it and the name that a refusal must contain.
const PLACES: [(&str, &[&str], &str); 14] = [
    ("input.toml", &["plan", "input.toml"], "input.toml"),
    ("input.toml", &["train", "input.toml"], "input.toml"),
    ("hf/config.json", &["import", "hf", "--run", "i"], "config.json"),
    ("hf/model.safetensors", &["import", "hf", "--run", "i"], "model.safetensors"),
    ("hf/config.json", &["inspect", "hf"], "config.json"),
    ("input.bin", &["inspect", "input.bin"], "input.bin"),
    (
        "input.bin",
        &["plan", "small.toml", "--set", "data.text=[]", "--set", "data.tokens=input.bin"],
        "input.bin",
    ),
    ("input.csv", &["plan", "--schedule", "input.csv"], "input.csv"),
    ("input.csv", &["plan", "small.toml", "--set", "parallel.schedule=input.csv"], "input.csv"),
    ("input.json", &["tokenize", "--tokenizer", "input.json", "--out", "t.bin", "text.txt"], "input.json"),
    ("input.txt", &["tokenize", "--out", "t.bin", "input.txt"], "input.txt"),
    ("input.txt", &["train", "small.toml", "--data", "input.txt", "--set", "train.steps=3"], "input.txt"),
    ("r/checkpoints/step-4/manifest.json", &["inspect", "r/checkpoints/step-4"], "step-4"),
    ("r/tokenizer.json", &["sample", "r", "--prompt", "rank"], "tokenizer.json"),
];

pub(super) fn make(case: &Case<'_>, random: &mut Random) -> Result<Attempt, String> {
    let prepared = prepared(case.world)?;
    let (place, words, named) = *random.pick(&PLACES);
    for folder in ["hf", "r"] {
        if place.starts_with(&format!("{folder}/")) {
            case.take(&prepared, folder)?;
        }
    }
    let path = case.path(place);
    let _ = std::fs::remove_file(&path);
    let kind =
        *random.pick(&["FIFO", "/dev/zero", "/dev/full", "/dev/null", "socket", "link to itself", "folder"]);
    put(kind, &path).map_err(|error| format!("{kind}: {error}"))?;
    let attempt = Attempt::new(format!("{kind} as {place}"), words.iter().copied());
    // A folder of no texts, or nothing at all, is refused for what is missing.
    Ok(attempt.refused(named))
}

fn put(kind: &str, path: &Path) -> std::io::Result<()> {
    match kind {
        "FIFO" => {
            let mode = rustix::fs::Mode::from_raw_mode(0o600);
            Ok(rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0)?)
        }
        "socket" => UnixListener::bind(path).map(drop),
        "link to itself" => symlink(path, path),
        "folder" => std::fs::create_dir(path),
        device => symlink(device, path),
    }
}
