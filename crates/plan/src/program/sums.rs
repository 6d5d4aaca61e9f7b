//! Sums of gradients over other axes than that of data, behind the sum over data: terms over the tensor axis, and parameters that several
//! pipeline stages have.

use super::action::{Buffer, Op, SumGroup, Work};
use super::builder::Builder;
use super::chunks::{Piece, Policies, Terms, TiedChunks};
use super::gradients::GradientPass;
use super::list::Role;
use super::stored::{read, write};

/// Sums the terms of a stage over the tensor axis.
pub(super) fn sum_terms(list: &mut Builder, gradients: &GradientPass) {
    let GradientPass { stage, policies, .. } = gradients;
    let Terms { pieces, elements } = &stage.terms;
    if pieces.is_empty() {
        return;
    }
    let named = (policies.precision.accumulate, "terms_of_gradients");
    let terms = list.take(Role::Terms, stage.index, *elements, named);
    for (number, Piece { chunk, start, elements }) in numbered(pieces) {
        let of = stage.first_chunk + chunk;
        if gradients.is_stored(chunk) {
            let from = read(list, policies, (Role::Sum, of), (number, start, elements));
            list.emit(Op::Pack { from, into: terms });
            list.emit(Op::Free(from));
        } else if number == 0 {
            list.emit(Op::Pack { from: gradients.sum(list, chunk), into: terms });
        }
    }
    sum_over(list, SumGroup::Tensor, terms);
    for (number, Piece { chunk, start, elements }) in numbered(pieces) {
        if gradients.is_stored(chunk) {
            write(list, policies, (terms, stage.first_chunk + chunk), (number, start, elements));
        } else if number == 0 {
            list.emit(Op::Unpack { from: terms, into: gradients.sum(list, chunk) });
        }
    }
    list.emit(Op::Free(terms));
}

/// Pieces with their numbers in their chunks.
fn numbered(pieces: &[Piece]) -> impl Iterator<Item = (usize, Piece)> {
    let number = |at: usize| pieces[..at].iter().rev().take_while(|p| p.chunk == pieces[at].chunk).count();
    (0..pieces.len()).map(move |at| (number(at), pieces[at]))
}

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

/// Sums a buffer over a group, and waits.
#[track_caller]
pub(super) fn sum_over(list: &mut Builder, group: SumGroup, buffer: Buffer) {
    let token = list.start(Work::AllReduce { group, buffer });
    list.emit(Op::Wait(token));
}
