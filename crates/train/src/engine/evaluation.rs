//! The parts of an evaluation. They run the same program, and between them all ranks agree whether to go on: an evaluation can be asked to stop
//! as often as steps can.

use phalanx_plan::{Action, Kind, Mesh, PipelineSchedule};

use crate::config::RunConfig;

/// Divides an evaluation of `evaluated` windows over all ranks into parts of at most as many micro-batches as a step has: number of parts,
/// and the schedule of each. The last rows may have no window.
pub(crate) fn parts(
    config: &RunConfig,
    mesh: Mesh,
    schedule: &PipelineSchedule,
    evaluated: usize,
) -> (usize, PipelineSchedule) {
    let whole = evaluated.div_ceil(config.micro_batch_size() * mesh.data);
    let parts = whole.div_ceil(config.micro_batches());
    (parts, forward_only(schedule, if parts == 0 { 0 } else { whole.div_ceil(parts) }))
}

/// The schedule that only runs forward of every micro-batch through the same stages.
fn forward_only(schedule: &PipelineSchedule, micro_batches: usize) -> PipelineSchedule {
    let of_rank = |rank: usize| {
        let actions = (0..micro_batches).flat_map(|micro_batch| {
            let action = move |stage| Some(Action { stage, kind: Kind::Forward, micro_batch });
            schedule.stages_of(rank).map(action)
        });
        actions.collect()
    };
    PipelineSchedule {
        name: "evaluation".into(),
        ranks: (0..schedule.ranks.len()).map(of_rank).collect(),
        placement: schedule.placement.clone(),
        micro_batches,
    }
}
