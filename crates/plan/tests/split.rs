//! Stripes against slicing: a tensor of numbered elements, cut the slow way.

use crate::generator::Generator;
use phalanx_plan::{Stripe, nearest_divisors};

/// The global indices that `rank` holds of a row-major tensor, by walking all of its elements: an element
/// belongs to the rank whose part of its sub-tensor its coordinate along `dim` lies in.
fn sliced(shape: &[usize], dim: usize, parts: usize, rank: usize, ranks: usize) -> Vec<u64> {
    let inner: usize = shape[dim + 1..].iter().product();
    let part = shape[dim] / parts;
    let owner = |element: usize| element / inner % shape[dim] % part / (part / ranks);
    let whole: usize = shape.iter().product();
    (0..whole).filter(|&element| owner(element) == rank).map(|element| element as u64).collect()
}

#[test]
fn one_formula_for_every_dimension_and_packing() {
    let mut generator = Generator(8);
    for _ in 0..400 {
        let mut number = |low, high| generator.within(low, high) as usize;
        let (ranks, parts) = (number(1, 5), number(1, 3));
        let mut shape: Vec<usize> = (0..number(1, 4)).map(|_| number(1, 5)).collect();
        let dim = number(0, shape.len() as u64 - 1);
        shape[dim] = ranks * parts * number(1, 3);
        let whole = shape.iter().product::<usize>() as u64;
        let run = (shape[dim] / parts / ranks * shape[dim + 1..].iter().product::<usize>()) as u64;
        for rank in 0..ranks {
            let stripe = Stripe { run, ranks: ranks as u64, rank: rank as u64 };
            let expected = sliced(&shape, dim, parts, rank, ranks);
            let count = expected.len() as u64;
            assert_eq!(stripe.local_elements(whole), Some(count));
            let found: Vec<u64> = (0..count).map(|local| stripe.global(local)).collect();
            assert_eq!(found, expected, "{shape:?} dim {dim} in {parts}, rank {rank} of {ranks}");
            for global in 0..=whole {
                let before = expected.partition_point(|&element| element < global) as u64;
                assert_eq!(stripe.locals_before(global), before, "{stripe:?} {global}");
            }
            check_runs(&stripe, &expected, &mut generator);
        }
    }
}

/// The runs of a range cover its elements in order, and each is as long as possible.
fn check_runs(stripe: &Stripe, expected: &[u64], generator: &mut Generator) {
    let count = expected.len() as u64;
    let start = generator.within(0, count);
    let end = generator.within(start, count);
    let (mut at, mut last) = (start, None);
    for (local, global) in stripe.runs(start..end) {
        assert_eq!((local.start, local.end - local.start), (at, global.end - global.start));
        assert!(!local.is_empty() && (stripe.is_whole() || last.is_none() || last < Some(global.start)));
        assert!(global.clone().eq(expected[local.start as usize..local.end as usize].iter().copied()));
        (at, last) = (local.end, Some(global.end));
    }
    assert_eq!(at, end);
}

#[test]
fn a_whole_parameter_is_one_run() {
    let stripe = Stripe::whole(35);
    assert!(stripe.is_whole());
    assert_eq!(stripe.runs(3..35).collect::<Vec<_>>(), [(3..35, 3..35)]);
    assert!(stripe.runs(4..4).next().is_none());
    // One rank of a packed split holds everything too, in one run.
    let alone = Stripe { run: 2, ranks: 1, rank: 0 };
    assert!(alone.is_whole());
    assert_eq!(alone.runs(1..24).collect::<Vec<_>>(), [(1..24, 1..24)]);
    // An empty tensor is valid as well.
    assert_eq!(Stripe::whole(0).local_elements(0), Some(0));
    assert_eq!(Stripe::whole(0).locals_before(0), 0);
}

#[test]
fn gpt2_attention_by_hand() {
    // Two rows of q q | k k | v v for two ranks: rank 1 holds every second element.
    let stripe = Stripe { run: 1, ranks: 2, rank: 1 };
    assert_eq!((0..6).map(|local| stripe.global(local)).collect::<Vec<_>>(), [1, 3, 5, 7, 9, 11]);
    assert_eq!(stripe.to_string(), "stripe 1 of 0..2, runs of 1");
}

#[test]
fn stripes_that_fit_no_tensor() {
    let stripe = |run, ranks, rank| Stripe { run, ranks, rank };
    for (stripe, whole, expected) in [
        (stripe(4, 2, 1), 24, Some(12)),
        (stripe(4, 2, 1), 20, None),
        (stripe(5, 2, 0), 9, Some(5)),
        (stripe(5, 2, 1), 9, Some(4)),
        (stripe(4, 2, 2), 24, None),
        (stripe(0, 2, 1), 24, None),
        (stripe(4, 0, 0), 24, None),
        (stripe(u64::MAX, 2, 0), 24, None),
    ] {
        assert_eq!(stripe.local_elements(whole), expected, "{stripe:?} {whole}");
    }
}

#[test]
fn nearest_divisors_by_trial() {
    for n in 1..=200usize {
        for wanted in 0..=210 {
            let below = (1..=wanted).rev().find(|&d| n.is_multiple_of(d));
            let above = (wanted.max(1)..=n).find(|&d| n.is_multiple_of(d));
            let mut expected: Vec<usize> = below.into_iter().chain(above).collect();
            expected.dedup();
            assert_eq!(nearest_divisors(n, wanted), expected, "{n} {wanted}");
        }
    }
}
