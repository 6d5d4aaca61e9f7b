//! Attention: forward, forward over cached keys and values, and backward; rotary positions of its queries and keys.

use phalanx_plan::trace::{DType, Site};

use super::{floats, same};
use crate::arguments::{Dropout, Heads, RowPositions};
use crate::device::Device;
use crate::operation::{Describe, Price, operation};
use crate::operations::family::family;
use crate::placement::rules::{Operand, Rule, operand, result};
use crate::record::Recorder;
use crate::rotary::Rotary;
use crate::view::{View, ViewMut};

const WHOLE_SEQUENCE: &str = "every position looks at the others";
const COUNTED: &str = "positions are counted from its first row";
/// Matrix products of the forward pass: `q · kᵀ` and `p · v`.
const FORWARD_PRODUCTS: usize = 2;
/// Matrix products of the backward pass, which computes the probabilities again.
const BACKWARD_PRODUCTS: usize = 5;

family! {
    /// Attention and its positions.
    Attentions { AttentionForward, AttentionCached, AttentionBackward, RotaryPositions, }
}

operation! {
    /// Softmax(scale q·kᵀ) · v in tiles (Dao et al., arXiv 2205.14135): no `[seq, seq]` matrix is stored.
    /// With dropout the probabilities are dropped; that of (sample, head, key, query) has the number `first +
    /// sample * dropout.sample + (head * seq + key) * seq + query`.
    AttentionForward {
        /// `[batch, seq, qkv_width]`: q, k, v side by side, each split into heads.
        qkv: View<'a>,
        /// Heads, mask and scores.
        heads: Heads,
        /// `[batch, seq]` u32: of each row, its position in its document. A row at position 0 begins one. Rows see rows of
        /// their own document only. None where each sequence is one document.
        positions: Option<View<'a>>,
        /// Dropout of the probabilities.
        dropout: Option<Dropout>,
        /// `[batch, seq, out_width]`, overwritten.
        out: ViewMut<'a>,
        /// `[batch, heads, seq]` f32, overwritten; backward reads it.
        log_sum_exp: ViewMut<'a>,
    }
}

impl Describe for AttentionForward<'_> {
    const NAME: &'static str = "attention";

    fn check(&self) {
        let AttentionForward { qkv, heads, positions, out, log_sum_exp, .. } = self;
        check_extents(*qkv, *heads, *positions, [out.elements(), log_sum_exp.elements()]);
        same(&[qkv.dtype(), out.dtype()]);
        same(&[DType::F32, log_sum_exp.dtype()]);
    }

    fn price(&self) -> Price {
        let AttentionForward { qkv, heads, out, log_sum_exp, .. } = self;
        let flops = FORWARD_PRODUCTS * product_flops(*qkv, *heads);
        Price::product(qkv.dtype(), flops, qkv.bytes() + out.bytes() + log_sum_exp.bytes())
    }

    /// A shard of the last dimension is one of heads: q, k and v of each head lie on one rank.
    fn follow(&self, recorder: &Recorder, site: Site) {
        let AttentionForward { qkv, positions, out, log_sum_exp, .. } = self;
        let factors = [Some(operand("qkv", "bsh", *qkv)), positions.map(row_positions)];
        let rule = Rule {
            op: Self::NAME,
            factors: &factors.into_iter().flatten().collect::<Vec<_>>(),
            addends: &[],
            results: &[result("out", "bsh", out, false), result("log_sum_exp", "bhs", log_sum_exp, false)],
            whole: &[('s', WHOLE_SEQUENCE)],
        };
        recorder.follow(&rule, site);
    }
}

operation! {
    /// Causal attention of new positions over all positions so far, whose keys and values are in a cache (sampling).
    /// First stores k and v of the new positions. `out` has the bits of those rows of [`AttentionForward`] over all
    /// positions.
    AttentionCached {
        /// `[batch, new, qkv_width]`: q, k, v of positions `past ..`.
        qkv: View<'a>,
        /// Heads and scores; the mask is causal.
        heads: Heads,
        /// Positions that the cache holds. If there are any, `new` is 1.
        past: usize,
        /// `[batch, capacity, cache_width]`: k and v side by side. Rows `past .. past + new` are overwritten.
        cache: ViewMut<'a>,
        /// `[batch, new, out_width]`, overwritten; for one sample also `[1, 1, out_width]`: the last new position only.
        out: ViewMut<'a>,
    }
}

impl<'a> AttentionCached<'a> {
    /// q, k and v of the rows that `out` has, `[batch, last, qkv_width]`, and how many positions are before them.
    pub fn queries(&self) -> (View<'a>, usize) {
        let ([batch, new, width], [_, last, _]) = (self.qkv.dims(), self.out.dims());
        let earlier = new - last;
        let elements = self.qkv.elements();
        let queries = self.qkv.range(earlier * width..elements).reshape([batch, last, width]);
        (queries, self.past + earlier)
    }
}

impl Describe for AttentionCached<'_> {
    const NAME: &'static str = "attention_cached";

    fn check(&self) {
        let AttentionCached { qkv, heads, past, cache, out } = self;
        let ([batch, new, width], [batches, capacity, columns]) = (qkv.dims(), cache.dims());
        heads.check();
        assert!(heads.causal, "a cache holds earlier positions, which a causal mask shows: {heads:?}");
        assert_eq!(width, heads.qkv_width(), "{qkv:?} for {heads:?}");
        assert_eq!((batches, columns), (batch, heads.cache_width()), "{cache:?} for {qkv:?}");
        assert!(past + new <= capacity, "{past} + {new} positions in {cache:?}");
        assert!(*past == 0 || new == 1, "{new} positions after {past}: one at a time");
        let [samples, last, columns] = out.dims();
        assert_eq!((samples, columns), (batch, heads.out_width()), "{out:?} for {qkv:?}");
        assert!(
            last == new || [batch, last] == [1, 1],
            "{last} of {new} rows of {batch} samples: all, or the last"
        );
        same(&[qkv.dtype(), cache.dtype(), out.dtype()]);
    }

    fn price(&self) -> Price {
        let AttentionCached { qkv, heads, past, cache, out } = self;
        let ([batch, new, _], [_, last, _]) = (qkv.dims(), out.dims());
        let (keys, window) = (past + new, heads.window.unwrap_or(usize::MAX));
        let pairs: usize = (0..last).map(|row| (keys - row).min(window)).sum();
        let keys = keys.min(window.saturating_add(last - 1));
        let read = batch * keys * heads.cache_width() * cache.dtype().bytes();
        let flops = FORWARD_PRODUCTS * 2 * batch * pairs * heads.out_width();
        Price::product(qkv.dtype(), flops, qkv.bytes() + read + out.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let AttentionCached { qkv, cache, out, .. } = self;
        let rule = Rule {
            op: Self::NAME,
            factors: &[operand("qkv", "bsh", *qkv)],
            addends: &[],
            results: &[result("out", "bsh", out, false), result("cache", "bch", cache, false)],
            whole: &[('s', WHOLE_SEQUENCE)],
        };
        recorder.follow(&rule, site);
    }
}

operation! {
    /// The gradient of [`AttentionForward`]; probabilities are computed again from the row statistics, and dropped
    /// again.
    AttentionBackward {
        /// The input of the forward pass, `[batch, seq, qkv_width]`.
        qkv: View<'a>,
        /// out and log_sum_exp of the forward pass, and dout `[batch, seq, out_width]`.
        saved: [View<'a>; 3],
        /// Heads, mask and scores.
        heads: Heads,
        /// Positions of the forward pass.
        positions: Option<View<'a>>,
        /// Dropout of the forward pass.
        dropout: Option<Dropout>,
        /// `[batch, seq, qkv_width]`, overwritten. dk and dv are sums over the query heads that read them, in order.
        dqkv: ViewMut<'a>,
    }
}

impl Describe for AttentionBackward<'_> {
    const NAME: &'static str = "attention_backward";

    fn check(&self) {
        let AttentionBackward { qkv, saved: [out, log_sum_exp, dout], heads, positions, dqkv, .. } = self;
        check_extents(*qkv, *heads, *positions, [out.elements(), log_sum_exp.elements()]);
        assert_eq!([dqkv.elements(), dout.elements()], [qkv.elements(), out.elements()]);
        same(&[qkv.dtype(), out.dtype(), dout.dtype(), dqkv.dtype()]);
        same(&[DType::F32, log_sum_exp.dtype()]);
    }

    fn price(&self) -> Price {
        let AttentionBackward { qkv, saved: [out, log_sum_exp, _], heads, .. } = self;
        let product = product_flops(*qkv, *heads);
        let bytes = 2 * qkv.bytes() + 2 * out.bytes() + log_sum_exp.bytes();
        Price::product(qkv.dtype(), BACKWARD_PRODUCTS * product, bytes)
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let AttentionBackward { qkv, saved: [out, log_sum_exp, dout], positions, dqkv, .. } = self;
        let factors = [
            Some(operand("qkv", "bsh", *qkv)),
            Some(operand("out", "bsh", *out)),
            Some(operand("log_sum_exp", "bhs", *log_sum_exp)),
            Some(operand("dout", "bsh", *dout)),
            positions.map(row_positions),
        ];
        let rule = Rule {
            op: Self::NAME,
            factors: &factors.into_iter().flatten().collect::<Vec<_>>(),
            addends: &[],
            results: &[result("dqkv", "bsh", dqkv, false)],
            whole: &[('s', WHOLE_SEQUENCE)],
        };
        recorder.follow(&rule, site);
    }
}

operation! {
    /// In place: turns the first `heads` heads of each row by its position: with a head's elements `a = x[i]` and
    /// `b = x[i + rotated / 2]`, and c and s `scale` times the cosine and sine of the angle, a becomes `a c - b s` and b
    /// `b c + a s`. The gradient of it is the same operation with `inverse`, where s is negated.
    RotaryPositions {
        /// `[batch, seq, width]`: heads one behind another from column 0; what is behind them stays.
        x: ViewMut<'a>,
        /// By how much they turn.
        rotary: Rotary,
        /// Number of heads that turn: of q, k and v side by side, those of q and k.
        heads: usize,
        /// The positions of the rows.
        positions: RowPositions<'a>,
        /// True to rotate back.
        inverse: bool,
    }
}

impl Describe for RotaryPositions<'_> {
    const NAME: &'static str = "rotary";

    fn name(&self) -> &'static str {
        if self.inverse { "rotary_backward" } else { Self::NAME }
    }

    fn check(&self) {
        let RotaryPositions { x, rotary, heads, positions, .. } = self;
        let [batch, seq, width] = x.dims();
        if let RowPositions::Each(positions) = positions {
            check_positions(*positions, [batch, seq]);
        }
        assert!(heads * rotary.head_dim() <= width, "{heads} heads of {} in {x:?}", rotary.head_dim());
        floats([x.dtype(); 2]);
    }

    fn price(&self) -> Price {
        let RotaryPositions { x, rotary, heads, .. } = self;
        let [batch, seq, _] = x.dims();
        Price::bytes(2 * batch * seq * heads * rotary.rotated() * x.dtype().bytes())
    }

    /// A shard of the last dimension is one of heads.
    fn follow(&self, recorder: &Recorder, site: Site) {
        let x = operand("x", "bsh", self.x.as_view());
        let positions = match self.positions {
            RowPositions::From(_) => None,
            RowPositions::Each(positions) => Some(row_positions(positions)),
        };
        let rule = Rule {
            op: self.name(),
            factors: &[Some(x), positions].into_iter().flatten().collect::<Vec<_>>(),
            addends: &[],
            results: &[result("x", "bsh", &self.x, false)],
            whole: &[('s', COUNTED)],
        };
        recorder.follow(&rule, site);
    }
}

impl Device {
    /// In place: turns the first `heads` heads of each row of x `[batch, seq, width]` by its position.
    #[track_caller]
    pub fn rotary(&self, x: ViewMut, rotary: &Rotary, heads: usize, positions: RowPositions) {
        self.run(RotaryPositions { x, rotary: rotary.clone(), heads, positions, inverse: false });
    }

    /// The gradient of [`Device::rotary`], in place.
    #[track_caller]
    pub fn rotary_backward(&self, dx: ViewMut, rotary: &Rotary, heads: usize, positions: RowPositions) {
        self.run(RotaryPositions { x: dx, rotary: rotary.clone(), heads, positions, inverse: true });
    }

    /// Attention in tiles: no `[seq, seq]` matrix is stored. qkv `[batch, seq, qkv_width]`, out
    /// `[batch, seq, out_width]`, log_sum_exp `[batch, heads, seq]` f32. With the positions of rows in their documents,
    /// `[batch, seq]` u32, rows see their own document only.
    #[track_caller]
    pub fn attention(
        &self,
        qkv: View,
        heads: Heads,
        positions: Option<View>,
        dropout: Option<Dropout>,
        out: ViewMut,
        log_sum_exp: ViewMut,
    ) {
        self.run(AttentionForward { qkv, heads, positions, dropout, out, log_sum_exp });
    }

    /// Causal attention of the new positions `past ..` over all positions so far. Stores their keys and values in
    /// `cache` `[batch, capacity, cache_width]`; qkv `[batch, new, qkv_width]`, out `[batch, new, out_width]`, or
    /// `[1, 1, out_width]` for the last position only.
    #[track_caller]
    pub fn attention_cached(&self, qkv: View, heads: Heads, past: usize, cache: ViewMut, out: ViewMut) {
        self.run(AttentionCached { qkv, heads, past, cache, out });
    }

    /// The gradient of [`Device::attention`]: dqkv is overwritten. `saved` are out, log_sum_exp and dout.
    #[track_caller]
    pub fn attention_backward(
        &self,
        qkv: View,
        saved: [View; 3],
        heads: Heads,
        positions: Option<View>,
        dropout: Option<Dropout>,
        dqkv: ViewMut,
    ) {
        self.run(AttentionBackward { qkv, saved, heads, positions, dropout, dqkv });
    }
}

#[track_caller]
fn check_extents(qkv: View, heads: Heads, positions: Option<View>, [out, log_sum_exp]: [usize; 2]) {
    let [batch, seq, width] = qkv.dims();
    heads.check();
    if let Some(positions) = positions {
        check_positions(positions, [batch, seq]);
    }
    assert_eq!(width, heads.qkv_width(), "{qkv:?} for {heads:?}");
    assert_eq!([out, log_sum_exp], [batch * seq * heads.out_width(), batch * heads.heads * seq]);
}

#[track_caller]
fn check_positions(positions: View, rows: [usize; 2]) {
    assert_eq!((positions.dims(), positions.dtype()), (rows, DType::U32), "{positions:?}");
}

fn row_positions(positions: View) -> Operand {
    operand("positions", "bs", positions)
}

/// Operations of one of the matrix products of an attention; half of them under a causal mask.
fn product_flops(qkv: View, heads: Heads) -> usize {
    let [batch, seq, _] = qkv.dims();
    let window = heads.window.unwrap_or(seq).min(seq);
    2 * batch * window * (2 * seq - window) * heads.out_width() / (1 + usize::from(heads.causal))
}
