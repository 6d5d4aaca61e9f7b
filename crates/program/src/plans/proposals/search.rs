//! The search for proposals.
//!
//! Changes of one kind come first, then several together, offloading with the others, and more ranks. Of each kind the mildest that fits is
//! taken, and of several together whatever they do not need is left out again. The search ends after a time, and says so.

use std::cell::Cell;

use phalanx_train::Spec;
use phalanx_train::config::Tier;

use super::{Proposal, Proposals, Replan};
use crate::host::busy;
use crate::plans::budgets::{self, Budget};
use crate::plans::planned::{IsHopeless, Outlook, Planned};
use crate::plans::proposed_changes::{self, Axis, Changes};

/// Proposals that are shown, at most, and those of them that keep the ranks, where others have more.
const SHOWN: usize = 6;
const SHOWN_OF_SAME_RANKS: usize = 4;

/// Proposals with which the search ends.
const ENOUGH: usize = 10;

/// Plans of the run as it is that a search may always take the time of.
const LONGEST_PLANS: f64 = 2.0;

/// Axes of changes. More ranks come first, since values of the same keys by other axes replace theirs.
const AXES: usize = 10;
const MORE: [usize; 3] = [0, 1, 2];
const FEWER: usize = 3;
const TIERS: [usize; 2] = [4, 5];
const AUTO: usize = 6;
const ZERO: usize = 7;
const CHECKPOINTING: usize = 8;
const MICRO: usize = 9;

/// For each axis how far it is changed; 0 is not at all.
pub(super) type Point = [usize; AXES];

pub(super) struct Search<'a> {
    run: &'a dyn Replan,
    own: &'a Planned,
    exceeded: &'a Budget,
    axes: [Axis; AXES],
    /// Changes that were planned, or cannot be.
    tried: Vec<(Changes, Option<Proposal>)>,
    longest_s: f64,
    until_s: f64,
    /// True if something was not tried because it would have taken too long.
    is_cut: Cell<bool>,
}

impl<'a> Search<'a> {
    pub(super) fn new(
        run: &'a dyn Replan,
        own: &'a Planned,
        exceeded: &'a Budget,
        longest_s: f64,
    ) -> Search<'a> {
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
        let longest_s = longest_s.max(LONGEST_PLANS * own.took_s);
        let until_s = busy::own_s() + longest_s;
        Search { run, own, exceeded, axes, tried: Vec::new(), longest_s, until_s, is_cut: Cell::new(false) }
    }

    fn changes(&self, point: Point) -> Changes {
        let levels = self.axes.iter().zip(point).filter_map(|(axis, level)| axis.get(level.checked_sub(1)?));
        levels.fold(Changes::default(), |sum, level| sum.and(level))
    }

    /// Returns whether the run fits with the changes of a point.
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

    /// Returns whether no time is left for a plan, which takes as long as that of the run for each of its dry runs.
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
            host: if plan.spec.device.host_addressable { 0 } else { host },
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

    /// Tries the changes. Those that take long to plan come last: disks, and the placements of `auto`.
    pub(super) fn all(&mut self) {
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

    pub(super) fn end(mut self) -> Proposals {
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

    /// Proposals that need the fewest bytes, for a run that nothing makes fit.
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

    use anyhow::Result;
    use phalanx_models::Gpt2;
    use phalanx_train::{ResolvedConfig, RunConfig};

    use super::*;
    use crate::plans::proposals::{LONGEST_S, OnThisMachine};

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

    /// Plans that would take longer than is left, by the time that the plan of the run took, are not made.
    #[test]
    fn the_search_is_bounded_by_the_time_of_the_first_plan() {
        let mut config = RunConfig::default();
        config.model.seq = 16;
        (config.batch.global, config.train.threads, config.memory.limit_mb) = (64, Some(1), Some(30.0));
        let model = Gpt2 { layers: 2, hidden: 256, heads: 4, vocab: 256, positions: 16, ..Gpt2::default() };
        let planned = Planned::new(ResolvedConfig::new(config).unwrap(), model.into(), 0).unwrap();
        for (took_s, scale_max) in [(0.0, u128::MAX), (1.0, 4), (3.0, 2)] {
            let mut planned = planned.clone();
            planned.took_s = took_s;
            let run = Counting(OnThisMachine(&planned), RefCell::default());
            let found = Proposals::search(&run, &planned, LONGEST_S);
            let tried = run.1.into_inner();
            assert!(!tried.is_empty() && !found.shown.is_empty(), "{took_s} s: {tried:?}");
            let largest = tried.iter().max().unwrap();
            assert!(*largest <= scale_max.saturating_mul(planned.dry_runs()), "{took_s} s: {tried:?}");
            let is_cut = found.to_text().contains("not all changes were tried");
            assert!(is_cut || *largest > 4 * planned.dry_runs(), "{took_s} s: {tried:?}");
        }
    }
}
