//! The sizes of an attention, where its heads lie, and which keys a query sees.

use std::ops::Range;

use phalanx_simd::Isa;
use phalanx_tensor::arguments::{Dropout, Heads};
use phalanx_tensor::{View, ViewMut};

use crate::attention_panel::DocumentKeys;
use crate::attention_tiles::width;
use crate::epilogue::MatrixPointer;
use crate::matrix::Matrix;

/// Index of a part in qkv and in dqkv.
pub(crate) const Q: usize = 0;
pub(crate) const K: usize = 1;
pub(crate) const V: usize = 2;

/// The sizes of an attention call. A pair is a head of queries of a sample.
#[derive(Clone, Copy)]
pub(crate) struct Extents<'a> {
    pub(crate) batch: usize,
    pub(crate) seq: usize,
    pub(crate) heads: Heads,
    /// Elements of a head.
    pub(crate) size: usize,
    /// Columns of a row before the keys.
    before: usize,
    /// Distance between the counters of two samples in the dropout generator.
    sample: u64,
    /// The positions of all rows in their documents, if sequences have several.
    positions: Option<&'a [u32]>,
}

impl<'a> Extents<'a> {
    pub(crate) fn new(
        [batch, seq, _]: [usize; 3],
        heads: Heads,
        positions: Option<View<'a>>,
        dropout: Option<Dropout>,
    ) -> Extents<'a> {
        let (size, before) = (heads.head_dim, heads.out_width());
        let (positions, sample) = (positions.map(|x| x.as_slice()), dropout.map_or(0, |d| d.sample));
        Extents { batch, seq, heads, size, before, sample, positions }
    }

    /// Those of a cache of so many rows, which has keys and values only.
    pub(crate) fn of_cache(self, capacity: usize) -> Extents<'a> {
        Extents { seq: capacity, before: 0, ..self }
    }

    /// Number of (sample, head) pairs.
    pub(crate) fn pairs(&self) -> usize {
        self.batch * self.heads.heads
    }

    /// The first row of the document of this row of a pair's sample.
    fn document(&self, pair: usize, row: usize) -> usize {
        let first = pair / self.heads.heads * self.seq;
        self.positions.map_or(0, |positions| row.saturating_sub(positions[first + row] as usize))
    }

    /// The end of the document of this row, of at most `end` rows.
    fn document_end(&self, pair: usize, row: usize, mut end: usize) -> usize {
        if self.positions.is_some() {
            let mut start = row + 1;
            while start < end {
                let middle = start.midpoint(end);
                if self.document(pair, middle) <= row { start = middle + 1 } else { end = middle }
            }
        }
        end
    }

    /// The keys, of `count`, that one or another of the queries in these rows sees.
    pub(crate) fn keys_of(&self, pair: usize, queries: &Range<usize>, count: usize) -> Range<usize> {
        let [behind, ahead] = self.heads.reach();
        let start = queries.start.saturating_sub(behind).max(self.document(pair, queries.start));
        let end = count.min(queries.end.saturating_add(ahead));
        start..self.document_end(pair, queries.end - 1, end)
    }

    /// The queries that see one or another of these keys.
    pub(crate) fn queries_of(&self, pair: usize, keys: &Range<usize>) -> Range<usize> {
        let [behind, ahead] = self.heads.reach();
        let end = self.seq.min(keys.end.saturating_add(behind));
        let start = keys.start.saturating_sub(ahead).max(self.document(pair, keys.start));
        start..self.document_end(pair, keys.end - 1, end)
    }

    /// The first and the last key of the document of each query of a panel, by their distances from `key`; None where each sequence
    /// is one document. Under a causal mask, which hides the keys behind a query, there is no last one.
    pub(crate) fn document_keys(
        &self,
        pair: usize,
        queries: &Range<usize>,
        key: usize,
    ) -> Option<DocumentKeys> {
        self.positions?;
        let row = |lane: usize| (queries.end - 1).min(queries.start + lane);
        let first = |lane| self.document(pair, row(lane)) as i32 - key as i32;
        let mut lasts = [i32::MAX; 32];
        if !self.heads.causal {
            let mut end = queries.start;
            for (lane, last) in lasts.iter_mut().enumerate() {
                if row(lane) >= end {
                    end = self.document_end(pair, row(lane), self.seq);
                }
                *last = end as i32 - 1 - key as i32;
            }
        }
        Some([std::array::from_fn(first), lasts])
    }

    /// The first and the last key that a mask lets the query at this position see, by their distances from `key`.
    pub(crate) fn sight(&self, position: usize, key: usize) -> [isize; 2] {
        let [behind, ahead] = self.heads.reach().map(|far| far.min(isize::MAX as usize / 4) as isize);
        let query = position as isize - key as isize;
        [query - behind, query + ahead]
    }

    /// The first column of a head of q ([`Q`]), k ([`K`]) or v ([`V`]) in qkv; out and dout have [`Q`] only.
    fn column(&self, head: usize, which: usize) -> usize {
        let kv_head = head / self.heads.group();
        match which {
            Q => head * self.size,
            K => self.before + kv_head * self.size,
            _ => self.before + (self.heads.kv_heads + kv_head) * self.size,
        }
    }

    /// Rows of one (sample, head) pair, `[rows, size]`, of a part.
    pub(crate) fn part<'m>(
        &self,
        x: Matrix<'m>,
        pair: usize,
        which: usize,
        rows: &Range<usize>,
    ) -> Matrix<'m> {
        let (sample, head) = (pair / self.heads.heads, pair % self.heads.heads);
        let first = sample * self.seq;
        let column = self.column(head, which);
        x.rows(first + rows.start..first + rows.end).t().rows(column..column + self.size).t()
    }

    /// Elements between rows of sums `[rows, size]`, padded to whole panels.
    pub(crate) fn stride(&self, isa: Isa) -> usize {
        self.size.next_multiple_of(width(isa))
    }

    /// Counter of the probability of (key, query) in the dropout generator.
    pub(crate) fn element(&self, pair: usize, key: usize, query: usize) -> u64 {
        let (sample, head) = (pair / self.heads.heads, pair % self.heads.heads);
        let within = ((head * self.seq + key) * self.seq + query) as u64;
        (sample as u64).wrapping_mul(self.sample).wrapping_add(within)
    }
}

/// An output that many tasks write; each writes different rows and heads.
#[derive(Clone, Copy)]
pub(crate) struct Results {
    whole: MatrixPointer,
    rows: usize,
}

// SAFETY: the memory is borrowed uniquely for the run, and the tasks write disjoint parts of it.
unsafe impl Send for Results {}
// SAFETY: as above.
unsafe impl Sync for Results {}

impl Results {
    pub(crate) fn new(x: &ViewMut) -> Results {
        let [rows, columns] = x.shape().rows_cols();
        Results { whole: MatrixPointer { at: x.address().as_ptr(), dtype: x.dtype(), stride: columns }, rows }
    }

    /// Like [`Extents::part`], but starting at `row`.
    pub(crate) fn part(&self, e: &Extents, pair: usize, which: usize, row: usize) -> MatrixPointer {
        let (sample, head) = (pair / e.heads.heads, pair % e.heads.heads);
        let (row, column) = (sample * e.seq + row, e.column(head, which));
        assert!(row < self.rows && column + e.size <= self.whole.stride);
        let bytes = (row * self.whole.stride + column) * self.whole.dtype.bytes();
        MatrixPointer { at: self.whole.at.wrapping_add(bytes), ..self.whole }
    }
}

/// Splits buffers of `lengths[i]` elements off the scratch, each aligned to a cache line.
pub(crate) fn cut<'a, const N: usize>(
    scratch: &mut &'a mut [f32],
    lengths: [usize; N],
) -> [&'a mut [f32]; N] {
    lengths.map(|len| {
        scratch.split_off_mut(..len.next_multiple_of(16)).expect("the scratch has the requested length")
    })
}

/// Scratch length that [`cut`] needs.
pub(crate) fn total(lengths: &[usize]) -> usize {
    lengths.iter().map(|len| len.next_multiple_of(16)).sum()
}
