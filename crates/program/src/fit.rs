//! Whether a plan fits the memory that there is, and which changes of the configuration would make it fit.
//!
//! Every change that is proposed has been planned itself.

use std::fmt;
use std::ops::Range;

use anyhow::{Context, Result, bail};
use phalanx_models::ModelShape;
use phalanx_train::RunConfig;
use phalanx_train::config::{Checkpointing, CheckpointingWord, DeviceKind, Tier};
use serde_json::{Value, json};

use crate::machine::{self, Available};
use crate::planned::{self, Need, Planned};
use crate::report::{Table, bytes};
use crate::{cards, mesh_report};

/// Largest number of dry runs of a block ([`RunConfig::dry_runs`]) for a smaller micro-batch that is proposed.
const MAX_DRY_RUNS: u128 = 1 << 14;

/// The memory that a run may use.
#[derive(Clone, Debug, PartialEq)]
pub enum Budget {
    /// Each rank has a device with so many bytes of memory (`--device-memory`).
    Device(u64),
    /// Each rank may take so many bytes of its card: `device.memory_mb`, or its share.
    Card(u64),
    /// Each rank may use so many bytes in all (`memory.limit_mb`).
    Rank(u64),
    /// All ranks share the memory of this machine.
    Machine(Available),
}

impl Budget {
    /// Whether the run of a plan fits.
    pub fn fits(&self, planned: &Planned) -> bool {
        self.needed(planned) <= self.bytes()
    }

    /// Bytes that the largest rank needs, or all ranks together.
    pub fn needed(&self, planned: &Planned) -> u64 {
        match self {
            Budget::Device(_) | Budget::Card(_) | Budget::Rank(_) => {
                planned.needed_by_one(self.need()) + self.between_hosts(planned)
            }
            Budget::Machine(_) => planned.needed_bytes(),
        }
    }

    /// Bytes of the budget that the largest rank keeps to exchange data with other hosts.
    fn between_hosts(&self, planned: &Planned) -> u64 {
        let is_of_host = match self {
            Budget::Device(_) | Budget::Card(_) => planned.plan.spec.host_addressable,
            Budget::Rank(_) | Budget::Machine(_) => true,
        };
        planned.between_hosts_bytes().filter(|_| is_of_host).unwrap_or(0)
    }

    /// The bytes of a rank that count.
    fn need(&self) -> Need {
        match self {
            Budget::Device(_) | Budget::Card(_) => planned::needed_on_device,
            Budget::Rank(_) | Budget::Machine(_) => planned::needed_by,
        }
    }

    /// Whether a rank's states alone exceed it after some changes, so that nothing needs to be planned.
    fn is_below_states(&self, planned: &Planned, changes: &[Change]) -> bool {
        let Some(each) = self.each() else { return false };
        let states = planned.min_states_with(|config| apply_all(changes, config));
        states.is_ok_and(|states| states > each)
    }

    /// The option or key that gives it.
    fn given(&self) -> &'static str {
        match self {
            Budget::Device(_) => "--device-memory",
            Budget::Card(_) => "its share of the card (device.memory_mb)",
            Budget::Rank(_) => "memory.limit_mb",
            Budget::Machine(_) => "this machine",
        }
    }

    /// The same for another run, whose configuration differs in what `change` does.
    fn needed_with(&self, planned: &Planned, change: impl FnOnce(&mut RunConfig)) -> Result<u64> {
        match self {
            Budget::Device(_) | Budget::Card(_) | Budget::Rank(_) => {
                Ok(planned.needed_by_one_with(change, self.need())? + self.between_hosts(planned))
            }
            Budget::Machine(_) => Ok(planned.with(change)?.needed_bytes()),
        }
    }

    /// Bytes that there are.
    pub fn bytes(&self) -> u64 {
        match self {
            Budget::Device(bytes)
            | Budget::Card(bytes)
            | Budget::Rank(bytes)
            | Budget::Machine(Available { bytes, .. }) => *bytes,
        }
    }

    /// Bytes that each rank may use; ranks of one machine share its memory as they need it.
    fn each(&self) -> Option<u64> {
        match self {
            Budget::Device(bytes) | Budget::Card(bytes) | Budget::Rank(bytes) => Some(*bytes),
            Budget::Machine(_) => None,
        }
    }
}

/// A change of the configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Change {
    Zero(u8),
    Checkpointing(CheckpointingWord),
    /// Optimizer states in host memory.
    Offload,
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
            Change::Offload => config.memory.optimizer = Tier::Host,
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

fn apply_all(changes: &[Change], config: &mut RunConfig) {
    changes.iter().for_each(|change| change.apply(config));
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
            Change::Offload => write!(f, "memory.optimizer=host"),
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
    /// Plans what changes need; `None` for an invalid configuration.
    fn planned(planned: &Planned, budget: &Budget, changes: Vec<Change>) -> Option<Proposal> {
        let needed = budget.needed_with(planned, |config| apply_all(&changes, config)).ok()?;
        Some(Proposal { fits: needed <= budget.bytes(), changes, needed })
    }

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
    // Changes with which the states of a rank alone are too large: they are planned only if nothing fits.
    let mut hopeless: Vec<Vec<Change>> = Vec::new();
    let mut try_all = |changes: Vec<Change>| {
        if changes.is_empty() || tried.iter().any(|other| other.changes == changes) {
            return false;
        }
        if budget.is_below_states(planned, &changes) {
            hopeless.push(changes);
            return false;
        }
        let Some(proposal) = Proposal::planned(planned, budget, changes) else { return false };
        let fits = proposal.fits;
        if proposal.needed < own {
            tried.push(proposal);
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
    if !found {
        let less = hopeless.into_iter().filter_map(|changes| Proposal::planned(planned, budget, changes));
        tried.extend(less.filter(|proposal| proposal.needed < own));
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
    if matches!(budget, Budget::Device(_) | Budget::Card(_)) && config.memory.optimizer == Tier::Device {
        changes.push(Change::Offload);
    }
    let few = smallest_micro(planned);
    if spec.micro_batch_size > few {
        changes.push(Change::Micro(few));
    }
    match budget {
        Budget::Machine(_) if config.data() > 1 => changes.push(Change::Data(config.data() / 2)),
        Budget::Device(_) | Budget::Rank(_) if spec.stage.number() > 0 => {
            changes.push(Change::Data(2 * config.data()));
        }
        // More ranks would share the same cards.
        Budget::Machine(_) | Budget::Card(_) | Budget::Device(_) | Budget::Rank(_) => {}
    }
    changes
}

/// Larger meshes, where each rank has a device of its own: more tensor ranks (up to 8, the devices of a common
/// machine, among which the heads can be divided), then more pipeline ranks as well.
fn more_ranks(planned: &Planned, budget: &Budget) -> Vec<Vec<Change>> {
    if matches!(budget, Budget::Machine(_) | Budget::Card(_)) {
        return Vec::new();
    }
    let mesh = planned.plan.spec.mesh;
    let doubled = |from: usize, to: usize| {
        std::iter::successors(Some(2 * from), |n| Some(2 * n)).take_while(move |n| *n <= to)
    };
    let ModelShape { layers, heads, .. } = planned.plan.spec.model.shape();
    let tensors = doubled(mesh.tensor, 8).filter(|tensor| heads.is_multiple_of(*tensor));
    let mut meshes: Vec<Vec<Change>> = tensors.map(|tensor| vec![Change::Tensor(tensor)]).collect();
    let tensor = meshes.last().cloned().unwrap_or_default();
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
    budgets(planned).iter().try_for_each(|budget| check(planned, budget))
}

/// The memories within which a run must stay.
pub fn budgets(planned: &Planned) -> Vec<Budget> {
    let machine = machine::available().map(Budget::Machine);
    [card(planned), limit(planned), machine].into_iter().flatten().collect()
}

fn check(planned: &Planned, budget: &Budget) -> Result<()> {
    if budget.fits(planned) {
        return Ok(());
    }
    let (needed, advice) = (budget.needed(planned), advice(planned, budget));
    match budget {
        Budget::Device(limit) | Budget::Card(limit) | Budget::Rank(limit) => bail!(
            "a rank needs {needed} bytes ({}), and {} allows {limit} ({}); {advice}",
            bytes(needed),
            budget.given(),
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
    proposals: Vec<Proposal>,
}

impl<'a> Verdict<'a> {
    /// Judges a plan; where it does not fit, plans what might.
    pub fn of(planned: &Planned, budget: &'a Budget) -> Verdict<'a> {
        let fits = budget.fits(planned);
        let mut ranks: Vec<(Range<usize>, u64)> = Vec::new();
        for (range, plan) in mesh_report::rows(planned) {
            let needed = budget.need()(&planned.plan.spec, plan);
            match ranks.last_mut() {
                Some((last, same)) if *same == needed => last.end = range.end,
                _ => ranks.push((range, needed)),
            }
        }
        let proposals = if fits { Vec::new() } else { proposals(planned, budget) };
        Verdict { budget, fits, needed: budget.needed(planned), ranks, proposals }
    }

    /// For people.
    pub fn to_text(&self) -> String {
        let head = match self.budget {
            Budget::Device(each) | Budget::Card(each) | Budget::Rank(each) => {
                format!("Does it fit? Each rank has {} ({})", bytes(*each), self.budget.given())
            }
            Budget::Machine(available) => {
                format!("Does it fit? All ranks together need {}, and {available}", bytes(self.needed))
            }
        };
        let mut table = Table::default();
        for (range, needed) in &self.ranks {
            let verdict = match self.budget.each().map(|each| (each.checked_sub(*needed), each)) {
                None => String::new(),
                Some((Some(left), _)) => format!("fits, {} left", bytes(left)),
                Some((None, each)) => format!("does not fit: {} too much", bytes(needed - each)),
            };
            table.row([mesh_report::rank_names(range), format!("needs {}", bytes(*needed)), verdict]);
        }
        let whole = match (self.fits, self.budget) {
            (true, _) => "  yes\n".to_string(),
            (false, Budget::Machine(_)) => "  no: `train` would refuse it on this machine\n".to_string(),
            (false, _) => "  no\n".to_string(),
        };
        format!("{head}\n{table}{whole}{}", self.changes_text())
    }

    fn changes_text(&self) -> String {
        if self.fits {
            return String::new();
        }
        let what = match self.budget {
            Budget::Machine(_) => "all ranks then need",
            Budget::Device(_) | Budget::Card(_) | Budget::Rank(_) => "a rank then needs",
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
        let each = self.budget.each();
        let rank = |(range, needed): &(Range<usize>, u64)| {
            let fits = each.map(|each| *needed <= each);
            json!({ "first": range.start, "last": range.end - 1, "needed_bytes": needed, "fits": fits })
        };
        let proposal = |proposal: &Proposal| {
            let set: Vec<String> = proposal.changes.iter().map(Change::to_string).collect();
            json!({ "set": set, "needed_bytes": proposal.needed, "fits": proposal.fits })
        };
        json!({
            "fits": self.fits,
            "device_memory_bytes": each,
            "available_bytes": self.budget.bytes(),
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
        return Ok(Some(Budget::Device(bytes)));
    }
    if planned.config.device.kind == DeviceKind::Cuda {
        let Some(card) = card(planned) else { return Ok(None) };
        // What is short decides: the card's memory, the limit of a rank, or this machine's memory.
        let machine = machine::available().filter(|_| !planned.is_for_elsewhere()).map(Budget::Machine);
        let mut others = [limit(planned), machine].into_iter().flatten();
        let short = others.find(|other| card.fits(planned) && !other.fits(planned));
        return Ok(Some(short.unwrap_or(card)));
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

/// What a rank may take of its card, if it has one that is known.
fn card(planned: &Planned) -> Option<Budget> {
    let has_card = planned.config.device.kind == DeviceKind::Cuda;
    has_card
        .then(|| cards::share_bytes(&planned.config, planned.ranks_here()).ok().map(Budget::Card))
        .flatten()
}

/// The memory that `memory.limit_mb` gives a rank, if it is set.
pub fn limit(planned: &Planned) -> Option<Budget> {
    let bytes = (planned.config.memory.limit_mb? * f64::from(1 << 20)) as u64;
    Some(Budget::Rank(bytes))
}
