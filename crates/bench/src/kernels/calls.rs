//! Every kernel of a GPT-2 step, called at the shapes of the step, and those of decoders with rotary positions and gates beside them.

use phalanx_tensor::blocks::{BLOCK, quantised};
use phalanx_tensor::operations::{
    Fold, InputGradient, MaxPool, MaxPoolBackward, Relu, ReluBackward, Unfold, WeightGradient,
};
use phalanx_tensor::{
    AdamW, AdamWUpdate, Category, CrossEntropy, DType, Device, Dropout, Epilogue, Gate, Gelu, Heads,
    LayerNormBackward, Layout, Lookup, NORM_BLOCK, Patches, Positions, Rotary, RotaryScaling, RowPositions,
    Sgd, SgdUpdate, Tensor, View, ViewMut, VocabularyLoss, VocabularyStatistics, Weight, logits_stride,
    vocabulary_blocks,
};

use super::Setting;

/// A callback that gets a kernel's name, the size it is called with, and a closure that calls it. Whatever else the
/// closure does must not be counted.
pub type Visit<'a> = &'a mut dyn FnMut(&'static str, String, &mut dyn FnMut());

/// Elements that are made on the host, and repeated.
const PATTERN: usize = 1 << 20;

/// All tensors, named as in a step. Those of `dtype` are what a forward or backward reads and writes; gradients
/// of parameters, optimizer states and statistics of rows are f32.
pub struct Calls {
    device: Device,
    setting: Setting,
    /// `[rows, 4 * hidden]`
    wide: [Tensor; 3],
    /// `[rows, hidden]`
    narrow: [Tensor; 4],
    /// `[batch, seq, 3 * hidden]`
    qkv: [Tensor; 2],
    /// `[4 * hidden * hidden]`
    weight: Tensor,
    weight_gradient: Tensor,
    /// `[4 * hidden * hidden]`, rounded up to whole blocks, in 8 and in 4 bits.
    quantised: [Tensor; 2],
    /// The same numbers.
    dequantised: Tensor,
    /// `[4 * hidden]`
    vectors: [Tensor; 2],
    vector_gradients: [Tensor; 2],
    /// `[rows]`
    row_statistics: [Tensor; 2],
    /// `[batch, heads, seq]`
    log_sum_exp: Tensor,
    /// `[vocab, hidden]`
    table: Tensor,
    table_gradient: Tensor,
    master: Tensor,
    states: [Tensor; 2],
    /// A copy of the master in 16 bits.
    rounded: Tensor,
    /// `[seq, hidden]`
    positions: Tensor,
    position_gradient: Tensor,
    /// `[slice, vocab]`
    logits: Tensor,
    /// Statistics of blocks of logits, and of rows.
    logit_statistics: [Tensor; 2],
    tokens: Tensor,
    one: Tensor,
    sum: Tensor,
    squares: Tensor,
}

impl Calls {
    /// Takes the memory and fills it; on `Meta` as on a device that computes.
    pub fn new(device: &Device, setting: Setting, dtype: DType, slice: usize) -> Calls {
        let Setting { batch, seq, hidden, heads, vocab } = setting;
        let rows = batch * seq;
        let pattern: Vec<f32> = (0..PATTERN).map(|i| (i * 7919 % 2003) as f32 / 1e3 - 1.0).collect();
        let alloc = |dtype, shape: &[usize]| device.alloc(dtype, shape, Category::Workspace, "bench");
        let mut staging = alloc(DType::F32, &[PATTERN]);
        device.upload(&pattern, staging.view_mut());
        let tensor = |dtype: DType, shape: &[usize]| {
            let mut tensor = alloc(dtype, shape);
            spread(device, staging.view(), tensor.view_mut());
            tensor
        };
        let (compute, float) =
            (|shape: &[usize]| tensor(dtype, shape), |shape: &[usize]| tensor(DType::F32, shape));
        let ids: Vec<u32> = (0..rows).map(|i| (i * 7919 % vocab) as u32).collect();
        let mut tokens = alloc(DType::U32, &[batch, seq]);
        device.upload(&ids, tokens.view_mut());
        let mut states = [(); 2].map(|()| float(&[vocab, hidden]));
        // No mean of squares is below zero.
        device.fill(states[1].view_mut(), 0.5);
        let blocks = (4 * hidden * hidden).div_ceil(BLOCK);
        let half = if dtype == DType::F32 { DType::BF16 } else { dtype };
        Calls {
            device: device.clone(),
            setting,
            wide: [(); 3].map(|()| compute(&[rows, 4 * hidden])),
            narrow: [(); 4].map(|()| compute(&[rows, hidden])),
            qkv: [(); 2].map(|()| compute(&[batch, seq, 3 * hidden])),
            weight: compute(&[4 * hidden * hidden]),
            weight_gradient: float(&[4 * hidden * hidden]),
            quantised: [DType::Q8_0, DType::Nf4].map(|kind| {
                let words = quantised(kind, &pattern[..BLOCK]).repeat(blocks);
                let mut tensor = alloc(kind, &[blocks * BLOCK]);
                device.upload(&words, tensor.view_mut().typed(DType::U32));
                tensor
            }),
            dequantised: alloc(dtype, &[blocks * BLOCK]),
            vectors: [(); 2].map(|()| compute(&[4 * hidden])),
            vector_gradients: [(); 2].map(|()| float(&[4 * hidden])),
            row_statistics: [(); 2].map(|()| float(&[rows])),
            log_sum_exp: float(&[batch, heads, seq]),
            table: compute(&[vocab, hidden]),
            table_gradient: float(&[vocab, hidden]),
            master: float(&[vocab, hidden]),
            states,
            rounded: alloc(half, &[vocab, hidden]),
            positions: compute(&[seq, hidden]),
            position_gradient: float(&[seq, hidden]),
            logits: compute(&[slice, logits_stride(vocab)]),
            logit_statistics: [4 * vocabulary_blocks(vocab), 4].map(|columns| float(&[slice, columns])),
            tokens,
            one: float(&[1]),
            sum: alloc(DType::F64, &[1]),
            squares: alloc(DType::F64, &[(vocab * hidden).div_ceil(NORM_BLOCK)]),
        }
    }

    /// Visits all of them, in the order of a step.
    pub fn each(&mut self, visit: Visit) {
        self.embedding(visit);
        self.linear(visit);
        self.dequantise(visit);
        self.gelu(visit);
        self.gated(visit);
        self.images(visit);
        self.layer_norm(visit);
        self.attention(visit);
        self.pointwise(visit);
        self.head(visit);
        self.loss(visit);
        self.optimizer(visit);
    }

    fn rows(&self) -> usize {
        self.setting.batch * self.setting.seq
    }

    fn embedding(&mut self, visit: Visit) {
        let Setting { batch, seq, hidden, vocab, .. } = self.setting;
        let device = &self.device;
        let rows = format!("{}x{hidden}", batch * seq);
        let size = format!("{rows}, {vocab} ids");
        let (tokens, lookup) = (self.tokens.view(), Lookup::whole(vocab));
        let y = &mut self.narrow[0];
        let positions = Positions { table: self.positions.view(), first_row: 0, seq };
        visit("embedding", size.clone(), &mut || {
            device.embedding(tokens, lookup, self.table.view(), Some(positions), false, y.view_mut());
        });
        visit("embedding_backward", size, &mut || {
            // The head has written its part of a tied table before.
            device.embedding_backward(tokens, lookup, y.view(), self.table_gradient.view_mut(), true);
        });
        visit("position_gradient", rows, &mut || {
            device.position_gradient(y.view(), 0, seq, self.position_gradient.view_mut(), false);
        });
    }

    fn linear(&mut self, visit: Visit) {
        let (h, rows) = (self.setting.hidden, self.rows());
        let device = &self.device;
        let [x, dy, _] = &mut self.wide;
        for (inner, out, adds) in [(h, 3 * h, false), (h, h, true), (h, 4 * h, false), (4 * h, h, true)] {
            let size = format!("{rows}x{inner} -> {out}");
            let mut x = x.view_mut().range(0..rows * inner).reshape([rows, inner]);
            let mut dy = dy.view_mut().range(0..rows * out).reshape([rows, out]);
            let mut dw = self.weight_gradient.view_mut().range(0..inner * out).reshape([inner, out]);
            let layout = Layout::InOut;
            let w = Weight { matrix: self.weight.view().range(0..inner * out).reshape([inner, out]), layout };
            let bias = Some(self.vectors[0].view().range(0..out));
            let residual = adds.then(|| self.narrow[0].view());
            visit("linear", size.clone(), &mut || {
                device.linear(x.as_view(), w, Epilogue { bias, residual }, dy.reborrow());
            });
            visit("linear_input_gradient", format!("{rows}x{out} -> {inner}"), &mut || {
                device.linear_input_gradient(dy.as_view(), w, x.reborrow(), false);
            });
            visit("linear_weight_gradient", size, &mut || {
                device.linear_weight_gradient(x.as_view(), dy.as_view(), dw.reborrow(), layout, false);
            });
        }
        // That of the wide layer comes with its GELU.
        let db = &mut self.vector_gradients[0];
        for out in [3 * h, h] {
            let dy = dy.view().range(0..rows * out).reshape([rows, out]);
            visit("bias_gradient", format!("{rows}x{out}"), &mut || {
                device.bias_gradient(dy, db.view_mut().range(0..out), false);
            });
        }
    }

    /// A frozen weight in blocks, as a product of `linear` needs it.
    fn dequantise(&mut self, visit: Visit) {
        for kept in &self.quantised {
            let size = format!("{}, {}", kept.dtype().name(), kept.view().elements());
            visit("dequantise", size, &mut || {
                self.device.dequantise(kept.view(), self.dequantised.view_mut());
            });
        }
    }

    fn gelu(&mut self, visit: Visit) {
        let (h, rows) = (self.setting.hidden, self.rows());
        let device = &self.device;
        let [pre, y, dy] = &mut self.wide;
        let w = Weight { matrix: self.weight.view().reshape([h, 4 * h]), layout: Layout::InOut };
        let (x, bias) = (self.narrow[0].view(), self.vectors[0].view());
        visit("linear_gelu", format!("{rows}x{h} -> {}", 4 * h), &mut || {
            device.linear_gelu(x, w, Some(bias), Gelu::Tanh, pre.view_mut(), y.view_mut());
        });
        let size = format!("{rows}x{}", 4 * h);
        for (form, name) in [(Gelu::Tanh, ""), (Gelu::Erf, ", erf")] {
            let size = format!("{size}{name}");
            visit("gelu", size, &mut || device.gelu(pre.view(), form, y.view_mut()));
        }
        let db = &mut self.vector_gradients[0];
        visit("gelu_backward", size, &mut || {
            // In place: a gradient that goes through it again and again would vanish.
            device.copy(dy.view(), y.view_mut());
            device.gelu_backward(pre.view(), Gelu::Tanh, y.view_mut(), Some(db.view_mut()), false);
        });
    }

    /// Gate and up of twice the width of the model, which are together as wide as an MLP of GPT-2.
    fn gated(&mut self, visit: Visit) {
        let (columns, rows) = (2 * self.setting.hidden, self.rows());
        let device = &self.device;
        let [x, y, kept] = &mut self.wide;
        let mut y = y.view_mut().range(0..rows * columns).reshape([rows, columns]);
        let size = format!("{rows}x{columns}");
        visit("gated", size.clone(), &mut || device.gated(x.view(), Gate::Silu, y.reborrow()));
        visit("gated_backward", size, &mut || {
            // In place: a gradient that goes through it again and again would vanish.
            device.copy(kept.view(), x.view_mut());
            device.gated_backward(x.view_mut(), Gate::Silu, y.as_view());
        });
    }

    /// Sequences as images of one row, and patches of three pixels.
    fn images(&mut self, visit: Visit) {
        let Setting { batch, seq, hidden, .. } = self.setting;
        let patches = Patches { image: [1, seq], kernel: [1, 3], stride: [1, 1], padding: [0, 1] };
        let (device, size) = (&self.device, format!("{batch}x{seq}x{hidden}, 3"));
        let [x, y, ..] = self.narrow.each_mut().map(|x| x.view_mut().reshape([batch, seq, hidden]));
        let ([rows, dy], mut y) = (&mut self.qkv, y);
        visit("relu", size.clone(), &mut || device.run(Relu { x: y.reborrow() }));
        visit("relu_backward", size.clone(), &mut || {
            device.run(ReluBackward { y: x.as_view(), dy: y.reborrow() });
        });
        visit("unfold", size.clone(), &mut || {
            device.run(Unfold { x: x.as_view(), patches, y: rows.view_mut() });
        });
        visit("fold", size.clone(), &mut || device.run(Fold { x: rows.view(), patches, y: y.reborrow() }));
        visit("max_pool", size.clone(), &mut || {
            device.run(MaxPool { x: x.as_view(), patches, y: y.reborrow() });
        });
        let dy = dy.view().range(0..batch * seq * hidden).reshape([batch, seq, hidden]);
        visit("max_pool_backward", size, &mut || {
            device.run(MaxPoolBackward { x: x.as_view(), patches, dy, dx: y.reborrow() });
        });
    }

    fn layer_norm(&mut self, visit: Visit) {
        let (h, rows) = (self.setting.hidden, self.rows());
        let device = &self.device;
        let size = format!("{rows}x{h}");
        let [x, y, dy, dx] = &mut self.narrow;
        let [mean, rstd] = &mut self.row_statistics;
        let [gamma, beta] = self.vectors.each_ref().map(|vector| vector.view().range(0..h));
        visit("layer_norm", size.clone(), &mut || {
            let statistics = (Some(mean.view_mut()), rstd.view_mut());
            device.layer_norm(x.view(), (gamma, Some(beta)), 1e-5, y.view_mut(), statistics);
        });
        let (mean, rstd) = (Some(mean.view()), rstd.view());
        let gradients = &mut self.vector_gradients;
        visit("layer_norm_backward", size, &mut || {
            let gradients = gradients.each_mut().map(|gradient| gradient.view_mut().range(0..h));
            let dx = dx.view_mut();
            device.run(LayerNormBackward {
                x: x.view(),
                gamma,
                norm: 1e-5.into(),
                products: None,
                mean,
                rstd,
                dy: dy.view(),
                dx,
                accumulate_input: true,
                gradients: gradients.map(Some),
                accumulate_parameters: false,
            });
        });
    }

    fn attention(&mut self, visit: Visit) {
        let Setting { batch, seq, hidden, heads, .. } = self.setting;
        let device = &self.device;
        let size = format!("{batch}x{seq}x{hidden}, {heads} heads");
        let (head_dim, turned) = (hidden / heads, 2 * heads);
        let heads = Heads::equal(heads, hidden / heads, true);
        let [qkv, dqkv] = &mut self.qkv;
        let rotary = Rotary::new(head_dim, head_dim, 1e4, RotaryScaling::Default);
        visit("rotary", size.clone(), &mut || {
            device.rotary(qkv.view_mut(), &rotary, turned, RowPositions::From(0))
        });
        let [out, dout, ..] = &mut self.narrow;
        let mut out = out.view_mut().reshape([batch, seq, hidden]);
        let dout = dout.view().reshape([batch, seq, hidden]);
        let lse = &mut self.log_sum_exp;
        visit("attention", size.clone(), &mut || {
            device.attention(qkv.view(), heads, None, None, out.reborrow(), lse.view_mut());
        });
        visit("attention_backward", size, &mut || {
            let saved = [out.as_view(), lse.view(), dout];
            device.attention_backward(qkv.view(), saved, heads, None, None, dqkv.view_mut());
        });
    }

    fn pointwise(&mut self, visit: Visit) {
        let device = &self.device;
        let size = format!("{}x{}", self.setting.batch * self.setting.seq, self.setting.hidden);
        let [x, y, residual, _] = &mut self.narrow;
        visit("dropout", size.clone(), &mut || {
            let dropout = Dropout { p: 0.1, key: 7, first: 0, sample: 0 };
            device.dropout(x.view(), dropout, Some(residual.view()), y.view_mut());
        });
        visit("add", size.clone(), &mut || device.add(x.view(), y.view_mut()));
        visit("copy", size, &mut || device.copy(x.view(), y.view_mut()));
    }

    fn head(&mut self, visit: Visit) {
        let Setting { hidden, vocab, .. } = self.setting;
        let device = &self.device;
        let [slice, _] = self.logits.dims();
        let layout = Layout::OutIn;
        let w = Weight { matrix: self.table.view(), layout };
        let [x, dx, ..] = &mut self.narrow;
        let mut logits = self.logits.view_mut();
        let dw = &mut self.table_gradient;
        let part = x.view().range(0..slice * hidden).reshape([slice, hidden]);
        visit("linear", format!("{slice}x{hidden} -> {vocab}"), &mut || {
            let plain = logits.reborrow().range(0..slice * vocab).reshape([slice, vocab]);
            device.linear(part, w, Epilogue::default(), plain);
        });
        visit("linear_input_gradient", format!("{slice}x{vocab} -> {hidden}"), &mut || {
            let dx = dx.view_mut().range(0..slice * hidden).reshape([slice, hidden]);
            device.run(InputGradient { dy: logits.as_view(), padded: true, w, dx, accumulate: false });
        });
        visit("linear_weight_gradient", format!("{slice}x{hidden} -> {vocab}"), &mut || {
            let dw = dw.view_mut();
            device.run(WeightGradient {
                x: part,
                dy: logits.as_view(),
                padded: true,
                dw,
                layout,
                accumulate: true,
            });
        });
    }

    /// Statistics and loss of the logits.
    fn loss(&mut self, visit: Visit) {
        let Setting { hidden, vocab, .. } = self.setting;
        let device = &self.device;
        let [slice, _] = self.logits.dims();
        let w = Weight { matrix: self.table.view(), layout: Layout::OutIn };
        let mut logits = self.logits.view_mut();
        let part = self.narrow[0].view().range(0..slice * hidden).reshape([slice, hidden]);
        let targets = self.tokens.view().range(0..slice);
        let [blocks, statistics] = &mut self.logit_statistics;
        for trains in [true, false] {
            let alone = if trains { "" } else { ", loss alone" };
            visit("vocabulary_statistics", format!("{slice}x{hidden} -> {vocab}{alone}"), &mut || {
                let logits = Some(logits.reborrow()).filter(|_| trains);
                let (blocks, statistics) = (blocks.view_mut(), statistics.view_mut());
                device.run(VocabularyStatistics {
                    x: part,
                    w,
                    bias: None,
                    targets,
                    first: 0,
                    exponentials: logits,
                    blocks,
                    statistics,
                });
            });
        }
        let numbers = CrossEntropy::scaled(1e-3);
        visit("vocabulary_loss", format!("{slice}x{vocab}"), &mut || {
            // In place: derivatives that go through it again and again would vanish.
            let (into, to) = (blocks.view_mut(), statistics.view_mut());
            device.run(VocabularyStatistics {
                x: part,
                w,
                bias: None,
                targets,
                first: 0,
                exponentials: Some(logits.reborrow()),
                blocks: into,
                statistics: to,
            });
            let (all, sum) = (statistics.view().reshape([1, slice, 4]), self.sum.view_mut());
            let logits = Some(logits.reborrow());
            device.run(VocabularyLoss {
                statistics: all,
                blocks: blocks.view(),
                targets,
                first: 0,
                columns: vocab,
                classes: vocab,
                numbers,
                exponentials: logits,
                weights: None,
                losses: None,
                loss: sum,
                accumulate: false,
            });
        });
    }

    fn optimizer(&mut self, visit: Visit) {
        let device = &self.device;
        let size = self.master.shape().elements().to_string();
        let (p, g, rounded) = (&mut self.master, &mut self.table_gradient, &mut self.rounded);
        let [m, v] = &mut self.states;
        let copied = format!("{size}, and rounded to {}", rounded.dtype().name());
        visit("block_squares", size.clone(), &mut || device.block_squares(g.view(), self.squares.view_mut()));
        device.fill(self.one.view_mut(), 1.0);
        let scale = self.one.view();
        let step = AdamW { lr: 1e-4, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 10 };
        for (size, copies) in [(&size, false), (&copied, true)] {
            visit("adamw", size.clone(), &mut || {
                let rounded = copies.then(|| rounded.view_mut());
                device.run(AdamWUpdate {
                    step,
                    p: p.view_mut(),
                    g: g.view(),
                    moments: [m.view_mut(), v.view_mut()],
                    gradient_scale: scale,
                    rounded,
                });
            });
        }
        let step = Sgd { lr: 1e-4, momentum: 0.9, weight_decay: 0.0, first: false };
        visit("sgd", size.clone(), &mut || {
            device.run(SgdUpdate {
                step,
                p: p.view_mut(),
                g: g.view(),
                velocity: m.view_mut(),
                gradient_scale: scale,
                rounded: None,
            });
        });
        let types = format!("{size}, {} to {}", p.dtype().name(), rounded.dtype().name());
        visit("convert", types, &mut || device.convert(p.view(), rounded.view_mut()));
        visit("fill", size, &mut || device.fill(g.view_mut(), 0.0));
    }
}

/// Repeats the numbers of `from` all over `to`.
fn spread(device: &Device, from: View, mut to: ViewMut) {
    let elements = to.elements();
    for start in (0..elements).step_by(PATTERN) {
        let part = start..elements.min(start + PATTERN);
        let from = from.range(0..part.len());
        let to = to.reborrow().range(part);
        match to.dtype() {
            DType::F32 => device.copy(from, to),
            _ => device.convert(from, to),
        }
    }
}
