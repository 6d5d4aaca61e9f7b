//! Sums of parts of the ranks, and the sum of all from them, along the same tree and with the same bits.
//!
//! The sum of a subtree is kept as it is added: f32 for 16-bit elements, so nothing is rounded before the end. Such sums
//! are combined two at a time, in tiles that stay in the first-level cache.

use std::any::TypeId;

use half::{bf16, f16};

use super::summand::Summand;
use super::{Element, Pass, TILE_BYTES, pass, sum_tile};
use crate::Isa;

/// A sum over subtrees of the ranks' tree.
#[derive(Debug)]
pub enum SumTree {
    /// The sum of a subtree, by its number.
    Leaf(usize),
    /// Left plus right.
    Sum(Box<SumTree>, Box<SumTree>),
}

/// The sum of a subtree.
#[derive(Clone, Copy, Debug)]
pub struct Partial {
    /// Its elements.
    pub address: *const u8,
    /// True if they have the type in which elements are added ([`sum_wide`]). False if they have that of the elements: the value
    /// of a single rank.
    pub is_wide: bool,
}

/// `target = sum of sources`, `elements` each, in the type in which they are added.
///
/// # Safety
/// The processor has `isa`. All pointers are aligned and valid for `elements`, and nobody writes the sources meanwhile. The
/// target overlaps no source.
pub unsafe fn sum_wide(isa: Isa, element: Element, sources: &[*const u8], target: *mut u8, elements: usize) {
    assert!(!sources.is_empty());
    // SAFETY: the caller's promise.
    unsafe {
        match element {
            Element::F64 => sum_wide_of::<f64>(isa, sources, target.cast(), elements),
            Element::F32 => sum_wide_of::<f32>(isa, sources, target.cast(), elements),
            Element::Bf16 => sum_wide_of::<bf16>(isa, sources, target.cast(), elements),
            Element::F16 => sum_wide_of::<f16>(isa, sources, target.cast(), elements),
        }
    }
}

/// # Safety
/// As [`sum_wide`].
unsafe fn sum_wide_of<N: Summand>(isa: Isa, sources: &[*const u8], target: *mut N::Sum, elements: usize) {
    let tile = TILE_BYTES / size_of::<N::Sum>();
    for from in (0..elements).step_by(tile) {
        let here = tile.min(elements - from);
        // SAFETY: the caller's promise; a tile lies inside the buffers.
        unsafe { sum_tile(isa, &Pass::<N, N::Sum>::new(sources, from, target.add(from), here, false)) };
    }
}

/// `target (+)= sum of all ranks`, `elements` each, from the sums of subtrees.
///
/// # Safety
/// The processor has `isa`. All pointers are aligned to their elements and valid for `elements`, and nobody writes the
/// partial sums meanwhile. The target may be one of them, if it has the same type, but may not overlap one otherwise.
pub unsafe fn combine(
    isa: Isa,
    element: Element,
    tree: &SumTree,
    partials: &[Partial],
    target: *mut u8,
    elements: usize,
    accumulate: bool,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match element {
            Element::F64 => combine_of::<f64>(isa, tree, partials, target.cast(), elements, accumulate),
            Element::F32 => combine_of::<f32>(isa, tree, partials, target.cast(), elements, accumulate),
            Element::Bf16 => combine_of::<bf16>(isa, tree, partials, target.cast(), elements, accumulate),
            Element::F16 => combine_of::<f16>(isa, tree, partials, target.cast(), elements, accumulate),
        }
    }
}

/// # Safety
/// As [`combine`].
unsafe fn combine_of<N: Summand>(
    isa: Isa,
    tree: &SumTree,
    partials: &[Partial],
    target: *mut N,
    elements: usize,
    accumulate: bool,
) {
    let SumTree::Sum(left, right) = tree else { panic!("a sum of one subtree") };
    let tile = TILE_BYTES / size_of::<N::Sum>();
    for from in (0..elements).step_by(tile) {
        let here = tile.min(elements - from);
        let mut rooms = [[N::Sum::default(); TILE_BYTES / 4]; 2];
        let [first, second] = &mut rooms;
        // SAFETY: the caller's promise; a tile lies inside the buffers, and the rooms hold one.
        unsafe {
            let left = operand::<N>(isa, left, partials, from, here, first.as_mut_ptr());
            let right = operand::<N>(isa, right, partials, from, here, second.as_mut_ptr());
            let halves = [left.cast(), right.cast()];
            pass(isa, &Pass::<N::Sum, N>::new(&halves, 0, target.add(from), here, accumulate));
        }
    }
}

/// The address of a tile of a tree's sum: in a partial sum, or in `room`, into which it is added.
///
/// # Safety
/// As [`combine`]; `room` holds a tile.
unsafe fn operand<N: Summand>(
    isa: Isa,
    tree: &SumTree,
    partials: &[Partial],
    from: usize,
    elements: usize,
    room: *mut N::Sum,
) -> *const N::Sum {
    // SAFETY: the caller's promise; the right room holds a tile, and is this function's own.
    unsafe {
        match tree {
            SumTree::Leaf(index)
                if partials[*index].is_wide || TypeId::of::<N>() == TypeId::of::<N::Sum>() =>
            {
                partials[*index].address.cast::<N::Sum>().add(from)
            }
            SumTree::Leaf(index) => {
                let source = [partials[*index].address];
                pass(isa, &Pass::<N, N::Sum>::new(&source, from, room, elements, false));
                room
            }
            SumTree::Sum(left, right) => {
                let mut other = [N::Sum::default(); TILE_BYTES / 4];
                let left = operand::<N>(isa, left, partials, from, elements, room);
                let right = operand::<N>(isa, right, partials, from, elements, other.as_mut_ptr());
                let halves = [left.cast(), right.cast()];
                pass(isa, &Pass::<N::Sum, N::Sum>::new(&halves, 0, room, elements, false));
                room
            }
        }
    }
}
