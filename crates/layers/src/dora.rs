//! Magnitudes beside adapters (Liu et al., "DoRA", arXiv 2402.09353), with PEFT's names: `y = m / n * (x · wᵀ + scale * x · aᵀ · bᵀ) + bias`,
//! where n is the norm of each row of `w + scale * b · a`, and a constant in backward.
//!
//! The norm is computed from all of w in each forward. Where a holder has a share of the inputs, its squares are summed over the holders, and
//! its result and its gradient of m are terms of sums. Dropout is that of the adapter's input alone, while PEFT's reaches the whole layer.

use std::ops::Range;
use std::sync::Arc;

use phalanx_tensor::{Rescale, RescaleGradient, Tensor, View, Weight};

use crate::activation::Activation;
use crate::call::Parameters;
use crate::failure::Result;
use crate::head_norm::SumOfShares;
use crate::init::Init;
use crate::layer::Context;
use crate::linear::Linear;
use crate::parameter::{Kind, ParameterSpec};

/// End of the name of the magnitudes of a result.
pub(crate) const END: &str = ".lora_magnitude_vector";

/// The magnitudes of the adapted results of a linear layer, or of its share.
pub(crate) struct Magnitudes {
    /// The layer without its biases, whose gradients do not pass the magnitudes.
    pub(crate) unbiased: Linear,
    /// Sums over the holders of other inputs, if there are some.
    pub(crate) sum: Option<SumOfShares>,
}

/// Parameters of an adapter, and the columns of its result.
pub(crate) struct Adapting<'a> {
    pub(crate) columns: Range<usize>,
    /// a and b
    pub(crate) matrices: [View<'a>; 2],
    pub(crate) magnitudes: Parameters<'a>,
}

/// Tensors that backward reads.
pub(crate) struct SavedMagnitudes {
    /// `[batch, seq, out]`, the result before it is rescaled; None where no magnitudes are trained.
    z: Option<Activation>,
    /// `[out]` f32 of each adapter: squared norms.
    squares: Vec<Tensor>,
}

/// The result whose parameter this is, if it is one of magnitudes.
pub fn rescaled_by(parameter: &str) -> Option<&str> {
    parameter.strip_suffix(END)
}

impl Magnitudes {
    /// The magnitudes of a result; they start as norms of the rows of its weight, which layers do not know.
    pub(crate) fn spec(&self, output: usize) -> ParameterSpec {
        let output = &self.unbiased.outputs[output];
        let whole =
            ParameterSpec::new(format!("{}{END}", output.name), Kind::Vector, [output.width], Init::Ones);
        let own = whole.cut(0, output.pieces, self.unbiased.share_of_outputs);
        ParameterSpec {
            partial: self.unbiased.share_of_inputs.of > 1,
            ..own.expect("checked when the layer was divided")
        }
    }

    /// Squared norms of the rows of `w + scale * b · a`, of each adapter.
    fn squares(
        &self,
        cx: &Context,
        weights: Parameters,
        adapters: &[Adapting],
        scale: f32,
    ) -> Result<Vec<Tensor>> {
        let mut all = Vec::with_capacity(adapters.len());
        for (index, joint) in self.unbiased.each(weights) {
            let inside = |columns: &Range<usize>| joint.start <= columns.start && columns.end <= joint.end;
            let mut own = adapters.iter().filter(|adapter| inside(&adapter.columns)).peekable();
            if own.peek().is_none() {
                continue;
            }
            let operand = self.unbiased.operand(cx, weights, index);
            for Adapting { columns, matrices, .. } in own {
                let mut squares = cx.statistics([columns.len()], "dora.squares");
                let Weight { mut matrix, layout } = operand.weight();
                if columns.len() < joint.len() {
                    // Weights of several results are [out, in].
                    let [_, inputs] = matrix.dims();
                    let rows = columns.start - joint.start..columns.end - joint.start;
                    matrix =
                        matrix.range(rows.start * inputs..rows.end * inputs).reshape([rows.len(), inputs]);
                }
                cx.device.weight_squares(Weight { matrix, layout }, *matrices, scale, squares.view_mut());
                all.push(squares);
            }
        }
        match &self.sum {
            None => Ok(all),
            Some(sum) => all.into_iter().map(sum).collect(),
        }
    }

    /// y of z; what backward reads.
    pub(crate) fn forward(
        &self,
        cx: &Context,
        (weights, biases): (Parameters, Parameters),
        (adapters, scale): (&[Adapting], f32),
        z: &Activation,
    ) -> Result<(Tensor, SavedMagnitudes)> {
        let saved = self.saved(cx, weights, (adapters, scale), Some(z.clone()))?;
        cx.device.sum_later(z.view());
        let y = self.rescaled(cx, biases, adapters, (z, &saved.squares));
        Ok((y, saved))
    }

    /// What backward reads; of z nothing is, where no magnitudes are trained.
    pub(crate) fn saved(
        &self,
        cx: &Context,
        weights: Parameters,
        (adapters, scale): (&[Adapting], f32),
        z: Option<Activation>,
    ) -> Result<SavedMagnitudes> {
        let is_read = adapters.iter().any(|adapter| adapter.magnitudes.are_trained());
        Ok(SavedMagnitudes { z: z.filter(|_| is_read), squares: self.squares(cx, weights, adapters, scale)? })
    }

    /// The columns of adapters, times magnitude over norm; the others as they are. Biases, if they are given, are added once.
    fn rescaled(
        &self,
        cx: &Context,
        biases: Parameters,
        adapters: &[Adapting],
        (x, squares): (&Tensor, &[Tensor]),
    ) -> Tensor {
        let mut y = cx.activation(x.shape(), "dora.y");
        let mut done = 0;
        let copy = |y: &mut Tensor, columns: Range<usize>| {
            if !columns.is_empty() {
                let start = columns.start;
                cx.device.copy_columns((x.view(), start), (y.view_mut(), start), columns.len());
            }
        };
        for (Adapting { columns, magnitudes, .. }, squares) in adapters.iter().zip(squares) {
            copy(&mut y, done..columns.start);
            done = columns.end;
            cx.device.run(Rescale {
                x: x.view(),
                first: columns.start,
                magnitudes: magnitudes.value(0),
                squares: squares.view(),
                bias: self.bias(biases, columns),
                y: y.view_mut(),
            });
        }
        copy(&mut y, done..self.unbiased.width());
        y
    }

    /// The bias of some columns, if there is one.
    fn bias<'a>(&self, biases: Parameters<'a>, columns: &Range<usize>) -> Option<View<'a>> {
        let mut each = self.unbiased.each(biases);
        let (index, joint) = each.find(|(_, joint)| joint.contains(&columns.start))?;
        Some(biases.value(index).range(columns.start - joint.start..columns.end - joint.start))
    }

    /// The derivative of z, and those of the magnitudes that are trained, in f32.
    pub(crate) fn backward(
        &self,
        cx: &Context,
        biases: Parameters,
        adapters: &[Adapting],
        (saved, dy): (SavedMagnitudes, &Activation),
    ) -> (Activation, Vec<Option<Tensor>>) {
        let SavedMagnitudes { z, squares } = saved;
        let of = |(Adapting { columns, magnitudes, .. }, squares): (&Adapting, &Tensor)| {
            let z = z.as_ref().filter(|_| magnitudes.are_trained())?;
            let mut dm = cx.statistics([columns.len()], "dora.dm");
            cx.device.run(RescaleGradient {
                x: z.view(),
                first: columns.start,
                squares: squares.view(),
                bias: self.bias(biases, columns),
                dy: dy.view(),
                dm: dm.view_mut(),
                accumulate: false,
            });
            Some(dm)
        };
        let gradients = adapters.iter().zip(&squares).map(of).collect();
        drop(z);
        let none = Parameters::new(&[]);
        (Arc::new(self.rescaled(cx, none, adapters, (dy, &squares))), gradients)
    }
}
