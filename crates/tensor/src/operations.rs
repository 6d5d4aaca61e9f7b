//! What a device computes.
//!
//! Every operation is checked and priced here once, for all devices: shapes, element types, then the
//! flops (of matrix products) and bytes (read and written at least) go to the trace when there is one,
//! then the kernels of the device run. Element types are those of [`kernels`](crate::kernels): one compute type
//! a call, gradients of parameters in f32 or in it. Those at the two ends of a language model, where tokens come
//! in, are in [`vocabulary`](crate::vocabulary).

use phalanx_trace::{DType, Stream};

use crate::buffer::{Element, View, ViewMut};
use crate::device::{Device, NORM_BLOCK};
use crate::kernels::{AdamW, Clip, Dropout, Epilogue, Gelu, Heads, Layout, Sgd, Weight};

impl Device {
    /// Host elements into device memory.
    #[track_caller]
    pub fn upload<T: Element>(&self, from: &[T], to: ViewMut) {
        assert_eq!((T::DTYPE, from.len()), (to.dtype(), to.elements()), "upload into {to:?}");
        let bytes = to.bytes();
        self.follow_write(&to, false);
        self.run_on(Stream::ToDevice, "upload", 0, bytes, |k| k.upload(bytemuck::cast_slice(from), to));
    }

    /// Device memory into host elements, after everything that was enqueued before.
    #[track_caller]
    pub fn download<T: Element>(&self, from: View, to: &mut [T]) {
        assert_eq!((T::DTYPE, to.len()), (from.dtype(), from.elements()), "download from {from:?}");
        let bytes = from.bytes();
        self.run_on(Stream::ToHost, "download", 0, bytes, |k| k.download(from, bytemuck::cast_slice_mut(to)));
    }

    /// One number, late. Zero on `Meta`.
    #[track_caller]
    pub fn fetch(&self, from: View) -> f32 {
        self.follow_fetch(from);
        let mut out = [0f32];
        self.download(from, &mut out);
        out[0]
    }

    /// Every element becomes `value`.
    pub fn fill(&self, x: ViewMut, value: f32) {
        self.follow_write(&x, value == 0.0);
        self.run("fill", 0, x.bytes(), |k| k.fill(x, value));
    }

    /// `to = from`; same dtype and number of elements.
    #[track_caller]
    pub fn copy(&self, from: View, to: ViewMut) {
        assert_eq!((from.dtype(), from.elements()), (to.dtype(), to.elements()));
        self.follow_copy(from, &to);
        self.run("copy", 0, 2 * to.bytes(), |k| k.copy(from, to));
    }

    /// `to = from`, rounded to nearest even; any two of f32, bf16 and f16.
    #[track_caller]
    pub fn convert(&self, from: View, to: ViewMut) {
        assert_eq!(from.elements(), to.elements());
        floats([from.dtype(), to.dtype()]);
        self.follow_copy(from, &to);
        self.run("convert", 0, from.bytes() + to.bytes(), |k| k.convert(from, to));
    }

    /// `into += from`; any two of f32, bf16 and f16, or both f64.
    #[track_caller]
    pub fn add(&self, from: View, into: ViewMut) {
        assert_eq!(from.elements(), into.elements());
        if into.dtype() == DType::F64 {
            assert_eq!(from.dtype(), DType::F64);
        } else {
            floats([from.dtype(), into.dtype()]);
        }
        self.follow_add(from, &into);
        self.run("add", 0, from.bytes() + 2 * into.bytes(), |k| k.add(from, into));
    }

    /// `y = x · w (+ bias) (+ residual)`; x `[.., in]`, w `[in, out]` by its layout, y, residual
    /// `[.., out]`, bias `[out]`. y is overwritten.
    #[track_caller]
    pub fn linear(&self, x: View, w: Weight, epilogue: Epilogue, y: ViewMut) {
        let Epilogue { bias, residual } = epilogue;
        let (flops, bytes) = check_linear(x, w, bias, &y);
        assert!(residual.is_none_or(|r| r.elements() == y.elements()), "residual {residual:?} for {y:?}");
        assert!(residual.is_none_or(|r| r.dtype() == y.dtype()), "residual {residual:?} for {y:?}");
        let bytes = bytes + residual.map_or(0, |r| r.bytes());
        self.follow_linear(x, w, epilogue, &y);
        self.run("linear", flops, bytes, |k| k.linear(x, w, epilogue, y));
    }

    /// `pre = x · w + bias`, `y = gelu(pre)` (see [`Device::gelu`]); shapes as of [`Device::linear`], both
    /// overwritten. y is the GELU of `pre` as it is stored, so it can be made again.
    #[track_caller]
    pub fn linear_gelu(&self, x: View, w: Weight, bias: View, gelu: Gelu, pre: ViewMut, y: ViewMut) {
        let (flops, bytes) = check_linear(x, w, Some(bias), &y);
        assert_eq!((pre.elements(), pre.dtype()), (y.elements(), y.dtype()), "{pre:?} for {y:?}");
        self.follow_linear_gelu(x, w, bias, &pre, &y);
        self.run("linear_gelu", flops, bytes + pre.bytes(), |k| k.linear_gelu(x, w, bias, gelu, pre, y));
    }

    /// `dx (+)= dy · wᵀ`; dy `[.., out]`, dx `[.., in]`.
    #[track_caller]
    pub fn linear_input_gradient(&self, dy: View, w: Weight, dx: ViewMut, accumulate: bool) {
        let [rows, out] = dy.shape().rows_cols();
        let [inner, w_out] = w.in_out();
        assert_eq!((w_out, [rows, inner]), (out, dx.shape().rows_cols()), "dx of {dy:?} · {w:?} -> {dx:?}");
        same(&[dy.dtype(), w.matrix.dtype(), dx.dtype()]);
        let bytes = dy.bytes() + w.matrix.bytes() + dx.bytes() * (1 + accumulate as usize);
        let flops = 2 * rows * inner * out;
        self.follow_linear_input_gradient(dy, w, &dx, accumulate);
        self.run("linear_input_gradient", flops, bytes, |k| k.linear_input_gradient(dy, w, dx, accumulate));
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
        same(&[x.dtype(), dy.dtype()]);
        gradient(&dw, x.dtype());
        let bytes = x.bytes() + dy.bytes() + dw.bytes() * (1 + accumulate as usize);
        let flops = 2 * rows * inner * out;
        self.follow_linear_weight_gradient(x, dy, &dw, layout, accumulate);
        self.run("linear_weight_gradient", flops, bytes, |k| {
            k.linear_weight_gradient(x, dy, dw, layout, accumulate)
        });
    }

    /// `db (+)= sum over rows of dy`; dy `[.., out]`, db `[out]`.
    #[track_caller]
    pub fn bias_gradient(&self, dy: View, db: ViewMut, accumulate: bool) {
        assert_eq!(dy.shape().rows_cols()[1], db.elements());
        gradient(&db, dy.dtype());
        self.follow_bias_gradient(dy, &db, accumulate);
        self.run("bias_gradient", 0, dy.bytes(), |k| k.bias_gradient(dy, db, accumulate));
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
        same(&[x.dtype(), gamma.dtype(), beta.dtype(), y.dtype()]);
        same(&[DType::F32, mean.dtype(), rstd.dtype()]);
        let bytes = x.bytes() + y.bytes();
        self.follow_layer_norm(x, [gamma, beta], &y, [&mean, &rstd]);
        self.run("layer_norm", 0, bytes, |k| k.layer_norm(x, gamma, beta, eps, y, mean, rstd));
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
        same(&[x.dtype(), gamma.dtype(), dy.dtype(), dx.dtype()]);
        same(&[DType::F32, mean.dtype(), rstd.dtype()]);
        same(&[dgamma.dtype(), dbeta.dtype()]);
        gradient(&dgamma, x.dtype());
        let bytes = x.bytes() + dy.bytes() + dx.bytes() * (1 + accumulate_input as usize);
        let (input, parameters) = ((&dx, accumulate_input), ([&dgamma, &dbeta], accumulate_parameters));
        self.follow_layer_norm_backward([x, gamma, mean, rstd, dy], input, parameters);
        self.run("layer_norm_backward", 0, bytes, |k| {
            k.layer_norm_backward(
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
            )
        });
    }

    /// `y = gelu(x)`, overwrites.
    #[track_caller]
    pub fn gelu(&self, x: View, gelu: Gelu, y: ViewMut) {
        assert_eq!(x.elements(), y.elements());
        same(&[x.dtype(), y.dtype()]);
        self.follow_gelu(x, &y);
        self.run("gelu", 0, x.bytes() + y.bytes(), |k| k.gelu(x, gelu, y));
    }

    /// In place: `dy` becomes `dx = dy * gelu'(x)`; `db (+)= sum over rows of dx`, before it is rounded.
    /// x, dy `[.., width]`, db `[width]`.
    #[track_caller]
    pub fn gelu_backward(&self, x: View, gelu: Gelu, dy: ViewMut, db: ViewMut, accumulate: bool) {
        let [_, width] = x.shape().rows_cols();
        assert_eq!((x.elements(), width), (dy.elements(), db.elements()));
        same(&[x.dtype(), dy.dtype()]);
        gradient(&db, x.dtype());
        let bytes = x.bytes() + 2 * dy.bytes();
        self.follow_gelu_backward(x, &dy, &db, accumulate);
        self.run("gelu_backward", 0, bytes, |k| k.gelu_backward(x, gelu, dy, db, accumulate));
    }

    /// Dropout (Srivastava et al., 2014): `to = from` over 1 - p where it is kept, else 0, `(+ residual)`;
    /// `to` is overwritten. Its own backward.
    #[track_caller]
    pub fn dropout(&self, from: View, dropout: Dropout, residual: Option<View>, to: ViewMut) {
        assert_eq!((from.elements(), from.dtype()), (to.elements(), to.dtype()));
        assert!(residual.is_none_or(|r| (r.elements(), r.dtype()) == (to.elements(), to.dtype())));
        assert!((0.0..1.0).contains(&dropout.p), "{dropout:?}");
        let bytes = from.bytes() + to.bytes() + residual.map_or(0, |r| r.bytes());
        self.follow_dropout(from, residual, &to);
        self.run("dropout", 0, bytes, |k| k.dropout(from, dropout, residual, to));
    }

    /// Attention in tiles (Dao et al., arXiv 2205.14135): no `[seq, seq]` matrix is stored. qkv
    /// `[batch, seq, 3*hidden]`, out `[batch, seq, hidden]`, log_sum_exp `[batch, heads, seq]` f32.
    #[track_caller]
    pub fn attention(
        &self,
        qkv: View,
        heads: Heads,
        dropout: Option<Dropout>,
        out: ViewMut,
        log_sum_exp: ViewMut,
    ) {
        let flops = 2 * attention_product_flops(qkv, heads, [out.elements(), log_sum_exp.elements()]);
        same(&[qkv.dtype(), out.dtype()]);
        same(&[DType::F32, log_sum_exp.dtype()]);
        let bytes = qkv.bytes() + out.bytes() + log_sum_exp.bytes();
        self.follow_attention(qkv, &out, &log_sum_exp);
        self.run("attention", flops, bytes, |k| k.attention(qkv, heads, dropout, out, log_sum_exp));
    }

    /// dqkv is overwritten; probabilities are computed again from the row statistics, and dropped again.
    #[track_caller]
    pub fn attention_backward(
        &self,
        qkv: View,
        [out, log_sum_exp, dout]: [View; 3],
        heads: Heads,
        dropout: Option<Dropout>,
        dqkv: ViewMut,
    ) {
        let flops = 5 * attention_product_flops(qkv, heads, [out.elements(), log_sum_exp.elements()]);
        assert_eq!([dqkv.elements(), dout.elements()], [qkv.elements(), out.elements()]);
        same(&[qkv.dtype(), out.dtype(), dout.dtype(), dqkv.dtype()]);
        same(&[DType::F32, log_sum_exp.dtype()]);
        let bytes = 2 * qkv.bytes() + 2 * out.bytes() + log_sum_exp.bytes();
        self.follow_attention_backward(qkv, [out, log_sum_exp, dout], &dqkv);
        self.run("attention_backward", flops, bytes, |k| {
            k.attention_backward(qkv, out, log_sum_exp, dout, heads, dropout, dqkv)
        });
    }

    /// One AdamW step over flat ranges of equal length; the gradient is multiplied by `gradient_scale`
    /// `[1]` first. `rounded`: a copy of the new parameters in another type, overwritten.
    #[track_caller]
    pub fn adamw(
        &self,
        step: AdamW,
        p: ViewMut,
        g: View,
        m: ViewMut,
        v: ViewMut,
        gradient_scale: View,
        rounded: Option<ViewMut>,
    ) {
        assert_eq!([g.elements(), m.elements(), v.elements()], [p.elements(); 3]);
        check_update(&p, g, gradient_scale, rounded.as_ref());
        same(&[p.dtype(), m.dtype(), v.dtype()]);
        let bytes = 6 * p.bytes() + g.bytes() + rounded.as_ref().map_or(0, |r| r.bytes());
        self.follow_update("adamw", &p, g, rounded.as_ref());
        self.run("adamw", 0, bytes, |k| k.adamw(step, p, g, m, v, gradient_scale, rounded));
    }

    /// One SGD step over flat ranges of equal length; the gradient is multiplied by `gradient_scale`
    /// `[1]` first. `rounded` as in [`Device::adamw`].
    #[track_caller]
    pub fn sgd(
        &self,
        step: Sgd,
        p: ViewMut,
        g: View,
        velocity: ViewMut,
        gradient_scale: View,
        rounded: Option<ViewMut>,
    ) {
        assert_eq!([g.elements(), velocity.elements()], [p.elements(); 2]);
        check_update(&p, g, gradient_scale, rounded.as_ref());
        same(&[p.dtype(), velocity.dtype()]);
        let bytes = 4 * p.bytes() + g.bytes() + rounded.as_ref().map_or(0, |r| r.bytes());
        self.follow_update("sgd", &p, g, rounded.as_ref());
        self.run("sgd", 0, bytes, |k| k.sgd(step, p, g, velocity, gradient_scale, rounded));
    }

    /// Sums of squares of blocks of [`NORM_BLOCK`] elements, in f64; the last block may be short. Not finite
    /// where an element is not.
    #[track_caller]
    pub fn block_squares(&self, x: View, squares: ViewMut) {
        assert_eq!((squares.dtype(), squares.elements()), (DType::F64, x.elements().div_ceil(NORM_BLOCK)));
        self.follow_block_squares(x, &squares);
        self.run("block_squares", 0, x.bytes(), |k| k.block_squares(x, squares));
    }

    /// `out[0]` = sum of x, both f64, along a fixed balanced tree: that of [`Device::norm`].
    #[track_caller]
    pub fn tree_sum(&self, x: View, out: ViewMut) {
        assert_eq!((x.dtype(), out.dtype(), out.elements()), (DType::F64, DType::F64, 1));
        self.follow_tree_sum(x, &out);
        self.run("tree_sum", 0, x.bytes(), |k| k.tree_sum(x, out));
    }

    /// `out[0] = x[0] * scale`, rounded once; x f64, out f32.
    #[track_caller]
    pub fn scaled(&self, x: View, scale: f32, out: ViewMut) {
        assert_eq!([x.dtype(), out.dtype()], [DType::F64, DType::F32]);
        assert_eq!([x.elements(), out.elements()], [1, 1]);
        self.follow_scaled(x, &out);
        self.run("scaled", 0, x.bytes() + out.bytes(), |k| k.scaled(x, scale, out));
    }

    /// `norm[0]` = root of the sum of `squares` (f64) along a fixed balanced tree, over the loss scale;
    /// `factor[0]` = `min(1, max_norm / (norm + 1e-6))`, or 1 when `max_norm` is 0, over the loss scale.
    #[track_caller]
    pub fn norm(&self, squares: View, clip: Clip, norm: ViewMut, factor: ViewMut) {
        assert_eq!((squares.dtype(), norm.elements(), factor.elements()), (DType::F64, 1, 1));
        self.follow_norm(squares, &norm, &factor);
        self.run("norm", 0, squares.bytes(), |k| k.norm(squares, clip, norm, factor));
    }

    /// `count[0]` = elements of `x` that are infinite or not a number; x f32, bf16 or f16.
    #[track_caller]
    pub fn count_non_finite(&self, x: View, count: ViewMut) {
        assert_eq!((count.dtype(), count.elements()), (DType::F32, 1));
        self.follow_count(&count);
        self.run("count_non_finite", 0, x.bytes(), |k| k.count_non_finite(x, count));
    }
}

#[track_caller]
pub(crate) fn floats(dtypes: [DType; 2]) {
    let float = |d: &DType| matches!(d, DType::F32 | DType::BF16 | DType::F16);
    assert!(dtypes.iter().all(float), "expected f32, bf16 or f16, got {dtypes:?}");
}

#[track_caller]
pub(crate) fn same(dtypes: &[DType]) {
    assert!(dtypes.iter().all(|d| *d == dtypes[0]), "expected one element type, got {dtypes:?}");
}

/// A gradient of parameters: f32, or the compute type.
#[track_caller]
pub(crate) fn gradient(dw: &ViewMut, compute: DType) {
    assert!([DType::F32, compute].contains(&dw.dtype()), "gradient {dw:?} of a computation in {compute:?}");
}

/// Flops and bytes of a linear layer without residual.
#[track_caller]
fn check_linear(x: View, w: Weight, bias: Option<View>, y: &ViewMut) -> (usize, usize) {
    let [rows, inner] = x.shape().rows_cols();
    let [w_in, out] = w.in_out();
    assert_eq!((w_in, [rows, out]), (inner, y.shape().rows_cols()), "linear {x:?} · {w:?} -> {y:?}");
    assert!(bias.is_none_or(|b| b.elements() == out), "bias {bias:?} for {out} outputs");
    assert!(bias.is_none_or(|b| b.dtype() == y.dtype()), "bias {bias:?} for {y:?}");
    same(&[x.dtype(), w.matrix.dtype(), y.dtype()]);
    (2 * rows * inner * out, x.bytes() + w.matrix.bytes() + y.bytes())
}

#[track_caller]
fn check_update(p: &ViewMut, g: View, gradient_scale: View, rounded: Option<&ViewMut>) {
    same(&[DType::F32, p.dtype(), gradient_scale.dtype()]);
    floats([p.dtype(), g.dtype()]);
    assert_eq!(gradient_scale.elements(), 1);
    assert!(rounded.is_none_or(|r| r.elements() == p.elements()), "{rounded:?} of {p:?}");
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
