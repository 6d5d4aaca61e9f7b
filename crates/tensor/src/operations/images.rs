//! Operations on images `[batch, height * width, channels]`: what convolutions are beside a product (Chellapilla et al., 2006), max
//! pooling and ReLU.

use phalanx_plan::trace::{DType, Site};

use super::{alike, floats, same};
use crate::arguments::Patches;
use crate::operation::{Describe, Price, operation};
use crate::operations::family::family;
use crate::placement::rules::{Operand, Rule, operand, result};
use crate::record::Recorder;
use crate::view::{View, ViewMut};

family! {
    /// Operations on images.
    Images { Relu, ReluBackward, Unfold, Fold, MaxPool, MaxPoolBackward, }
}

/// Why pixels may not be sharded.
const WHOLE_IMAGES: [(char, &str); 1] = [('p', "patches reach over pixels")];

/// Follows an operation on whole images: batch and channels may be sharded.
fn follow_images(recorder: &Recorder, op: &'static str, factors: &[Operand], to: &ViewMut, site: Site) {
    let results = &[result("the result", "bpc", to, false)];
    recorder.follow(&Rule { op, factors, addends: &[], results, whole: &WHOLE_IMAGES }, site);
}

operation! {
    /// In place: `x` becomes `max(x, 0)`; NaN stays NaN.
    Relu {
        /// Any shape.
        x: ViewMut<'a>,
    }
}

impl Describe for Relu<'_> {
    const NAME: &'static str = "relu";

    fn check(&self) {
        floats([self.x.dtype(); 2]);
    }

    fn price(&self) -> Price {
        Price::bytes(2 * self.x.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let (factors, results) =
            (&[operand("x", "rh", self.x.as_view())], &[result("x", "rh", &self.x, false)]);
        recorder.follow(&Rule::of(Self::NAME, factors, results), site);
    }
}

operation! {
    /// In place: `dy` becomes dx, which is 0 where `y <= 0`.
    ReluBackward {
        /// The output of the forward pass.
        y: View<'a>,
        /// Like `y`, becomes dx.
        dy: ViewMut<'a>,
    }
}

impl Describe for ReluBackward<'_> {
    const NAME: &'static str = "relu_backward";

    fn check(&self) {
        alike(self.y, self.dy.as_view());
        floats([self.y.dtype(); 2]);
    }

    fn price(&self) -> Price {
        Price::bytes(self.y.bytes() + 2 * self.dy.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let factors = &[operand("y", "rh", self.y), operand("dy", "rh", self.dy.as_view())];
        let results = &[result("dx", "rh", &self.dy, false)];
        recorder.follow(&Rule::of(Self::NAME, factors, results), site);
    }
}

operation! {
    /// The patches of images as rows of a matrix, with zeros for padding: `y[b, o, (c * kernel height + i) * kernel width + j]` is pixel
    /// (i, j) of patch o in channel c, the order of PyTorch's `unfold` and of its weights `[out, channels, height, width]`.
    Unfold {
        /// `[batch, height * width, channels]`
        x: View<'a>,
        /// The patches.
        patches: Patches,
        /// `[batch, patches, channels * pixels of a patch]`, overwritten.
        y: ViewMut<'a>,
    }
}

/// Images and the rows of their patches.
#[track_caller]
fn check_rows(images: View, patches: &Patches, rows: View) {
    patches.check();
    let [batch, pixels, channels] = images.dims();
    assert_eq!(pixels, patches.pixels(), "images {images:?} of {patches:?}");
    assert_eq!(rows.dims(), [batch, patches.count(), channels * patches.size()], "{images:?}, {patches:?}");
    same(&[images.dtype(), rows.dtype()]);
    floats([images.dtype(); 2]);
}

impl Describe for Unfold<'_> {
    const NAME: &'static str = "unfold";

    fn check(&self) {
        check_rows(self.x, &self.patches, self.y.as_view());
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes() + self.y.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        follow_images(recorder, Self::NAME, &[operand("x", "bpc", self.x)], &self.y, site);
    }
}

operation! {
    /// The transpose of [`Unfold`]: each pixel is the sum of its elements in all patches, in the order of the patches, rounded once.
    Fold {
        /// `[batch, patches, channels * pixels of a patch]`
        x: View<'a>,
        /// The patches.
        patches: Patches,
        /// `[batch, height * width, channels]`, overwritten.
        y: ViewMut<'a>,
    }
}

impl Describe for Fold<'_> {
    const NAME: &'static str = "fold";

    fn check(&self) {
        check_rows(self.y.as_view(), &self.patches, self.x);
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes() + self.y.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        follow_images(recorder, Self::NAME, &[operand("x", "bpc", self.x)], &self.y, site);
    }
}

operation! {
    /// The largest pixel of each patch in each channel; a NaN is the largest. Padding does not count.
    MaxPool {
        /// `[batch, height * width, channels]`
        x: View<'a>,
        /// The patches; their padding is at most half of the kernel.
        patches: Patches,
        /// `[batch, patches, channels]`, overwritten.
        y: ViewMut<'a>,
    }
}

/// Images and the pixels that are left of them.
#[track_caller]
fn check_pooled(images: View, patches: &Patches, pooled: View) {
    patches.check();
    let [batch, pixels, channels] = images.dims();
    assert_eq!(pixels, patches.pixels(), "images {images:?} of {patches:?}");
    assert_eq!(pooled.dims(), [batch, patches.count(), channels], "{images:?}, {patches:?}");
    let has_pixels = [0, 1].iter().all(|d| 2 * patches.padding[*d] <= patches.kernel[*d]);
    assert!(has_pixels, "max pooling of {patches:?}: expected padding of at most half of the kernel");
    same(&[images.dtype(), pooled.dtype()]);
    floats([images.dtype(), DType::F32]);
}

impl Describe for MaxPool<'_> {
    const NAME: &'static str = "max_pool";

    fn check(&self) {
        check_pooled(self.x, &self.patches, self.y.as_view());
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes() + self.y.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        follow_images(recorder, Self::NAME, &[operand("x", "bpc", self.x)], &self.y, site);
    }
}

operation! {
    /// The gradient of [`MaxPool`]: dy of a patch goes to its largest pixel, the first of equals, which is found again.
    MaxPoolBackward {
        /// The input of the forward pass, `[batch, height * width, channels]`.
        x: View<'a>,
        /// The patches.
        patches: Patches,
        /// `[batch, patches, channels]`
        dy: View<'a>,
        /// Like `x`, overwritten: sums in the order of the patches, rounded once.
        dx: ViewMut<'a>,
    }
}

impl Describe for MaxPoolBackward<'_> {
    const NAME: &'static str = "max_pool_backward";

    fn check(&self) {
        check_pooled(self.x, &self.patches, self.dy);
        check_pooled(self.dx.as_view(), &self.patches, self.dy);
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes() + self.dy.bytes() + self.dx.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let factors = [operand("x", "bpc", self.x), operand("dy", "bpc", self.dy)];
        follow_images(recorder, Self::NAME, &factors, &self.dx, site);
    }
}
