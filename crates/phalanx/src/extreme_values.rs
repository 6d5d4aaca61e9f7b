//! Every numeric key of the configuration with every extreme value: planning refuses it by name or succeeds, in
//! bounded time and memory, and never panics.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::args::Overrides;
use crate::config::Given;
use crate::planned::{Planned, estimate_data};
use crate::{keys, machine, shape};

/// As people write them behind `--set KEY=`.
const VALUES: [&str; 21] = [
    "0",
    "1",
    "3",
    "65535",
    "1000000",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740992",
    "4611686018427387904",
    "9223372036854775807",
    "-1",
    "-9223372036854775808",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "-1e308",
    "5e-324",
    "0.5",
];

/// Configurations in which different keys matter.
const BASES: [&[&str]; 5] = [
    &[],
    &["model.arch=bert", "batch.micro=2"],
    &["precision.compute=f16", "parallel.data=2", "parallel.zero=3", "memory.chunk=1"],
    &["parallel.data=2", "parallel.updates=asynchronous"],
    &[
        "parallel.pipeline=2",
        "parallel.tensor=2",
        "parallel.sequence_parallel=true",
        "parallel.schedule=interleaved",
        "batch.micro=2",
    ],
];

/// Longest time of one case; a machine that does other things beside it is given as much again.
const LIMIT: Duration = Duration::from_secs(10);

/// A small model on a small text, in a folder of its own.
fn small() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::TempDir::new().unwrap();
    let text = dir.path().join("text.txt");
    std::fs::write(&text, "a small text ".repeat(200)).unwrap();
    let config = format!(
        "[model]\nlayers = 2\nhidden = 8\nheads = 2\nseq = 8\n[data]\ntext = [{:?}]\n[batch]\nglobal = 8\n\
         [train]\nsteps = 4\neval_samples = 8\n",
        text.display().to_string()
    );
    let path = dir.path().join("small.toml");
    std::fs::write(&path, config).unwrap();
    (dir, path)
}

/// What `phalanx plan` does, but for the printing.
fn plan(file: &Given, set: Vec<String>) -> Result<Planned> {
    let given = file.clone().with(&Overrides { set, nproc: None }, &[])?;
    let mut config = given.config()?;
    config.check()?;
    let (vocabulary, evaluated) = estimate_data(&mut config)?;
    let model = shape::complete(&mut config, None, &vocabulary)?;
    let planned = Planned::new(config, model, evaluated)?;
    planned.check_memory()?;
    Ok(planned)
}

#[test]
fn every_number_is_refused_by_name_or_planned() {
    let (_dir, path) = small();
    let file = Given::read(&path).unwrap();
    let keys = keys::numeric();
    assert!(keys.len() > 45, "{keys:?}");
    let mut faults = Vec::new();
    for base in BASES {
        for key in &keys {
            for value in VALUES {
                let assignment = format!("{key}={value}");
                let set = base.iter().map(|set| set.to_string()).chain([assignment.clone()]).collect();
                let start = Instant::now();
                let planned = catch_unwind(AssertUnwindSafe(|| plan(&file, set)));
                let took = start.elapsed();
                let fault = match planned {
                    Err(_) => Some("panic".to_string()),
                    Ok(Err(error)) => {
                        let text = format!("{error:#}");
                        // Where a key contradicts another, that one may be told, and what this one makes of it;
                        // where memory does not suffice, what would need less.
                        let leaf = key.split_once('.').map_or("", |(_, leaf)| leaf);
                        let named = text.contains(leaf) || text.contains("this machine has");
                        (!named).then_some(text)
                    }
                    Ok(Ok(_)) => None,
                };
                let fault = fault.or_else(|| (took > LIMIT).then(|| format!("{took:?}")));
                faults.extend(fault.map(|fault| format!("{base:?} {assignment}: {fault}")));
            }
        }
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
    let peak = machine::field("/proc/self/status", "VmHWM:").unwrap();
    assert!(peak < 1 << 30, "{peak} bytes were resident");
}
