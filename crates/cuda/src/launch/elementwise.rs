//! Elementwise operations, activation functions, dropout, and optimizer steps.

use phalanx_tensor::arguments::{AdamW, Dropout, Gate, Gelu};
use phalanx_tensor::operations::{Activations, Elementwise, Optimizers};
use phalanx_tensor::{AdamWUpdate, DType, SgdUpdate};

use crate::error::Error;
use crate::launch::spans::{Shared, Span};
use crate::launch::sums::RowBlocks;
use crate::launch::{Argument, Issue, ROWS_MAX, THREADS, numbers};
use crate::modules::Launch;
use crate::programs::{Program, Source};

/// Elements that a block updates, and most updates of a launch: those of `adamw.cu`.
const ADAMW_TILE: u64 = 4096;
const ADAMW_SPANS: usize = 64;

/// The form of GELU as kernels take it.
pub(crate) fn form(gelu: Gelu) -> u32 {
    match gelu {
        Gelu::Tanh => 0,
        Gelu::Erf => 1,
    }
}

/// The activation of a gate as kernels take it.
fn gate(gate: Gate) -> u32 {
    match gate {
        Gate::Gelu(gelu) => form(gelu),
        Gate::Silu => 2,
    }
}

/// A dropout as kernels take it: the smallest random number whose element is kept, and 1 / (1 - p).
pub(crate) fn kept(dropout: Dropout) -> (u64, f32) {
    let p = f64::from(dropout.p);
    ((p * 4_294_967_296.0).round() as u64, (1.0 / (1.0 - p)) as f32)
}

/// The numbers of an AdamW step as f32, rounded once from f64 as PyTorch does: keep, blend1, beta2, blend2, step size, root of
/// the second correction, eps.
fn factors(step: AdamW) -> [f32; 7] {
    let (lr, beta1, beta2) = (f64::from(step.lr), f64::from(step.beta1), f64::from(step.beta2));
    let power = |beta: f64| beta.powf(step.step as f64);
    [
        (1.0 - lr * f64::from(step.weight_decay)) as f32,
        (1.0 - beta1) as f32,
        step.beta2,
        (1.0 - beta2) as f32,
        (lr / (1.0 - power(beta1))) as f32,
        (1.0 - power(beta2)).sqrt() as f32,
        step.eps,
    ]
}

/// A step of AdamW as a span.
pub(super) fn adamw_span(o: &AdamWUpdate) -> Span {
    let rounded = o.rounded.as_ref();
    let program = Program::of(Source::AdamW, o.g.dtype())
        .with_other(rounded.map_or(DType::F32, |rounded| rounded.dtype()));
    let [keep, shared @ ..] = factors(o.step);
    let arguments = std::iter::once(o.gradient_scale.number()).chain(shared.map(Argument::number)).collect();
    let (n, [m, v]) = (o.p.elements(), &o.moments);
    let words = Vec::from(numbers![&o.p, o.g, m, v, rounded, n, keep.number() << 32]);
    let kernel = Shared { program, kernel: "adamw", threads: THREADS, spans_max: ADAMW_SPANS, arguments };
    Span { shared: kernel, words, blocks: (n as u64).div_ceil(ADAMW_TILE) }
}

impl Issue<'_> {
    pub(super) fn elementwise(&mut self, operation: Elementwise) -> Result<(), Error> {
        let f64s = Program::of_f64(Source::ElementwiseF64);
        match operation {
            Elementwise::Fill(o) if o.x.dtype() == DType::F64 => {
                let n = o.x.elements();
                self.over_fours(f64s, "fill_f64", n, numbers![&o.x, n, o.value])
            }
            Elementwise::Fill(o) => {
                let (n, program) = (o.x.elements(), Program::of(Source::Elementwise, o.x.dtype()));
                self.over_fours(program, "fill", n, numbers![&o.x, n, o.value])
            }
            Elementwise::Copy(o) => {
                self.copy(o.from, &o.to);
                Ok(())
            }
            Elementwise::Multiply(o) => {
                let (n, program) = (o.x.elements(), Program::of(Source::Elementwise, o.x.dtype()));
                self.over_fours(program, "multiply", n, numbers![&o.x, n, o.factor])
            }
            Elementwise::CopyColumns(o) => {
                let ([rows, columns], program) =
                    (o.extents(), Program::of(Source::Elementwise, o.to.dtype()));
                let [from_row, to_row] = [o.from.shape(), o.to.shape()].map(|shape| shape.rows_cols()[1]);
                let n = rows * columns;
                let from = o.from.range(o.from_first..o.from.elements());
                let to = o.to.as_view().range(o.to_first..o.to.elements());
                self.over_fours(program, "copy_columns", n, numbers![from, from_row, to, to_row, columns, n])
            }
            Elementwise::Convert(o) if o.from.dtype() == o.to.dtype() => {
                self.copy(o.from, &o.to);
                Ok(())
            }
            Elementwise::Convert(o) => {
                let program = Program::of(Source::Elementwise, o.from.dtype()).with_other(o.to.dtype());
                let n = o.to.elements();
                self.over_fours(program, "convert", n, numbers![o.from, &o.to, n])
            }
            Elementwise::Dequantise(o) => {
                let kernel = if o.from.dtype() == DType::Nf4 { "dequantise_nf4" } else { "dequantise_q8_0" };
                let (n, program) = (o.to.elements(), Program::of(Source::Blocks, o.to.dtype()));
                self.over_fours(program, kernel, n, numbers![o.from, &o.to, n])
            }
            Elementwise::Add(o) if o.into.dtype() == DType::F64 => {
                let n = o.into.elements();
                self.over_fours(f64s, "add_f64", n, numbers![o.from, &o.into, n])
            }
            Elementwise::Add(o) => {
                let program = Program::of(Source::Elementwise, o.from.dtype()).with_other(o.into.dtype());
                let n = o.into.elements();
                self.over_fours(program, "add", n, numbers![o.from, &o.into, n])
            }
            Elementwise::Scaled(o) => {
                let one =
                    Launch { program: f64s, kernel: "scaled", grid: [1, 1], threads: 1, shared_bytes: 0 };
                self.launch(one, numbers![o.x, o.scale, &o.out])
            }
        }
    }

    pub(super) fn activation(&mut self, operation: Activations) -> Result<(), Error> {
        match operation {
            Activations::GeluForward(o) => {
                let (program, n) = (Program::of(Source::Gelu, o.x.dtype()), o.x.elements());
                self.over_fours(program, "gelu", n, numbers![o.x, &o.y, n, form(o.gelu)])
            }
            Activations::GeluBackward(o) => {
                let [rows, columns] = o.x.shape().rows_cols();
                let blocks = RowBlocks::new(rows, columns, 1);
                let partial = self.scratch(blocks.bytes())?;
                let arguments = numbers![o.x, &o.dy, partial, rows, columns, blocks.grain, form(o.gelu)];
                self.over_blocks(
                    Program::of(Source::Gelu, o.x.dtype()),
                    "gelu_backward",
                    &blocks,
                    arguments,
                )?;
                self.add_blocks(&blocks, [o.db.as_ref()], o.accumulate, partial, o.x.dtype())
            }
            Activations::TanhForward(o) => {
                let (program, n) = (Program::of(Source::Tanh, o.x.dtype()), o.x.elements());
                self.over_fours(program, "tanh_forward", n, numbers![o.x, &o.y, n])
            }
            Activations::TanhBackward(o) => {
                let (program, n) = (Program::of(Source::Tanh, o.y.dtype()), o.y.elements());
                self.over_fours(program, "tanh_backward", n, numbers![o.y, &o.dy, n])
            }
            Activations::Gated(o) => {
                let [rows, columns] = o.y.shape().rows_cols();
                let arguments = numbers![o.x, &o.y, rows, columns, gate(o.gate)];
                self.over_gates("gated", o.x.dtype(), [rows, columns], arguments)
            }
            Activations::GatedBackward(o) => {
                let [rows, columns] = o.dy.shape().rows_cols();
                let arguments = numbers![&o.x, o.dy, rows, columns, gate(o.gate)];
                self.over_gates("gated_backward", o.dy.dtype(), [rows, columns], arguments)
            }
            Activations::DropoutForward(o) => {
                let program = Program::of(Source::Dropout, o.from.dtype());
                let (n, (kept_min, factor)) = (o.to.elements(), kept(o.dropout));
                let (key, first, [_, columns]) = (o.dropout.key, o.dropout.first, o.from.shape().rows_cols());
                let row = if o.row == 0 { columns } else { o.row };
                let arguments =
                    numbers![o.from, o.residual, &o.to, n, key, kept_min, factor, first, columns, row];
                self.over_fours(program, "dropout", n, arguments)
            }
        }
    }

    /// Launches a kernel of which a thread computes 16 bytes of columns of one row, or of several.
    fn over_gates(
        &self,
        kernel: &'static str,
        dtype: DType,
        [rows, columns]: [usize; 2],
        arguments: &[u64],
    ) -> Result<(), Error> {
        let of_block = 16 / dtype.bytes() as u64 * u64::from(THREADS);
        let grid = [(columns as u64).div_ceil(of_block), (rows as u64).min(ROWS_MAX)];
        let program = Program::of(Source::Gated, dtype);
        self.launch(Launch { program, kernel, grid, threads: THREADS, shared_bytes: 0 }, arguments)
    }

    pub(super) fn optimizer(&mut self, operation: Optimizers) -> Result<(), Error> {
        match operation {
            Optimizers::AdamWUpdate(_) => unreachable!("every step of AdamW is gathered"),
            Optimizers::SgdUpdate(o) => self.sgd(o),
        }
    }

    fn sgd(&mut self, o: SgdUpdate) -> Result<(), Error> {
        let rounded = o.rounded.as_ref();
        let program = Program::of(Source::Sgd, o.g.dtype())
            .with_other(rounded.map_or(DType::F32, |rounded| rounded.dtype()));
        let (n, step) = (o.p.elements(), o.step);
        let arguments = numbers![
            &o.p,
            o.g,
            &o.velocity,
            o.gradient_scale,
            rounded,
            n,
            step.lr,
            step.momentum,
            step.weight_decay,
            step.first
        ];
        self.over_fours(program, "sgd", n, arguments)
    }
}
