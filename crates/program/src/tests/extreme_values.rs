//! Every numeric key of the configuration with every extreme value: planning refuses it by name or succeeds, in
//! bounded time and memory, and never panics.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use phalanx_testing::sweeps;
use rustix::time::{ClockId, clock_gettime};

use crate::arguments::overrides::Overrides;
use crate::configuration::keys;
use crate::configuration::user_config::UserConfig;
use crate::plans::estimate::estimate_data;
use crate::plans::planned::Planned;
use crate::plans::resolve::{Purpose, resolve};

/// Values as users write them after `--set KEY=`.
const VALUES: [&str; 15] = [
    "0",
    "1",
    "65535",
    "1000000",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740992",
    "9223372036854775807",
    "-1",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "5e-324",
];

/// The largest sizes that are allowed on their own, and some smaller ones that pass more checks; pairs of them are
/// tried.
const LARGE: [&str; 20] = [
    "model.hidden=262144",
    "model.seq=16777216",
    "model.seq=65536",
    "model.positions=16777216",
    "batch.global=4194304",
    "batch.global=256 --set batch.micro=1",
    "batch.global=1048576 --set parallel.data=1048576",
    "batch.global=16384 --set parallel.data=16384 --set parallel.zero=3",
    "data.mask_token=16777215 --set model.arch=bert",
    "memory.chunk=1048576",
    "memory.chunk=none",
    "memory.hidden_dim=1",
    "memory.search_range_mb=1e12",
    "memory.prefetch=1048576",
    "train.eval_samples=4194304",
    "train.threads=4096",
    "train.steps=1000000000000 --set schedule.warmup=1000000000000",
    "parallel.tensor=8 --set model.heads=8",
    "parallel.pipeline=5 --set batch.micro=1",
    "parallel.max_staleness=1048576 --set parallel.updates=asynchronous",
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

/// Maximum processor time of one case: what other programs and tests take does not count.
const LIMIT: Duration = Duration::from_secs(10);

/// Seconds of processor time for the proposals of each case.
const SEARCH_S: f64 = 0.2;

/// Processor time of this thread.
fn own_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

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

/// Describes what is wrong with the answer to the assignments `set`: a panic, too long a wait, or a refusal that
/// contains none of `words`.
fn fault_of(file: &UserConfig, set: &[&str], words: &[&str]) -> Option<String> {
    let start = own_time();
    let set_owned = set.iter().map(|set| set.to_string()).collect();
    let planned = catch_unwind(AssertUnwindSafe(|| plan(file, set_owned)));
    let took = own_time() - start;
    let fault = match planned {
        Err(_) => Some("panic".to_string()),
        Ok(Err(error)) => {
            let text = format!("{error:#}");
            // If memory does not suffice, the message advises what needs less.
            let told = text.contains("this machine has") || words.iter().any(|word| text.contains(word));
            (!told).then_some(text)
        }
        Ok(Ok(_)) => None,
    };
    let fault = fault.or_else(|| (took > LIMIT).then(|| format!("{took:?}")));
    fault.map(|fault| format!("{set:?}: {fault}"))
}

#[track_caller]
fn assert_none(faults: &[String]) {
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
    let peak = phalanx_system::host::kib_field("/proc/self/status", "VmHWM:").unwrap();
    assert!(peak < 1 << 30, "{peak} bytes were resident");
}

/// Does what `phalanx plan` does, without printing, and with less time for proposals.
fn plan(file: &UserConfig, set: Vec<String>) -> Result<Planned> {
    let given = file.clone().with(&Overrides { set, ..Overrides::default() }, &[])?;
    let (resolved, estimate) = resolve(&given, Purpose::Plan, None, estimate_data)?;
    let planned = Planned::of(resolved, estimate.evaluated)?;
    crate::reports::fit::check_memory_within(&planned, SEARCH_S)?;
    Ok(planned)
}

#[test]
fn every_number_is_refused_by_name_or_planned() {
    let (_dir, path) = small();
    let file = UserConfig::read(&path).unwrap();
    let keys = keys::numeric();
    assert!(keys.len() > 45, "{keys:?}");
    let mut faults = Vec::new();
    for (at, base) in BASES.iter().enumerate() {
        for (number, key) in keys.iter().enumerate() {
            // If two keys contradict each other, the message may name the other one.
            let leaf = key.split_once('.').map_or("", |(_, leaf)| leaf);
            // Each second value on the first, a fifth of them on each other.
            for value in sweeps::share(&VALUES, at + number, if at == 0 { 2 } else { 5 }) {
                let assignment = format!("{key}={value}");
                faults.extend(fault_of(&file, &[*base, &[assignment.as_str()]].concat(), &[leaf]));
            }
        }
    }
    assert_none(&faults);
}

#[test]
fn products_of_large_sizes_are_refused_or_planned() {
    let (_dir, path) = small();
    let file = UserConfig::read(&path).unwrap();
    let mut faults = Vec::new();
    for (number, first) in LARGE.iter().enumerate() {
        for second in sweeps::share(&LARGE[number + 1..], number, 2) {
            let set: Vec<&str> = [*first, second].iter().flat_map(|set| set.split(" --set ")).collect();
            let words: Vec<&str> =
                set.iter().filter_map(|set| set.split(['.', '=']).nth(1)).chain(["heads", "micro"]).collect();
            faults.extend(fault_of(&file, &set, &words));
        }
    }
    assert_none(&faults);
}
