//! The sizes of an attention, where its heads lie, and which keys a query sees.

use std::ops::Range;

use phalanx_simd::Isa;
use phalanx_tensor::ViewMut;
use phalanx_tensor::arguments::{Dropout, Heads};

use crate::attention_tiles::width;
use crate::epilogue::MatrixPointer;
use crate::matrix::Matrix;

/// Index of a part in qkv and in dqkv.
pub(crate) const Q: usize = 0;
pub(crate) const K: usize = 1;
pub(crate) const V: usize = 2;

/// The sizes of an attention call. A pair is a head of queries of a sample.
#[derive(Clone, Copy)]
pub(crate) struct Extents {
    pub(crate) batch: usize,
    pub(crate) seq: usize,
    pub(crate) heads: Heads,
    /// Elements of a head.
    pub(crate) size: usize,
    /// Columns of a row before the keys.
    before: usize,
    /// Distance between the counters of two samples in the dropout generator.
    sample: u64,
}

impl Extents {
    pub(crate) fn new([batch, seq, _]: [usize; 3], heads: Heads, dropout: Option<Dropout>) -> Extents {
        let sample = dropout.map_or(0, |d| d.sample);
        Extents { batch, seq, heads, size: heads.head_dim, before: heads.out_width(), sample }
    }

    /// Those of a cache of so many rows, which has keys and values only.
    pub(crate) fn of_cache(self, capacity: usize) -> Extents {
        Extents { seq: capacity, before: 0, ..self }
    }

    /// Number of (sample, head) pairs.
    pub(crate) fn pairs(&self) -> usize {
        self.batch * self.heads.heads
    }

    /// The keys, of `count`, that one or another of the queries at these positions sees.
    pub(crate) fn keys_of(&self, queries: &Range<usize>, count: usize) -> Range<usize> {
        let [behind, ahead] = self.heads.reach();
        queries.start.saturating_sub(behind)..count.min(queries.end.saturating_add(ahead))
    }

    /// The queries that see one or another of these keys.
    pub(crate) fn queries_of(&self, keys: &Range<usize>) -> Range<usize> {
        let [behind, ahead] = self.heads.reach();
        keys.start.saturating_sub(ahead)..self.seq.min(keys.end.saturating_add(behind))
    }

    /// The first and the last key that the query at this position sees, by their distances from `key`.
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
    pub(crate) fn part<'a>(
        &self,
        x: Matrix<'a>,
        pair: usize,
        which: usize,
        rows: &Range<usize>,
    ) -> Matrix<'a> {
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
