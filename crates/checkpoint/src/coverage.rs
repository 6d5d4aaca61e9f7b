//! Checks that the pieces of a tensor hold each of its elements exactly once.
//!
//! All pieces must be cut alike: as contiguous ranges of the whole, or as stripes of the same number of ranks with runs
//! of the same length. Each rank's stripe must be covered on its own, and no rank may be missing. Pieces that are cut in
//! several ways come from ranks that disagree, and are refused.

use std::collections::BTreeMap;

use phalanx_plan::Stripe;

use crate::stored_tensor::{StoredPiece, StoredTensor, part};
use crate::tensor_file::elements;

/// Checks one tensor against the files that hold its pieces (name to size).
///
/// # Errors
/// A description of the problem: an impossible shape or position, a gap, an overlap, a missing stripe.
pub(crate) fn check(tensor: &StoredTensor, files: &BTreeMap<String, u64>) -> Result<(), String> {
    let whole = elements(&tensor.shape)
        .filter(|count| count.checked_mul(tensor.dtype.bytes() as u64).is_some())
        .ok_or_else(|| format!("{} has an impossible shape {:?}", tensor.label(), tensor.shape))?;
    for piece in &tensor.pieces {
        check_place(tensor, piece, whole, files.get(&piece.file).copied().unwrap_or(0))?;
    }
    if !tensor.pieces.is_sorted_by_key(StoredPiece::order) {
        return Err(format!("the pieces of {} are out of order", tensor.label()));
    }
    check_cut(tensor)?;
    check_stripes(tensor, whole)
}

/// Checks that a piece lies within its stripe and its file.
fn check_place(
    tensor: &StoredTensor,
    piece: &StoredPiece,
    whole: u64,
    file_bytes: u64,
) -> Result<(), String> {
    let StoredPiece { file, range: [start, end], .. } = piece;
    let part = part(&tensor.label(), piece.stripe);
    let local = piece.stripe_in(whole).local_elements(whole).ok_or_else(|| {
        format!("{file} has a part of {part}, which does not fit its shape {:?}", tensor.shape)
    })?;
    if end <= start || *end > local {
        return Err(format!("{file} has elements {start} to {end} of {part}, which has {local} elements"));
    }
    let length = (end - start) * tensor.dtype.bytes() as u64;
    if piece.offset.checked_add(length).is_none_or(|last| last > file_bytes) {
        return Err(format!("elements {start} to {end} of {part} lie outside {file} of {file_bytes} bytes"));
    }
    Ok(())
}

/// Checks that all pieces of a tensor are cut in the same way.
fn check_cut(tensor: &StoredTensor) -> Result<(), String> {
    let mut cuts = tensor.pieces.chunk_by(|a, b| cut(a) == cut(b)).map(|pieces| &pieces[0]);
    let (Some(one), Some(other)) = (cuts.next(), cuts.next()) else { return Ok(()) };
    Err(format!(
        "{} is cut differently by two ranks: {} in {} and {} in {}",
        tensor.label(),
        cut_name(one),
        one.file,
        cut_name(other),
        other.file
    ))
}

/// Checks that every stripe is there and that its pieces cover it without gap or overlap.
fn check_stripes(tensor: &StoredTensor, whole: u64) -> Result<(), String> {
    let label = tensor.label();
    let first = tensor.pieces.first().ok_or_else(|| format!("{label} was saved by no rank"))?;
    let ranks = first.stripe_in(whole).ranks;
    let mut rank = 0;
    for pieces in tensor.pieces.chunk_by(|a, b| a.stripe == b.stripe) {
        let stripe = pieces[0].stripe_in(whole);
        if stripe.rank > rank {
            return Err(format!("{} was saved by no rank", part(&label, Some(Stripe { rank, ..stripe }))));
        }
        let local = stripe.local_elements(whole).unwrap_or(0);
        check_tiles(&part(&label, pieces[0].stripe), pieces, local)?;
        rank = stripe.rank + 1;
    }
    if rank < ranks {
        let missing = Stripe { rank, ..first.stripe_in(whole) };
        return Err(format!("{} was saved by no rank", part(&label, Some(missing))));
    }
    Ok(())
}

/// Checks that the pieces of one stripe, in order, hold each element from 0 to `local` once.
fn check_tiles(part: &str, pieces: &[StoredPiece], local: u64) -> Result<(), String> {
    let mut covered = 0;
    let mut before = "";
    for StoredPiece { file, range: [start, end], .. } in pieces {
        if *start < covered {
            return Err(format!(
                "elements {start} to {} of {part} are saved twice, in {before} and in {file}",
                covered.min(*end)
            ));
        }
        if *start > covered {
            return Err(format!("elements {covered} to {start} of {part} were saved by no rank"));
        }
        covered = *end;
        before = file;
    }
    if covered < local {
        return Err(format!("elements {covered} to {local} of {part} were saved by no rank"));
    }
    Ok(())
}

/// Checks that no two pieces share bytes of a file, so all pieces together are at most as large as the files.
///
/// # Errors
/// A description of the two pieces.
pub(crate) fn check_apart(tensors: &[StoredTensor]) -> Result<(), String> {
    let pieces = tensors.iter().flat_map(|tensor| tensor.pieces.iter().map(move |piece| (tensor, piece)));
    let mut places: Vec<_> =
        pieces.map(|(tensor, piece)| (piece.file.as_str(), piece.bytes(tensor.dtype), tensor)).collect();
    places.sort_by_key(|(file, bytes, _)| (*file, bytes.start));
    for pair in places.windows(2) {
        let [(file, first, one), (next_file, second, other)] = pair else { continue };
        if file == next_file && second.start < first.end {
            let (one, other, at) = (one.label(), other.label(), second.start);
            return Err(format!("byte {at} of {file} belongs to a piece of {one} and to one of {other}"));
        }
    }
    Ok(())
}

/// Number of ranks and run length of a piece's stripe, which describe how the tensor was cut.
fn cut(piece: &StoredPiece) -> Option<(u64, u64)> {
    piece.stripe.map(|Stripe { run, ranks, .. }| (ranks, run))
}

fn cut_name(piece: &StoredPiece) -> String {
    cut(piece).map_or_else(|| "whole".to_string(), |(ranks, run)| format!("runs of {run} over {ranks} ranks"))
}
