//! The device that computes on the host processor.
//!
//! Each file holds one operation. Three rules keep results the same for any number of threads: work is cut into
//! tasks by shapes alone; an element is computed by one task; a sum over tasks goes through partial sums
//! of fixed pieces, which are added in a fixed order.

mod adamw;
mod attention;
mod attention_backward;
mod attention_dots;
mod attention_extents;
mod attention_pack;
mod attention_panel;
mod attention_registers;
mod attention_softmax;
mod attention_tiles;
mod bias;
mod blocks;
mod cross_entropy;
mod dropout;
mod elementwise;
mod embedding;
mod embedding_backward;
mod epilogue;
mod execute;
mod factory;
mod few_rows;
mod float;
mod format;
mod gated;
mod gelu;
mod images;
mod layer_norm;
mod magnitudes;
mod matmul;
mod matrix;
mod microkernel;
mod non_finite;
mod norm;
mod packing;
pub mod peak;
pub mod pool;
mod preference;
mod random;
mod resident;
mod rotary;
mod scratch;
mod sgd;
mod shards;
mod side;
mod tanh;
mod tile_kernel;
mod tile_packing;
mod tile_step;

pub use factory::CpuFactory;
pub use phalanx_tensor::ProductMethod;

use std::io::{Error, ErrorKind};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use phalanx_simd::Isa;
use phalanx_simd::tiles::TileUnit;
use pool::Pool;
use scratch::Scratch;
use shards::Shards;

/// Settings of a [`Cpu`].
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Number of threads, including the caller's.
    pub threads: usize,
    /// Instruction set; at most what the processor has.
    pub isa: Isa,
    /// Tile registers for matrix products of bf16, and of other types as `products` says; which the processor must have.
    pub tiles: Option<TileUnit>,
    /// Method for products of f32 and f16. Without tile registers, it is always [`ProductMethod::Fma`].
    pub products: ProductMethod,
    /// Time that an idle worker spins before it sleeps.
    pub spin: Duration,
}

impl Options {
    /// Options for `threads` threads, with the fastest instruction set and the tile registers of this processor.
    pub fn new(threads: usize) -> Options {
        Options {
            threads,
            isa: Isa::fastest(),
            tiles: TileUnit::fastest(),
            products: ProductMethod::Fma,
            spin: Duration::from_micros(50),
        }
    }

    /// The same with the products that a run asks for; None for the fastest ones. These are multiply-adds: on the only
    /// processor with tile registers that was measured, a step of GPT-2 mini took 4.28 s by multiply-adds and 4.96 s in parts.
    /// On the model of tile registers, which is for tests, they are in parts.
    ///
    /// # Errors
    /// [`ProductMethod::Split`] without tile registers, and [`ProductMethod::Tf32`].
    pub fn with_products(self, wanted: Option<ProductMethod>) -> std::io::Result<Options> {
        let has_tiles = self.tiles.is_some_and(TileUnit::is_available);
        let products = match wanted {
            Some(ProductMethod::Split) if !has_tiles => {
                let text = "precision.products = \"split\": the processor's kernels have no tile registers for it; give \"fma\" or leave it out";
                return Err(Error::new(ErrorKind::InvalidInput, text));
            }
            Some(ProductMethod::Tf32) => {
                let text = "precision.products = \"tf32\" is for cards (device.kind = \"cuda\"); on a processor leave it out";
                return Err(Error::new(ErrorKind::InvalidInput, text));
            }
            Some(wanted) => wanted,
            None if self.tiles == Some(TileUnit::Model) => ProductMethod::Split,
            None => ProductMethod::Fma,
        };
        Ok(Options { products, ..self })
    }
}

/// The processor as a device. Each rank has its own, with its own threads.
pub struct Cpu {
    pool: Pool,
    isa: Isa,
    tiles: Option<TileUnit>,
    products: ProductMethod,
    scratch: Scratch,
}

impl Cpu {
    /// A device with `threads` threads, including the caller's.
    ///
    /// # Panics
    /// When the system starts fewer threads. A device of one thread starts none.
    pub fn new(threads: usize) -> Arc<Cpu> {
        Cpu::with_options(Options::new(threads)).unwrap_or_else(|error| panic!("{error}"))
    }

    /// A device with the given options.
    ///
    /// # Errors
    /// When the system starts fewer threads.
    pub fn with_options(options: Options) -> std::io::Result<Arc<Cpu>> {
        let isa = options.isa.limit(Isa::detect());
        // Asks for permission before the threads start.
        let tiles = options.tiles.filter(|unit| unit.is_available());
        let pool = Pool::new(options.threads, options.spin)?;
        Ok(Arc::new(Cpu { pool, isa, tiles, products: options.products, scratch: Scratch::default() }))
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The tile registers in use.
    pub fn tiles(&self) -> Option<TileUnit> {
        self.tiles
    }

    /// Cuts `0..len` into pieces of `grain` (the last may be short) and runs `task` on each.
    fn over(&self, len: usize, grain: usize, task: impl Fn(Range<usize>) + Sync) {
        let grain = grain.max(1);
        self.pool.run(len.div_ceil(grain), &|i| task(i * grain..len.min((i + 1) * grain)));
    }

    /// [`Cpu::over`] for a slice: each task gets its piece to write.
    fn over_mut<T: Send>(&self, x: &mut [T], grain: usize, task: impl Fn(Range<usize>, &mut [T]) + Sync) {
        let shards = Shards::new(x);
        self.over(shards.len(), grain, |range| {
            // SAFETY: `over` hands out each range once, and they are disjoint.
            task(range.clone(), unsafe { shards.piece(range) });
        });
    }
}

/// Elements that one elementwise task computes: 64 KiB of f32, a few microseconds.
const GRAIN: usize = 16 * 1024;

/// Rows that one task computes, when a row has `columns` elements.
fn row_grain(columns: usize) -> usize {
    (GRAIN / columns.max(1)).max(1)
}
