//! A rank's membership in a group: it numbers the rank's calls, and describes each to the peers.

use std::sync::Arc;

use phalanx_plan::trace::CollectiveOp;

use crate::error::CollectiveError;
use crate::shared_memory::clock::now_ns;
use crate::shared_memory::descriptor::Descriptor;
use crate::shared_memory::host::Host;
use crate::shared_memory::memory::MemoryRange;
use crate::shared_memory::options::Options;
use crate::shared_memory::participation::{Participation, Patience};
use crate::shared_memory::rank_cell::LastCall;
use crate::shared_memory::transfer::Transfer;

/// One rank's membership in a group.
pub(crate) struct Membership {
    pub(crate) host: Arc<Host>,
    pub(crate) options: Options,
    pub(crate) group: &'static str,
    hash: u32,
    /// Number of the channel.
    pub(crate) index: usize,
    /// World ranks, by group rank.
    pub(crate) members: Vec<usize>,
    /// Which members run on this host.
    here: Vec<bool>,
    pub(crate) rank: usize,
    /// Calls of the whole group so far.
    calls: u64,
    /// Messages with each member so far.
    messages: Vec<u64>,
}

/// A call that is about to be announced.
pub(crate) struct Announced {
    pub(crate) descriptor: Descriptor,
    /// The other end of a send or recv, by its group rank.
    pub(crate) pair: Option<usize>,
}

impl Membership {
    /// `members` are world ranks, among them this host's.
    pub(crate) fn new(
        host: Arc<Host>,
        options: Options,
        group: &'static str,
        index: usize,
        members: Vec<usize>,
    ) -> Membership {
        let rank = members.iter().position(|m| *m == host.rank);
        let rank =
            rank.unwrap_or_else(|| panic!("rank {} is not a member of group {group} {members:?}", host.rank));
        host.control.open_channel(index);
        host.control.slot(index, host.rank).name.write(group, 0);
        let messages = vec![0; members.len()];
        let here = members.iter().map(|member| host.ranks.contains(member)).collect();
        let hash = hash(group, &members);
        Membership { host, options, group, hash, index, members, here, rank, calls: 0, messages }
    }

    /// Numbers the call `t` and notes that it begins. Peers on this host may write `written`.
    pub(crate) fn begin(&mut self, t: &Transfer, written: MemoryRange) -> Result<Announced, CollectiveError> {
        let pair = if matches!(t.op, CollectiveOp::Send | CollectiveOp::Recv) { t.root } else { None };
        let number = pair.map_or(&mut self.calls, |peer| &mut self.messages[peer]);
        *number += 1;
        let offered = t.offered(self.rank, self.members.len());
        let Host { memory, control, rank, .. } = &*self.host;
        let descriptor = Descriptor {
            group: self.hash,
            sequence: *number,
            op: t.op,
            dtype: t.dtype,
            accumulate: t.accumulate,
            by_device: t.by_device,
            count: t.count as u64,
            root: t.root,
            tag: t.tag,
            source: memory.offer(*rank, offered)?,
            source_bytes: offered.bytes as u64,
            target: if written.bytes == 0 { 0 } else { memory.offer(*rank, written)? + 1 },
        };
        let peer = pair.map(|q| self.members[q]);
        let now_ns = now_ns();
        let last = LastCall { channel: self.index, peer, parity: descriptor.parity() };
        control.rank(*rank).begin(last, now_ns);
        control.flight(*rank).begin(now_ns, self.index, &descriptor, t.site);
        Ok(Announced { descriptor, pair })
    }

    /// Notes that a call has ended.
    pub(crate) fn end(&self, descriptor: &Descriptor) {
        self.host.control.flight(self.host.rank).end(self.index, descriptor);
    }

    /// This rank's part in a call.
    pub(crate) fn participation(&self, pair: Option<usize>, patience: Patience) -> Participation<'_> {
        Participation {
            host: &self.host,
            options: &self.options,
            group: self.group,
            channel: self.index,
            members: &self.members,
            here: &self.here,
            rank: self.rank,
            pair,
            patience,
        }
    }

    /// Returns whether member `q` runs on this host.
    pub(crate) fn is_here(&self, q: usize) -> bool {
        self.here[q]
    }
}

/// FNV-1a over the name and the members.
fn hash(group: &str, members: &[usize]) -> u32 {
    let members = members.iter().flat_map(|m| (*m as u32).to_le_bytes());
    let bytes = group.bytes().chain([0]).chain(members);
    bytes.fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}
