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
    table_of_added,
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
        let all = self.head.vocab - self.head.added;
        let each = all.div_ceil(self.share.of);
        let first = self.share.index * each;
        Classes { first, here: all.saturating_sub(first).min(each) }
    }

    /// dx of all ranks' classes, and that of added ones, which every rank has for all rows.
    fn plus_added(&self, cx: &Context, mut dx: Tensor, of_added: &Tensor) -> Tensor {
        let elements = dx.shape().elements();
        let first = if self.sequence { self.share.index * elements } else { 0 };
        let own = of_added.view().range(first..first + elements);
        if !self.sequence {
            cx.device.add(own, dx.view_mut());
            return dx;
        }
        // The dry run knows the copy as this rank's rows.
        let mut rows = cx.activation(dx.shape(), "head.dx_of_own_rows");
        cx.device.copy(own, rows.view_mut());
        cx.device.place(rows.view(), cx.device.placements(dx.view()));
        cx.device.add(rows.view(), dx.view_mut());
        dx
    }

    /// All rows of the head's input.
    fn all_rows(&self, cx: &Context, x: Activation) -> Result<Activation> {
        if self.sequence { self.exchange.all_gather(cx, &x) } else { Ok(x) }
    }
}

impl Head for VocabularyHead {
    fn parameters(&self) -> Vec<ParameterSpec> {
        let own = |spec: ParameterSpec| match table_of_added(&spec.name) {
            Some(_) => spec,
            None => spec.rows_of(self.share),
        };
        self.head.parameters().into_iter().map(own).collect()
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
        let (classes, apart) = (self.classes(), true);
        let input = HeadInput { x: &x, targets: &targets, numbers, classes, input_wanted, apart };
        let (loss, [dx, of_added]) = self.head.pass(cx, parameters, (input, terms), &mut tell)?;
        drop(x);
        let summing = dx.map(|dx| match self.sequence {
            false => self.exchange.all_reduce(dx),
            true => self.exchange.reduce_scatter(cx, dx),
        });
        let Some(dx) = summing.map(|summing| summing.wait()).transpose()? else { return Ok((loss, None)) };
        let Some(of_added) = of_added else { return Ok((loss, Some(Arc::new(dx)))) };
        Ok((loss, Some(Arc::new(self.plus_added(cx, dx, &of_added)))))
    }

    /// Logits of this rank's classes.
    fn logits(&self, cx: &Context, parameters: Parameters, x: View) -> Tensor {
        assert_eq!(self.head.added, 0, "models that are sampled have their added rows in their tables");
        let [rows, _] = x.shape().rows_cols();
        let classes = self.classes().here;
        let mut y = cx.device.alloc(cx.compute, [rows, classes], Category::Workspace, "head.logits");
        let epilogue = Epilogue { bias: parameters.get(1), residual: None };
        cx.device.linear(x, self.head.weight(parameters.value(0)), epilogue, y.view_mut());
        y
    }
}
