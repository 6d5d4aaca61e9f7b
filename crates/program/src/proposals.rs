//! Proposals for a run that does not fit: changed commands, each of which was planned as it stands.
//!
//! Changes of one kind come first, then several together, offloading with the others, and more ranks. Of each kind the mildest that fits is
//! taken, and of several together whatever they do not need is left out again. The search ends after a time, and says so.

use std::cell::Cell;

use anyhow::Result;
use phalanx_train::Spec;
use phalanx_train::config::Tier;
use serde_json::{Value, json};

use crate::budgets::{self, Budget};
use crate::busy;
use crate::overrides::Overrides;
use crate::placement_budget;
use crate::planned::{IsHopeless, Outlook, Planned};
use crate::proposed_changes::{self, Axis, Changes};
use crate::report::{bytes, plural, seconds};
use crate::resume::shell_word;
use crate::user_config::UserConfig;

/// Proposals that are shown, at most, and those of them that keep the ranks, where others have more.
const SHOWN: usize = 6;
const SHOWN_OF_SAME_RANKS: usize = 4;

/// Proposals with which the search ends.
const ENOUGH: usize = 10;

/// Seconds of processor time that the search takes, or as much as so many plans of the run as it is, whichever is longer.
const LONGEST_S: f64 = 4.0;
const LONGEST_PLANS: f64 = 2.0;

/// Plans a run again with changed options.
pub trait Replan {
    /// The plan of the run with `changes`; `None` where it `is_hopeless`, or where planning it takes long.
    ///
    /// # Errors
    /// A configuration that cannot work.
    fn plan(&self, changes: &Changes, is_hopeless: &IsHopeless) -> Result<Option<Planned>>;

    /// The memories within which a plan must stay.
    fn budgets(&self, planned: &Planned) -> Vec<Budget>;

    /// The predicted time of a step, where there is a machine for it.
    fn step_s(&self, planned: &Planned) -> Option<f64>;

    /// The command, or its options, with `changes`.
    fn words(&self, changes: &Changes) -> Vec<String>;
}

/// A run on this machine that is refused: its proposals are options to add.
pub struct OnThisMachine<'a>(pub &'a Planned);

impl Replan for OnThisMachine<'_> {
    fn plan(&self, changes: &Changes, is_hopeless: &IsHopeless) -> Result<Option<Planned>> {
        let own = self.0;
        let options = changes.applied_to(&Overrides::default());
        let mut config = UserConfig::of(&own.config)?.with(&options, &[])?.config()?;
        if options.nproc.is_some() && config.train.threads == Some(own.plan.spec.threads) {
            // It follows from the number of ranks.
            config.train.threads = None;
        }
        placement_budget::fill(&mut config, own.ranks_here());
        own.again_within(|changed| *changed = config, is_hopeless)
    }

    fn budgets(&self, planned: &Planned) -> Vec<Budget> {
        budgets::budgets(planned)
    }

    fn step_s(&self, _: &Planned) -> Option<f64> {
        None
    }

    fn words(&self, changes: &Changes) -> Vec<String> {
        changes.applied_to(&Overrides::default()).words()
    }
}

/// A changed command with the figures of its plan.
#[derive(Clone, Debug)]
struct Proposal {
    point: Point,
    changes: Changes,
    words: Vec<String>,
    ranks: usize,
    /// Bytes that the largest rank needs, or all ranks together, of what the run exceeded.
    needed: u64,
    /// What the largest rank holds in memory of its host beside a device of its own.
    host: u64,
    /// Bytes that all ranks send to each other in a step, and bytes that one copies between memories.
    sent: u64,
    copied: u64,
    step_s: Option<f64>,
    fits: bool,
}

/// What was found.
pub struct Proposals {
    /// Whether `needed` counts all ranks together.
    of_all_ranks: bool,
    shown: Vec<Proposal>,
    /// Others that fit.
    more: usize,
    /// Seconds of the search, if they did not suffice for all changes.
    cut_s: Option<f64>,
    /// What a process takes beside its plan, where that alone is more than there is.
    outside: Option<u64>,
}

impl Proposals {
    /// Searches for changes with which the run of `planned` fits the memories that it exceeds.
    pub fn search(run: &dyn Replan, planned: &Planned) -> Proposals {
        let limits = run.budgets(planned);
        let Some(exceeded) = budgets::exceeded(planned, &limits) else { return Proposals::none(None) };
        let outside = exceeded.outside(planned);
        if outside > exceeded.bytes() {
            return Proposals::none(Some(outside));
        }
        let mut search = Search::new(run, planned, exceeded);
        search.all();
        search.end()
    }

    fn none(outside: Option<u64>) -> Proposals {
        Proposals { of_all_ranks: false, shown: Vec::new(), more: 0, cut_s: None, outside }
    }

    fn any_fits(&self) -> bool {
        self.shown.iter().any(|proposal| proposal.fits)
    }

    /// For people.
    pub fn to_text(&self) -> String {
        if let Some(outside) = self.outside {
            return format!(
                "No change would make it fit: {} lie beside what is planned, and stay\n",
                bytes(outside)
            );
        }
        let mut text = match (self.any_fits(), self.shown.is_empty()) {
            (true, _) => {
                "What would make it fit: each of these commands was planned as it stands\n".to_string()
            }
            (false, true) => {
                "Nothing that was tried needs less: make the model, model.seq or the batch smaller\n"
                    .to_string()
            }
            (false, false) => {
                "These need less, and still too much; make the model or model.seq smaller\n".to_string()
            }
        };
        for proposal in &self.shown {
            let words: Vec<String> = proposal.words.iter().map(|word| shell_word(word)).collect();
            text.push_str(&format!("  {}\n      {}\n", words.join(" "), self.figures(proposal)));
        }
        if self.more > 0 {
            text.push_str(&format!("  {} fit, too\n", plural(self.more, "other change")));
        }
        if self.shown.iter().any(|proposal| proposal.changes.assumes_folder()) {
            text.push_str(&format!(
                "  {} stands for a folder on a local disk of yours\n",
                proposed_changes::FOLDER
            ));
        }
        if let Some(longest_s) = self.cut_s {
            text.push_str(&format!(
                "  the search takes at most {longest_s:.0} s: not all changes were tried\n"
            ));
        }
        text
    }

    fn figures(&self, proposal: &Proposal) -> String {
        let Proposal { ranks, needed, host, sent, copied, .. } = *proposal;
        let need = match (ranks, self.of_all_ranks) {
            (1, _) => "needs",
            (_, true) => "together need",
            (_, false) => "each needs",
        };
        let host =
            if host >= 1 << 20 { format!(" and {} of host memory", bytes(host)) } else { String::new() };
        let sent =
            if ranks > 1 { format!("sends {} between ranks and ", bytes(sent)) } else { String::new() };
        let time = proposal.step_s.map_or(String::new(), |step_s| format!(", in {}", seconds(step_s)));
        let (ranks, needed, copied) = (plural(ranks, "rank"), bytes(needed), bytes(copied));
        format!("{ranks}, {need} {needed}{host}; a step {sent}copies {copied} between memories{time}")
    }

    /// For scripts.
    pub fn to_json(&self) -> Value {
        let one = |proposal: &Proposal| {
            json!({
                "command": proposal.words, "fits": proposal.fits, "ranks": proposal.ranks, "needed_bytes": proposal.needed,
                "host_bytes_per_rank": proposal.host, "sent_bytes_per_step": proposal.sent,
                "copied_bytes_per_step": proposal.copied, "step_s": proposal.step_s,
            })
        };
        self.shown.iter().map(one).collect()
    }

    /// The first change that fits, or else those that need less, for a refusal.
    pub fn advice(&self) -> String {
        let one = |proposal: &Proposal| {
            let words: Vec<String> = proposal.words.iter().map(|word| shell_word(word)).collect();
            let folder = match proposal.changes.assumes_folder() {
                true => format!(" ({} stands for a folder on a local disk)", proposed_changes::FOLDER),
                false => String::new(),
            };
            format!("{}{folder} needs {}", words.join(" "), bytes(proposal.needed))
        };
        match self.shown.first() {
            None if self.outside.is_some() => {
                let outside = bytes(self.outside.unwrap_or(0));
                format!("no change would make it fit: {outside} lie beside what is planned, and stay")
            }
            None => "make the model, model.seq or the batch smaller".to_string(),
            Some(first) if first.fits => format!("change the configuration: {}", one(first)),
            Some(_) => {
                let all: Vec<String> = self.shown.iter().map(one).collect();
                format!("not even these fit: {}; make the model or model.seq smaller", all.join(", "))
            }
        }
    }
}

/// What is changed, by axis. More ranks come first: what other axes say of the same keys counts.
const AXES: usize = 10;
const MORE: [usize; 3] = [0, 1, 2];
const FEWER: usize = 3;
const TIERS: [usize; 2] = [4, 5];
const AUTO: usize = 6;
const ZERO: usize = 7;
const CHECKPOINTING: usize = 8;
const MICRO: usize = 9;

/// For each axis how far it is changed; 0 is not at all.
type Point = [usize; AXES];

struct Search<'a> {
    run: &'a dyn Replan,
    own: &'a Planned,
    exceeded: &'a Budget,
    axes: [Axis; AXES],
    /// Changes that were planned, or cannot be.
    tried: Vec<(Changes, Option<Proposal>)>,
    longest_s: f64,
    until_s: f64,
    /// Whether something was not tried because it would have taken too long.
    is_cut: Cell<bool>,
}

impl<'a> Search<'a> {
    fn new(run: &'a dyn Replan, own: &'a Planned, exceeded: &'a Budget) -> Search<'a> {
        let of_device = matches!(exceeded, Budget::Device(..) | Budget::Card(_));
        let has_own = !own.config.device.kind.is_processor();
        // Ranks on other devices; more on the same cards or in the same memory would need more.
        let grows = matches!(exceeded, Budget::Device(..) | Budget::Rank(_) | Budget::Host(_));
        let stage = own.config.parallel.zero;
        let only = |is_tried: bool, axis: Axis| if is_tried { axis } else { Axis::new() };
        let axes = [
            only(grows && stage < 3, proposed_changes::more_replicas(own, stage.max(2))),
            only(grows, proposed_changes::more_replicas(own, 3)),
            only(grows, proposed_changes::larger_meshes(own)),
            only(matches!(exceeded, Budget::Machine(_)), proposed_changes::fewer_ranks(own)),
            only(of_device && has_own, proposed_changes::away(own, Tier::Host)),
            proposed_changes::away(own, Tier::Nvme),
            only(of_device, proposed_changes::auto(own)),
            proposed_changes::zero(own),
            proposed_changes::checkpointing(own),
            proposed_changes::micro(own),
        ];
        let longest_s = LONGEST_S.max(LONGEST_PLANS * own.took_s);
        let until_s = busy::own_s() + longest_s;
        Search { run, own, exceeded, axes, tried: Vec::new(), longest_s, until_s, is_cut: Cell::new(false) }
    }

    fn changes(&self, point: Point) -> Changes {
        let levels = self.axes.iter().zip(point).filter_map(|(axis, level)| axis.get(level.checked_sub(1)?));
        levels.fold(Changes::default(), |sum, level| sum.and(level))
    }

    /// Whether the run fits with the changes of a point.
    fn fits(&mut self, point: Point) -> bool {
        let changes = self.changes(point);
        if let Some((_, known)) = self.tried.iter().find(|(tried, _)| *tried == changes) {
            return known.as_ref().is_some_and(|proposal| proposal.fits);
        }
        if changes == Changes::default() {
            return false;
        }
        let is_hopeless = |spec: &Spec, outlook: Outlook| {
            self.exceeded.is_below_states(spec, outlook.states) || self.takes_too_long(outlook)
        };
        let proposal = self.proposal(point, &is_hopeless);
        let fits = proposal.as_ref().is_some_and(|proposal| proposal.fits);
        self.tried.push((changes, proposal));
        fits
    }

    /// Whether no time is left for a plan, which takes as long as that of the run for each of its dry runs.
    fn takes_too_long(&self, outlook: Outlook) -> bool {
        let scale = outlook.dry_runs as f64 / self.own.dry_runs().max(1) as f64;
        let is_cut = busy::own_s() + scale * self.own.took_s > self.until_s;
        self.is_cut.set(self.is_cut.get() || is_cut);
        is_cut
    }

    fn proposal(&self, point: Point, is_hopeless: &IsHopeless) -> Option<Proposal> {
        let changes = self.changes(point);
        let planned = self.run.plan(&changes, is_hopeless).ok()??;
        let limits = self.run.budgets(&planned);
        let fits = !limits.is_empty() && budgets::exceeded(&planned, &limits).is_none();
        // The same kind of memory may be another number of bytes for other ranks.
        let same = limits
            .iter()
            .find(|budget| std::mem::discriminant(*budget) == std::mem::discriminant(self.exceeded));
        let plan = &planned.plan;
        let copies = plan.ranks.iter().map(|rank| rank.step.copies.iter().map(|copy| copy.bytes).sum());
        let host = plan.ranks.iter().map(|rank| rank.host.arena_bytes).max().unwrap_or(0);
        Some(Proposal {
            point,
            words: self.run.words(&changes),
            ranks: plan.spec.world_size(),
            needed: same.unwrap_or(self.exceeded).needed(&planned),
            host: if plan.spec.host_addressable { 0 } else { host },
            sent: plan.collective_bytes_per_step(),
            copied: copies.max().unwrap_or(0),
            step_s: if fits { self.run.step_s(&planned) } else { None },
            changes,
            fits,
        })
    }

    /// The most of each axis that changes neither ranks nor memories.
    fn strongest(&self) -> Point {
        let mut point = [0; AXES];
        [ZERO, CHECKPOINTING, MICRO].into_iter().for_each(|axis| point[axis] = self.axes[axis].len());
        point
    }

    /// The mildest change along an axis, below `end`, that fits beside those of `point`; less of these where they are not needed.
    fn mildest(&mut self, point: Point, axis: usize, end: usize) -> Option<Point> {
        let at = |level| {
            let mut point = point;
            point[axis] = level;
            point
        };
        let first = (1..end).find(|level| self.fits(at(*level)))?;
        Some(self.lighter(at(first)))
    }

    /// A point that fits, with as little of each axis as that needs.
    fn lighter(&mut self, mut point: Point) -> Point {
        for axis in [CHECKPOINTING, MICRO, ZERO, TIERS[0], TIERS[1], AUTO] {
            for level in 0..point[axis] {
                let mut less = point;
                less[axis] = level;
                if self.fits(less) {
                    point = less;
                    break;
                }
            }
        }
        point
    }

    fn is_enough(&self) -> bool {
        let found = self.tried.iter().flat_map(|(_, proposal)| proposal).filter(|proposal| proposal.fits);
        found.count() >= ENOUGH
    }

    /// What takes long to plan comes last: disks, and the placements of `auto`.
    fn all(&mut self) {
        let (none, strongest) = ([0; AXES], self.strongest());
        let mut fits_here = false;
        for axis in [ZERO, CHECKPOINTING, MICRO, FEWER] {
            fits_here |= self.mildest(none, axis, self.end_of(axis)).is_some();
        }
        if !fits_here && self.fits(strongest) {
            self.lighter(strongest);
        }
        self.away(TIERS[0], strongest);
        let mut all_away = none;
        all_away[TIERS[0]] = self.axes[TIERS[0]].len().saturating_sub(1);
        let fits_away = self.fits(all_away);
        for axis in MORE {
            if self.is_enough() {
                break;
            }
            let end = self.end_of(axis);
            let found = self.mildest(strongest, axis, end).map_or(end, |point| point[axis]);
            // With states outside of device memory, fewer ranks may do.
            all_away[ZERO..].copy_from_slice(&strongest[ZERO..]);
            if all_away[TIERS[0]] > 0 && !fits_here && !fits_away {
                self.mildest(all_away, axis, found);
            }
        }
        self.away(TIERS[1], strongest);
        self.away(AUTO, strongest);
    }

    /// Something outside of device memory: alone, and as little as needed where more is computed again or micro-batches are smaller.
    fn away(&mut self, axis: usize, strongest: Point) {
        let end = self.end_of(axis);
        let alone = self.mildest([0; AXES], axis, end);
        self.mildest(strongest, axis, alone.map_or(end, |point| point[axis]));
    }

    fn end_of(&self, axis: usize) -> usize {
        self.axes[axis].len() + 1
    }

    fn end(mut self) -> Proposals {
        let own = self.own.plan.spec.world_size();
        let of_all_ranks = matches!(self.exceeded, Budget::Machine(_));
        let cut_s = self.is_cut.get().then_some(self.longest_s);
        let all: Vec<Proposal> = self.tried.iter().filter_map(|(_, proposal)| proposal.clone()).collect();
        let mut fitting: Vec<Proposal> = all.iter().filter(|proposal| proposal.fits).cloned().collect();
        let all_fitting = fitting.clone();
        // More changes than needed, unless they leave half of the memory.
        let is_needless = |proposal: &Proposal| {
            let of_less = |less: &Proposal| {
                let has_less = less.point != proposal.point
                    && less.point.iter().zip(proposal.point).all(|(less, own)| *less <= own);
                has_less && less.needed < 2 * proposal.needed
            };
            all_fitting.iter().any(of_less)
        };
        fitting.retain(|proposal| !is_needless(proposal));
        if fitting.is_empty() {
            return Proposals { of_all_ranks, shown: self.smallest(all), more: 0, cut_s, outside: None };
        }
        let moved = |proposal: &Proposal| (proposal.sent / proposal.ranks as u64 + proposal.copied) as f64;
        fitting.sort_by(|a, b| {
            let ranks = |proposal: &Proposal| if proposal.ranks == own { 0 } else { proposal.ranks };
            let time = |proposal: &Proposal| proposal.step_s.unwrap_or(0.0);
            let by_cost = time(a).total_cmp(&time(b)).then(moved(a).total_cmp(&moved(b)));
            ranks(a).cmp(&ranks(b)).then(by_cost)
        });
        let found = fitting.len();
        let same = fitting.iter().filter(|proposal| proposal.ranks == own).count();
        // Some with other ranks are shown, too.
        let kept = same.min(SHOWN.saturating_sub(found - same).max(SHOWN_OF_SAME_RANKS));
        fitting.drain(kept..same);
        fitting.truncate(SHOWN);
        let more = found - fitting.len();
        Proposals { of_all_ranks, shown: fitting, more, cut_s, outside: None }
    }

    /// What needs least, where nothing fits.
    fn smallest(&mut self, mut all: Vec<Proposal>) -> Vec<Proposal> {
        let own = self.exceeded.needed(self.own);
        if all.is_empty() {
            // States alone are too large for everything that was tried.
            let on_device = self.strongest();
            let mut away = on_device;
            away[TIERS[0]] = self.axes[TIERS[0]].len();
            let strongest =
                self.proposal(away, &|_, _| false).or_else(|| self.proposal(on_device, &|_, _| false));
            all.extend(strongest.filter(|strongest| strongest.changes != Changes::default()));
        }
        all.retain(|proposal| proposal.needed < own);
        all.sort_by_key(|proposal| proposal.needed);
        all.truncate(SHOWN / 2);
        all
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use phalanx_models::{Gpt2, ModelShape};
    use phalanx_train::{ResolvedConfig, RunConfig};

    use super::*;

    /// A run on this machine, with the dry runs of the plans that were made.
    struct Counting<'a>(OnThisMachine<'a>, RefCell<Vec<u128>>);

    impl Replan for Counting<'_> {
        fn plan(&self, changes: &Changes, is_hopeless: &IsHopeless) -> Result<Option<Planned>> {
            let planned = self.0.plan(changes, is_hopeless)?;
            self.1.borrow_mut().extend(planned.as_ref().map(Planned::dry_runs));
            Ok(planned)
        }

        fn budgets(&self, planned: &Planned) -> Vec<Budget> {
            self.0.budgets(planned)
        }

        fn step_s(&self, planned: &Planned) -> Option<f64> {
            self.0.step_s(planned)
        }

        fn words(&self, changes: &Changes) -> Vec<String> {
            self.0.words(changes)
        }
    }

    /// What would take longer than is left, by the time that the plan of the run took, is not planned.
    #[test]
    fn the_search_is_bounded_by_the_time_of_the_first_plan() {
        let mut config = RunConfig::default();
        (config.model.layers, config.model.hidden, config.model.heads, config.model.seq) = (2, 256, 4, 16);
        (config.batch.global, config.train.threads, config.memory.limit_mb) = (64, Some(1), Some(30.0));
        let model = Gpt2::new(ModelShape { layers: 2, hidden: 256, heads: 4, vocab: 256, positions: 16 });
        let planned = Planned::new(ResolvedConfig::new(config).unwrap(), model.into(), 0).unwrap();
        for (took_s, scale_max) in [(0.0, u128::MAX), (1.0, 4), (3.0, 2)] {
            let mut planned = planned.clone();
            planned.took_s = took_s;
            let run = Counting(OnThisMachine(&planned), RefCell::default());
            let found = Proposals::search(&run, &planned);
            let tried = run.1.into_inner();
            assert!(!tried.is_empty() && !found.shown.is_empty(), "{took_s} s: {tried:?}");
            let largest = tried.iter().max().unwrap();
            assert!(*largest <= scale_max.saturating_mul(planned.dry_runs()), "{took_s} s: {tried:?}");
            let is_cut = found.to_text().contains("not all changes were tried");
            assert!(is_cut || *largest > 4 * planned.dry_runs(), "{took_s} s: {tried:?}");
        }
    }
}
