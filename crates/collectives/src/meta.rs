//! The group of a dry run: it records collectives for any rank of any world, and moves nothing.
//!
//! It writes each collective to the dry run's trace when it is submitted, and the wait when it is
//! waited for, so that the trace shows what overlaps what. The placements of its buffers are checked and carried
//! on (`placement`). On `Meta` it stands in for groups of one rank too where something is
//! placed along their axis: the world of one that computes knows of no placements.

use std::sync::Arc;

use phalanx_plan::trace::{Axis, Collective, Event};
use phalanx_tensor::record::Recorder;

use crate::call::{Buffers, Call};
use crate::error::CollectiveError;
use crate::group::Group;
use crate::pending::{Pending, Progress};
use crate::placement::Following;
use crate::statistics::{Statistics, Tally};

/// A group that records collectives and moves nothing.
pub struct MetaGroup {
    name: &'static str,
    axes: Vec<Axis>,
    members: Arc<[usize]>,
    rank: usize,
    world_size: usize,
    tape: Arc<Tape>,
    tally: Tally,
}

struct Tape(Arc<Recorder>);

impl MetaGroup {
    /// Stands in for `rank` of a group of all ranks, which are `world_size`, and writes to the device's `recorder`. It
    /// runs over no axis of a mesh: placements are not checked.
    pub fn new(name: &'static str, rank: usize, world_size: usize, recorder: Arc<Recorder>) -> MetaGroup {
        assert!(rank < world_size, "rank {rank} of {world_size}");
        MetaGroup {
            name,
            axes: Vec::new(),
            members: Arc::default(),
            rank,
            world_size,
            tape: Arc::new(Tape(recorder)),
            tally: Tally::default(),
        }
    }

    /// Stands in for `rank_in_group` of the group of the world ranks `members`, which runs over `axes`: placements are
    /// checked along them.
    pub fn over(
        name: &'static str,
        axes: &[Axis],
        members: &[usize],
        rank_in_group: usize,
        recorder: Arc<Recorder>,
    ) -> MetaGroup {
        let group = MetaGroup::new(name, rank_in_group, members.len(), recorder);
        MetaGroup { axes: axes.to_vec(), members: members.into(), ..group }
    }
}

impl Group for MetaGroup {
    fn name(&self) -> &'static str {
        self.name
    }
    fn axes(&self) -> &[Axis] {
        &self.axes
    }
    fn members(&self) -> &[usize] {
        &self.members
    }
    fn rank(&self) -> usize {
        self.rank
    }
    fn world_size(&self) -> usize {
        self.world_size
    }

    fn submit(&self, call: Call) -> Pending<Buffers> {
        let MetaGroup { name: group, axes, rank, world_size, .. } = self;
        let (rank, world_size) = (*rank, *world_size);
        let placements = Following { recorder: &self.tape.0, group, axes, rank, world_size }.follow(&call);
        let members = Arc::clone(&self.members);
        let record = Collective { members, placements, ..call.record(group, rank, world_size) };
        self.tally.completed(record.sent_bytes, std::time::Duration::ZERO);
        let number = self.tape.0.collective(record);
        Pending::started(call.buffers, Arc::clone(&self.tape) as Arc<dyn Progress>, number.into())
    }

    fn take_statistics(&self) -> Statistics {
        self.tally.take()
    }
}

impl Progress for Tape {
    fn wait(&self, ticket: u64, _: &mut Buffers) -> Result<(), CollectiveError> {
        self.0.push(Event::Wait { collective: ticket as u32 });
        Ok(())
    }

    fn is_done(&self, _: u64) -> bool {
        true
    }
}
