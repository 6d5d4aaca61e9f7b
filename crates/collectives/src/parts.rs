//! Division of a buffer into one part for each rank.
//!
//! Scatters and gathers have equal parts, so their counts are multiples of the world. All_reduce and
//! reduce take any count: parts are whole cache lines and the last ones may be short or empty. Sums
//! are element by element, so the cut changes no bit.

use std::ops::Range;

/// Elements in a cache line of the narrowest type that is summed.
const LINE: usize = 32;

/// The elements that `rank` sums when `world_size` ranks share a reduction of `count` elements.
pub(crate) fn uneven(count: usize, world_size: usize, rank: usize) -> Range<usize> {
    let part = count.div_ceil(world_size).next_multiple_of(LINE);
    (rank * part).min(count)..((rank + 1) * part).min(count)
}

/// Elements of part `rank` of `count`, a multiple of `world_size`.
pub(crate) fn equal(count: usize, world_size: usize, rank: usize) -> Range<usize> {
    debug_assert_eq!(count % world_size, 0);
    let part = count / world_size;
    rank * part..(rank + 1) * part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uneven_parts_tile_the_buffer() {
        for world_size in 1..10 {
            for count in [0, 1, 31, 32, 33, 100, 1000, 1024, 4097] {
                let mut end = 0;
                for rank in 0..world_size {
                    let part = uneven(count, world_size, rank);
                    assert_eq!(part.start, end);
                    end = part.end;
                }
                assert_eq!(end, count, "{count} over {world_size}");
            }
        }
    }
}
