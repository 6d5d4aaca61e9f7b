//! The memory of the rank that needs most, without the plans of most others.
//!
//! Whether a configuration fits depends on that rank alone. In a large world, one rank of each pipeline stage runs dry
//! without the micro-batches that repeat themselves, which takes a small part of the time of a plan. Only the ranks that
//! may be the largest are then planned with all micro-batches.

use phalanx_plan::{Coordinates, Stage};

use crate::dry_run::{DryRuns, Learned, orders_of};
use crate::planning::{ALL_RANKS, PlanError, RankPlan, RunPlan, parameters_at};
use crate::rank::Rank;
use crate::spec::Spec;

/// Offsets of all micro-batches take at most this part, 1/20, more than those of the micro-batches that do not repeat
/// themselves: both are packed close to what is live at once, which is the same.
const MARGIN: u64 = 20;

impl RunPlan {
    /// The most that any rank of a run needs, where `needed` is what a rank with a plan needs.
    ///
    /// # Errors
    /// The errors of [`RunPlan::new`], save those that only the comparison of several ranks can find.
    pub fn largest_need(spec: Spec, needed: &dyn Fn(&Spec, &RankPlan) -> u64) -> Result<u64, PlanError> {
        if spec.world_size() <= ALL_RANKS {
            let plan = RunPlan::without_offsets(spec)?;
            return Ok(plan.ranks.iter().map(|rank| needed(&plan.spec, rank)).max().unwrap_or(0));
        }
        let spec = spec.with_chosen_chunks(&Rank::new).with_placed_chunks(&Rank::new, 0)?;
        let rank_of = |pipeline| spec.mesh.rank(Coordinates { pipeline, data: 0, tensor: 0 });
        let counted = |plan: &RankPlan| needed(&spec, plan);
        let rough =
            |pipeline| rough_plan(&spec, rank_of(pipeline), pipeline).map_or(u64::MAX, |plan| counted(&plan));
        let mut order: Vec<(u64, usize)> = (0..spec.mesh.pipeline).map(|at| (rough(at), at)).collect();
        order.sort_by_key(|(bytes, at)| (std::cmp::Reverse(*bytes), *at));
        let mut largest = 0;
        for (bytes, pipeline) in order {
            if bytes.saturating_add(bytes / MARGIN) < largest {
                break;
            }
            let plan = rank_plan(&spec, rank_of(pipeline), pipeline)?;
            largest = largest.max(counted(&plan));
        }
        Ok(largest)
    }
}

/// The plan of one rank without the micro-batches that repeat themselves; `None` where it has no plan.
fn rough_plan(spec: &Spec, rank: usize, pipeline: usize) -> Option<RankPlan> {
    let trace = DryRuns { spec, make_rank: &Rank::new, abridges: true }.short_trace(rank);
    RankPlan::of(&trace, orders_of(&trace), parameters_at(spec, &spec.whole(), pipeline)).ok()
}

/// The plan of one rank.
fn rank_plan(spec: &Spec, rank: usize, pipeline: usize) -> Result<RankPlan, PlanError> {
    let runs = DryRuns { spec, make_rank: &Rank::new, abridges: true };
    let learned = if spec.stage == Stage::Zero { Learned::nothing() } else { runs.learn(rank) };
    let trace = runs.trace(rank, &learned);
    Ok(RankPlan::of(&trace, orders_of(&trace), parameters_at(spec, &spec.whole(), pipeline))?)
}
