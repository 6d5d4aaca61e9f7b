//! Stripes against slicing: a tensor of numbered elements, cut the slow way.

use crate::generator::Generator;
use phalanx_plan::{Split, SplitError, Stripe, nearest_divisors};

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
        let split = Split::Dimension { dim, parts };
        let whole = shape.iter().product::<usize>() as u64;
        let local_shape = split.local_shape(&shape, ranks).unwrap();
        assert_eq!(local_shape[dim] * ranks, shape[dim]);
        for rank in 0..ranks {
            let stripe = split.stripe(&shape, rank, ranks);
            let expected = sliced(&shape, dim, parts, rank, ranks);
            let count = expected.len() as u64;
            assert_eq!(stripe.local_elements(whole), Some(count));
            assert_eq!(local_shape.iter().product::<usize>() as u64, count);
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
    for ranks in [1, 3] {
        assert_eq!(Split::Whole.local_shape(&[7, 5], ranks).unwrap(), [7, 5]);
        let stripe = Split::Whole.stripe(&[7, 5], ranks - 1, ranks);
        assert_eq!(stripe, Stripe::whole(35));
        assert!(stripe.is_whole());
        assert_eq!(stripe.runs(3..35).collect::<Vec<_>>(), [(3..35, 3..35)]);
        assert!(stripe.runs(4..4).next().is_none());
    }
    // One rank of a packed split holds everything too, in one run.
    let alone = Split::Dimension { dim: 1, parts: 3 }.stripe(&[4, 6], 0, 1);
    assert!(alone.is_whole());
    assert_eq!(alone.runs(1..24).collect::<Vec<_>>(), [(1..24, 1..24)]);
    // An empty tensor is valid as well.
    assert_eq!(Stripe::whole(0).local_elements(0), Some(0));
    assert_eq!(Stripe::whole(0).locals_before(0), 0);
}

#[test]
fn gpt2_attention_by_hand() {
    // Two rows of q q | k k | v v for two ranks: rank 1 holds every second element.
    let stripe = Split::Dimension { dim: 1, parts: 3 }.stripe(&[2, 6], 1, 2);
    assert_eq!(stripe, Stripe { run: 1, ranks: 2, rank: 1 });
    assert_eq!((0..6).map(|local| stripe.global(local)).collect::<Vec<_>>(), [1, 3, 5, 7, 9, 11]);
    assert_eq!(stripe.to_string(), "stripe 1 of 0..2, runs of 1");
}

#[test]
fn what_cannot_be_split_is_told() {
    let split = |dim, parts| Split::Dimension { dim, parts };
    for (split, shape, ranks, words) in [
        (
            split(1, 1),
            &[4, 10][..],
            4,
            "[4, 10] has 10 elements, which cannot be split over 4 ranks: the nearest",
        ),
        (split(1, 1), &[4, 10], 4, "are 2 and 5"),
        (split(0, 3), &[36], 5, "in 3 packed parts of 12, which cannot be split over 5 ranks"),
        (split(0, 3), &[36], 5, "are 4 and 6"),
        (split(0, 1), &[7], 100, "are 7"),
        (split(0, 1), &[7], 0, "over 0 ranks"),
        (split(0, 3), &[7], 1, "cannot be 3 equal packed parts"),
        (split(0, 0), &[7], 1, "cannot be 0 equal packed parts"),
        (split(0, 1), &[0], 1, "has 0 elements"),
        (split(2, 1), &[4, 10], 2, "has no dimension 2 to split: it has 2 dimensions"),
    ] {
        let error = split.local_shape(shape, ranks).unwrap_err().to_string();
        assert!(error.contains(words), "{words:?} in {error}");
    }
    let error = split(0, 1).local_shape(&[6], 4).unwrap_err();
    assert!(matches!(error, SplitError::Ranks { nearest, .. } if nearest == [3, 6]));
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
