//! ReLU, the patches of images, and max pooling.

use phalanx_tensor::operations::Images;
use phalanx_tensor::{DType, Patches};

use crate::error::Error;
use crate::launch::{Issue, numbers};
use crate::programs::{Program, Source};

/// Extents as kernels take them behind their other arguments: image, kernel, stride, padding, output.
fn extents(patches: Patches) -> Vec<u64> {
    let Patches { image, kernel, stride, padding } = patches;
    let all = [image, kernel, stride, padding, patches.output()];
    all.as_flattened().iter().map(|extent| *extent as u64).collect()
}

impl Issue<'_> {
    pub(super) fn images(&mut self, operation: Images) -> Result<(), Error> {
        match operation {
            Images::Relu(o) => {
                let n = o.x.elements();
                self.over_fours(Program::of(Source::Images, o.x.dtype()), "relu", n, numbers![&o.x, n])
            }
            Images::ReluBackward(o) => {
                let n = o.y.elements();
                let program = Program::of(Source::Images, o.y.dtype());
                self.over_fours(program, "relu_backward", n, numbers![o.y, &o.dy, n])
            }
            Images::Unfold(o) => {
                let ([_, _, channels], n) = (o.x.dims(), o.y.elements());
                let arguments = numbers![o.x, &o.y, channels, n];
                self.over_patches(("unfold", o.x.dtype()), n, arguments, o.patches)
            }
            Images::Fold(o) => {
                let ([_, _, channels], n) = (o.y.dims(), o.y.elements());
                let arguments = numbers![o.x, &o.y, channels, n];
                self.over_patches(("fold", o.x.dtype()), n, arguments, o.patches)
            }
            Images::MaxPool(o) => {
                let ([_, _, channels], n) = (o.x.dims(), o.y.elements());
                let arguments = numbers![o.x, &o.y, channels, n];
                self.over_patches(("max_pool", o.x.dtype()), n, arguments, o.patches)
            }
            Images::MaxPoolBackward(o) => {
                let ([_, _, channels], n) = (o.x.dims(), o.dx.elements());
                let arguments = numbers![o.x, o.dy, &o.dx, channels, n];
                self.over_patches(("max_pool_backward", o.x.dtype()), n, arguments, o.patches)
            }
        }
    }

    /// Launches a kernel of which a thread computes elements of n, each from some patches.
    fn over_patches(
        &self,
        (kernel, dtype): (&'static str, DType),
        n: usize,
        arguments: &[u64],
        patches: Patches,
    ) -> Result<(), Error> {
        let arguments = [arguments, &extents(patches)].concat();
        self.over_fours(Program::of(Source::Images, dtype), kernel, n, &arguments)
    }
}
