//! A world of one: an implementation, not an `if`.
//!
//! Sums of one rank are that rank's values, so everything is a copy from source to target, or nothing;
//! only what accumulates is added, and rounded, as in any group. It is over when submit returns.

use phalanx_plan::trace::CollectiveOp;
use phalanx_simd::Isa;
use phalanx_simd::sums;

use crate::call::summed;
use crate::call::{Buffers, Call};
use crate::group::Group;
use crate::pending::Pending;
use crate::statistics::{Statistics, Tally};

/// The group of a single rank.
pub struct Solo {
    name: &'static str,
    isa: Isa,
    tally: Tally,
}

impl Solo {
    /// A group of one rank.
    pub fn new(name: &'static str) -> Solo {
        Solo { name, isa: Isa::detect(), tally: Tally::default() }
    }

    /// The same group, which sums and copies with the instruction set `isa`, at most what the processor has.
    #[must_use]
    pub fn with_isa(self, isa: Isa) -> Solo {
        Solo { isa: isa.limit(Isa::detect()), ..self }
    }
}

impl Group for Solo {
    fn name(&self) -> &'static str {
        self.name
    }
    fn rank(&self) -> usize {
        0
    }
    fn world_size(&self) -> usize {
        1
    }

    fn submit(&self, call: Call) -> Pending<Buffers> {
        let start = std::time::Instant::now();
        let Call { op, accumulate, mut buffers, .. } = call;
        if let Buffers { source: Some(source), target: Some(target) } = &mut buffers {
            let (dtype, elements) = (source.dtype(), source.shape().elements());
            let from = source.view().address().as_ptr().cast_const();
            let to = target.view_mut().address().as_ptr();
            let sums = op == CollectiveOp::ReduceScatter && accumulate;
            // On a device without memory (a dry run), nothing is copied.
            if !from.is_null() && !to.is_null() {
                // SAFETY: two tensors, owned here, with the same number of elements (Call::check);
                // the processor has the instruction set (limited where it was set).
                unsafe {
                    if sums {
                        sums::sum(self.isa, summed(dtype), &[from], to, elements, true);
                    } else {
                        phalanx_simd::copy(self.isa, from, to, elements * dtype.bytes());
                    }
                }
            }
        }
        let busy = start.elapsed();
        self.tally.completed(0, busy);
        self.tally.blocked(busy);
        Pending::ready(buffers)
    }

    fn take_statistics(&self) -> Statistics {
        self.tally.take()
    }
}
