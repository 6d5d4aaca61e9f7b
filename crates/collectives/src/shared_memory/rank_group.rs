//! A group of ranks, as the engine sees it: submits calls to the group's stream.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use phalanx_tensor::refused_thread;

use crate::call::{Buffers, Call};
use crate::group::Group;
use crate::mover::Mover;
use crate::pending::Pending;
use crate::shared_memory::call_queue::{CallQueue, Queued};
use crate::shared_memory::channel::Channel;
use crate::shared_memory::host::Host;
use crate::shared_memory::membership::Membership;
use crate::shared_memory::transfer::Transfer;
use crate::statistics::Statistics;

/// A group of ranks.
pub(crate) struct RankGroup {
    name: &'static str,
    members: Vec<usize>,
    rank: usize,
    world_size: usize,
    host: Arc<Host>,
    overlap: bool,
    stream: Arc<CallQueue>,
    /// The owner thread, started by the first call that overlaps.
    owner: Mutex<Option<JoinHandle<()>>>,
}

impl Group for RankGroup {
    fn name(&self) -> &'static str {
        self.name
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

    fn submit(&self, mut call: Call) -> Pending<Buffers> {
        let transfer = Transfer::new(&mut call, self.world_size);
        self.queue(call, Queued { transfer, mover: None })
    }

    fn submit_moved(&self, mut call: Call, mover: Box<dyn Mover>) -> Pending<Buffers> {
        let transfer = Transfer::new(&mut call, self.world_size).by_device();
        self.queue(call, Queued { transfer, mover: Some(mover) })
    }

    fn abort(&self, reason: &str) {
        let _ = self.host.abort(reason);
    }

    fn take_statistics(&self) -> Statistics {
        self.stream.tally.take()
    }
}

impl RankGroup {
    /// The group of a channel. With `overlap`, its calls run on a thread of the group.
    pub(crate) fn new(channel: Box<dyn Channel>, overlap: bool) -> RankGroup {
        let Membership { host, group, members, rank, .. } = channel.membership();
        RankGroup {
            name: group,
            members: members.clone(),
            rank: *rank,
            world_size: members.len(),
            host: Arc::clone(host),
            overlap,
            stream: Arc::new(CallQueue::new(channel)),
            owner: Mutex::new(None),
        }
    }

    fn queue(&self, call: Call, queued: Queued) -> Pending<Buffers> {
        let ticket = if self.overlap {
            self.ensure_owner();
            self.stream.enqueue(queued)
        } else {
            self.stream.run(queued)
        };
        Pending::started(call.buffers, Arc::clone(&self.stream) as _, ticket)
    }

    fn ensure_owner(&self) {
        let mut owner = self.owner.lock().expect("no panic under this lock");
        if owner.is_none() {
            match self.stream.own(self.name) {
                Ok(thread) => *owner = Some(thread),
                // Without the thread, waiting callers could run the calls, but two ranks that send to each other would
                // both wait.
                Err(error) => {
                    let whose = format!("the thread of group {}", self.name);
                    self.stream.fail(self.host.abort(&refused_thread(&whose, &error).to_string()));
                }
            }
        }
    }
}

impl Drop for RankGroup {
    fn drop(&mut self) {
        self.host.abort_if_panicking();
        self.stream.close();
        if let Some(owner) = self.owner.lock().ok().and_then(|mut owner| owner.take()) {
            let _ = owner.join();
        }
    }
}
