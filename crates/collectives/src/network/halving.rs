//! All_reduce by recursive halving and doubling: P ranks on H hosts, H a power of two, S bytes, 2 log2(H) steps.
//!
//! In step k, hosts whose numbers differ in bit k exchange halves of what they still have to add, so that each holds the
//! sum of 2^k hosts that follow each other, for one half less; then the sums return on the same way. 2S(H-1)/H bytes leave
//! each host, half of them as f32 if elements have 16 bits. A host sends log2(H) messages instead of H-1, which pays for
//! many hosts and buffers of medium size.
//!
//! Distances double, so what is added in step k are two neighbouring subtrees of the ranks' tree, left plus right: the bits
//! are those of the tree, if every host is one subtree and all have the same size.

use std::ops::Range;

use phalanx_simd::sums::{self, Partial, SumTree};
use phalanx_tensor::DType;

use crate::call::summed;
use crate::error::CollectiveError;
use crate::network::exchange::Exchange;
use crate::network::parcels::{at, copy_to_locals};
use crate::network::partial_sums::PartialSums;
use crate::network::staging::Staging;
use crate::shared_memory::transfer::Transfer;

/// Elements of a segment are halved at multiples of this.
const HALVE_ALIGN: usize = 16;

/// The part of a segment that a host keeps, and the one that it gives to its partner: the lower host keeps the lower half.
fn halves(segment: &Range<usize>, is_lower: bool) -> (Range<usize>, Range<usize>) {
    let middle = segment.start + (segment.len() / 2).next_multiple_of(HALVE_ALIGN).min(segment.len());
    let (low, high) = (segment.start..middle, middle..segment.end);
    if is_lower { (low, high) } else { (high, low) }
}

/// Sums the elements `slice` of all buffers, this rank's lane, into the buffers of this host.
pub(crate) fn run(
    x: &mut Exchange,
    t: &Transfer,
    sums: &mut PartialSums,
    slice: Range<usize>,
) -> Result<(), CollectiveError> {
    let (width, wide) = (t.dtype.bytes(), summed(t.dtype).wide_bytes());
    let (layout, hosts, isa) = (x.layout, x.layout.hosts(), x.meeting.isa());
    let wide_type = if t.dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let staging = &mut sums.own;
    staging.reset(2 * Staging::lines_for(slice.len() * wide));
    let (own, received) = (staging.take(slice.len() * wide), staging.take(slice.len() * wide));
    let wide_at = |base: *mut u8, part: &Range<usize>| {
        at(base, (part.start - slice.start) * wide..(part.end - slice.start) * wide)
    };
    let (_, subtree) = layout.subtrees_of(layout.own).next().expect("one subtree for each host");
    let sources = &x.meeting.sources_at(slice.start * width)[subtree.ranks.clone()];
    // SAFETY: the ranks are on this host and every source holds the whole (Meeting compared), unwritten while it is read;
    // the target is staging of this rank.
    unsafe { sums::sum_wide(isa, summed(t.dtype), sources, own, slice.len()) };
    let steps = hosts.trailing_zeros();
    let mut segments = vec![slice.clone()];
    for step in 0..steps {
        let partner = layout.own ^ 1 << step;
        let is_lower = layout.own < partner;
        let (kept, given) = halves(segments.last().expect("the slice"), is_lower);
        x.send(partner, wide_at(own, &given));
        x.receive(partner, wide_at(received, &kept));
        x.settle()?;
        let (mine, theirs) = (wide_at(own, &kept).address, wide_at(received, &kept).address);
        let pair = if is_lower { [mine.cast_const(), theirs] } else { [theirs.cast_const(), mine] };
        // SAFETY: both are staging of this rank; the lane's slice of the own buffer is this rank's alone to write after all
        // hosts have agreed, and no peer reads it: its sums were sent from staging.
        unsafe {
            if step + 1 < steps {
                sums::sum(isa, summed(wide_type), &pair, mine, kept.len(), false);
            } else {
                let tree = SumTree::Sum(Box::new(SumTree::Leaf(0)), Box::new(SumTree::Leaf(1)));
                let partials = pair.map(|address| Partial { address, is_wide: true });
                let target = t.source.address.wrapping_add(kept.start * width);
                sums::combine(isa, summed(t.dtype), &tree, &partials, target, kept.len(), false);
            }
        }
        segments.push(kept);
    }
    let bytes = |part: &Range<usize>| at(t.source.address, part.start * width..part.end * width);
    for step in (0..steps).rev() {
        let partner = layout.own ^ 1 << step;
        let held = segments.pop().expect("one for each step");
        let (_, missing) = halves(segments.last().expect("the slice"), layout.own < partner);
        x.send(partner, bytes(&held));
        x.receive(partner, bytes(&missing));
        x.settle()?;
    }
    copy_to_locals(x, slice.start * width..slice.end * width);
    Ok(())
}
