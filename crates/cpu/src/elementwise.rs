//! fill, copy, convert, add: bound by memory, and split over threads. Other kernels read and
//! write their rows with the loops of this file.

use std::ops::Range;

use phalanx_plan::trace::DType;
use phalanx_simd::{Isa, Lanes, Number, vectorized};
use phalanx_tensor::operations::CopyColumns;
use phalanx_tensor::{View, ViewMut};

use crate::float::{Float, by_float};
use crate::shards::Shards;
use crate::{Cpu, GRAIN};

/// The bytes of a view.
pub(crate) fn bytes<'a>(x: &View<'a>) -> &'a [u8] {
    // SAFETY: the view borrows this many bytes for 'a; the address is of host memory on this device
    // (a view of `Meta` has a null address and cannot reach it: its kernels never run here).
    unsafe { std::slice::from_raw_parts(not_null(x.address().as_ptr()), x.bytes()) }
}

/// The bytes of a unique view.
pub(crate) fn bytes_mut<'a>(x: ViewMut<'a>) -> &'a mut [u8] {
    // SAFETY: as in `bytes`; the view borrows the memory uniquely for 'a. Its elements are plain numbers,
    // for which every byte is valid.
    unsafe { std::slice::from_raw_parts_mut(not_null(x.address().as_ptr()), x.bytes()) }
}

fn not_null(address: *mut u8) -> *mut u8 {
    assert!(!address.is_null(), "tensors of the Meta device have no memory");
    address
}

/// Sets every element to `value`, rounded.
pub(crate) fn fill(cpu: &Cpu, x: ViewMut, value: f32) {
    match x.dtype() {
        DType::F64 => fill_slice(cpu, x.into_slice(), f64::from(value)),
        dtype => by_float!(dtype, T => fill_slice(cpu, x.into_slice(), T::from_f32(value))),
    }
}

/// Sets every element to `value`.
pub(crate) fn fill_slice<T: Copy + Send + Sync>(cpu: &Cpu, x: &mut [T], value: T) {
    cpu.over_mut(x, 4 * GRAIN, |_, x| x.fill(value));
}

/// `to = from`.
pub(crate) fn copy(cpu: &Cpu, from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len());
    cpu.over_mut(to, 16 * GRAIN, |range, to| to.copy_from_slice(&from[range]));
}

/// Some columns of a matrix, to those of another.
pub(crate) fn copy_columns(cpu: &Cpu, o: CopyColumns) {
    let ([rows, columns], size) = (o.extents(), o.to.dtype().bytes());
    let [from_row, to_row] = [o.from.shape(), o.to.shape()].map(|shape| shape.rows_cols()[1] * size);
    let (from, to) = (bytes(&o.from), Shards::new(bytes_mut(o.to)));
    let (read, written, length) = (o.from_first * size, o.to_first * size, columns * size);
    cpu.over(rows, (16 * GRAIN / length.max(1)).max(1), |rows| {
        for row in rows {
            let at = row * to_row + written;
            // SAFETY: rows do not overlap, and each is given to one thread by `over`.
            let to = unsafe { to.piece(at..at + length) };
            to.copy_from_slice(&from[row * from_row + read..][..length]);
        }
    });
}

/// `to = from`, rounded.
pub(crate) fn convert(cpu: &Cpu, from: View, to: ViewMut) {
    if from.dtype() == to.dtype() {
        return copy(cpu, bytes(&from), bytes_mut(to));
    }
    by_float!(from.dtype(), F => by_float!(to.dtype(), T => {
        let from = from.as_slice::<F>();
        cpu.over_mut(to.into_slice::<T>(), GRAIN, |range, to| convert_piece(cpu.isa, &from[range], to));
    }));
}

/// `into += from`, rounded once.
pub(crate) fn add(cpu: &Cpu, from: View, into: ViewMut) {
    if into.dtype() == DType::F64 {
        let from = from.as_slice::<f64>();
        return cpu.over_mut(into.into_slice::<f64>(), GRAIN, |range, into| {
            into.iter_mut().zip(&from[range]).for_each(|(i, f)| *i += *f);
        });
    }
    by_float!(from.dtype(), F => by_float!(into.dtype(), T => {
        let from = from.as_slice::<F>();
        cpu.over_mut(into.into_slice::<T>(), GRAIN, |range, into| add_piece(cpu.isa, &from[range], into));
    }));
}

vectorized!(pub(crate) fn convert_piece<F: Float, T: Float>(from: &[F], to: &mut [T]) = convert_body);
/// `to = from`, rounded.
#[inline(always)]
pub(crate) fn convert_body<L: Lanes, F: Float, T: Float>(from: &[F], to: &mut [T]) {
    assert_eq!(from.len(), to.len());
    // SAFETY: compiled for L; both slices have the same length.
    unsafe {
        by_lanes!(to.len(), |at, count| store::<L, T>(to, at, load::<L, F>(from, at, count), count));
    }
}

vectorized!(pub(crate) fn add_piece<F: Float, T: Float>(from: &[F], into: &mut [T]) = add_body);
/// `into += from`, rounded once.
#[inline(always)]
fn add_body<L: Lanes, F: Float, T: Float>(from: &[F], into: &mut [T]) {
    assert_eq!(from.len(), into.len());
    // SAFETY: compiled for L; both slices have the same length.
    unsafe {
        by_lanes!(into.len(), |at, count| {
            let sum = L::add(load::<L, T>(into, at, count), load::<L, F>(from, at, count));
            store::<L, T>(into, at, sum, count);
        });
    }
}

/// `x *= factor`, which is rounded to the type of x before.
pub(crate) fn multiply(cpu: &Cpu, x: ViewMut, factor: f32) {
    by_float!(x.dtype(), T => {
        let factor = T::from_f32(factor).to_f32();
        cpu.over_mut(x.into_slice::<T>(), GRAIN, |_, x| multiply_piece(cpu.isa, x, factor));
    });
}

vectorized!(fn multiply_piece<T: Float>(x: &mut [T], factor: f32) = multiply_body);
#[inline(always)]
fn multiply_body<L: Lanes, T: Float>(x: &mut [T], factor: f32) {
    // SAFETY: compiled for L; all elements are those of x.
    unsafe {
        by_lanes!(x.len(), |at, count| {
            let product = L::mul(load::<L, T>(x, at, count), L::splat(factor));
            store::<L, T>(x, at, product, count);
        });
    }
}

/// `to (+)= from`, rounded once.
pub(crate) fn put<T: Float>(isa: Isa, from: &[f32], to: &mut [T], accumulate: bool) {
    if accumulate { add_piece(isa, from, to) } else { convert_piece(isa, from, to) }
}

/// Elements that a kernel widens at once: as f32 they stay in L1.
pub(crate) const PIECE: usize = 1024;

/// `x` as f32: `x` itself if it is f32, else widened into `buffer`.
pub(crate) fn widened<'a, T: Float>(isa: Isa, x: &'a [T], buffer: &'a mut [f32]) -> &'a [f32] {
    if T::DTYPE == DType::F32 {
        return bytemuck::cast_slice(x);
    }
    let buffer = &mut buffer[..x.len()];
    convert_piece(isa, x, buffer);
    buffer
}

/// `by_lanes!(len, |at, count| body)`: the body for 16 numbers at a time and for the rest.
///
/// A macro for the reason given at [`fold_row!`](phalanx_simd::fold_row). To be used inside `unsafe`,
/// compiled for some [`Lanes`].
macro_rules! by_lanes {
    ($len:expr, |$at:ident, $count:ident| $body:expr) => {{
        let len: usize = $len;
        let mut next = 0;
        while next + 16 <= len {
            let ($at, $count) = (next, 16usize);
            $body;
            next += 16;
        }
        if next < len {
            let ($at, $count) = (next, len - next);
            $body;
        }
    }};
}
pub(crate) use by_lanes;

/// Loads `count` elements starting at `at` into the first lanes.
///
/// # Safety
/// Compiled for `L`; the elements lie inside the row.
#[inline(always)]
pub(crate) unsafe fn load<L: Lanes, T: Float>(row: &[T], at: usize, count: usize) -> L::V {
    debug_assert!(at + count <= row.len());
    // SAFETY: the caller's promise.
    unsafe {
        let from = row.as_ptr().add(at);
        if count == 16 { T::load::<L>(from) } else { T::load_first::<L>(from, count) }
    }
}

/// Stores the first `count` lanes, rounded, starting at element `at`.
///
/// # Safety
/// Compiled for `L`; the elements lie inside the row.
#[inline(always)]
pub(crate) unsafe fn store<L: Lanes, T: Float>(row: &mut [T], at: usize, x: L::V, count: usize) {
    debug_assert!(at + count <= row.len());
    // SAFETY: the caller's promise.
    unsafe {
        let to = row.as_mut_ptr().add(at);
        if count == 16 { T::store::<L>(to, x) } else { T::store_first::<L>(to, x, count) }
    }
}

/// One pass of an optimizer: calls `update(range, p, g)` once per piece, with gradients in f32, and then writes p to
/// `rounded`.
pub(crate) fn over_updates(
    cpu: &Cpu,
    p: ViewMut,
    g: View,
    rounded: Option<ViewMut>,
    update: impl Fn(Range<usize>, &mut [f32], &[f32]) + Sync,
) {
    let p = p.into_slice::<f32>();
    by_float!(g.dtype(), G => match rounded {
        None => pieces::<G, f32>(cpu, p, g.as_slice(), None, update),
        Some(rounded) => by_float!(rounded.dtype(), R => {
            pieces::<G, R>(cpu, p, g.as_slice(), Some(rounded.into_slice()), update)
        }),
    });
}

fn pieces<G: Float, R: Float>(
    cpu: &Cpu,
    p: &mut [f32],
    g: &[G],
    rounded: Option<&mut [R]>,
    update: impl Fn(Range<usize>, &mut [f32], &[f32]) + Sync,
) {
    let rounded = rounded.map(Shards::new);
    cpu.over_mut(p, GRAIN, |task, p| {
        let mut buffer = [0f32; PIECE];
        for (start, p) in task.step_by(PIECE).zip(p.chunks_mut(PIECE)) {
            let range = start..start + p.len();
            update(range.clone(), p, widened(cpu.isa, &g[range.clone()], &mut buffer));
            if let Some(rounded) = &rounded {
                // SAFETY: ranges are disjoint.
                convert_piece(cpu.isa, p, unsafe { rounded.piece(range) });
            }
        }
    });
}
