//! Sums over whole tensors: squares for the gradient norm, the norm itself, counts of what is not finite.

use phalanx_plan::trace::{Axis, DType, Placement, Site};

use crate::arguments::Clip;
use crate::device::{Device, NORM_BLOCK};
use crate::operation::{Describe, Price, operation};
use crate::operations::family::family;
use crate::placement::rules::{Rule, result};
use crate::placement::table::Mark;
use crate::record::Recorder;
use crate::view::{View, ViewMut};

family! {
    /// Reductions to one number, or to one a block.
    Reductions { BlockSquares, TreeSum, Norm, CountNonFinite, }
}

operation! {
    /// Sums of squares of blocks of [`NORM_BLOCK`] elements, in f64; the last block may be short. Not finite where
    /// an element is not.
    BlockSquares {
        /// Read.
        x: View<'a>,
        /// `[blocks]` f64, overwritten.
        squares: ViewMut<'a>,
    }
}

impl Describe for BlockSquares<'_> {
    const NAME: &'static str = "block_squares";

    fn check(&self) {
        let BlockSquares { x, squares } = self;
        assert_eq!((squares.dtype(), squares.elements()), (DType::F64, x.elements().div_ceil(NORM_BLOCK)));
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes())
    }

    /// Squares of a part are a partial sum; whether those of replicated elements are counted once or on every
    /// rank is for the caller to know.
    fn follow(&self, recorder: &Recorder, site: Site) {
        recorder.check_pieces(Self::NAME, ("x", self.x), site, |placement| {
            (placement == Placement::Partial).then_some("is a partial sum: an all_reduce or reduce_scatter")
        });
        let mut mark = Mark::ZERO;
        for axis in Axis::ALL {
            let cut = |m: &Mark| matches!(m.get(axis), Some(Placement::Shard(_)));
            if recorder.marks_in(self.x).iter().flatten().any(cut) {
                mark = mark.with(axis, Some(Placement::Partial));
            }
        }
        recorder.mark(self.squares.as_view(), Some(mark));
    }
}

operation! {
    /// `out[0]` = sum of `x` along a fixed balanced tree: that of [`Norm`].
    TreeSum {
        /// f64
        x: View<'a>,
        /// `[1]` f64, overwritten.
        out: ViewMut<'a>,
    }
}

impl Describe for TreeSum<'_> {
    const NAME: &'static str = "tree_sum";

    fn check(&self) {
        let TreeSum { x, out } = self;
        assert_eq!((x.dtype(), out.dtype(), out.elements()), (DType::F64, DType::F64, 1));
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes())
    }

    /// The sum of a list of which each rank has a part is a partial sum.
    fn follow(&self, recorder: &Recorder, _: Site) {
        let sum = |mark: Mark| {
            Axis::ALL.into_iter().fold(mark.of_dimensions(1), |mark, axis| match mark.get(axis) {
                Some(Placement::Shard(_)) => mark.with(axis, Some(Placement::Partial)),
                _ => mark,
            })
        };
        recorder.mark(self.out.as_view(), recorder.mark_of(self.x).map(sum));
    }
}

operation! {
    /// The gradient norm, and what gradients are to be multiplied by: `norm[0] = sqrt(sum of squares along a fixed
    /// balanced tree) / loss_scale`, `factor[0] = min(1, max_norm / (norm + 1e-6)) / loss_scale` (PyTorch's
    /// `clip_grad_norm_`); no clipping when `max_norm` is 0.
    Norm {
        /// f64, from [`BlockSquares`].
        squares: View<'a>,
        /// Largest norm and loss scale.
        clip: Clip,
        /// `[1]` f32, overwritten.
        norm: ViewMut<'a>,
        /// `[1]` f32, overwritten.
        factor: ViewMut<'a>,
    }
}

impl Describe for Norm<'_> {
    const NAME: &'static str = "norm";

    fn check(&self) {
        let Norm { squares, norm, factor, .. } = self;
        assert_eq!((squares.dtype(), norm.elements(), factor.elements()), (DType::F64, 1, 1));
    }

    fn price(&self) -> Price {
        Price::bytes(self.squares.bytes())
    }

    /// The root of a sum needs all blocks, on every rank.
    fn follow(&self, recorder: &Recorder, site: Site) {
        let rule = Rule {
            op: Self::NAME,
            factors: &[],
            addends: &[],
            results: &[result("norm", "", &self.norm, false), result("factor", "", &self.factor, false)],
            whole: &[],
        };
        recorder.follow(&rule, site);
        recorder.check_pieces(Self::NAME, ("squares", self.squares), site, |placement| match placement {
            Placement::Shard(_) => Some("holds this rank's blocks alone: an all_reduce or all_gather"),
            Placement::Partial => Some("is a partial sum: an all_reduce"),
            Placement::Replicated => None,
        });
    }
}

operation! {
    /// `count[0]` = elements of `x` that are infinite or not a number.
    CountNonFinite {
        /// f32, bf16 or f16.
        x: View<'a>,
        /// `[1]` f32, overwritten.
        count: ViewMut<'a>,
    }
}

impl Describe for CountNonFinite<'_> {
    const NAME: &'static str = "count_non_finite";

    fn check(&self) {
        assert_eq!((self.count.dtype(), self.count.elements()), (DType::F32, 1));
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes())
    }

    /// A count may be summed over ranks or not.
    fn follow(&self, recorder: &Recorder, _: Site) {
        recorder.mark(self.count.as_view(), Some(Mark::ZERO));
    }
}

impl Device {
    /// Sums of squares of blocks of [`NORM_BLOCK`] elements, in f64; the last block may be short. Not finite
    /// where an element is not.
    #[track_caller]
    pub fn block_squares(&self, x: View, squares: ViewMut) {
        self.run(BlockSquares { x, squares });
    }

    /// `out[0]` = sum of x, both f64, along a fixed balanced tree: that of [`Device::norm`].
    #[track_caller]
    pub fn tree_sum(&self, x: View, out: ViewMut) {
        self.run(TreeSum { x, out });
    }

    /// The gradient norm from sums of squares, and the factor that clips the gradients; see [`Norm`].
    #[track_caller]
    pub fn norm(&self, squares: View, clip: Clip, norm: ViewMut, factor: ViewMut) {
        self.run(Norm { squares, clip, norm, factor });
    }

    /// `count[0]` = elements of `x` that are infinite or not a number; x f32, bf16 or f16.
    #[track_caller]
    pub fn count_non_finite(&self, x: View, count: ViewMut) {
        self.run(CountNonFinite { x, count });
    }
}
