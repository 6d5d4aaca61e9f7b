//! A device: memory, kernels, and the record of what was asked of them.
//!
//! Every operation is checked and priced here once, for all devices: shapes, element types, then the
//! flops (of matrix products) and bytes (read and written at least) go to the trace when there is one,
//! then the kernels of the device run. Callers (layers, optimizers) see only this type.

use std::sync::Arc;

use phalanx_trace::{Category, DType, Event, Site, Stream, Trace};

use crate::arena::Arena;
use crate::buffer::{Element, Tensor, View, ViewMut};
use crate::kernels::{AdamW, CrossEntropyGradients, Heads, Kernels, Layout, Sgd, Weight};
use crate::meta::Meta;
use crate::record::Recorder;
use crate::shape::Shape;

/// Elements of one block of a norm; parameters start at multiples of it in every layout.
pub const NORM_BLOCK: usize = phalanx_plan::BLOCK as usize;

/// Handle of a device; cheap to clone.
#[derive(Clone)]
pub struct Device {
    kernels: Arc<dyn Kernels>,
    arena: Arc<Arena>,
    recorder: Option<Arc<Recorder>>,
}

impl Device {
    /// A device that computes with `kernels` in the memory of `arena`.
    pub fn new(kernels: Arc<dyn Kernels>, arena: Arc<Arena>) -> Device {
        Device { kernels, arena, recorder: None }
    }

    /// A device that only records, standing in for one of `threads` threads.
    pub fn meta(threads: usize) -> Device {
        let recorder = Arc::new(Recorder::default());
        let arena = Arena::recording(Arc::clone(&recorder));
        Device { kernels: Arc::new(Meta { threads }), arena, recorder: Some(recorder) }
    }

    /// The device's memory.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Where a dry run writes; groups add their collectives to it.
    pub fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.recorder.as_ref()
    }

    /// Whether nothing is computed here.
    pub fn is_meta(&self) -> bool {
        self.recorder.is_some()
    }

    /// `cpu` or `meta`.
    pub fn name(&self) -> &'static str {
        self.kernels.name()
    }

    /// Threads that one kernel uses.
    pub fn threads(&self) -> usize {
        self.kernels.threads()
    }

    /// The trace so far, as that of `rank`; empty on a device that computes.
    pub fn take_trace(&self, rank: usize) -> Trace {
        self.recorder.as_ref().map_or(Trace { rank, phases: Vec::new() }, |r| r.take(rank))
    }

    /// Runs `f` as one phase of the plan.
    pub fn phase<T>(&self, name: &'static str, f: impl FnOnce() -> T) -> T {
        self.arena.begin(name);
        let out = f();
        self.arena.end();
        out
    }

    /// As [`Device::phase`], for work that can fail. A phase that failed is not held against its plan; none
    /// may follow it.
    ///
    /// # Errors
    /// Those of `f`.
    pub fn try_phase<T, E>(&self, name: &'static str, f: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        self.arena.begin(name);
        let out = f()?;
        self.arena.end();
        Ok(out)
    }

    /// Memory for a tensor. Its contents are whatever was there before.
    #[track_caller]
    pub fn alloc(
        &self,
        dtype: DType,
        shape: impl Into<Shape>,
        category: Category,
        name: &'static str,
    ) -> Tensor {
        self.arena.alloc(dtype, shape.into(), category, name, Site::caller())
    }

    fn record(&self, name: &'static str, flops: usize, bytes: usize) {
        self.record_on(Stream::Compute, name, flops, bytes);
    }

    fn record_on(&self, stream: Stream, name: &'static str, flops: usize, bytes: usize) {
        if let Some(recorder) = &self.recorder {
            recorder.push(Event::Kernel { name, flops: flops as u64, bytes: bytes as u64, stream });
        }
    }

    /// Notes that `chunk` is needed from here on.
    pub fn record_use(&self, chunk: usize) {
        if let Some(recorder) = &self.recorder {
            recorder.push(Event::Use { chunk: chunk as u32 });
        }
    }

    /// Host elements into device memory.
    #[track_caller]
    pub fn upload<T: Element>(&self, from: &[T], to: ViewMut) {
        assert_eq!((T::DTYPE, from.len()), (to.dtype(), to.elements()), "upload into {to:?}");
        self.record_on(Stream::ToDevice, "upload", 0, to.bytes());
        self.kernels.upload(bytemuck::cast_slice(from), to);
    }

    /// Device memory into host elements, after everything that was enqueued before.
    #[track_caller]
    pub fn download<T: Element>(&self, from: View, to: &mut [T]) {
        assert_eq!((T::DTYPE, to.len()), (from.dtype(), from.elements()), "download from {from:?}");
        self.record_on(Stream::ToHost, "download", 0, from.bytes());
        self.kernels.download(from, bytemuck::cast_slice_mut(to));
    }

    /// One number, late. Zero on `Meta`.
    #[track_caller]
    pub fn fetch(&self, from: View) -> f32 {
        let mut out = [0f32];
        self.download(from, &mut out);
        out[0]
    }

    /// Every element becomes `value`.
    pub fn fill(&self, x: ViewMut, value: f32) {
        self.record("fill", 0, x.bytes());
        self.kernels.fill(x, value);
    }

    /// `to = from`; same dtype and number of elements.
    #[track_caller]
    pub fn copy(&self, from: View, to: ViewMut) {
        assert_eq!((from.dtype(), from.elements()), (to.dtype(), to.elements()));
        self.record("copy", 0, 2 * to.bytes());
        self.kernels.copy(from, to);
    }

    /// `into += from`; same dtype and number of elements.
    #[track_caller]
    pub fn add(&self, from: View, into: ViewMut) {
        assert_eq!((from.dtype(), from.elements()), (into.dtype(), into.elements()));
        self.record("add", 0, 3 * into.bytes());
        self.kernels.add(from, into);
    }

    /// `y = x · w (+ bias) (+ residual)`; x `[.., in]`, w `[in, out]` by its layout, y, residual
    /// `[.., out]`, bias `[out]`. y is overwritten.
    #[track_caller]
    pub fn linear(&self, x: View, w: Weight, bias: Option<View>, residual: Option<View>, y: ViewMut) {
        let [rows, inner] = x.shape().rows_cols();
        let [w_in, out] = w.in_out();
        assert_eq!((w_in, [rows, out]), (inner, y.shape().rows_cols()), "linear {x:?} · {w:?} -> {y:?}");
        assert!(bias.is_none_or(|b| b.elements() == out), "bias {bias:?} for {out} outputs");
        assert!(residual.is_none_or(|r| r.elements() == rows * out), "residual {residual:?} for {y:?}");
        let bytes = x.bytes() + w.matrix.bytes() + y.bytes() + residual.map_or(0, |r| r.bytes());
        self.record("linear", 2 * rows * inner * out, bytes);
        self.kernels.linear(x, w, bias, residual, y);
    }

    /// `dx (+)= dy · wᵀ`; dy `[.., out]`, dx `[.., in]`.
    #[track_caller]
    pub fn linear_input_gradient(&self, dy: View, w: Weight, dx: ViewMut, accumulate: bool) {
        let [rows, out] = dy.shape().rows_cols();
        let [inner, w_out] = w.in_out();
        assert_eq!((w_out, [rows, inner]), (out, dx.shape().rows_cols()), "dx of {dy:?} · {w:?} -> {dx:?}");
        let bytes = dy.bytes() + w.matrix.bytes() + dx.bytes() * (1 + accumulate as usize);
        self.record("linear_input_gradient", 2 * rows * inner * out, bytes);
        self.kernels.linear_input_gradient(dy, w, dx, accumulate);
    }

    /// `dw (+)= xᵀ · dy`; x `[.., in]`, dy `[.., out]`, dw in the layout given.
    #[track_caller]
    pub fn linear_weight_gradient(&self, x: View, dy: View, dw: ViewMut, layout: Layout, accumulate: bool) {
        let [rows, inner] = x.shape().rows_cols();
        let [dy_rows, out] = dy.shape().rows_cols();
        let expected = match layout {
            Layout::InOut => [inner, out],
            Layout::OutIn => [out, inner],
        };
        assert_eq!((dy_rows, dw.dims()), (rows, expected), "dw of {x:?}, {dy:?} -> {dw:?}");
        let bytes = x.bytes() + dy.bytes() + dw.bytes() * (1 + accumulate as usize);
        self.record("linear_weight_gradient", 2 * rows * inner * out, bytes);
        self.kernels.linear_weight_gradient(x, dy, dw, layout, accumulate);
    }

    /// `db (+)= sum over rows of dy`; dy `[.., out]`, db `[out]`.
    #[track_caller]
    pub fn bias_gradient(&self, dy: View, db: ViewMut, accumulate: bool) {
        assert_eq!(dy.shape().rows_cols()[1], db.elements());
        self.record("bias_gradient", 0, dy.bytes() + db.bytes());
        self.kernels.bias_gradient(dy, db, accumulate);
    }

    /// Layer norm over the last dimension (Ba et al., arXiv 1607.06450). x, y `[.., hidden]`, gamma, beta
    /// `[hidden]`; mean, rstd `[rows]` are kept for backward.
    #[track_caller]
    pub fn layer_norm(
        &self,
        x: View,
        [gamma, beta]: [View; 2],
        eps: f32,
        y: ViewMut,
        [mean, rstd]: [ViewMut; 2],
    ) {
        let [rows, hidden] = x.shape().rows_cols();
        assert_eq!([gamma.elements(), beta.elements()], [hidden; 2], "layer_norm of {x:?}");
        assert_eq!([y.elements(), mean.elements(), rstd.elements()], [x.elements(), rows, rows]);
        self.record("layer_norm", 0, x.bytes() + y.bytes());
        self.kernels.layer_norm(x, gamma, beta, eps, y, mean, rstd);
    }

    /// dx (+)= by `accumulate_input`; dgamma, dbeta (+)= by `accumulate_parameters`.
    #[track_caller]
    pub fn layer_norm_backward(
        &self,
        x: View,
        gamma: View,
        [mean, rstd]: [View; 2],
        dy: View,
        dx: ViewMut,
        accumulate_input: bool,
        [dgamma, dbeta]: [ViewMut; 2],
        accumulate_parameters: bool,
    ) {
        let [rows, hidden] = x.shape().rows_cols();
        assert_eq!([gamma.elements(), dgamma.elements(), dbeta.elements()], [hidden; 3]);
        assert_eq!([dy.elements(), dx.elements()], [x.elements(); 2]);
        assert_eq!([mean.elements(), rstd.elements()], [rows; 2]);
        self.record(
            "layer_norm_backward",
            0,
            x.bytes() + dy.bytes() + dx.bytes() * (1 + accumulate_input as usize),
        );
        self.kernels.layer_norm_backward(
            x,
            gamma,
            mean,
            rstd,
            dy,
            dx,
            accumulate_input,
            dgamma,
            dbeta,
            accumulate_parameters,
        );
    }

    /// GELU, tanh form (Hendrycks and Gimpel, arXiv 1606.08415; `gelu_new` in transformers).
    #[track_caller]
    pub fn gelu(&self, x: View, y: ViewMut) {
        assert_eq!(x.elements(), y.elements());
        self.record("gelu", 0, x.bytes() + y.bytes());
        self.kernels.gelu(x, y);
    }

    /// In place: `dy` becomes `dx = dy * gelu'(x)`.
    #[track_caller]
    pub fn gelu_backward(&self, x: View, dy: ViewMut) {
        assert_eq!(x.elements(), dy.elements());
        self.record("gelu_backward", 0, x.bytes() + 2 * dy.bytes());
        self.kernels.gelu_backward(x, dy);
    }

    /// Attention in tiles (Dao et al., arXiv 2205.14135): no `[seq, seq]` matrix is stored. qkv
    /// `[batch, seq, 3*hidden]`, out `[batch, seq, hidden]`, log_sum_exp `[batch, heads, seq]`.
    #[track_caller]
    pub fn attention(&self, qkv: View, heads: Heads, out: ViewMut, log_sum_exp: ViewMut) {
        let flops = 2 * attention_product_flops(qkv, heads, [out.elements(), log_sum_exp.elements()]);
        self.record("attention", flops, qkv.bytes() + out.bytes() + log_sum_exp.bytes());
        self.kernels.attention(qkv, heads, out, log_sum_exp);
    }

    /// dqkv is overwritten; probabilities are computed again from the row statistics.
    #[track_caller]
    pub fn attention_backward(
        &self,
        qkv: View,
        [out, log_sum_exp, dout]: [View; 3],
        heads: Heads,
        dqkv: ViewMut,
    ) {
        let flops = 5 * attention_product_flops(qkv, heads, [out.elements(), log_sum_exp.elements()]);
        assert_eq!([dqkv.elements(), dout.elements()], [qkv.elements(), out.elements()]);
        self.record("attention_backward", flops, 2 * qkv.bytes() + 2 * out.bytes() + log_sum_exp.bytes());
        self.kernels.attention_backward(qkv, out, log_sum_exp, dout, heads, dqkv);
    }

    /// `y = table[tokens] + positions`; tokens `[batch, seq]` u32, table `[vocab, hidden]`, positions
    /// `[at least seq, hidden]`, y `[batch, seq, hidden]`.
    #[track_caller]
    pub fn embedding(&self, tokens: View, table: View, positions: View, y: ViewMut) {
        check_embedding(tokens, table.dims(), positions.dims(), y.dims());
        self.record("embedding", 0, 2 * y.bytes());
        self.kernels.embedding(tokens, table, positions, y);
    }

    /// dtable (+)= and dpositions (+)= as `accumulate` says, in that order.
    #[track_caller]
    pub fn embedding_backward(
        &self,
        tokens: View,
        dy: View,
        dtable: ViewMut,
        dpositions: ViewMut,
        accumulate: [bool; 2],
    ) {
        check_embedding(tokens, dtable.dims(), dpositions.dims(), dy.dims());
        self.record("embedding_backward", 0, 3 * dy.bytes());
        self.kernels.embedding_backward(tokens, dy, dtable, dpositions, accumulate);
    }

    /// `loss[0] = scale * sum of cross entropies` (overwrites) of `softmax(x · w)`, and its derivatives
    /// (times `scale`) when asked for. The logits exist only as slices in `logits` `[slice, vocab]`
    /// (Liger Kernel's fused linear cross entropy). x `[.., hidden]`, targets `[rows]` u32, loss `[1]`.
    #[track_caller]
    pub fn linear_cross_entropy(
        &self,
        x: View,
        w: Weight,
        targets: View,
        scale: f32,
        logits: ViewMut,
        loss: ViewMut,
        gradients: Option<CrossEntropyGradients>,
    ) {
        let [rows, hidden] = x.shape().rows_cols();
        let [w_in, vocab] = w.in_out();
        assert_eq!((w_in, targets.elements(), loss.elements()), (hidden, rows, 1));
        assert_eq!((logits.dims::<2>()[1], targets.dtype()), (vocab, DType::U32));
        let products = 1 + 2 * gradients.is_some() as usize;
        if let Some(g) = &gradients {
            assert_eq!((g.dx.elements(), g.dw.elements()), (x.elements(), w.matrix.elements()));
        }
        let slices = rows.div_ceil(logits.dims::<2>()[0]);
        let bytes = products * (x.bytes() + slices * w.matrix.bytes());
        self.record("linear_cross_entropy", products * 2 * rows * hidden * vocab, bytes);
        self.kernels.linear_cross_entropy(x, w, targets, scale, logits, loss, gradients);
    }

    /// One AdamW step over flat ranges of equal length; the gradient is multiplied by `gradient_scale`
    /// `[1]` first.
    #[track_caller]
    pub fn adamw(&self, step: AdamW, p: ViewMut, g: View, m: ViewMut, v: ViewMut, gradient_scale: View) {
        assert_eq!([g.elements(), m.elements(), v.elements()], [p.elements(); 3]);
        assert_eq!(gradient_scale.elements(), 1);
        self.record("adamw", 0, 7 * p.bytes());
        self.kernels.adamw(step, p, g, m, v, gradient_scale);
    }

    /// One SGD step over flat ranges of equal length; the gradient is multiplied by `gradient_scale`
    /// `[1]` first.
    #[track_caller]
    pub fn sgd(&self, step: Sgd, p: ViewMut, g: View, velocity: ViewMut, gradient_scale: View) {
        assert_eq!([g.elements(), velocity.elements()], [p.elements(); 2]);
        assert_eq!(gradient_scale.elements(), 1);
        self.record("sgd", 0, 5 * p.bytes());
        self.kernels.sgd(step, p, g, velocity, gradient_scale);
    }

    /// Sums of squares of blocks of [`NORM_BLOCK`] elements, in f64; the last block may be short.
    #[track_caller]
    pub fn block_squares(&self, x: View, squares: ViewMut) {
        assert_eq!((squares.dtype(), squares.elements()), (DType::F64, x.elements().div_ceil(NORM_BLOCK)));
        self.record("block_squares", 0, x.bytes());
        self.kernels.block_squares(x, squares);
    }

    /// `norm[0]` = root of the sum of `squares` (f64) along a fixed balanced tree; `factor[0]` =
    /// `min(1, max_norm / (norm + 1e-6))`, or 1 when `max_norm` is 0.
    #[track_caller]
    pub fn norm(&self, squares: View, max_norm: f32, norm: ViewMut, factor: ViewMut) {
        assert_eq!((squares.dtype(), norm.elements(), factor.elements()), (DType::F64, 1, 1));
        self.record("norm", 0, squares.bytes());
        self.kernels.norm(squares, max_norm, norm, factor);
    }
}

/// Flops of one of the matrix products of an attention; half of them under a causal mask.
#[track_caller]
fn attention_product_flops(qkv: View, heads: Heads, [out, log_sum_exp]: [usize; 2]) -> usize {
    let [batch, seq, hidden3] = qkv.dims();
    let hidden = hidden3 / 3;
    assert!(hidden3 == 3 * hidden && hidden % heads.heads == 0, "{hidden3} for {heads:?}");
    assert_eq!([out, log_sum_exp], [batch * seq * hidden, batch * heads.heads * seq]);
    2 * batch * seq * seq * hidden / (1 + heads.causal as usize)
}

#[track_caller]
fn check_embedding(tokens: View, table: [usize; 2], positions: [usize; 2], y: [usize; 3]) {
    let [batch, seq] = tokens.dims();
    assert_eq!((y, tokens.dtype()), ([batch, seq, table[1]], DType::U32));
    assert!(positions[0] >= seq && positions[1] == table[1], "positions {positions:?} for {y:?}");
}
