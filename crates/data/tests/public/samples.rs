//! Splits, coverage of both orders, and what a sample is.

use std::collections::HashSet;
use std::iter;

use phalanx_data::{EvaluationWindows, SampleOrder, Sampler, Tokens};

use crate::assert_says;

/// `count` tokens whose ids are their numbers.
fn tokens(count: usize) -> Tokens {
    let ids: Vec<u32> = (0..count as u32).collect();
    Tokens::from_ids("the test's tokens", &ids, count.max(1)).unwrap()
}

/// Checks the sample and returns its first token.
fn start(sampler: &Sampler, position: u64) -> usize {
    let seq = sampler.seq();
    let (mut inputs, mut targets) = (vec![0; seq], vec![0; seq]);
    sampler.fill(position, &mut inputs, &mut targets).unwrap();
    let first = inputs[0];
    let count = seq as u32;
    assert_eq!(inputs, (first..first + count).collect::<Vec<_>>());
    assert_eq!(targets, (first + 1..first + 1 + count).collect::<Vec<_>>());
    first as usize
}

#[test]
fn the_validation_part_is_the_last() {
    // tinyshakespeare's numbers in nanoGPT's README are 1003854 and 111540.
    let table =
        [(1_115_394, 0.1, 1_003_854), (10, 0.1, 9), (10, 0.0, 10), (10, 0.25, 7), (3, 0.999, 0), (0, 0.1, 0)];
    for (count, fraction, training) in table {
        let (train, validation) = tokens(count).split(fraction).unwrap();
        assert_eq!((train.len(), validation.len()), (training, count - training), "{count} {fraction}");
        let mut first = [0];
        if !validation.is_empty() {
            validation.read(0, &mut first).unwrap();
            assert_eq!(first[0] as usize, training);
        }
    }
    for fraction in [1.0, -0.1, f64::NAN, f64::INFINITY, 10.0] {
        let given = format!("part of {fraction} ");
        assert_says(tokens(10).split(fraction), &[&given, "0.1"]);
    }
    let (_, validation) = tokens(100).split(0.1).unwrap();
    let (train, rest) = validation.split(0.5).unwrap();
    assert_eq!((train.len(), rest.len()), (5, 5));
    let mut last = [0];
    rest.read(4, &mut last).unwrap();
    assert_eq!(last, [99]);
}

#[test]
fn sequential_samples_are_the_text_in_order() {
    for (count, seq, samples) in [(101, 10, 10), (100, 10, 9), (11, 10, 1), (20, 10, 1), (2, 1, 1), (7, 3, 2)]
    {
        let sampler = Sampler::new(tokens(count), seq, SampleOrder::Sequential, 5).unwrap();
        assert_eq!(sampler.samples_per_epoch(), samples, "{count} tokens, sequence {seq}");
        for position in 0..3 * samples {
            assert_eq!(start(&sampler, position), (position % samples) as usize * seq);
            assert_eq!(sampler.epoch(position), position / samples);
        }
    }
}

#[test]
fn shuffled_epochs_cover_every_window_once() {
    for (count, seq) in [(1000, 7), (101, 10), (19, 10), (20, 10), (21, 10), (11, 10), (50, 1), (4097, 16)] {
        let sampler = Sampler::new(tokens(count), seq, SampleOrder::Shuffled, 11).unwrap();
        let samples = sampler.samples_per_epoch();
        assert_eq!(samples as usize, ((count - seq) / seq).max(1));
        for epoch in 0..20 {
            let starts: HashSet<usize> =
                (0..samples).map(|index| start(&sampler, epoch * samples + index)).collect();
            assert_eq!(starts.len() as u64, samples, "each window once");
            let offset = starts.iter().min().unwrap();
            assert!(starts.iter().all(|start| start % seq == offset % seq), "one offset for all");
            assert!(*offset < seq);
        }
    }
}

#[test]
fn shuffled_order_depends_on_seed_and_epoch_only() {
    let order = |seed, epoch| -> Vec<usize> {
        let sampler = Sampler::new(tokens(10_000), 10, SampleOrder::Shuffled, seed).unwrap();
        let samples = sampler.samples_per_epoch();
        (0..samples).map(|index| start(&sampler, epoch * samples + index)).collect()
    };
    assert_eq!(order(1, 0), order(1, 0));
    let different: HashSet<Vec<usize>> = iter::zip([1, 1, 1, 2, 3], [0, 1, 2, 0, 0])
        .map(|(seed, epoch)| order(seed, epoch).into_iter().map(|start| start / 10).collect())
        .collect();
    assert_eq!(different.len(), 5, "the order of the windows, whatever their offset");
    let offsets: HashSet<usize> = (0..200).map(|epoch| order(1, epoch)[0] % 10).collect();
    assert_eq!(offsets.len(), 10, "every offset occurs");
}

#[test]
fn the_shuffled_order_is_pinned() {
    // A changed order would silently change runs that are resumed.
    let sampler = Sampler::new(tokens(100), 8, SampleOrder::Shuffled, 1337).unwrap();
    let starts: Vec<usize> = (0..22).map(|position| start(&sampler, position)).collect();
    assert_eq!(starts, PINNED);
}

const PINNED: [usize; 22] =
    [27, 51, 19, 35, 3, 59, 11, 43, 75, 67, 83, 48, 40, 32, 24, 64, 80, 56, 72, 16, 0, 8];

#[test]
fn evaluation_windows_are_spread_evenly() {
    let table: [(usize, &[u32]); 5] = [
        (0, &[]),
        (1, &[0]),
        (3, &[0, 30, 60]),
        (4, &[0, 20, 50, 70]),
        (99, &[0, 10, 20, 30, 40, 50, 60, 70, 80, 90]),
    ];
    for (limit, starts) in table {
        let windows = EvaluationWindows::new(tokens(101), 10, limit).unwrap();
        let mut found = Vec::new();
        for index in 0..windows.len() {
            let (mut inputs, mut targets) = ([0; 10], [0; 10]);
            windows.fill(index, &mut inputs, &mut targets).unwrap();
            assert_eq!(targets[9], inputs[0] + 10);
            found.push(inputs[0]);
        }
        assert_eq!(found, starts, "{limit}");
        assert_eq!(windows.is_empty(), limit == 0);
    }
}

#[test]
fn text_shorter_than_a_sequence() {
    let (train, validation) = tokens(70).split(0.1).unwrap();
    assert_says(
        Sampler::new(train, 64, SampleOrder::Shuffled, 0),
        &["the training part of the test's tokens", "63 tokens", "needs 65", "sequence of 64"],
    );
    assert_says(EvaluationWindows::new(validation, 64, 1), &["the validation part", "7 tokens", "needs 65"]);
    assert_says(Sampler::new(tokens(0), 1, SampleOrder::Sequential, 0), &["0 tokens", "needs 2"]);
}

#[test]
fn tokens_are_checked_against_a_vocabulary() {
    assert_says(Tokens::from_ids("ids", &[1, 2, 9], 5), &["token 2 of ids", "id 9", "0 to 4"]);
    for wide in [100, 1 << 17] {
        let some = Tokens::from_ids("ids", &[1, 99, 2], wide).unwrap();
        assert_eq!((some.vocab_size(), some.len()), (Some(wide), 3));
        assert_eq!(some.resident_bytes(), if wide == 100 { 6 } else { 12 });
        some.check_vocab(100).unwrap();
        assert_says(some.check_vocab(99), &["token 1 of ids", "id 99", "0 to 98"]);
    }
}

#[test]
fn the_order_is_written_in_lower_case() {
    for (order, text) in
        [(SampleOrder::Sequential, "\"sequential\""), (SampleOrder::Shuffled, "\"shuffled\"")]
    {
        assert_eq!(serde_json::to_string(&order).unwrap(), text);
        assert_eq!(serde_json::from_str::<SampleOrder>(text).unwrap(), order);
    }
}

/// Windows are found at any offset, and only where all their tokens follow each other.
#[test]
fn windows_that_were_trained_on_are_counted() {
    let ids = |range: std::ops::Range<u64>| range.map(|i| (i * i % 997 % 251) as u32).collect::<Vec<u32>>();
    let tokens = |ids: &[u32]| Tokens::from_ids("a text", ids, 251).unwrap();
    let held_out = ids(300_000..300_400);
    let windows = |seq, limit| EvaluationWindows::new(tokens(&held_out), seq, limit).unwrap();
    for (seq, limit) in [(16, 8), (16, 100), (64, 3)] {
        let windows = windows(seq, limit);
        let none = vec![250; 70_000];
        assert_eq!(windows.count_within(&tokens(&none)).unwrap(), 0);
        for before in [0, 1, 13, 65_500, 65_536] {
            let trained = [&none[..before], &held_out, &none[..9]].concat();
            assert_eq!(windows.count_within(&tokens(&trained)).unwrap(), windows.len(), "{seq}, {before}");
            // One token in the middle is another.
            let mut other = trained.clone();
            other[before + 200] = 250 - other[before + 200] % 250;
            let found = windows.count_within(&tokens(&other)).unwrap();
            assert!((windows.len() - 1..=windows.len()).contains(&found), "{seq}, {before}: {found}");
        }
        assert_eq!(windows.count_within(&tokens(&held_out[..seq - 1])).unwrap(), 0);
    }
}
