//! The device that computes on the host processor.
//!
//! Each file holds one operation. Three rules keep results the same for any number of threads: work is cut into
//! tasks by shapes alone; an element is computed by one task; a sum over tasks goes through partial sums
//! of fixed pieces, which are added in a fixed order.

mod adamw;
mod attention;
mod attention_backward;
mod attention_dots;
mod attention_pack;
mod attention_softmax;
mod attention_tiles;
mod bias;
mod cross_entropy;
mod dropout;
mod elementwise;
mod embedding;
mod embedding_backward;
mod epilogue;
mod float;
mod gelu;
mod layer_norm;
mod matmul;
mod matrix;
mod microkernel;
mod non_finite;
mod norm;
mod packing;
pub mod peak;
pub mod pool;
mod random;
mod resident;
mod scratch;
mod sgd;
mod shards;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use phalanx_simd::Isa;
use phalanx_tensor::buffer::{View, ViewMut};
use phalanx_tensor::kernels::{
    AdamW, Clip, CrossEntropy, Dropout, Epilogue, Gelu, Heads, Kernels, Layout, Lookup, Positions, Sgd,
    Weight,
};
use pool::Pool;
use scratch::Scratch;
use shards::Shards;

/// How a [`Cpu`] computes.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Number of threads, including the caller's.
    pub threads: usize,
    /// Instruction set; at most what the processor has.
    pub isa: Isa,
    /// How long an idle worker spins before it sleeps.
    pub spin: Duration,
}

impl Options {
    /// Options for `threads` threads and the best instruction set of this processor.
    pub fn new(threads: usize) -> Options {
        Options { threads, isa: Isa::detect(), spin: Duration::from_micros(50) }
    }
}

/// The processor as a device. Each rank has its own, with its own threads.
pub struct Cpu {
    pool: Pool,
    isa: Isa,
    scratch: Scratch,
}

impl Cpu {
    /// A device with `threads` threads, including the caller's: for one thread, and for tests.
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
        let pool = Pool::new(options.threads, options.spin)?;
        Ok(Arc::new(Cpu { pool, isa, scratch: Scratch::default() }))
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

/// Elements that one elementwise task computes: 64 KiB of f32, a few microseconds.
const GRAIN: usize = 16 * 1024;

/// Rows that one task computes, when a row has `columns` elements.
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
        elementwise::fill(self, x, value);
    }

    fn copy(&self, from: View, to: ViewMut) {
        elementwise::copy(self, elementwise::bytes(&from), elementwise::bytes_mut(to));
    }

    fn convert(&self, from: View, to: ViewMut) {
        elementwise::convert(self, from, to);
    }

    fn add(&self, from: View, into: ViewMut) {
        elementwise::add(self, from, into);
    }

    fn linear(&self, x: View, w: Weight, epilogue: Epilogue, y: ViewMut) {
        matmul::linear(self, x, w, epilogue, y);
    }

    fn linear_gelu(&self, x: View, w: Weight, bias: View, gelu: Gelu, pre: ViewMut, y: ViewMut) {
        matmul::linear_gelu(self, x, w, bias, gelu, pre, y);
    }

    fn linear_input_gradient(&self, dy: View, w: Weight, dx: ViewMut, accumulate: bool) {
        matmul::linear_input_gradient(self, dy, w, dx, accumulate);
    }

    fn linear_weight_gradient(&self, x: View, dy: View, dw: ViewMut, layout: Layout, accumulate: bool) {
        matmul::linear_weight_gradient(self, x, dy, dw, layout, accumulate);
    }

    fn bias_gradient(&self, dy: View, db: ViewMut, accumulate: bool) {
        bias::bias_gradient(self, dy, db, accumulate);
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
        layer_norm::layer_norm(self, x, [gamma, beta], eps, y, [mean, rstd]);
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
            layer_norm::SavedLayerNorm { x, gamma, mean, rstd },
            dy,
            dx,
            accumulate_input,
            [dgamma, dbeta],
            accumulate_parameters,
        );
    }

    fn gelu(&self, x: View, gelu: Gelu, y: ViewMut) {
        gelu::gelu(self, x, gelu, y);
    }

    fn gelu_backward(&self, x: View, gelu: Gelu, dy: ViewMut, db: ViewMut, accumulate: bool) {
        gelu::gelu_backward(self, x, gelu, dy, db, accumulate);
    }

    fn dropout(&self, from: View, dropout: Dropout, residual: Option<View>, to: ViewMut) {
        dropout::dropout(self, from, dropout, residual, to);
    }

    fn attention(
        &self,
        qkv: View,
        heads: Heads,
        dropout: Option<Dropout>,
        out: ViewMut,
        log_sum_exp: ViewMut,
    ) {
        let shape = attention::Extents::new(qkv.dims(), heads, dropout);
        attention::attention(self, shape, qkv, dropout, out, log_sum_exp);
    }

    fn attention_backward(
        &self,
        qkv: View,
        out: View,
        log_sum_exp: View,
        dout: View,
        heads: Heads,
        dropout: Option<Dropout>,
        dqkv: ViewMut,
    ) {
        let shape = attention::Extents::new(qkv.dims(), heads, dropout);
        let saved = attention_backward::SavedAttention { qkv, out, log_sum_exp, dropout };
        attention_backward::attention_backward(self, shape, saved, dout, dqkv);
    }

    fn embedding(
        &self,
        ids: View,
        lookup: Lookup,
        table: View,
        positions: Option<Positions>,
        accumulate: bool,
        y: ViewMut,
    ) {
        embedding::embedding(self, ids, lookup, table, positions, accumulate, y);
    }

    fn add_positions(&self, positions: Positions, y: ViewMut) {
        embedding::add_positions(self, positions, y);
    }

    fn embedding_backward(&self, ids: View, lookup: Lookup, dy: View, dtable: ViewMut, accumulate: bool) {
        embedding_backward::embedding_backward(self, ids, lookup, dy, dtable, accumulate);
    }

    fn position_gradient(
        &self,
        dy: View,
        first_row: usize,
        seq: usize,
        dpositions: ViewMut,
        accumulate: bool,
    ) {
        embedding_backward::position_gradient(self, dy, first_row, seq, dpositions, accumulate);
    }

    fn vocabulary_statistics(
        &self,
        x: View,
        w: Weight,
        bias: Option<View>,
        targets: View,
        first: usize,
        exponentials: Option<ViewMut>,
        blocks: ViewMut,
        statistics: ViewMut,
    ) {
        let targets = cross_entropy::Targets { ids: targets.as_slice(), first };
        let outputs = cross_entropy::Outputs { exponentials, blocks, statistics };
        cross_entropy::statistics(self, x, w, bias, targets, outputs);
    }

    fn logits_statistics(
        &self,
        logits: ViewMut,
        targets: View,
        first: usize,
        blocks: ViewMut,
        statistics: ViewMut,
    ) {
        let targets = cross_entropy::Targets { ids: targets.as_slice(), first };
        cross_entropy::statistics_of_stored(self, logits, targets, blocks, statistics);
    }

    fn vocabulary_loss(
        &self,
        statistics: View,
        blocks: View,
        targets: View,
        first: usize,
        classes: usize,
        numbers: CrossEntropy,
        exponentials: Option<ViewMut>,
        loss: ViewMut,
        accumulate: bool,
    ) {
        let targets = cross_entropy::Targets { ids: targets.as_slice(), first };
        let loss = &mut loss.into_slice::<f64>()[0];
        let before = if accumulate { *loss } else { 0.0 };
        let rows = cross_entropy::LossRows { statistics: statistics.as_slice(), targets, classes, numbers };
        *loss = cross_entropy::loss(self, rows, blocks, exponentials, before);
    }

    fn scaled(&self, x: View, scale: f32, out: ViewMut) {
        out.into_slice::<f32>()[0] = (x.as_slice::<f64>()[0] * f64::from(scale)) as f32;
    }

    fn adamw(
        &self,
        step: AdamW,
        p: ViewMut,
        g: View,
        m: ViewMut,
        v: ViewMut,
        gradient_scale: View,
        rounded: Option<ViewMut>,
    ) {
        let scale = gradient_scale.as_slice::<f32>()[0];
        adamw::adamw(self, step, p, g, [m, v], scale, rounded);
    }

    fn sgd(
        &self,
        step: Sgd,
        p: ViewMut,
        g: View,
        velocity: ViewMut,
        gradient_scale: View,
        rounded: Option<ViewMut>,
    ) {
        let scale = gradient_scale.as_slice::<f32>()[0];
        sgd::sgd(self, step, p, g, velocity, scale, rounded);
    }

    fn block_squares(&self, x: View, squares: ViewMut) {
        norm::block_squares(self, x, squares);
    }

    fn tree_sum(&self, x: View, out: ViewMut) {
        out.into_slice::<f64>()[0] = norm::tree_sum(x.as_slice());
    }

    fn norm(&self, squares: View, clip: Clip, norm: ViewMut, factor: ViewMut) {
        let (value, clip) = norm::norm(squares.as_slice(), clip);
        norm.into_slice::<f32>()[0] = value;
        factor.into_slice::<f32>()[0] = clip;
    }

    fn count_non_finite(&self, x: View, count: ViewMut) {
        count.into_slice::<f32>()[0] = non_finite::count_non_finite(self, x) as f32;
    }
}
