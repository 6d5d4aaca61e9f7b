//! The search for the fastest configuration that fits (`plan --search`).
//!
//! All candidates of the given devices are compared by estimates ([`estimate`]), which are made from a dry run of a replica for each number of
//! tensor ranks. Those that are too large by states and activations alone are left out. The others are appraised in the order of their
//! estimates, in the multiples that were found so far ([`queue`]): one rank of each pipeline stage runs dry, its memory is planned, and the stages play a step together. The search ends when what is
//! left is estimated to be slower than the tenth that was found. What is proposed was then planned as `train` plans it, from the text of its
//! configuration.

mod appraise;
mod begin;
pub mod candidate;
pub mod estimate;
pub mod limits;
pub mod lost;
mod queue;
mod shapes;
pub mod smallest;
mod work;

use std::collections::{BTreeMap, HashMap, HashSet};

use anyhow::Result;
use phalanx_plan::Machine;
use phalanx_train::RunConfig;
use toml::Value;

use crate::host::busy;
use crate::plans::budgets::Budget;
use crate::plans::planned::Planned;
use crate::plans::resolve::Resolved;
use crate::plans::step_time::StepTime;
use candidate::{Axes, Candidate, Placed};
use estimate::Estimate;
use limits::Limits;
use lost::{Class, ClassOf};
use queue::Multiples;

/// Configurations that are proposed.
const SHOWN: usize = 10;

/// Seconds of processor time after which no more candidates are appraised if some were found: for one host, for some, for many. Two cores
/// take about half as long.
const LONGEST_S: [(usize, f64); 3] = [(8, 5.0), (64, 18.0), (usize::MAX, 80.0)];

/// A run whose keys are searched.
pub trait Subject {
    /// The configuration with other values of some keys, and the windows of an evaluation.
    ///
    /// # Errors
    /// A configuration that cannot work.
    fn resolved(&self, settings: &[(&'static str, Value)]) -> Result<(Resolved, usize)>;

    /// The memories within which a plan must stay.
    fn budgets(&self, planned: &Planned) -> Vec<Budget>;

    /// Bytes that a rank of a run of so many ranks may take of its device, about.
    fn device_bytes(&self, config: &RunConfig, ranks: usize) -> u64;

    /// The text of the configuration with other values of some keys.
    ///
    /// # Errors
    /// None for keys that were resolved.
    fn text(&self, settings: &[(&'static str, Value)]) -> Result<String>;

    /// The plan of a configuration's text, as `train` makes it.
    ///
    /// # Errors
    /// A configuration that cannot work.
    fn planned(&self, text: &str) -> Result<Planned>;
}

/// A candidate that was planned.
pub struct Found {
    /// The candidate.
    pub candidate: Candidate,
    /// Its keys.
    pub settings: Vec<(&'static str, Value)>,
    /// Its plan: all ranks of the proposed first one, of others one of each stage.
    pub planned: Planned,
    /// Its step.
    pub time: StepTime,
    /// The memory of which it needs the largest share: bytes that it needs, and bytes that there are.
    pub need: (u64, u64),
}

/// Keys with their values.
type Settings = Vec<(&'static str, Value)>;

impl Found {
    /// Seconds of a step.
    pub fn seconds(&self) -> f64 {
        self.time.seconds().unwrap_or(f64::MAX)
    }
}

/// What became of a candidate.
enum Outcome {
    Fits(Box<Found>),
    /// It is among those that were found.
    Found,
    /// Bytes that are missing, and the pipeline stage that lacks them.
    TooLarge(u64, usize),
    Impossible(String),
}

/// The result of a search.
pub struct Search<'a> {
    machine: &'a Machine,
    ranks: usize,
    axes: Axes,
    /// Candidates with their estimates, fastest first.
    candidates: Vec<(Candidate, Estimate)>,
    outcomes: HashMap<Candidate, Outcome>,
    /// Bytes of a rank's device.
    device_bytes: u64,
    /// Meshes that cannot be, with the reason.
    impossible: Vec<(Candidate, String)>,
    block: u64,
    /// What each value of a key could be.
    classes: BTreeMap<Class, ClassOf>,
    /// Candidates that were planned and do not fit.
    failed: Vec<Candidate>,
    /// What plans need, and how long their steps are, in multiples of the estimates.
    bytes_needed: Multiples,
    step_times: Multiples,
    is_cut: bool,
    /// What was found, fastest first.
    pub found: Vec<Found>,
    /// Configuration of the fastest.
    pub text: String,
}

/// Runs a search on `ranks` devices of `machine`; `config` is the configuration as the user gave it.
///
/// # Errors
/// Limits that nothing meets, a model that fits nowhere: with what excludes most.
pub fn search<'a>(
    subject: &dyn Subject,
    config: &RunConfig,
    (machine, ranks): (&'a Machine, usize),
    limits: &Limits,
) -> Result<Search<'a>> {
    let began_s = busy::own_s();
    let mut search = Search::begin(subject, config, (machine, ranks), limits)?;
    let longest_s = LONGEST_S.iter().find(|(max, _)| ranks <= *max).map_or(0.0, |(_, seconds)| *seconds);
    let is_late = |scale: f64| busy::own_s() - began_s > scale * longest_s;
    search.appraise(subject, &is_late)?;
    search.propose(subject)?;
    search.appraise_lost(subject, &|| is_late(1.5))?;
    Ok(search)
}

impl<'a> Search<'a> {
    /// The machine.
    pub fn machine(&self) -> &Machine {
        self.machine
    }

    /// Number of devices.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Number of candidates that may fit.
    pub fn candidates(&self) -> usize {
        self.candidates.len()
    }

    /// Number of candidates of which a rank of each stage was planned.
    pub fn planned(&self) -> usize {
        self.outcomes.len()
    }

    /// Returns whether the time did not suffice for all candidates that might be faster.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// What is proposed, fastest first.
    pub fn shown(&self) -> &[Found] {
        &self.found[..self.found.len().min(SHOWN)]
    }

    /// Leaves out what needs the same memory and time as another that is shown, but for the first: it differs in what does not matter.
    fn leave_out_equal(&mut self) {
        let figures = |found: &Found| (found.need.0, (found.seconds() * 1e7) as u64, found.candidate.global);
        let mut known = HashSet::new();
        self.found.retain(|found| known.insert(figures(found)));
    }

    /// What a candidate recomputes.
    pub fn checkpointing(&self, of: &Candidate) -> &str {
        &self.axes.checkpointing[of.checkpointing]
    }

    /// The schedule of a candidate.
    pub fn schedule(&self, of: &Candidate) -> String {
        self.axes.schedules[of.schedule].word()
    }

    /// The type in which a candidate sends gradients.
    pub fn on_the_wire(&self, of: &Candidate) -> String {
        self.axes.on_the_wire(of.sends_half)
    }
}

impl Candidate {
    /// A candidate of which one value is meant.
    const NONE: Candidate = Candidate {
        global: 0,
        pipeline: 0,
        data: 0,
        tensor: 0,
        zero: 0,
        schedule: 0,
        micro: 0,
        checkpointing: 0,
        placed: Placed::Device,
        sends_half: false,
        defers: false,
    };
}

/// The divisors of a number, ascending.
pub fn divisors(of: usize) -> Vec<usize> {
    let small: Vec<usize> = (1..).take_while(|n| n * n <= of).filter(|n| of.is_multiple_of(*n)).collect();
    let large = small.iter().rev().map(|n| of / n).filter(|n| n * n > of);
    small.iter().copied().chain(large).collect()
}
