//! Cuts against trying all of them.

use std::ops::Range;

use crate::generator::Generator;
use phalanx_plan::{BlockCost, Cut, CutError, cut};

fn block(flops: u64, parameters: u64, bytes: u64) -> BlockCost {
    BlockCost { flops, parameters, bytes }
}

/// All cuts of the blocks `start..blocks` into `stages`, earliest cuts first.
fn all(start: usize, blocks: usize, stages: usize) -> Vec<Vec<Range<usize>>> {
    if stages == 1 {
        return if start < blocks { vec![vec![start..blocks]] } else { vec![] };
    }
    let with = |end| {
        let rests = all(end, blocks, stages - 1).into_iter();
        rests.map(move |rest| std::iter::once(start..end).chain(rest).collect())
    };
    (start + 1..blocks).flat_map(with).collect()
}

#[test]
fn balanced_is_the_best_of_all_cuts_and_the_earliest() {
    let mut generator = Generator(11);
    let (mut fitting, mut refused) = (0, 0);
    for _ in 0..600 {
        let blocks: Vec<BlockCost> = (0..generator.within(1, 9))
            .map(|_| block(generator.within(0, 12), generator.within(0, 12), generator.within(1, 9)))
            .collect();
        let stages = generator.within(1, blocks.len() as u64) as usize;
        let limit = (generator.within(0, 2) > 0).then(|| generator.within(5, 30));
        for by in [Cut::Parameters, Cut::Balanced] {
            let weight = |block: &BlockCost| if by == Cut::Balanced { block.flops } else { block.parameters };
            let largest = |ranges: &[Range<usize>], weight: &dyn Fn(&BlockCost) -> u64| -> u64 {
                ranges.iter().map(|range| blocks[range.clone()].iter().map(weight).sum()).max().unwrap()
            };
            let bytes = |ranges: &[Range<usize>]| largest(ranges, &|block| block.bytes);
            let cuts = all(0, blocks.len(), stages);
            let allowed = cuts.iter().filter(|ranges| limit.is_none_or(|limit| bytes(ranges) <= limit));
            // Of equals, `min_by_key` takes the first.
            let expected = allowed.min_by_key(|ranges| largest(ranges, &weight));
            match (cut(&blocks, stages, &by, limit), expected) {
                (Ok(found), Some(expected)) => {
                    assert_eq!(&found, expected, "{blocks:?} {stages} {limit:?}");
                    fitting += 1;
                }
                (Err(CutError::Memory { limit_bytes, needed_bytes, enough, .. }), None) => {
                    assert_eq!(Some(limit_bytes), limit);
                    assert_eq!(needed_bytes, cuts.iter().map(|ranges| bytes(ranges)).min().unwrap());
                    let fits = |&stages: &usize| {
                        all(0, blocks.len(), stages).iter().any(|ranges| bytes(ranges) <= limit_bytes)
                    };
                    assert_eq!(enough, (1..=blocks.len()).find(fits));
                    refused += 1;
                }
                (found, expected) => panic!("{found:?} {expected:?}"),
            }
        }
    }
    assert!(fitting > 100 && refused > 100, "{fitting} {refused}: the cases show both");
}

#[test]
fn uniform_deals_out_the_inner_blocks() {
    // Embedding, eight Transformer blocks, norm and head.
    let blocks = vec![block(1, 1, 1); 11];
    let by = |inner| Cut::Uniform { inner };
    assert_eq!(cut(&blocks, 1, &by(1..9), None).unwrap(), all(0, 11, 1)[0]);
    assert_eq!(cut(&blocks, 2, &by(1..9), None).unwrap(), [0..5, 5..11]);
    assert_eq!(cut(&blocks, 4, &by(1..9), None).unwrap(), [0..3, 3..5, 5..7, 7..11]);
    assert_eq!(cut(&blocks, 8, &by(1..9), Some(3)).unwrap().len(), 8);
    for (stages, inner, limit, words) in [
        (
            3,
            1..9,
            None,
            "8 blocks cannot be shared equally by 3 stages: the nearest numbers of stages that can are \
             2 and 4",
        ),
        (9, 1..9, None, "8 blocks cannot be cut into 9 stages: at most 8 are possible"),
        (2, 4..12, None, "blocks 4 to 12 cannot be the inner ones of 11 blocks"),
        (2, 4..4, None, "blocks 4 to 4 cannot be the inner ones"),
        (4, 1..9, Some(3), "a stage may hold 3 bytes"),
        (
            4,
            1..9,
            Some(3),
            "into 4 stages needs 4 in the largest: 4 are the fewest that can fit, cut anywhere",
        ),
    ] {
        let error = cut(&blocks, stages, &by(inner), limit).unwrap_err().to_string();
        assert!(error.contains(words), "{words:?} in {error}");
    }
}

#[test]
fn impossible_numbers_of_stages() {
    let blocks = [block(5, 5, 5), block(1, 1, 100), block(1, 1, 1)];
    for by in [Cut::Parameters, Cut::Balanced, Cut::Uniform { inner: 0..3 }] {
        assert_eq!(cut(&blocks, 0, &by, None), Err(CutError::NoStages));
        let error = cut(&blocks, 4, &by, None).unwrap_err().to_string();
        assert_eq!(error, "3 blocks cannot be cut into 4 stages: at most 3 are possible");
        let error = cut(&blocks, 3, &by, Some(99)).unwrap_err().to_string();
        assert!(error.contains("needs 100 in the largest: one block alone is larger"), "{error}");
    }
    // Sums beyond 64 bits are exact.
    let huge = [block(u64::MAX, 1, 1), block(u64::MAX, 1, 1), block(1, 1, 1)];
    assert_eq!(cut(&huge, 2, &Cut::Balanced, None).unwrap(), [0..1, 1..3]);
}
