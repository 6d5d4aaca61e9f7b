//! Dropout, and with it the generator of its masks.

use phalanx_simd::Isa;
use phalanx_system::random::{GOLDEN, mix};
use phalanx_tensor::operations::DropoutForward;
use phalanx_tensor::{DType, Device, Dropout};

use crate::oracle::{FLOATS, check_exact, cpu, numbers, poisoned_as, read_f32, rounded, tensor_as};

const SHARES: [f32; 4] = [0.0, 0.1, 0.5, 0.9];
const KEY: u64 = 0x0123_4567_89ab_cdef;

/// The generator by its definition: halves of SplitMix64's finaliser over key and counter.
fn number(key: u64, counter: u64) -> u32 {
    let z = mix(key.wrapping_add((counter / 2).wrapping_mul(GOLDEN)));
    if counter.is_multiple_of(2) { z as u32 } else { (z >> 32) as u32 }
}

fn factor(dropout: Dropout, index: usize) -> f32 {
    let p = f64::from(dropout.p);
    let kept = f64::from(number(dropout.key, dropout.first + index as u64)) >= (p * 2f64.powi(32)).round();
    if kept { (1.0 / (1.0 - p)) as f32 } else { 0.0 }
}

fn run(device: &Device, dtype: DType, from: &[f32], dropout: Dropout, residual: Option<&[f32]>) -> Vec<f32> {
    let from = tensor_as(device, dtype, [from.len()], from);
    let residual = residual.map(|r| tensor_as(device, dtype, [r.len()], r));
    let mut to = poisoned_as(device, dtype, from.shape());
    device.dropout(from.view(), dropout, residual.as_ref().map(|r| r.view()), to.view_mut());
    read_f32(device, &to)
}

/// One product, one addition, one rounding: known to the bit, on every instruction set.
#[test]
fn as_defined() {
    for dtype in FLOATS {
        for count in [1, 3, 16, 17, 67, 257, 40_001] {
            let from = rounded(dtype, &numbers(1, count));
            let residual = rounded(dtype, &numbers(2, count));
            for (p, first) in SHARES.into_iter().flat_map(|p| [0, 1, 1 << 40, (1 << 40) + 7].map(|f| (p, f)))
            {
                let dropout = Dropout { p, key: KEY, first, sample: 0 };
                let dropped: Vec<f32> =
                    from.iter().enumerate().map(|(i, x)| x * factor(dropout, i)).collect();
                let kernel = |device: &Device| run(device, dtype, &from, dropout, None);
                check_exact("dropout", kernel, &rounded(dtype, &dropped));
                let sums: Vec<f32> = dropped.iter().zip(&residual).map(|(x, r)| x + r).collect();
                let kernel = |device: &Device| run(device, dtype, &from, dropout, Some(&residual));
                check_exact("dropout with residual", kernel, &rounded(dtype, &sums));
            }
        }
    }
}

/// Columns of rows of which others have the other columns: the mask of the whole rows.
#[test]
fn columns_have_their_part_of_the_mask() {
    let [rows, whole] = [7, 37];
    let from = numbers(1, rows * whole);
    let dropout = Dropout { p: 0.4, key: KEY, first: 5, sample: 0 };
    let expected: Vec<f32> = from.iter().enumerate().map(|(i, x)| x * factor(dropout, i)).collect();
    for (start, columns) in [(0, 1), (3, 16), (20, 17), (0, whole)] {
        let part = |x: &[f32]| -> Vec<f32> {
            x.chunks(whole).flat_map(|row| &row[start..start + columns]).copied().collect()
        };
        let kernel = |device: &Device| {
            let from = tensor_as(device, DType::F32, [rows, columns], &part(&from));
            let mut to = poisoned_as(device, DType::F32, from.shape());
            let dropout = Dropout { first: dropout.first + start as u64, ..dropout };
            device.run(DropoutForward {
                from: from.view(),
                dropout,
                row: whole,
                residual: None,
                to: to.view_mut(),
            });
            read_f32(device, &to)
        };
        check_exact(&format!("{columns} columns from {start}"), kernel, &part(&expected));
    }
}

/// At the ends of what key, counter and share may be, where they carry, wrap or round.
#[test]
fn as_defined_for_extreme_numbers() {
    let from = vec![1.0; 48];
    for (p, key) in [(0.0, 3), (0.1, u64::MAX), (0.5, 1 << 63), (1.0 - f32::EPSILON / 2.0, 9)] {
        for first in [2, 15, 16, 17, 1 << 32, (1 << 32) - 3, u64::MAX - 52, u64::MAX - 48] {
            let dropout = Dropout { p, key, first, sample: 0 };
            let factors: Vec<f32> = (0..from.len()).map(|i| factor(dropout, i)).collect();
            let kernel = |device: &Device| run(device, DType::F32, &from, dropout, None);
            check_exact("dropout", kernel, &factors);
        }
    }
}

#[test]
fn nothing_is_dropped_for_p_0() {
    for dtype in FLOATS {
        let from = rounded(dtype, &numbers(1, 5000));
        assert_eq!(
            run(&cpu(2, Isa::detect()), dtype, &from, Dropout { p: 0.0, key: 5, first: 3, sample: 0 }, None),
            from
        );
    }
}

/// A call that starts at counter `first + k` equals that part of the whole.
#[test]
fn a_part_is_that_of_the_whole() {
    let from = numbers(1, 50_000);
    for (isa, threads) in Isa::ALL.into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
        let device = cpu(threads, isa);
        let dropout = Dropout { p: 0.3, key: KEY, first: 12_345, sample: 7 };
        let whole = run(&device, DType::F32, &from, dropout, None);
        for range in [1..50_000, 4096..20_000, 16_384..50_000, 7..8, 13..400, 49_999..50_000] {
            let part = Dropout { first: dropout.first + range.start as u64, ..dropout };
            assert_eq!(run(&device, DType::F32, &from[range.clone()], part, None), whole[range]);
        }
    }
}

/// Shares of a binomial of n, within five standard errors: kept elements, kept pairs of neighbours (which share
/// a word or not), and elements kept under one key and under the next.
#[test]
fn shares_are_those_of_independent_choices() {
    let n = 1 << 20;
    let device = cpu(2, Isa::detect());
    for p in [0.1, 0.5, 0.9] {
        let kept = |key| -> Vec<bool> {
            run(&device, DType::F32, &vec![1.0; n], Dropout { p, key, first: 0, sample: 0 }, None)
                .iter()
                .map(|x| *x != 0.0)
                .collect()
        };
        let share = |what: &str, count: usize, n: usize, expected: f64| {
            let error = (count as f64 / n as f64 - expected).abs();
            let allowed = 5.0 * (expected * (1.0 - expected) / n as f64).sqrt();
            assert!(error <= allowed, "{what} of p = {p}: off by {error:e}, allowed {allowed:e}");
        };
        let q = 1.0 - f64::from(p);
        let (a, b) = (kept(KEY), kept(KEY + 1));
        share("kept", a.iter().filter(|k| **k).count(), n, q);
        for (what, at) in [("pairs in a word", 0), ("pairs between words", 1)] {
            let pairs = a[at..].chunks_exact(2);
            share(what, pairs.clone().filter(|pair| pair[0] && pair[1]).count(), pairs.len(), q * q);
        }
        share("two keys", a.iter().zip(&b).filter(|(a, b)| **a && **b).count(), n, q * q);
    }
}

/// Dropout is linear, so its backward is the same call on dy.
#[test]
fn backward_drops_what_forward_dropped() {
    let device = cpu(2, Isa::detect());
    let (x, dy) = (numbers(1, 3000), numbers(2, 3000));
    let dropout = Dropout { p: 0.4, key: 99, first: 17, sample: 0 };
    let (y, dx) = (run(&device, DType::F32, &x, dropout, None), run(&device, DType::F32, &dy, dropout, None));
    let along = |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum() };
    // <dy, J x> = <Jᵀ dy, x>; products of rounded numbers up to 1.7.
    let (forward, backward) = (along(&dy, &y), along(&dx, &x));
    assert!((forward - backward).abs() <= 3000.0 * 4.0 * crate::oracle::EPS, "{forward} {backward}");
    for (i, (y, dx)) in y.iter().zip(&dx).enumerate() {
        assert_eq!([*y == 0.0, *dx == 0.0], [factor(dropout, i) == 0.0; 2]);
    }
}
