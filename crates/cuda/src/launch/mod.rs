//! Operations as launches of kernels: one file for each group of operations.
//!
//! Nothing here depends on the card but the number of blocks of kernels that walk over elements, and the size of the tiles of a
//! product; neither changes a bit of a result.

mod attention;
mod elementwise;
mod embeddings;
mod gathered;
mod images;
mod library;
mod products;
mod rows;
mod spans;
mod sums;

pub use attention::attention_shared_bytes;

pub(crate) use gathered::Gathered;
pub(crate) use spans::Span;
pub(crate) use sums::{COUNTS_BYTES, RowBlocks};

use std::cell::RefCell;
use std::ops::Range;

use phalanx_plan::trace::Site;
use phalanx_tensor::operations::{Operation, Own};
use phalanx_tensor::{View, ViewMut};

use crate::blas::Blas;
use crate::error::Error;
use crate::faults::{Checked, Faults};
use crate::modules::{Launch, Modules};
use crate::programs::Program;
use crate::segment::{CopyEnd, Segment, Step};

/// Threads of a block of kernels that walk over elements or rows.
const THREADS: u32 = 256;

/// Most blocks in y of a launch.
const ROWS_MAX: u64 = 65_535;

/// Everything that is needed to issue one operation.
pub(crate) struct Issue<'a> {
    pub(crate) modules: &'a Modules,
    /// The library for products, if it is there.
    pub(crate) blas: Option<&'a Blas>,
    /// Takes the operation's steps.
    pub(crate) segment: RefCell<&'a mut Segment>,
    /// The addresses of tensors on the card.
    pub(crate) card: Range<u64>,
    /// Memory for kernels, which calls of the compute stream use one after the other. None on other streams.
    pub(crate) scratch: Option<Range<u64>>,
    pub(crate) multiprocessors: u64,
    /// True if products of f32 are computed as TF32.
    pub(crate) tf32: bool,
    pub(crate) faults: &'a mut Faults,
    pub(crate) call: &'static str,
    pub(crate) site: Site,
}

/// A number that a kernel is given.
pub(crate) trait Argument {
    /// The number, in the lower bytes.
    fn number(self) -> u64;
}

macro_rules! arguments {
    ($($type:ty: $self:ident => $number:expr;)*) => {
        $(impl Argument for $type {
            fn number($self) -> u64 {
                $number
            }
        })*
    };
}
arguments! {
    u64: self => self;
    u32: self => u64::from(self);
    usize: self => self as u64;
    bool: self => u64::from(self);
    f32: self => u64::from(self.to_bits());
    f64: self => self.to_bits();
    View<'_>: self => address(self);
    &ViewMut<'_>: self => address(self.as_view());
}

impl<A: Argument> Argument for Option<A> {
    /// A null address.
    fn number(self) -> u64 {
        self.map_or(0, Argument::number)
    }
}

/// `numbers![a, b, ..]`: the arguments of a kernel.
macro_rules! numbers {
    ($($argument:expr),* $(,)?) => {
        &[$($crate::launch::Argument::number($argument)),*]
    };
}
pub(crate) use numbers;

/// Address of a tensor on the card: views have been translated to addresses of the card before.
fn address(view: View) -> u64 {
    view.address().as_ptr().expose_provenance() as u64
}

impl Issue<'_> {
    /// Issues an operation. Its operands have addresses of the card.
    ///
    /// # Errors
    /// The driver's and the compiler's, and operations that the card does not compute.
    pub(crate) fn operation(&mut self, operation: Operation) -> Result<(), Error> {
        match operation {
            Operation::Elementwise(operation) => self.elementwise(operation),
            Operation::Products(operation) => self.product(operation),
            Operation::Normalization(operation) => self.normalization(operation),
            Operation::Activations(operation) => self.activation(operation),
            Operation::Attentions(operation) => self.attention(operation),
            Operation::Embeddings(operation) => self.embedding(operation),
            Operation::Images(operation) => self.images(operation),
            Operation::Magnitudes(operation) => self.magnitudes(operation),
            Operation::Vocabulary(operation) => self.vocabulary(operation),
            Operation::Optimizers(operation) => self.optimizer(operation),
            Operation::Reductions(operation) => self.reduction(operation),
            Operation::Own(Own::OwnOperation(_)) => Err(Error::Unsupported(format!(
                "`{}` is code for the host's processor: a card does not run it; compute on the `cpu` device, or run it on tensors \
                 in host memory (`Device::run_on_host`)",
                self.call
            ))),
        }
    }

    /// Copies a tensor within the card, to it, or from it.
    pub(crate) fn copy(&self, from: View, to: &ViewMut) {
        let bytes = to.bytes();
        if bytes > 0 {
            let place = |address: u64| match self.card.contains(&address) {
                true => CopyEnd::Card(address),
                false => CopyEnd::Host(address as usize),
            };
            let (from, to) = (place(address(from)), place(address(to.as_view())));
            self.push(Step::Copy { to, from, bytes });
        }
    }

    /// Adds a step.
    fn push(&self, step: Step) {
        self.segment.borrow_mut().push(step);
    }

    /// Launches one kernel. Its arguments are written down beside each launch, in the order of the kernel's.
    fn launch(&self, launch: Launch, arguments: &[u64]) -> Result<(), Error> {
        self.launch_table(launch, &[], arguments)
    }

    /// The same for a kernel whose first argument is a table, of the table's length; an empty one is none.
    fn launch_table(&self, launch: Launch, table: &[u64], arguments: &[u64]) -> Result<(), Error> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        let function = self.modules.prepare(&launch)?;
        self.segment.borrow_mut().push_kernel(function, &launch, [table, arguments])
    }

    /// Launches a kernel that walks over `n` elements in groups of four.
    fn over_fours(
        &self,
        program: Program,
        kernel: &'static str,
        n: usize,
        arguments: &[u64],
    ) -> Result<(), Error> {
        let blocks = (n as u64).div_ceil(4 * u64::from(THREADS)).min(16 * self.multiprocessors);
        self.launch(
            Launch { program, kernel, grid: [blocks, 1], threads: THREADS, shared_bytes: 0 },
            arguments,
        )
    }

    /// Launches a kernel in which a warp computes one of `rows` rows.
    fn over_rows(
        &self,
        program: Program,
        kernel: &'static str,
        rows: usize,
        arguments: &[u64],
    ) -> Result<(), Error> {
        let blocks = (rows as u64).div_ceil(u64::from(THREADS / 32)).min(64 * self.multiprocessors);
        self.launch(
            Launch { program, kernel, grid: [blocks, 1], threads: THREADS, shared_bytes: 0 },
            arguments,
        )
    }

    /// Launches a kernel of which a block computes one of `rows` rows.
    fn by_block(
        &self,
        program: Program,
        kernel: &'static str,
        rows: usize,
        arguments: &[u64],
    ) -> Result<(), Error> {
        let grid = [rows as u64, 1];
        self.launch(Launch { program, kernel, grid, threads: THREADS, shared_bytes: 0 }, arguments)
    }

    /// Launches one block of 1,024 threads.
    fn one_block(&self, program: Program, kernel: &'static str, arguments: &[u64]) -> Result<(), Error> {
        self.launch(Launch { program, kernel, grid: [1, 1], threads: 1024, shared_bytes: 0 }, arguments)
    }

    /// The address of `bytes` bytes for this operation alone.
    fn scratch(&self, bytes: usize) -> Result<u64, Error> {
        let scratch = self.scratch.as_ref().ok_or_else(|| {
            Error::Unsupported(format!("`{}` needs scratch, which the compute stream alone has", self.call))
        })?;
        let available = scratch.end - scratch.start;
        if bytes as u64 > available {
            return Err(Error::Unsupported(format!(
                "`{}` needs {bytes} bytes of scratch, and the device has {available}: give it more (`Options::scratch_bytes`)",
                self.call
            )));
        }
        Ok(scratch.start)
    }

    /// Returns the arguments of a kernel that checks its data: the address of its report, and its number.
    fn checked(&mut self, checked: Checked) -> (u64, u32) {
        self.faults.note(checked, self.call, self.site)
    }
}
