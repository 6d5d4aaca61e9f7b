//! Sets of bytes of a memory: one bit for each.

/// How many words hold the bits of so many bytes.
pub fn words_for(bytes: usize) -> usize {
    bytes.div_ceil(64)
}

/// Visits the words of a range: index, and which of its bits are in the range.
#[inline(always)]
fn visit(at: usize, count: usize, mut each: impl FnMut(usize, u64)) {
    if count == 0 {
        return;
    }
    let (first, last) = (at / 64, (at + count - 1) / 64);
    let (low, high) = (u64::MAX << (at % 64), u64::MAX >> (63 - (at + count - 1) % 64));
    if first == last {
        return each(first, low & high);
    }
    each(first, low);
    for index in first + 1..last {
        each(index, u64::MAX);
    }
    each(last, high);
}

/// Whether all bytes of a range are in the set.
#[inline]
pub fn all(set: &[u64], at: usize, count: usize) -> bool {
    let mut missing = 0;
    visit(at, count, |index, mask| missing |= mask & !set[index]);
    missing == 0
}

/// Whether any byte of a range is in the set.
#[inline]
pub fn any(set: &[u64], at: usize, count: usize) -> bool {
    let mut found = 0;
    visit(at, count, |index, mask| found |= mask & set[index]);
    found != 0
}

/// Adds a range.
#[inline]
pub fn add(set: &mut [u64], at: usize, count: usize) {
    visit(at, count, |index, mask| set[index] |= mask);
}

/// Removes a range.
#[inline]
pub fn remove(set: &mut [u64], at: usize, count: usize) {
    visit(at, count, |index, mask| set[index] &= !mask);
}

/// Whether a byte is in the set.
pub fn has(set: &[u64], at: usize) -> bool {
    set[at / 64] >> (at % 64) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_within_and_over_words() {
        for (at, count) in [(0, 1), (3, 60), (3, 61), (3, 62), (60, 200), (64, 64), (127, 1), (5, 0)] {
            let mut set = vec![0; words_for(320)];
            add(&mut set, at, count);
            let expected = |byte: usize| (at..at + count).contains(&byte);
            assert!((0..320).all(|byte| has(&set, byte) == expected(byte)), "{at} {count}");
            assert!(all(&set, at, count) && any(&set, at, count) == (count > 0));
            assert!(!all(&set, at, count + 1) && (at == 0 || !all(&set, at - 1, count + 1)));
            assert!(!any(&set, at + count, 320 - at - count) && !any(&set, 0, at));
            remove(&mut set, at, count);
            assert!(!any(&set, 0, 320));
        }
    }
}
