//! Sums over pipeline stages of the gradients of parameters of which several have a copy, behind those over data and the tensor axis.

use super::action::{Op, SumGroup};
use super::builder::Builder;
use super::chunks::{Policies, TiedChunks};
use super::gradients::GradientPass;
use super::list::Role;
use super::stored::{read, write};
use super::sums::sum_over;

/// Sums the terms of a parameter that several stages have; `of_chunk` are the gradients that a chunk of the rank is of.
pub(super) fn sum_tied<'a, 'b: 'a>(
    list: &mut Builder,
    policies: &Policies,
    tied: &TiedChunks,
    of_chunk: impl Fn(usize) -> &'a GradientPass<'b>,
) {
    let own = |(chunk, start): (usize, u64)| {
        let gradients = of_chunk(chunk);
        (gradients, chunk - gradients.stage.first_chunk, (0, start, tied.elements))
    };
    let take = |list: &mut Builder, copy: (usize, u64)| {
        let (gradients, c, piece) = own(copy);
        if tied.elements > 0 && gradients.is_stored(c) {
            return read(list, policies, (Role::Tied, copy.0), piece);
        }
        let named = (policies.precision.accumulate, "tied_gradient");
        let terms = list.take(Role::Tied, copy.0, tied.elements, named);
        if tied.elements > 0 {
            list.emit(Op::Pack { from: gradients.sum(list, c), into: terms });
        }
        terms
    };
    let all = take(list, tied.copies[0]);
    if tied.elements > 0 {
        for other in &tied.copies[1..] {
            let term = take(list, *other);
            list.emit(Op::Add { from: term, into: all });
            list.emit(Op::Free(term));
        }
        if tied.is_shared {
            sum_over(list, SumGroup::Tie, all);
        }
        for copy in &tied.copies {
            let (gradients, c, piece) = own(*copy);
            match gradients.is_stored(c) {
                true => write(list, policies, (all, copy.0), piece),
                false => list.emit(Op::Unpack { from: all, into: gradients.sum(list, c) }),
            }
        }
    }
    list.emit(Op::Free(all));
}
