//! Whether a run fits so many devices at all: the candidates that need least memory are planned first.

use anyhow::Result;
use phalanx_plan::Machine;
use phalanx_train::RunConfig;

use super::appraise::WAVE;
use super::limits::Limits;
use super::{Found, Outcome, Search, Subject};

/// Candidates that are planned at most.
const PLANNED: usize = 3 * WAVE;

/// What of a run on so many devices needs least memory.
pub enum Smallest {
    /// It fits: the candidate, and the text of its configuration.
    Fits(Box<Found>, String),
    /// Bytes that are missing, about.
    TooLarge(u64),
}

/// Plans the candidates that are estimated to need least memory of their devices.
///
/// # Errors
/// Limits that nothing meets.
pub fn smallest(
    subject: &dyn Subject,
    config: &RunConfig,
    machine: (&Machine, usize),
    limits: &Limits,
) -> Result<Smallest> {
    let mut search = Search::begin(subject, config, machine, limits)?;
    search.candidates.sort_by(|(a, x), (b, y)| x.bytes.cmp(&y.bytes).then(a.cmp(b)));
    let first: Vec<_> = search.candidates.iter().take(PLANNED).map(|(candidate, _)| *candidate).collect();
    for wave in first.chunks(WAVE) {
        search.appraise_all(subject, wave);
        if !search.found.is_empty() && search.propose(subject).is_ok() {
            let text = std::mem::take(&mut search.text);
            return Ok(Smallest::Fits(Box::new(search.found.swap_remove(0)), text));
        }
    }
    let missing = search.outcomes.values().filter_map(|outcome| match outcome {
        Outcome::TooLarge(missing, _) => Some(*missing),
        _ => None,
    });
    let estimated = search.classes.values().filter_map(|of| of.min_excess);
    match missing.min().or_else(|| estimated.min()) {
        Some(missing) => Ok(Smallest::TooLarge(missing)),
        None => anyhow::bail!("{}", search.nothing_fits()),
    }
}
