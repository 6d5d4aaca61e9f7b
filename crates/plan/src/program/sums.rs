//! Sums of gradients over other axes than that of data, behind the sum over data: terms over the tensor axis, and parameters that several
//! pipeline stages have.

use super::action::{Buffer, Op, SumGroup, Work};
use super::builder::Builder;
use super::chunks::{Policies, StageChunks, Terms, TiedChunks};
use super::list::Role;

/// Sums the terms of a stage over the tensor axis; `sum` is the buffer with the summed gradient of a chunk.
pub(super) fn sum_terms(
    list: &mut Builder,
    policies: &Policies,
    stage: &StageChunks,
    sum: impl Fn(&Builder, usize) -> Buffer,
) {
    let Terms { chunks, elements } = &stage.terms;
    if chunks.is_empty() {
        return;
    }
    let named = (policies.precision.accumulate, "terms_of_gradients");
    let terms = list.take(Role::Terms, stage.index, *elements, named);
    for c in chunks {
        list.emit(Op::Pack { from: sum(list, *c), into: terms });
    }
    sum_over(list, SumGroup::Tensor, terms);
    for c in chunks {
        list.emit(Op::Unpack { from: terms, into: sum(list, *c) });
    }
    list.emit(Op::Free(terms));
}

/// Sums the terms of a parameter that several stages have; `sum` is the buffer with the summed gradient of a chunk of the rank.
pub(super) fn sum_tied(
    list: &mut Builder,
    policies: &Policies,
    tied: &TiedChunks,
    sum: impl Fn(&Builder, usize) -> Buffer,
) {
    let take = |list: &mut Builder, chunk: usize| {
        let named = (policies.precision.accumulate, "tied_gradient");
        let terms = list.take(Role::Tied, chunk, tied.elements, named);
        if tied.elements > 0 {
            list.emit(Op::Pack { from: sum(list, chunk), into: terms });
        }
        terms
    };
    let all = take(list, tied.chunks[0]);
    if tied.elements > 0 {
        for other in &tied.chunks[1..] {
            let term = take(list, *other);
            list.emit(Op::Add { from: term, into: all });
            list.emit(Op::Free(term));
        }
        if tied.is_shared {
            sum_over(list, SumGroup::Tie, all);
        }
        for chunk in &tied.chunks {
            list.emit(Op::Unpack { from: all, into: sum(list, *chunk) });
        }
    }
    list.emit(Op::Free(all));
}

/// Sums a buffer over a group, and waits.
#[track_caller]
pub(super) fn sum_over(list: &mut Builder, group: SumGroup, buffer: Buffer) {
    let token = list.start(Work::AllReduce { group, buffer });
    list.emit(Op::Wait(token));
}
