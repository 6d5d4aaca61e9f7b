//! A panel of scores, and which of them the masks of attention let count: those of keys that a query sees.

use std::ops::Range;

/// Indices of the first and of the last keys of the documents of a panel's queries, each ascending.
pub(crate) type DocumentKeys = [[i32; 32]; 2];

/// A panel of scores `[keys][queries]`.
#[derive(Clone, Copy)]
pub(crate) struct Panel<'a> {
    /// Keys.
    pub(crate) keys: usize,
    /// Indices of the first and the last key that query 0 sees; those of each further query are one later.
    pub(crate) first: isize,
    pub(crate) last: isize,
    /// The keys of each query's document: a query sees only its own document. None without documents.
    pub(crate) documents: Option<&'a DocumentKeys>,
    /// Factor that turns scores into exponents of 2.
    pub(crate) factor: f32,
    /// Counter of (first key, first query) in the dropout generator, and the distance to that of the next key.
    pub(crate) element: u64,
    pub(crate) next_key: u64,
}

impl Panel<'_> {
    /// The key of this index, or the nearest that there is; `keys` behind all.
    pub(crate) fn below(&self, index: isize) -> usize {
        index.clamp(0, self.keys as isize) as usize
    }

    /// The keys that each of `queries` sees.
    pub(crate) fn clear(&self, queries: usize) -> Range<usize> {
        let (mut first, mut last) = (self.first + queries as isize - 1, self.last);
        if let Some([firsts, lasts]) = self.documents {
            (first, last) = (first.max(firsts[queries - 1] as isize), last.min(lasts[0] as isize));
        }
        let end = self.below(last + 1);
        self.below(first).min(end)..end
    }

    /// The queries of vector `v` that see `key`.
    #[inline(always)]
    pub(crate) fn seeing(&self, key: usize, v: usize) -> Range<usize> {
        let query = key as isize - 16 * v as isize;
        let mut end = (query - self.first + 1).clamp(0, 16) as usize;
        let mut start = (query - self.last).clamp(0, 16) as usize;
        if let Some([firsts, lasts]) = self.documents {
            end = end.min(firsts[16 * v..][..16].partition_point(|first| *first <= key as i32));
            start = start.max(lasts[16 * v..][..16].partition_point(|last| *last < key as i32));
        }
        start..end
    }
}
