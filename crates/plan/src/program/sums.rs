//! Sums over the tensor axis of gradients of which each rank has a term, behind the sum over data.

use super::action::{Buffer, Op, SumGroup, Work};
use super::builder::Builder;
use super::chunks::{Piece, Terms};
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

/// Sums a buffer over a group, and waits.
#[track_caller]
pub(super) fn sum_over(list: &mut Builder, group: SumGroup, buffer: Buffer) {
    let token = list.start(Work::AllReduce { group, buffer });
    list.emit(Op::Wait(token));
}
