//! The output projection and cross entropy with the classes split over ranks.
//!
//! Each rank has the logits of its classes, in slices of rows as ever. What the others need of them are four numbers
//! a row: the largest, the sum of exponentials, the sum, the target's. One all_gather of them stands for Megatron's three
//! all_reduces (largest, target, sum): fewer meetings, and every rank adds them in the same order. Logits never move.
//! Price a micro-batch of R rows: 16 R (t - 1) bytes sent, and the all_reduce (or, with sequence parallelism, all_gather
//! and reduce_scatter) of the activations, as of a column layer.

use std::sync::Arc;

use phalanx_layers::head::Classes;
use phalanx_layers::{Activation, Context, Gradient, Head, LinearCrossEntropy, ParameterSpec, Part, Result};
use phalanx_tensor::{Category, CrossEntropy, Epilogue, Tensor, View};

use super::exchange::Exchange;

/// See the module's head.
pub struct VocabularyHead {
    head: LinearCrossEntropy,
    /// What is here of weight and bias.
    weight: (Vec<usize>, Part),
    bias: (Vec<usize>, Part),
    exchange: Exchange,
    sequence: bool,
}

impl VocabularyHead {
    /// `head` says what the whole is; `weight` and `bias` what is here of them.
    pub fn new(
        head: LinearCrossEntropy,
        weight: (Vec<usize>, Part),
        bias: (Vec<usize>, Part),
        exchange: Exchange,
        sequence: bool,
    ) -> VocabularyHead {
        VocabularyHead { head, weight, bias, exchange, sequence }
    }

    fn classes(&self) -> Classes {
        let each = self.bias.1.stripe.run as usize;
        Classes { first: self.exchange.rank() * each, here: self.weight.0[0] }
    }

    /// All rows of the head's input.
    fn all_rows(&self, cx: &Context, x: Activation) -> Result<Activation> {
        if self.sequence { self.exchange.all_gather(cx, &x) } else { Ok(x) }
    }
}

impl Head for VocabularyHead {
    fn parameters(&self) -> Vec<ParameterSpec> {
        let here = [&self.weight, &self.bias];
        let part = |(spec, (shape, part)): (ParameterSpec, &(Vec<usize>, Part))| ParameterSpec {
            shape: shape.clone(),
            part: Some(part.clone()),
            ..spec
        };
        self.head.parameters().into_iter().zip(here).map(part).collect()
    }

    /// x: `[batch, seq, hidden]` or this rank's rows, targets: `[batch, seq]` u32 -> `[1]`, the same on all ranks
    fn loss(
        &self,
        cx: &Context,
        parameters: &[View],
        x: Activation,
        targets: &Tensor,
        numbers: CrossEntropy,
    ) -> Result<Tensor> {
        let x = self.all_rows(cx, x)?;
        let mut tell = |told| self.exchange.gather_statistics(cx, told);
        let (loss, _) =
            self.head.pass(cx, parameters, None, &x, targets, numbers, self.classes(), &mut tell)?;
        Ok(loss)
    }

    /// As [`Head::loss`], and dx like x, the sum over ranks; dw as `gradients` says.
    fn loss_and_gradient(
        &self,
        cx: &Context,
        parameters: &[View],
        gradients: &mut [Gradient],
        x: Activation,
        targets: &Tensor,
        numbers: CrossEntropy,
    ) -> Result<(Tensor, Activation)> {
        let x = self.all_rows(cx, x)?;
        let mut tell = |told| self.exchange.gather_statistics(cx, told);
        let some = Some(gradients);
        let (loss, dx) =
            self.head.pass(cx, parameters, some, &x, targets, numbers, self.classes(), &mut tell)?;
        drop(x);
        let dx = dx.expect("asked for");
        let dx = match self.sequence {
            false => self.exchange.all_reduce(dx),
            true => self.exchange.reduce_scatter(cx, dx),
        };
        Ok((loss, Arc::new(dx.wait()?)))
    }

    /// Logits of the classes that are here.
    fn logits(&self, cx: &Context, parameters: &[View], x: View) -> Tensor {
        let [rows, _] = x.shape().rows_cols();
        let classes = self.classes().here;
        let mut y = cx.device.alloc(cx.compute, [rows, classes], Category::Workspace, "head.logits");
        let epilogue = Epilogue { bias: parameters.get(1).copied(), residual: None };
        cx.device.linear(x, self.head.weight(parameters[0]), epilogue, y.view_mut());
        y
    }
}
