//! The group that only records: any rank of any world, nothing moves.
//!
//! It writes each collective to the dry run's trace when it is submitted, and the wait when it is
//! waited for, so that the trace shows what overlaps what.

use std::sync::Arc;

use phalanx_tensor::record::Recorder;
use phalanx_trace::Event;

use crate::call::{Buffers, Call};
use crate::error::CollectiveError;
use crate::group::Group;
use crate::pending::{Pending, Progress};
use crate::statistics::{Statistics, Tally};

/// See the module's head.
pub struct MetaGroup {
    name: &'static str,
    rank: usize,
    world_size: usize,
    tape: Arc<Tape>,
    tally: Tally,
}

struct Tape(Arc<Recorder>);

impl MetaGroup {
    /// Stands in for `rank` of a group of `world_size`, writing to the device's `recorder`.
    pub fn new(name: &'static str, rank: usize, world_size: usize, recorder: Arc<Recorder>) -> MetaGroup {
        assert!(rank < world_size, "rank {rank} of {world_size}");
        MetaGroup { name, rank, world_size, tape: Arc::new(Tape(recorder)), tally: Tally::default() }
    }
}

impl Group for MetaGroup {
    fn name(&self) -> &'static str {
        self.name
    }
    fn rank(&self) -> usize {
        self.rank
    }
    fn world_size(&self) -> usize {
        self.world_size
    }

    fn submit(&self, call: Call) -> Pending<Buffers> {
        let record = call.record(self.name, self.rank, self.world_size);
        self.tally.completed(record.sent_bytes, std::time::Duration::ZERO);
        let number = self.tape.0.collective(record);
        Pending::started(call.buffers, Arc::clone(&self.tape) as Arc<dyn Progress>, number.into())
    }

    fn take_statistics(&self) -> Statistics {
        self.tally.take()
    }
}

impl Progress for Tape {
    fn wait(&self, ticket: u64) -> Result<(), CollectiveError> {
        self.0.push(Event::Wait { collective: ticket as u32 });
        Ok(())
    }

    fn is_done(&self, _: u64) -> bool {
        true
    }
}
