//! Updates of parameters: AdamW and SGD on flat ranges.

use phalanx_plan::trace::{Axis, DType, Placement, Site};

use super::{floats, same};
use crate::arguments::{AdamW, Sgd};
use crate::operation::{Describe, Price, operation};
use crate::operations::family::family;
use crate::placement::table::Mark;
use crate::record::Recorder;
use crate::view::{View, ViewMut};

family! {
    /// Optimizer steps.
    Optimizers { AdamWUpdate, SgdUpdate, }
}

operation! {
    /// One AdamW step over flat ranges of equal length.
    AdamWUpdate {
        /// The numbers of the step.
        step: AdamW,
        /// Parameters, f32, updated.
        p: ViewMut<'a>,
        /// Gradients.
        g: View<'a>,
        /// First and second moments, f32 each, updated.
        moments: [ViewMut<'a>; 2],
        /// `[1]` f32: the gradient is multiplied by it first.
        gradient_scale: View<'a>,
        /// A copy of the new parameters in another type, overwritten.
        rounded: Option<ViewMut<'a>>,
    }
}

impl Describe for AdamWUpdate<'_> {
    const NAME: &'static str = "adamw";

    fn check(&self) {
        let AdamWUpdate { p, g, moments: [m, v], gradient_scale, rounded, .. } = self;
        assert_eq!([g.elements(), m.elements(), v.elements()], [p.elements(); 3]);
        check_update(p, *g, *gradient_scale, rounded.as_ref());
        same(&[p.dtype(), m.dtype(), v.dtype()]);
    }

    fn price(&self) -> Price {
        let copied = self.rounded.as_ref().map_or(0, |r| r.bytes());
        Price::bytes(6 * self.p.bytes() + self.g.bytes() + copied)
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        recorder.follow_update(Self::NAME, (&self.p, self.g, self.rounded.as_ref()), site);
    }
}

operation! {
    /// One SGD step with momentum over flat ranges of equal length.
    SgdUpdate {
        /// The numbers of the step.
        step: Sgd,
        /// Parameters, f32, updated.
        p: ViewMut<'a>,
        /// Gradients.
        g: View<'a>,
        /// Velocity, f32, updated.
        velocity: ViewMut<'a>,
        /// `[1]` f32: the gradient is multiplied by it first.
        gradient_scale: View<'a>,
        /// A copy of the new parameters in another type, overwritten.
        rounded: Option<ViewMut<'a>>,
    }
}

impl Describe for SgdUpdate<'_> {
    const NAME: &'static str = "sgd";

    fn check(&self) {
        let SgdUpdate { p, g, velocity, gradient_scale, rounded, .. } = self;
        assert_eq!([g.elements(), velocity.elements()], [p.elements(); 2]);
        check_update(p, *g, *gradient_scale, rounded.as_ref());
        same(&[p.dtype(), velocity.dtype()]);
    }

    fn price(&self) -> Price {
        let copied = self.rounded.as_ref().map_or(0, |r| r.bytes());
        Price::bytes(4 * self.p.bytes() + self.g.bytes() + copied)
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        recorder.follow_update(Self::NAME, (&self.p, self.g, self.rounded.as_ref()), site);
    }
}

impl Recorder {
    /// A gradient is reduced before it is applied. A part of a replicated parameter that is updated from its part
    /// of the gradient is this rank's alone until it is gathered.
    pub(crate) fn follow_update(
        &self,
        op: &'static str,
        (p, g, rounded): (&ViewMut, View, Option<&ViewMut>),
        site: Site,
    ) {
        self.check_pieces(op, ("gradient", g), site, |placement| {
            (placement == Placement::Partial).then_some("is a partial sum: an all_reduce or reduce_scatter")
        });
        self.combine_marks(g, p.as_view(), |g, p| {
            let (Some(g), p) = (g, p.unwrap_or(Mark::REPLICATED)) else { return p };
            // Along an axis where p is replicated, its part is placed as g's.
            let open = Axis::ALL.into_iter().fold(p, |p, axis| match (g.get(axis), p.get(axis)) {
                (Some(Placement::Shard(_)), Some(Placement::Replicated)) => p.with(axis, None),
                _ => p,
            });
            Some(open.or(g).or(Mark::REPLICATED))
        });
        if let Some(rounded) = rounded {
            self.combine_marks(p.as_view(), rounded.as_view(), |p, _| p);
        }
    }
}

#[track_caller]
fn check_update(p: &ViewMut, g: View, gradient_scale: View, rounded: Option<&ViewMut>) {
    same(&[DType::F32, p.dtype(), gradient_scale.dtype()]);
    floats([p.dtype(), g.dtype()]);
    assert_eq!(gradient_scale.elements(), 1);
    assert!(rounded.is_none_or(|r| r.elements() == p.elements()), "{rounded:?} of {p:?}");
}
