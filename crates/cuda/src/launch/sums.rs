//! Sums: over rows in blocks, and of whole tensors.

use phalanx_tensor::operations::{BlockSquares, Reductions, TreeSum};
use phalanx_tensor::{DType, NORM_BLOCK, ViewMut};

use crate::error::Error;
use crate::launch::spans::{Shared, Span};
use crate::launch::{Issue, numbers};
use crate::modules::Launch;
use crate::programs::{Program, Source};

/// Elements that a block of rows has at least.
const GRAIN: usize = 16 * 1024;

/// Most blocks of a sum over rows.
const BLOCKS_MAX: usize = 64;

/// Threads of a block that sums columns over rows, and columns of a thread.
const COLUMN_THREADS: u32 = 64;
const THREAD_COLUMNS: u32 = 2;

/// Threads of a block that adds the blocks' lines, each in one column.
const LINE_THREADS: u32 = 32;

/// Threads of a block that sums squares, and the blocks of squares that it sums.
const SQUARE_THREADS: u32 = 128;
const SQUARE_BLOCKS: usize = 2;

/// Most sums of a launch: those of `norm.cu` and `norm_f64.cu`.
const SUM_SPANS: usize = 120;

/// Most blocks that count, and bytes of scratch for their counts.
const COUNT_BLOCKS: u64 = 1024;
pub(crate) const COUNTS_BYTES: usize = COUNT_BLOCKS as usize * size_of::<u32>();

/// Numbers that the tree of one block of threads sums.
const TREE_MAX: usize = 2048 * 2048;

/// A sum over rows: how they are cut into blocks, by shape alone and as on the processor.
pub(crate) struct RowBlocks {
    columns: usize,
    /// Lines of sums of a block.
    lines: usize,
    /// Rows of a block.
    pub(super) grain: usize,
    blocks: usize,
}

impl RowBlocks {
    pub(crate) fn new(rows: usize, columns: usize, lines: usize) -> RowBlocks {
        let grain = (GRAIN / columns.max(1)).max(1).max(rows.div_ceil(BLOCKS_MAX));
        RowBlocks { columns, lines, grain, blocks: rows.div_ceil(grain) }
    }

    /// Bytes of the table of partial sums.
    pub(crate) fn bytes(&self) -> usize {
        self.blocks * self.lines * self.columns * size_of::<f32>()
    }
}

/// Sums of squares as a span.
pub(super) fn squares_span(o: &BlockSquares) -> Span {
    let n = o.x.elements();
    let shared = Shared {
        program: Program::of(Source::Norm, o.x.dtype()),
        kernel: "block_squares",
        threads: SQUARE_THREADS,
        spans_max: SUM_SPANS,
        arguments: Vec::new(),
    };
    let blocks = n.div_ceil(SQUARE_BLOCKS * NORM_BLOCK) as u64;
    Span { shared, words: Vec::from(numbers![o.x, n, &o.squares, 0u64]), blocks }
}

/// A sum along a tree as a span; None if it has too many numbers.
pub(super) fn tree_span(o: &TreeSum) -> Option<Span> {
    let n = o.x.elements();
    let shared = Shared {
        program: Program::of_f64(Source::NormF64),
        kernel: "tree_sum",
        threads: 1024,
        spans_max: SUM_SPANS,
        arguments: Vec::new(),
    };
    (n <= TREE_MAX).then(|| Span { shared, words: Vec::from(numbers![o.x, n, &o.out, 0u64]), blocks: 1 })
}

impl Issue<'_> {
    /// Launches a kernel that sums columns over each block of rows.
    pub(super) fn over_blocks(
        &self,
        program: Program,
        kernel: &'static str,
        blocks: &RowBlocks,
        arguments: &[u64],
    ) -> Result<(), Error> {
        let across = (blocks.columns as u64).div_ceil(u64::from(COLUMN_THREADS * THREAD_COLUMNS));
        let grid = [across, blocks.blocks as u64];
        self.launch(Launch { program, kernel, grid, threads: COLUMN_THREADS, shared_bytes: 0 }, arguments)
    }

    /// Adds the blocks' lines in order; line k goes to `out[k]`, where it is wanted. There are one or two, of one type.
    pub(super) fn add_blocks<const K: usize>(
        &self,
        blocks: &RowBlocks,
        out: [Option<&ViewMut>; K],
        accumulate: bool,
        partial: u64,
        element: DType,
    ) -> Result<(), Error> {
        assert!(K == blocks.lines && K <= 2, "{K} results of {} lines", blocks.lines);
        let Some(wanted) = out.iter().flatten().next() else { return Ok(()) };
        let (first, second) = (out[0], out.get(1).copied().flatten());
        let launch = Launch {
            program: Program::of(Source::Bias, element).with_other(wanted.dtype()),
            kernel: "add_blocks",
            grid: [(blocks.columns as u64).div_ceil(u64::from(LINE_THREADS)), K as u64],
            threads: LINE_THREADS,
            shared_bytes: 0,
        };
        self.launch(launch, numbers![partial, blocks.blocks, K, blocks.columns, first, second, accumulate])
    }

    pub(super) fn reduction(&mut self, operation: Reductions) -> Result<(), Error> {
        let f64s = Program::of_f64(Source::NormF64);
        match operation {
            Reductions::BlockSquares(_) => unreachable!("all squares are gathered"),
            Reductions::TreeSum(o) => self.check_tree(o.x.elements()),
            Reductions::Norm(o) => {
                let n = o.squares.elements();
                self.check_tree(n)?;
                let (max_norm, loss_scale) = (o.clip.max_norm, o.clip.loss_scale);
                let arguments = numbers![o.squares, n, max_norm, loss_scale, &o.norm, &o.factor];
                self.one_block(f64s, "gradient_norm", arguments)
            }
            Reductions::CountNonFinite(o) => {
                let (n, program) = (o.x.elements(), Program::of(Source::Norm, o.x.dtype()));
                let blocks = (n as u64).div_ceil(1024).min(COUNT_BLOCKS);
                let counts = self.scratch(blocks as usize * size_of::<u32>())?;
                let launch = Launch {
                    program,
                    kernel: "count_non_finite",
                    grid: [blocks, 1],
                    threads: 256,
                    shared_bytes: 0,
                };
                self.launch(launch, numbers![o.x, n, counts])?;
                self.one_block(f64s, "sum_counts", numbers![counts, blocks as u32, &o.count])
            }
        }
    }

    fn check_tree(&self, n: usize) -> Result<(), Error> {
        if n <= TREE_MAX {
            return Ok(());
        }
        Err(Error::Unsupported(format!(
            "`{}` sums {n} numbers; a card sums at most {TREE_MAX} at once",
            self.call
        )))
    }
}
