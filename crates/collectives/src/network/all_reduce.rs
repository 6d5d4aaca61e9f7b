//! All_reduce in place: P ranks on H hosts, S bytes.
//!
//! Small ([`choice`]): 1 step. Every lane sends the host's sums of its slice to all other hosts, and each adds all of them;
//! (H-1)S bytes leave each host for each of its subtrees.
//!
//! Large: 2 steps. Each lane's slice is cut into one part for each host; a host adds its part of the sum, then sends it
//! to the others, or, where [`choice`] says so, along a ring of hosts (H-1 steps instead of the second). 2S(H-1)/H bytes leave
//! each host. A ring only copies here: one that adds would change the order of additions.

use crate::error::CollectiveError;
use crate::network::choice::{self, AllReduce};
use crate::network::exchange::Exchange;
use crate::network::halving;
use crate::network::partial_sums::{self, PartialSums, Region};
use crate::parts;
use crate::shared_memory::memory::MemoryRange;
use crate::shared_memory::transfer::Transfer;

pub(crate) fn run(x: &mut Exchange, t: &Transfer, sums: &mut PartialSums) -> Result<(), CollectiveError> {
    let Some((lane, lanes)) = x.lane() else { return Ok(()) };
    let (hosts, width) = (x.layout.hosts(), t.dtype.bytes());
    let slice = parts::uneven(t.count, lanes, lane);
    let small = match choice::all_reduce(x.layout, slice.len() * width) {
        AllReduce::OneStep => true,
        AllReduce::Halving => return halving::run(x, t, sums, slice),
        AllReduce::Direct => false,
    };
    let part = |host: usize| {
        let part = parts::uneven(slice.len(), hosts, host);
        if small { slice.clone() } else { slice.start + part.start..slice.start + part.end }
    };
    let region = |host: usize| {
        let part = part(host);
        let target = t.source.address.wrapping_add(part.start * width);
        Region { host, start: part.start, elements: part.len(), target }
    };
    let regions: Vec<Region> = (0..hosts).map(region).collect();
    let locals = x.locals();
    let copy = |x: &Exchange, first: usize, elements: usize| {
        let (at, bytes) = (first * width, elements * width);
        for q in locals.iter().filter(|q| **q != x.meeting.rank()) {
            let address = x.meeting.target(*q).wrapping_add(at);
            // SAFETY: the slice of every buffer of this host is this lane's alone to read and to write until it leaves;
            // all hold the whole (Meeting compared).
            unsafe {
                MemoryRange { address, bytes }.fill_from(x.meeting.isa(), t.source.range(at, bytes).address)
            };
        }
    };
    partial_sums::run(x, t, sums, &regions, copy)?;
    if small {
        return Ok(());
    }
    let range = |host: usize| t.source.range(part(host).start * width, part(host).len() * width);
    if choice::gathers_in_ring(x.layout, slice.len() * width) {
        let before = |steps: usize| (x.layout.own + hosts - steps) % hosts;
        let (next, previous) = (before(hosts - 1), before(1));
        for step in 0..hosts - 1 {
            // The sum of the host that is so many steps before this one; at first its own.
            let (passed, arriving) = (before(step), before(step + 1));
            x.send(next, range(passed));
            x.receive(previous, range(arriving));
            x.settle()?;
            copy(x, part(arriving).start, part(arriving).len());
        }
        return Ok(());
    }
    for host in x.layout.others() {
        x.send(host, range(x.layout.own));
        x.receive(host, range(host));
    }
    x.settle()?;
    for host in x.layout.others() {
        copy(x, part(host).start, part(host).len());
    }
    Ok(())
}
