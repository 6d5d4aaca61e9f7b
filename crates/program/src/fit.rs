//! Whether a plan fits the memory that there is, and which changes of the configuration would make it fit.
//!
//! Every change that is proposed has been planned itself.

use std::fmt;
use std::ops::Range;

use anyhow::{Context, Result, bail};
use phalanx_train::RunConfig;
use phalanx_train::config::{Checkpointing, CheckpointingWord};
use serde_json::{Value, json};

use crate::machine::{self, Available};
use crate::mesh_report;
use crate::planned::Planned;
use crate::report::{Table, bytes};

/// Largest number of dry runs of a block ([`RunConfig::dry_runs`]) for a smaller micro-batch that is proposed.
const MAX_DRY_RUNS: u128 = 1 << 14;

/// The memory that a run may use.
#[derive(Clone, Debug, PartialEq)]
pub enum Budget {
    /// Each rank has a device of so many bytes.
    Device {
        /// Its memory.
        bytes: u64,
        /// The option or key that says so.
        given: &'static str,
    },
    /// All ranks share the memory of this machine.
    Machine(Available),
}

impl Budget {
    /// Whether the run of a plan fits.
    pub fn fits(&self, planned: &Planned) -> bool {
        self.needed(planned) <= self.bytes()
    }

    /// Bytes that the largest rank needs, or all ranks together.
    fn needed(&self, planned: &Planned) -> u64 {
        match self {
            Budget::Device { .. } => planned.needed_by_one(),
            Budget::Machine(_) => planned.needed_bytes(),
        }
    }

    /// The same for another run, whose configuration differs in what `change` does.
    fn needed_with(&self, planned: &Planned, change: impl FnOnce(&mut RunConfig)) -> Result<u64> {
        match self {
            Budget::Device { .. } => planned.needed_by_one_with(change),
            Budget::Machine(_) => Ok(planned.with(change)?.needed_bytes()),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Budget::Device { bytes, .. } | Budget::Machine(Available { bytes, .. }) => *bytes,
        }
    }

    /// Bytes of each of so many ranks.
    fn share(&self, ranks: usize) -> u64 {
        match self {
            Budget::Device { bytes, .. } => *bytes,
            Budget::Machine(Available { bytes, .. }) => bytes / ranks as u64,
        }
    }
}

/// A change of the configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Change {
    Zero(u8),
    Checkpointing(CheckpointingWord),
    Micro(usize),
    Data(usize),
    Tensor(usize),
    Pipeline(usize),
}

impl Change {
    fn apply(self, config: &mut RunConfig) {
        // Meshes of other sizes have other numbers of ranks, and micro-batches follow from their size.
        let data = config.data();
        match self {
            Change::Zero(stage) => config.parallel.zero = stage,
            Change::Checkpointing(word) => config.memory.checkpointing = Checkpointing::Word(word),
            Change::Micro(size) => (config.batch.micro, config.parallel.micro_batches) = (Some(size), None),
            Change::Data(ranks) => (config.parallel.ranks, config.parallel.data) = (None, Some(ranks)),
            Change::Tensor(ranks) => {
                (config.parallel.ranks, config.parallel.data, config.parallel.tensor) =
                    (None, Some(data), ranks);
            }
            Change::Pipeline(ranks) => {
                (config.parallel.ranks, config.parallel.data) = (None, Some(data));
                config.parallel.pipeline = ranks;
            }
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::Zero(stage) => write!(f, "parallel.zero={stage}"),
            Change::Checkpointing(CheckpointingWord::None) => write!(f, "memory.checkpointing=none"),
            Change::Checkpointing(CheckpointingWord::Selective) => {
                write!(f, "memory.checkpointing=selective")
            }
            Change::Checkpointing(CheckpointingWord::Block) => write!(f, "memory.checkpointing=block"),
            Change::Micro(size) => write!(f, "batch.micro={size}"),
            Change::Data(ranks) => write!(f, "parallel.data={ranks}"),
            Change::Tensor(ranks) => write!(f, "parallel.tensor={ranks}"),
            Change::Pipeline(ranks) => write!(f, "parallel.pipeline={ranks}"),
        }
    }
}

/// Changes of the configuration that were planned.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    changes: Vec<Change>,
    /// Bytes that the largest rank needs, or all ranks together.
    needed: u64,
    fits: bool,
}

impl Proposal {
    /// `parallel.zero=3 with batch.micro=1`
    fn words(&self) -> String {
        self.changes.iter().map(Change::to_string).collect::<Vec<_>>().join(" with ")
    }

    /// `--set parallel.zero=3 --set batch.micro=1`
    fn options(&self) -> String {
        self.changes.iter().map(|change| format!("--set {change}")).collect::<Vec<_>>().join(" ")
    }
}

/// Changes that need less memory. Single changes first; where none of them fits, several together, and then more ranks,
/// until something fits.
pub fn proposals(planned: &Planned, budget: &Budget) -> Vec<Proposal> {
    let own = budget.needed(planned);
    let mut tried: Vec<Proposal> = Vec::new();
    let mut try_all = |changes: Vec<Change>| {
        if changes.is_empty() || tried.iter().any(|other| other.changes == changes) {
            return false;
        }
        let change = |config: &mut RunConfig| changes.iter().for_each(|change| change.apply(config));
        let Ok(needed) = budget.needed_with(planned, change) else { return false };
        let fits = needed <= budget.bytes();
        if needed < own {
            tried.push(Proposal { changes, needed, fits });
        }
        fits
    };
    let single = single_changes(planned, budget);
    let mut found = false;
    for change in &single {
        found |= try_all(vec![*change]);
    }
    // The strongest change of each kind.
    let kinds = [
        single.iter().rfind(|change| matches!(change, Change::Zero(_))),
        single.iter().rfind(|change| matches!(change, Change::Checkpointing(_))),
        single.iter().rfind(|change| matches!(change, Change::Micro(_))),
    ];
    let strongest: Vec<Change> = kinds.into_iter().flatten().copied().collect();
    for count in 2..=strongest.len() {
        found = found || try_all(strongest[..count].to_vec());
    }
    for more in more_ranks(planned, budget) {
        found = found || try_all([strongest.clone(), more].concat());
    }
    tried
}

/// One change each, from mild to strong within a kind.
fn single_changes(planned: &Planned, budget: &Budget) -> Vec<Change> {
    let (config, spec) = (&planned.config, &planned.plan.spec);
    let mut changes = Vec::new();
    if config.data() > 1 {
        changes.extend((config.parallel.zero + 1..=3).map(Change::Zero));
    }
    let words: &[CheckpointingWord] = match config.memory.checkpointing {
        Checkpointing::Word(CheckpointingWord::None) => {
            &[CheckpointingWord::Selective, CheckpointingWord::Block]
        }
        Checkpointing::Word(CheckpointingWord::Block) | Checkpointing::Every(1) => &[],
        Checkpointing::Word(CheckpointingWord::Selective) | Checkpointing::Every(_) => {
            &[CheckpointingWord::Block]
        }
    };
    changes.extend(words.iter().copied().map(Change::Checkpointing));
    let few = smallest_micro(planned);
    if spec.micro_batch_size > few {
        changes.push(Change::Micro(few));
    }
    match budget {
        Budget::Device { .. } if spec.stage.number() > 0 => changes.push(Change::Data(2 * config.data())),
        Budget::Machine(_) if config.data() > 1 => changes.push(Change::Data(config.data() / 2)),
        Budget::Device { .. } | Budget::Machine(_) => {}
    }
    changes
}

/// Larger meshes, where each rank has a device of its own: more tensor ranks (up to 8, the devices of a common
/// machine), then more pipeline ranks as well.
fn more_ranks(planned: &Planned, budget: &Budget) -> Vec<Vec<Change>> {
    if matches!(budget, Budget::Machine(_)) {
        return Vec::new();
    }
    let mesh = planned.plan.spec.mesh;
    let doubled = |from: usize, to: usize| {
        std::iter::successors(Some(2 * from), |n| Some(2 * n)).take_while(move |n| *n <= to)
    };
    let mut meshes: Vec<Vec<Change>> = doubled(mesh.tensor, 8).map(|t| vec![Change::Tensor(t)]).collect();
    let tensor = meshes.last().cloned().unwrap_or_default();
    let layers = planned.plan.spec.model.shape().layers;
    let pipelines = doubled(mesh.pipeline, layers).take(6);
    meshes.extend(pipelines.map(|p| [tensor.clone(), vec![Change::Pipeline(p)]].concat()));
    meshes
}

/// The smallest micro-batch that is planned quickly: 1, unless that makes very many micro-batches.
fn smallest_micro(planned: &Planned) -> usize {
    let (spec, micro_batch_size) = (&planned.plan.spec, planned.plan.spec.micro_batch_size);
    let runs = |few: usize| {
        let mut config = RunConfig::clone(&planned.config);
        (config.batch.micro, config.parallel.micro_batches) = (Some(few), None);
        config.dry_runs(spec.mesh, &spec.model.shape())
    };
    let mut divisors = (1..micro_batch_size).filter(|few| micro_batch_size.is_multiple_of(*few));
    divisors.find(|few| runs(*few) <= MAX_DRY_RUNS).unwrap_or(micro_batch_size)
}

/// Advice for a run that does not fit: a change that does, or else those that need less.
fn advice(planned: &Planned, budget: &Budget) -> String {
    let mut tried = proposals(planned, budget);
    tried.sort_by_key(|proposal| (!proposal.fits, proposal.needed));
    let describe = |proposal: &Proposal| format!("{} needs {}", proposal.words(), bytes(proposal.needed));
    match tried.iter().find(|proposal| proposal.fits) {
        Some(first) => format!("change the configuration: {}", describe(first)),
        None if tried.is_empty() => "make the model, model.seq or the batch smaller".to_string(),
        None => {
            let all: Vec<String> = tried.iter().map(describe).collect();
            format!("not even these fit: {}; make the model or model.seq smaller", all.join(", "))
        }
    }
}

/// Refuses a run that needs more memory than this machine has, or more than `memory.limit_mb` on a rank.
///
/// # Errors
/// The bytes needed and available, and changes that need less.
pub fn check_memory(planned: &Planned) -> Result<()> {
    let budgets = [limit(planned), machine::available().map(Budget::Machine)];
    budgets.iter().flatten().try_for_each(|budget| check(planned, budget))
}

fn check(planned: &Planned, budget: &Budget) -> Result<()> {
    if budget.fits(planned) {
        return Ok(());
    }
    let (needed, advice) = (budget.needed(planned), advice(planned, budget));
    match budget {
        Budget::Device { bytes: limit, given } => bail!(
            "a rank needs {needed} bytes ({}), and {given} allows {limit} ({}); {advice}",
            bytes(needed),
            bytes(*limit)
        ),
        Budget::Machine(available) => bail!(
            "{} rank(s) need {needed} bytes ({}), and {available}; {advice}",
            planned.plan.spec.world_size(),
            bytes(needed)
        ),
    }
}

/// Whether each rank of a plan fits.
pub struct Verdict<'a> {
    budget: &'a Budget,
    fits: bool,
    needed: u64,
    /// Neighbouring ranks that need the same bytes.
    ranks: Vec<(Range<usize>, u64)>,
    share: u64,
    proposals: Vec<Proposal>,
}

impl<'a> Verdict<'a> {
    /// Judges a plan; where it does not fit, plans what might.
    pub fn of(planned: &Planned, budget: &'a Budget) -> Verdict<'a> {
        let fits = budget.fits(planned);
        let mut ranks: Vec<(Range<usize>, u64)> = Vec::new();
        for (range, plan) in mesh_report::rows(planned) {
            let needed = planned.needed_by(plan);
            match ranks.last_mut() {
                Some((last, same)) if *same == needed => last.end = range.end,
                _ => ranks.push((range, needed)),
            }
        }
        let proposals = if fits { Vec::new() } else { proposals(planned, budget) };
        let share = budget.share(planned.plan.spec.world_size());
        Verdict { budget, fits, needed: budget.needed(planned), ranks, share, proposals }
    }

    /// For people.
    pub fn to_text(&self) -> String {
        let head = match self.budget {
            Budget::Device { bytes: each, given } => {
                format!("Does it fit? Each rank has {} ({given})", bytes(*each))
            }
            Budget::Machine(available) => format!(
                "Does it fit? All ranks together need {}, and {available}; a rank's share is {}",
                bytes(self.needed),
                bytes(self.share)
            ),
        };
        let mut table = Table::default();
        for (range, needed) in &self.ranks {
            let verdict = match self.share.checked_sub(*needed) {
                Some(left) => format!("fits, {} left", bytes(left)),
                None => format!("does not fit: {} too much", bytes(needed - self.share)),
            };
            table.row([mesh_report::rank_names(range), format!("needs {}", bytes(*needed)), verdict]);
        }
        let whole = match (self.fits, self.budget) {
            (true, _) => "  yes\n".to_string(),
            (false, Budget::Device { .. }) => "  no\n".to_string(),
            (false, Budget::Machine(_)) => "  no: `train` would refuse it on this machine\n".to_string(),
        };
        format!("{head}\n{table}{whole}{}", self.changes_text())
    }

    fn changes_text(&self) -> String {
        if self.fits {
            return String::new();
        }
        let what = match self.budget {
            Budget::Device { .. } => "a rank then needs",
            Budget::Machine(_) => "all ranks then need",
        };
        let any = self.proposals.iter().any(|proposal| proposal.fits);
        let mut table = Table::default();
        for proposal in self.proposals.iter().filter(|proposal| proposal.fits == any) {
            table.row([proposal.options(), format!("{what} {}", bytes(proposal.needed))]);
        }
        match (any, self.proposals.is_empty()) {
            (true, _) => format!("What would make it fit (each was planned)\n{table}"),
            (false, true) => {
                "Nothing that was tried needs less: make the model, model.seq or the batch smaller\n".into()
            }
            (false, false) => {
                format!("These need less, and still too much; make the model or model.seq smaller\n{table}")
            }
        }
    }

    /// For scripts.
    pub fn to_json(&self) -> Value {
        let rank = |(range, needed): &(Range<usize>, u64)| json!({ "first": range.start, "last": range.end - 1, "needed_bytes": needed, "fits": *needed <= self.share });
        let proposal = |proposal: &Proposal| {
            let set: Vec<String> = proposal.changes.iter().map(Change::to_string).collect();
            json!({ "set": set, "needed_bytes": proposal.needed, "fits": proposal.fits })
        };
        json!({
            "fits": self.fits,
            "device_memory_bytes": self.share,
            "needed_bytes": self.needed,
            "ranks": self.ranks.iter().map(rank).collect::<Vec<_>>(),
            "proposals": self.proposals.iter().map(proposal).collect::<Vec<_>>(),
        })
    }
}

/// The memory that a plan is compared with: `given` by the user, that of `memory.limit_mb`, or else this machine's; `None`
/// for a run of more ranks than one machine runs.
///
/// # Errors
/// Where the machine does not say how much memory it has.
pub fn budget_for_plan(planned: &Planned, given: Option<u64>) -> Result<Option<Budget>> {
    if let Some(bytes) = given {
        return Ok(Some(Budget::Device { bytes, given: "--device-memory" }));
    }
    if let Some(budget) = limit(planned) {
        return Ok(Some(budget));
    }
    if planned.is_for_elsewhere() {
        return Ok(None);
    }
    let available = crate::machine::available();
    Ok(Some(Budget::Machine(
        available.context("the system does not report its memory; give --device-memory")?,
    )))
}

/// The memory that `memory.limit_mb` gives a rank, if it is set.
pub fn limit(planned: &Planned) -> Option<Budget> {
    let bytes = (planned.config.memory.limit_mb? * f64::from(1 << 20)) as u64;
    Some(Budget::Device { bytes, given: "memory.limit_mb" })
}
