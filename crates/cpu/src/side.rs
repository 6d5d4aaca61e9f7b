//! One operand of a matrix product, packed into panels for the kernel of its [`Format`].

use std::ops::Range;

use phalanx_simd::Isa;

use crate::Cpu;
use crate::format::{Format, PanelSize};
use crate::matrix::Matrix;
use crate::packing::{MatrixBlock, PanelLayout, pack};
use crate::shards::Shards;
use crate::tile_packing::{self, Operand};

/// Elements between two panels: one cache line. Without them, panels lie a power of two apart, so that the same step of
/// all panels, which is packed in turn, falls into one set of the L1 cache and one or two of L2.
const GAP: usize = 16;

/// One operand in its packed layout: steps of depth by lanes.
#[derive(Clone, Copy)]
pub(crate) struct Side<'a> {
    pub(crate) matrix: Matrix<'a>,
    pub(crate) operand: Operand,
    pub(crate) format: Format,
    /// Depth of a block, in packed steps.
    pub(crate) depth: usize,
    /// Lanes of a panel.
    pub(crate) panel: usize,
    /// Elements between two steps of a panel.
    pub(crate) width: usize,
}

impl<'a> Side<'a> {
    /// `matrix`, whose columns are the lanes, as an operand that is packed for `isa`.
    pub(crate) fn new(
        matrix: Matrix<'a>,
        operand: Operand,
        (isa, format): (Isa, Format),
        depth: usize,
    ) -> Side<'a> {
        let PanelSize { lanes, width } = format.panel(isa, operand);
        Side { matrix, operand, format, depth, panel: lanes, width }
    }

    pub(crate) fn lanes(&self) -> usize {
        self.matrix.columns
    }

    pub(crate) fn panels(&self) -> usize {
        self.lanes().div_ceil(self.panel)
    }

    /// Packed elements of one step of depth.
    pub(crate) fn packed(&self) -> usize {
        self.panels() * self.width
    }

    /// Elements between the starts of two panels of `depth` steps.
    pub(crate) fn stride(&self, depth: usize) -> usize {
        self.length(1, depth)
    }

    /// Elements of `panels` panels of `steps` steps, in blocks of the inner dimension.
    pub(crate) fn length(&self, panels: usize, steps: usize) -> usize {
        panels * (self.width * steps + GAP * steps.div_ceil(self.depth))
    }

    /// The panels `panels` of the block of `count` steps that starts at step `at`, out of all packed panels.
    pub(crate) fn slice<'p>(
        &self,
        packed: &'p [f32],
        at: usize,
        count: usize,
        panels: Range<usize>,
    ) -> &'p [f32] {
        let stride = self.stride(count);
        &packed[self.length(self.panels(), at) + panels.start * stride..][..panels.len() * stride]
    }

    /// The unpacked block that becomes the packed steps `packed` of some lanes.
    pub(crate) fn block(&self, packed: Range<usize>, lanes: Range<usize>) -> MatrixBlock {
        let inner = self.format.inner(packed.start)..self.format.inner(packed.end).min(self.matrix.rows);
        self.matrix.block(inner, lanes)
    }

    /// Packs a block into panels of `depth` steps.
    ///
    /// # Safety
    /// `to` is valid for all panels of the block, from the step on at which the block starts, and nobody else uses them;
    /// the processor has the instruction set.
    pub(crate) unsafe fn pack(&self, isa: Isa, block: MatrixBlock, depth: usize, to: *mut f32) {
        let stride = self.stride(depth);
        // SAFETY: the caller's promise.
        unsafe {
            match self.format {
                Format::Vectors(packing) => {
                    let layout = PanelLayout { packing, lanes: self.panel, width: self.width, stride };
                    pack(isa, block, layout, to);
                }
                Format::Tiles { cut, .. } => tile_packing::pack((isa, cut), self.operand, block, stride, to),
            }
        }
    }

    /// Packs the steps `depth` on all threads: block by block, each with all its panels in order.
    pub(crate) fn pack_all(&self, cpu: &Cpu, depth: Range<usize>, packed: &mut [f32]) {
        // Contiguous rows are read whole, and tasks split the steps; other layouts are read panel by panel.
        let [steps, panels] = if self.matrix.column_stride == 1 {
            [(crate::GRAIN / self.packed()).clamp(1, self.depth), self.panels()]
        } else {
            [self.depth, (crate::GRAIN / (self.width * self.depth)).max(1)]
        };
        let groups = self.panels().div_ceil(panels);
        let pieces = self.depth.div_ceil(steps);
        let packed = Shards::new(packed);
        cpu.pool.run(depth.len().div_ceil(self.depth) * pieces * groups, &|task| {
            let (block, piece, group) = (task / groups / pieces, task / groups % pieces, task % groups);
            let block = block * self.depth..depth.len().min((block + 1) * self.depth);
            let piece = block.start + piece * steps..block.end.min(block.start + (piece + 1) * steps);
            if piece.is_empty() {
                return;
            }
            let lanes = group * panels * self.panel..self.lanes().min((group + 1) * panels * self.panel);
            let at = self.length(self.panels(), block.start)
                + group * panels * self.stride(block.len())
                + (piece.start - block.start) * self.width;
            assert!(at < packed.len());
            let from = self.block(depth.start + piece.start..depth.start + piece.end, lanes);
            // SAFETY: only this task writes these steps of these panels, and they lie inside the buffer, which holds
            // all panels of all blocks; `Matrix::block` checked what is read.
            unsafe { self.pack(cpu.isa, from, block.len(), packed.base().add(at)) };
        });
    }
}
