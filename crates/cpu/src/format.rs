//! Layout of the packed operands of a product, which selects the kernel.

use phalanx_plan::trace::DType;
use phalanx_simd::Isa;
use phalanx_simd::tiles::TileUnit;

use crate::microkernel::{self, Packing, Panels};
use crate::tile_packing::{self, Cut, Operand};
use crate::{Cpu, ProductMethod};

/// The layout of packed operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// Panels for vectors. A packed step is one step of the inner dimension, or two.
    Vectors(Packing),
    /// Tiles of bf16, of numbers that are cut. A packed step is 32 steps of the inner dimension.
    Tiles { unit: TileUnit, cut: Cut },
}

/// Sizes of the panels of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PanelSize {
    /// Lanes of a panel.
    pub(crate) lanes: usize,
    /// Elements of four bytes between two packed steps of a panel.
    pub(crate) width: usize,
}

impl Format {
    /// Returns the layout in which `cpu` multiplies operands stored as `dtype`.
    pub(crate) fn of(cpu: &Cpu, dtype: DType) -> Format {
        match cpu.tiles {
            Some(unit) if dtype == DType::BF16 || cpu.products != ProductMethod::Fma => {
                Format::Tiles { unit, cut: Cut::of(dtype, cpu.products) }
            }
            _ => Format::Vectors(Packing::of(cpu.isa, dtype)),
        }
    }

    /// Packed steps for `inner` steps of the inner dimension.
    pub(crate) fn packed(self, inner: usize) -> usize {
        match self {
            Format::Vectors(packing) => packing.packed(inner),
            Format::Tiles { .. } => inner.div_ceil(tile_packing::STEPS),
        }
    }

    /// Steps of the inner dimension in `packed` steps.
    pub(crate) fn inner(self, packed: usize) -> usize {
        match self {
            Format::Vectors(packing) => packing.inner(packed),
            Format::Tiles { .. } => packed * tile_packing::STEPS,
        }
    }

    /// The panels of an operand.
    pub(crate) fn panel(self, isa: Isa, operand: Operand) -> PanelSize {
        match (self, operand) {
            (Format::Tiles { cut, .. }, _) => {
                PanelSize { lanes: tile_packing::LANES, width: cut.parts() * tile_packing::BLOCK }
            }
            (Format::Vectors(_), Operand::Left) => {
                let Panels { rows, row_width, .. } = microkernel::panels(isa);
                PanelSize { lanes: rows, width: row_width }
            }
            (Format::Vectors(_), Operand::Right) => {
                let Panels { columns, .. } = microkernel::panels(isa);
                PanelSize { lanes: columns, width: columns }
            }
        }
    }

    /// Returns whether tile registers multiply.
    pub(crate) fn is_tiled(self) -> bool {
        matches!(self, Format::Tiles { .. })
    }

    /// Packed steps of a block of the inner dimension, out of `packed` in total, for results of type `to`. Results in f32
    /// hold the sums between blocks themselves; others need scratch for them, so they are cut only where necessary. It is
    /// fixed, because sums are rounded between blocks: it does not depend on the processor's caches.
    pub(crate) fn depth(self, to: DType, packed: usize) -> usize {
        let [block, all] = match self {
            Format::Vectors(_) => [512, 2048],
            // Tiles multiply so fast that reading and writing the sums between blocks would take most of the time.
            Format::Tiles { cut: Cut::One, .. } => [64, 64],
            Format::Tiles { .. } => [8, 32],
        };
        packed.clamp(1, if to != DType::F32 && packed <= all { all } else { block })
    }

    /// Operations that a task has at least, about 10 microseconds.
    pub(crate) fn task_flops(self) -> usize {
        match self {
            Format::Vectors(_) => 2 << 20,
            Format::Tiles { cut: Cut::One, .. } => 16 << 20,
            Format::Tiles { .. } => 4 << 20,
        }
    }

    /// Most packed elements of a task's own operand. Vectors: 384 KiB, less than half of an L2 cache. Tiles read them
    /// faster and need more work between two reads of the other operand, so they follow the size of the cache.
    pub(crate) fn own_elements(self) -> usize {
        match self {
            Format::Vectors(_) => 96 << 10,
            Format::Tiles { .. } => phalanx_simd::l2_bytes() / 4 * 5 / 8,
        }
    }

    /// With enough work, the number of tasks is a multiple of this, so that the threads finish together. Of vectors, for 2,
    /// 3, 4, 6 or 8 threads; with few panels, tasks are larger, because each reads all of the other operand. Of tiles, for
    /// `threads`: one task for each, or two if they still have enough work between two reads of the other operand.
    pub(crate) fn even_tasks(self, panels: usize, threads: usize) -> usize {
        match self {
            Format::Vectors(_) if panels < 48 => 6,
            Format::Vectors(_) => 24,
            Format::Tiles { .. } if panels < 16 * threads => threads,
            Format::Tiles { .. } => 2 * threads,
        }
    }

    /// Elements between two rows of sums of so many columns. Rows a multiple of 1 KiB apart fall into few sets of L1.
    pub(crate) fn gap(self, columns: usize) -> usize {
        if self.is_tiled() && columns.is_multiple_of(256) { 16 } else { 0 }
    }
}
