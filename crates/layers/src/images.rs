//! Layers of images `[batch, height * width, channels]`: convolution, ReLU, max pooling, and what is before the head of classes,
//! [`LinearCrossEntropy`](crate::LinearCrossEntropy).
//!
//! A convolution is a product of the rows of all patches ([`Unfold`]) with the weight. The rows have the pixels of a patch in every
//! channel, so they are as many times larger than the image as patches overlap: 9 times for a kernel of 3 x 3. They are not saved:
//! forward and each part of backward make them again, for one product.

use std::sync::Arc;

use phalanx_tensor::operations::{Fold, MaxPool, MaxPoolBackward, Relu as ReluForward, ReluBackward, Unfold};
use phalanx_tensor::{Epilogue, Layout, Patches, Tensor, Weight};

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::failure::Result;
use crate::init::Init;
use crate::layer::{Context, Layer};
use crate::parameter::{Kind, ParameterSpec};
use crate::saved::Saved;

/// A convolution (`torch.nn.Conv2d`, without dilation and groups). Every rank of a tensor axis has it whole.
#[derive(Clone, Debug)]
pub struct Conv2d {
    /// Its parameters are `name.weight`, `[outputs, inputs, kernel height, kernel width]`, and `name.bias`, `[outputs]`.
    pub name: String,
    /// The patches that it reads.
    pub patches: Patches,
    /// Channels of x.
    pub inputs: usize,
    /// Channels of y.
    pub outputs: usize,
    /// Initial weight; the bias starts at zero.
    pub init: Init,
    /// True if there is a bias.
    pub bias: bool,
}

impl Conv2d {
    /// A convolution with a bias. Its weight is normal with the variance 2 / (inputs of an output), for a ReLU behind it (He et al.,
    /// arXiv 1502.01852).
    pub fn new(name: impl Into<String>, patches: Patches, [inputs, outputs]: [usize; 2]) -> Conv2d {
        let init = Init::Normal((2.0 / (inputs * patches.size()) as f32).sqrt());
        Conv2d { name: name.into(), patches, inputs, outputs, init, bias: true }
    }

    /// Columns of the rows of patches.
    fn columns(&self) -> usize {
        self.inputs * self.patches.size()
    }

    /// The weight, as a matrix.
    fn weight<'a>(&self, parameters: Parameters<'a>) -> Weight<'a> {
        let matrix = parameters.value(0).reshape([self.outputs, self.columns()]);
        Weight { matrix, layout: Layout::OutIn }
    }

    /// Memory for the rows of patches.
    fn rows(&self, cx: &Context, batch: usize) -> Tensor {
        cx.activation([batch, self.patches.count(), self.columns()], "conv2d.patches")
    }

    fn unfold(&self, cx: &Context, x: &Tensor) -> Tensor {
        let [batch, _, _] = x.dims();
        let mut rows = self.rows(cx, batch);
        cx.device.run(Unfold { x: x.view(), patches: self.patches, y: rows.view_mut() });
        rows
    }
}

impl Layer for Conv2d {
    type Own = ();

    /// The weight, then the bias.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let [height, width] = self.patches.kernel;
        let (weight, bias) = (format!("{}.weight", self.name), format!("{}.bias", self.name));
        let shape = [self.outputs, self.inputs, height, width];
        let weight = ParameterSpec::new(weight, Kind::Matrix, shape, self.init);
        let bias = self.bias.then(|| ParameterSpec::new(bias, Kind::Bias, [self.outputs], Init::Zeros));
        std::iter::once(weight).chain(bias).collect()
    }

    /// x: `[batch, height * width, inputs]` -> y: `[batch, height' * width', outputs]`
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        let Call { parameters, x, sum, .. } = call;
        let [batch, _, _] = x.dims();
        let mut y = cx.activation([batch, self.patches.count(), self.outputs], "conv2d.y");
        let rows = self.unfold(cx, &x);
        let epilogue = Epilogue { bias: parameters.get(1), residual: sum.as_ref().map(|sum| sum.view()) };
        cx.device.linear(rows.view(), self.weight(parameters), epilogue, y.view_mut());
        let saved = if parameters.is_trained(0) { Saved::new(()).with_input(x) } else { Saved::new(()) };
        Ok((Arc::new(y), saved))
    }

    /// dx overwrites, or adds to the sum; dw and db where they are wanted.
    fn backward(&self, cx: &Context, saved: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let Call { parameters, x: dy, sum, input_wanted } = call;
        if let Some(mut db) = parameters.gradient(1) {
            let (db, accumulate) = db.write();
            cx.device.bias_gradient(dy.view(), db, accumulate);
        }
        if let (Some(mut dw), Some(x)) = (parameters.gradient(0), saved.x.if_read()) {
            let rows = self.unfold(cx, &x);
            let (dw, accumulate) = dw.write();
            let dw = dw.reshape([self.outputs, self.columns()]);
            cx.device.linear_weight_gradient(rows.view(), dy.view(), dw, Layout::OutIn, accumulate);
        }
        if !input_wanted {
            return Ok(None);
        }
        let [batch, _, _] = dy.dims();
        let mut dx = cx.activation([batch, self.patches.pixels(), self.inputs], "conv2d.dx");
        let mut rows = self.rows(cx, batch);
        cx.device.linear_input_gradient(dy.view(), self.weight(parameters), rows.view_mut(), false);
        cx.device.run(Fold { x: rows.view(), patches: self.patches, y: dx.view_mut() });
        Ok(Some(cx.plus(dx, sum)))
    }
}

/// `y = max(x, 0)` (`torch.nn.ReLU`), in the memory of x where nothing else holds it. Backward reads y.
pub struct Relu;

impl Layer for Relu {
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: any shape -> y: the same
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        let Call { x, sum, .. } = call;
        let mut y = cx.owned(x, "relu.y");
        cx.device.run(ReluForward { x: y.view_mut() });
        let y = Arc::new(y);
        let out = match sum {
            None => Arc::clone(&y),
            // The sum is a tensor of its own: backward reads y.
            Some(sum) => {
                let (mut out, _) = cx.target(Some(sum), y.shape(), "relu.sum");
                cx.device.add(y.view(), out.view_mut());
                Arc::new(out)
            }
        };
        Ok((out, Saved::new(()).with_output(y)))
    }

    /// dx, in the memory of dy where nothing else holds it.
    fn backward(&self, cx: &Context, saved: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let Call { x: dy, sum, input_wanted, .. } = call;
        if !input_wanted {
            return Ok(None);
        }
        let mut dx = cx.owned(dy, "relu.dx");
        cx.device.run(ReluBackward { y: saved.y.held().view(), dy: dx.view_mut() });
        Ok(Some(cx.plus(dx, sum)))
    }
}

/// The largest pixel of each patch, in each channel (`torch.nn.MaxPool2d`). Backward finds it again in x, which the layer before has saved
/// if it is a [`Relu`]: no indices are saved.
#[derive(Clone, Copy, Debug)]
pub struct MaxPool2d {
    /// The patches; their padding is at most half of the kernel.
    pub patches: Patches,
}

impl Layer for MaxPool2d {
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    /// x: `[batch, height * width, channels]` -> y: `[batch, height' * width', channels]`
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        let Call { x, sum, .. } = call;
        let [batch, _, channels] = x.dims();
        let mut y = cx.activation([batch, self.patches.count(), channels], "max_pool.y");
        cx.device.run(MaxPool { x: x.view(), patches: self.patches, y: y.view_mut() });
        Ok((cx.plus(y, sum), Saved::new(()).with_input(x)))
    }

    /// dx overwrites, or adds to the sum.
    fn backward(&self, cx: &Context, saved: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let Call { x: dy, sum, input_wanted, .. } = call;
        if !input_wanted {
            return Ok(None);
        }
        let x = saved.x.into_held();
        let mut dx = cx.activation(x.shape(), "max_pool.dx");
        let patches = self.patches;
        cx.device.run(MaxPoolBackward { x: x.view(), patches, dy: dy.view(), dx: dx.view_mut() });
        Ok(Some(cx.plus(dx, sum)))
    }
}

/// All of an image as one row, in which the channels of a pixel are neighbours (PyTorch's `flatten` of images in the order
/// `channels_last`). The memory stays where nothing else holds it.
#[derive(Clone, Copy, Debug)]
pub struct Flatten {
    /// Pixels of the image.
    pub pixels: usize,
}

impl Layer for Flatten {
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    /// x: `[batch, pixels, channels]` -> y: `[batch, 1, pixels * channels]`
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        let Call { x, sum, .. } = call;
        let [batch, pixels, channels] = x.dims();
        assert_eq!(pixels, self.pixels, "an image of {pixels} pixels");
        let y = cx.owned(x, "flatten.y").reshape([batch, 1, pixels * channels]);
        Ok((cx.plus(y, sum), Saved::new(())))
    }

    /// dx, in the memory of dy where nothing else holds it.
    fn backward(&self, cx: &Context, _: Saved<()>, call: Call) -> Result<Option<Activation>> {
        let Call { x: dy, sum, input_wanted, .. } = call;
        let [batch, _, width] = dy.dims();
        let dx = || cx.owned(dy, "flatten.dx").reshape([batch, self.pixels, width / self.pixels]);
        Ok(input_wanted.then(|| cx.plus(dx(), sum)))
    }
}
