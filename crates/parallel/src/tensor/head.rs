//! The output projection and cross entropy with the classes split over ranks.
//!
//! Each rank computes the logits of its classes, in slices of rows. The other ranks need four numbers of each row:
//! the largest logit, the sum of exponentials, the sum of logits, and the target's logit. One all_gather of these
//! numbers replaces Megatron's three all_reduces (largest, target, sum): there are fewer collectives, and every rank
//! adds the numbers in the same order. Logits are never communicated. Cost for a micro-batch of R rows: 16 R (t - 1)
//! bytes sent, and the collectives of a column layer for the activations.

use std::sync::Arc;

use phalanx_layers::head::{Classes, HeadInput, RowTerms};
use phalanx_layers::{
    Activation, Call, Context, Head, LinearCrossEntropy, ParameterSpec, Parameters, Result, Share, TARGETS,
};
use phalanx_tensor::{Category, CrossEntropy, Epilogue, Tensor, View};

use super::exchange::Exchange;

/// An output projection with cross entropy of which this rank has some classes.
pub struct VocabularyHead {
    head: LinearCrossEntropy,
    share: Share,
    exchange: Exchange,
    sequence: bool,
}

impl VocabularyHead {
    /// `head` describes the whole, of whose classes this rank has a share.
    pub fn new(head: LinearCrossEntropy, share: Share, exchange: Exchange, sequence: bool) -> VocabularyHead {
        VocabularyHead { head, share, exchange, sequence }
    }

    fn classes(&self) -> Classes {
        let each = self.head.vocab.div_ceil(self.share.of);
        let first = self.share.index * each;
        Classes { first, here: self.head.vocab.saturating_sub(first).min(each) }
    }

    /// All rows of the head's input.
    fn all_rows(&self, cx: &Context, x: Activation) -> Result<Activation> {
        if self.sequence { self.exchange.all_gather(cx, &x) } else { Ok(x) }
    }
}

impl Head for VocabularyHead {
    fn parameters(&self) -> Vec<ParameterSpec> {
        self.head.parameters().into_iter().map(|spec| spec.rows_of(self.share)).collect()
    }

    /// x: `[batch, seq, hidden]` or this rank's rows, input `targets`: `[batch, seq]` u32 -> `[1]`, the same on all ranks, and dx, the sum
    /// over the ranks, with the shape of x
    fn loss(&self, cx: &Context, call: Call, numbers: CrossEntropy) -> Result<(Tensor, Option<Activation>)> {
        self.loss_of_rows(cx, call, numbers, RowTerms::default())
    }

    fn loss_of_rows(
        &self,
        cx: &Context,
        call: Call,
        numbers: CrossEntropy,
        terms: RowTerms,
    ) -> Result<(Tensor, Option<Activation>)> {
        let Call { parameters, x, input_wanted, .. } = call;
        let x = self.all_rows(cx, x)?;
        let mut tell = |told| self.exchange.gather_statistics(cx, told);
        let targets = cx.input(TARGETS);
        let input = HeadInput { x: &x, targets: &targets, numbers, classes: self.classes(), input_wanted };
        let (loss, dx) = self.head.pass(cx, parameters, (input, terms), &mut tell)?;
        drop(x);
        let summing = dx.map(|dx| match self.sequence {
            false => self.exchange.all_reduce(dx),
            true => self.exchange.reduce_scatter(cx, dx),
        });
        Ok((loss, summing.map(|summing| summing.wait().map(Arc::new)).transpose()?))
    }

    /// Logits of this rank's classes.
    fn logits(&self, cx: &Context, parameters: Parameters, x: View) -> Tensor {
        let [rows, _] = x.shape().rows_cols();
        let classes = self.classes().here;
        let mut y = cx.device.alloc(cx.compute, [rows, classes], Category::Workspace, "head.logits");
        let epilogue = Epilogue { bias: parameters.get(1), residual: None };
        cx.device.linear(x, self.head.weight(parameters.value(0)), epilogue, y.view_mut());
        y
    }
}
