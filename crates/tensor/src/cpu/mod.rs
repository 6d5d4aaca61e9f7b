//! The device that computes here.
//!
//! One operation a file. Three rules keep results the same for any number of threads: work is cut into
//! tasks by shapes alone; an element is computed by one task; a sum over tasks goes through partial sums
//! of fixed pieces, which are added in a fixed order.

mod adamw;
mod attention;
mod attention_backward;
mod bias;
mod cross_entropy;
mod elementwise;
mod embedding;
mod epilogue;
mod gelu;
mod lanes;
mod layer_norm;
mod matmul;
mod microkernel;
mod norm;
mod number;
mod packing;
pub mod peak;
pub mod pool;
mod scratch;
mod sgd;
mod shards;
pub mod simd;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use phalanx_trace::DType;

use crate::buffer::{View, ViewMut};
use crate::kernels::{
    AdamW, Clip, CrossEntropy, CrossEntropyGradients, Dropout, Epilogue, Heads, Kernels, Layout, Sgd, Weight,
};
use pool::Pool;
use scratch::Scratch;
use shards::Shards;
use simd::Isa;

/// How a [`Cpu`] computes.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads in all, the caller's included.
    pub threads: usize,
    /// Instruction set; at most what the processor has.
    pub isa: Isa,
    /// How long an idle worker spins before it sleeps.
    pub spin: Duration,
}

impl Options {
    /// `threads` threads and the best of this processor.
    pub fn new(threads: usize) -> Options {
        Options { threads, isa: Isa::detect(), spin: Duration::from_micros(50) }
    }
}

/// See the module's head. One rank owns one; its threads are its own.
pub struct Cpu {
    pool: Pool,
    isa: Isa,
    scratch: Scratch,
}

impl Cpu {
    /// With `threads` threads in all, the caller's included.
    pub fn new(threads: usize) -> Arc<Cpu> {
        Cpu::with_options(Options::new(threads))
    }

    /// With everything said.
    pub fn with_options(options: Options) -> Arc<Cpu> {
        let isa = options.isa.limit(Isa::detect());
        Arc::new(Cpu { pool: Pool::new(options.threads, options.spin), isa, scratch: Scratch::default() })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Cuts `0..len` into pieces of `grain` (the last may be short) and runs `task` on each.
    fn over(&self, len: usize, grain: usize, task: impl Fn(Range<usize>) + Sync) {
        let grain = grain.max(1);
        self.pool.run(len.div_ceil(grain), &|i| task(i * grain..len.min((i + 1) * grain)));
    }

    /// [`Cpu::over`] for a slice that each task writes its piece of.
    fn over_mut<T: Send>(&self, x: &mut [T], grain: usize, task: impl Fn(Range<usize>, &mut [T]) + Sync) {
        let shards = Shards::new(x);
        self.over(shards.len(), grain, |range| {
            // SAFETY: `over` hands out each range once, and they are disjoint.
            task(range.clone(), unsafe { shards.piece(range) });
        });
    }
}

/// Elements of an elementwise task: 64 KiB of f32, a few microseconds.
const GRAIN: usize = 16 * 1024;

/// Rows of a task whose rows have `columns` elements.
fn row_grain(columns: usize) -> usize {
    (GRAIN / columns.max(1)).max(1)
}

impl Kernels for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn upload(&self, from: &[u8], to: ViewMut) {
        elementwise::copy(self, from, elementwise::bytes_mut(to));
    }

    fn download(&self, from: View, to: &mut [u8]) {
        elementwise::copy(self, elementwise::bytes(&from), to);
    }

    fn fill(&self, x: ViewMut, value: f32) {
        match x.dtype() {
            DType::F64 => elementwise::fill(self, x.into_slice(), f64::from(value)),
            _ => elementwise::fill(self, x.into_slice(), value),
        }
    }

    fn copy(&self, from: View, to: ViewMut) {
        elementwise::copy(self, elementwise::bytes(&from), elementwise::bytes_mut(to));
    }

    fn convert(&self, _from: View, _to: ViewMut) {
        todo!()
    }

    fn add(&self, from: View, into: ViewMut) {
        match into.dtype() {
            DType::F64 => elementwise::add::<f64>(self, from.as_slice(), into.into_slice()),
            _ => elementwise::add::<f32>(self, from.as_slice(), into.into_slice()),
        }
    }

    fn linear(&self, x: View, w: Weight, epilogue: Epilogue, y: ViewMut) {
        matmul::linear(self, x, w, epilogue, y);
    }

    fn linear_gelu(&self, x: View, w: Weight, bias: View, pre: ViewMut, y: ViewMut) {
        matmul::linear_gelu(self, x, w, bias, pre, y);
    }

    fn linear_input_gradient(&self, dy: View, w: Weight, dx: ViewMut, accumulate: bool) {
        matmul::linear_input_gradient(self, dy, w, dx, accumulate);
    }

    fn linear_weight_gradient(&self, x: View, dy: View, dw: ViewMut, layout: Layout, accumulate: bool) {
        matmul::linear_weight_gradient(self, x, dy, dw, layout, accumulate);
    }

    fn bias_gradient(&self, dy: View, db: ViewMut, accumulate: bool) {
        bias::bias_gradient(self, dy.as_slice(), db.into_slice(), accumulate);
    }

    fn layer_norm(
        &self,
        x: View,
        gamma: View,
        beta: View,
        eps: f32,
        y: ViewMut,
        mean: ViewMut,
        rstd: ViewMut,
    ) {
        let parameters = [gamma.as_slice(), beta.as_slice()];
        let statistics = [mean.into_slice(), rstd.into_slice()];
        layer_norm::layer_norm(self, x.as_slice(), parameters, eps, y.into_slice(), statistics);
    }

    fn layer_norm_backward(
        &self,
        x: View,
        gamma: View,
        mean: View,
        rstd: View,
        dy: View,
        dx: ViewMut,
        accumulate_input: bool,
        dgamma: ViewMut,
        dbeta: ViewMut,
        accumulate_parameters: bool,
    ) {
        layer_norm::layer_norm_backward(
            self,
            layer_norm::Saved {
                x: x.as_slice(),
                gamma: gamma.as_slice(),
                mean: mean.as_slice(),
                rstd: rstd.as_slice(),
            },
            dy.as_slice(),
            dx.into_slice(),
            accumulate_input,
            [dgamma.into_slice(), dbeta.into_slice()],
            accumulate_parameters,
        );
    }

    fn gelu(&self, x: View, y: ViewMut) {
        gelu::gelu(self, x.as_slice(), y.into_slice());
    }

    fn gelu_backward(&self, x: View, mut dy: ViewMut, db: ViewMut, accumulate: bool) {
        gelu::gelu_backward(self, x.as_slice(), dy.reborrow().into_slice());
        bias::bias_gradient(self, dy.as_view().as_slice(), db.into_slice(), accumulate);
    }

    fn dropout(&self, _from: View, _dropout: Dropout, _residual: Option<View>, _to: ViewMut) {
        todo!()
    }

    fn attention(
        &self,
        qkv: View,
        heads: Heads,
        _dropout: Option<Dropout>,
        out: ViewMut,
        log_sum_exp: ViewMut,
    ) {
        let shape = attention::Extents::new(qkv.dims(), heads);
        attention::attention(self, shape, qkv.as_slice(), out.into_slice(), log_sum_exp.into_slice());
    }

    fn attention_backward(
        &self,
        qkv: View,
        out: View,
        log_sum_exp: View,
        dout: View,
        heads: Heads,
        _dropout: Option<Dropout>,
        dqkv: ViewMut,
    ) {
        let shape = attention::Extents::new(qkv.dims(), heads);
        let saved = attention_backward::Saved {
            qkv: qkv.as_slice(),
            out: out.as_slice(),
            log_sum_exp: log_sum_exp.as_slice(),
        };
        attention_backward::attention_backward(self, shape, saved, dout.as_slice(), dqkv.into_slice());
    }

    fn embedding(&self, tokens: View, table: View, positions: View, y: ViewMut) {
        let [_, seq, hidden] = y.dims();
        let tables = [table.as_slice(), positions.as_slice()];
        embedding::embedding(self, [seq, hidden], tokens.as_slice(), tables, y.into_slice());
    }

    fn embedding_backward(
        &self,
        tokens: View,
        dy: View,
        dtable: ViewMut,
        dpositions: ViewMut,
        accumulate: [bool; 2],
    ) {
        let [_, seq, hidden] = dy.dims();
        let [add_table, add_positions] = accumulate;
        embedding::table_gradient(
            self,
            hidden,
            tokens.as_slice(),
            dy.as_slice(),
            dtable.into_slice(),
            add_table,
        );
        embedding::position_gradient(
            self,
            [seq, hidden],
            dy.as_slice(),
            dpositions.into_slice(),
            add_positions,
        );
    }

    fn linear_cross_entropy(
        &self,
        x: View,
        w: Weight,
        targets: View,
        numbers: CrossEntropy,
        logits: ViewMut,
        loss: ViewMut,
        gradients: Option<CrossEntropyGradients>,
    ) {
        cross_entropy::linear_cross_entropy(self, x, w, targets.as_slice(), numbers, logits, loss, gradients);
    }

    fn adamw(
        &self,
        step: AdamW,
        p: ViewMut,
        g: View,
        m: ViewMut,
        v: ViewMut,
        gradient_scale: View,
        _rounded: Option<ViewMut>,
    ) {
        let scale = gradient_scale.as_slice::<f32>()[0];
        adamw::adamw(self, step, p.into_slice(), g.as_slice(), m.into_slice(), v.into_slice(), scale);
    }

    fn sgd(
        &self,
        step: Sgd,
        p: ViewMut,
        g: View,
        velocity: ViewMut,
        gradient_scale: View,
        _rounded: Option<ViewMut>,
    ) {
        let scale = gradient_scale.as_slice::<f32>()[0];
        sgd::sgd(self, step, p.into_slice(), g.as_slice(), velocity.into_slice(), scale);
    }

    fn block_squares(&self, x: View, squares: ViewMut) {
        norm::block_squares(self, x.as_slice(), squares.into_slice());
    }

    fn norm(&self, squares: View, clip: Clip, norm: ViewMut, factor: ViewMut) {
        let (value, clip) = norm::norm(squares.as_slice(), clip.max_norm);
        norm.into_slice::<f32>()[0] = value;
        factor.into_slice::<f32>()[0] = clip;
    }

    fn count_non_finite(&self, _x: View, _count: ViewMut) {
        todo!()
    }
}
