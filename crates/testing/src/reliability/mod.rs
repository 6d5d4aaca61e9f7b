//! The fault campaign: faults generated from a seed, tried against the `phalanx` binary in temporary folders.
//!
//! It knows nothing of the engine. A case is a prepared run folder or a generated input, a fault (a kill, a
//! damaged file, a full disk ...), one or more commands, and a rule for how they may end: with the same numbers as an
//! undisturbed run, or with an error that names the cause, within ten seconds and one GiB, without a panic, and with
//! nothing left behind or changed. `cargo xtask reliability` runs it; `docs/reliability.md` has the rule and the table.

pub mod arguments;
mod command;
mod folder;
mod groups;
mod mesh;
mod names;
mod phase;
mod processes;
mod trial;
mod world;

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

pub use names::{RUN_NAMES, SETUP_FILES};
pub use trial::{Failed, Report, Tally};

use crate::hostile::Random;
use groups::{GROUPS, Group};
use trial::Trial;
use world::World;

/// Number of cases that are tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// A few of each group, for every submission.
    Short,
    /// All.
    Whole,
    /// As many as given, shared among the groups as in the whole.
    Cases(usize),
}

/// A selection of cases, and the program that they test.
#[derive(Clone, Debug)]
pub struct Campaign {
    /// The `phalanx` binary.
    pub program: PathBuf,
    /// Seed of all cases.
    pub seed: u64,
    /// Number of cases.
    pub selection: Selection,
    /// Only this group.
    pub only: Option<String>,
    /// Only this case of the group.
    pub case: Option<usize>,
    /// Cases at a time.
    pub jobs: usize,
}

/// A case that has ended, for whoever shows progress.
#[derive(Clone, Copy, Debug)]
pub struct Done<'a> {
    /// Cases that have ended.
    pub done: usize,
    /// Cases in all.
    pub of: usize,
    /// This case's group.
    pub group: &'static str,
    /// Its number in the group.
    pub case: usize,
    /// Message of the failure; None if the case passed.
    pub failure: Option<&'a str>,
}

/// The names of the groups.
pub fn group_names() -> Vec<&'static str> {
    GROUPS.iter().map(|group| group.name).collect()
}

/// Tries all cases. One that failed by its time alone, beside other cases, is tried once more with nothing beside it, and the
/// report says so: the limits are for a machine that has a processor to spare.
///
/// # Errors
/// A group that is not known, or a machine on which no case can be tried.
pub fn run(campaign: &Campaign, progress: &(dyn Fn(Done<'_>) + Sync)) -> Result<Report, String> {
    let cases = cases(campaign)?;
    let world = World::new(&campaign.program)?;
    let report = Mutex::new(Report { seed: campaign.seed, ..Report::default() });
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..campaign.jobs.max(1) {
            scope.spawn(|| {
                while let Some((group, number)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (trial, seconds) = trial(&world, campaign.seed, (group, *number));
                    let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                    let failure = trial.result.as_ref().err().map(String::as_str);
                    progress(Done { done, of: cases.len(), group: group.name, case: *number, failure });
                    let mut report = report.lock().expect("no case panics while it adds");
                    report.add(group.name, *number, trial, seconds);
                }
            });
        }
    });
    let mut report = report.into_inner().expect("no case panics while it adds");
    if campaign.jobs > 1 {
        for (group, number) in &cases {
            if report.was_late(group.name, *number) {
                let (trial, seconds) = trial(&world, campaign.seed, (group, *number));
                report.try_again(group.name, *number, trial, seconds);
            }
        }
    }
    report.failed.sort_by_key(|failed| (failed.group, failed.case));
    Ok(report)
}

/// Tries a case; returns its seconds, too.
fn trial(world: &World, seed: u64, (group, number): (&Group, usize)) -> (Trial, f64) {
    let started = Instant::now();
    let mut random = Random::of_case(&format!("{seed}/{}", group.name), number);
    let trial = (group.case)(world, &mut random, number);
    (trial, started.elapsed().as_secs_f64())
}

/// The cases to try, mixed so that waiting and computing ones run side by side.
fn cases(campaign: &Campaign) -> Result<Vec<(&'static Group, usize)>, String> {
    let only = campaign.only.as_deref();
    if let Some(name) = only.filter(|name| GROUPS.iter().all(|group| group.name != *name)) {
        return Err(format!("no group {name}: the groups are {}", group_names().join(", ")));
    }
    let chosen: Vec<&'static Group> =
        GROUPS.iter().filter(|group| only.is_none_or(|name| group.name == name)).collect();
    if let Some(case) = campaign.case {
        return match chosen[..] {
            [group] => Ok(vec![(group, case)]),
            _ => Err("--case needs --only GROUP".to_string()),
        };
    }
    let whole: usize = chosen.iter().map(|group| group.cases).sum();
    let mut cases = Vec::new();
    for group in chosen {
        let count = match campaign.selection {
            Selection::Short => group.short,
            Selection::Whole => group.cases,
            Selection::Cases(count) => (count * group.cases).div_ceil(whole),
        };
        cases.extend((0..count).map(|number| (group, number)));
    }
    Random::of_case(&format!("{}/order", campaign.seed), 0).shuffle(&mut cases);
    Ok(cases)
}
