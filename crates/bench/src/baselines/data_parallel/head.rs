//! The head of a model on one device of DataParallel: its loss is that of all devices, on the first of them.

use std::sync::Arc;

use phalanx_collectives::{CollectiveError, Group};
use phalanx_layers::{Activation, Call, Context, Failure, Head, ParameterSpec, Parameters, TARGETS};
use phalanx_tensor::{
    Category, CrossEntropy, DType, Tensor, View, ViewMut, VocabularyLoss, vocabulary_blocks,
};

use super::ROOT;

/// A head whose loss is gathered; on other devices than the first, the loss it returns is a part of it, or nothing.
pub(super) struct GatheringHead {
    pub(super) head: Box<dyn Head>,
    pub(super) group: Arc<dyn Group>,
    /// True if each device computes the loss of its part; otherwise the first one computes it from the logits of all.
    pub(super) loss_in_forward: bool,
}

impl Head for GatheringHead {
    fn parameters(&self) -> Vec<ParameterSpec> {
        self.head.parameters()
    }

    fn logits(&self, cx: &Context, parameters: Parameters, x: View) -> Tensor {
        self.head.logits(cx, parameters, x)
    }

    fn loss(
        &self,
        cx: &Context,
        call: Call,
        numbers: CrossEntropy,
    ) -> Result<(Tensor, Option<Activation>), Failure> {
        if !self.loss_in_forward {
            return self.loss_on_root(cx, call, numbers);
        }
        let (loss, dx) = self.head.loss(cx, call, numbers)?;
        let devices = self.group.world_size();
        let all = self.is_root().then(|| cx.statistics([devices], "data_parallel.losses"));
        let (mut loss, all) = self.group.gather(loss, all, ROOT).wait().map_err(failed)?;
        for other in 1..devices {
            all.iter().for_each(|all| cx.device.add(all.view().range(other..other + 1), loss.view_mut()));
        }
        Ok((loss, dx))
    }
}

impl GatheringHead {
    fn is_root(&self) -> bool {
        self.group.rank() == ROOT
    }

    /// Gathers the logits `[rows, vocab]` of all devices on the first and scatters their derivatives.
    fn loss_on_root(
        &self,
        cx: &Context,
        call: Call,
        numbers: CrossEntropy,
    ) -> Result<(Tensor, Option<Activation>), Failure> {
        let Call { parameters, x, .. } = call;
        let head = self.head.as_linear().expect("the plan refuses other heads");
        let logits = self.head.logits(cx, parameters, x.view().reshape(x.shape().rows_cols()));
        let ([rows, vocab], devices) = (logits.dims(), self.group.world_size());
        let ids = |rows: usize, name| cx.device.alloc(DType::U32, [rows], Category::Activations, name);
        let mut own = ids(rows, "data_parallel.targets");
        cx.device.copy(cx.input(TARGETS).view().reshape([rows]), own.view_mut());
        let all = self.is_root().then(|| ids(devices * rows, "data_parallel.gathered_targets"));
        let (own, targets) = self.group.gather(own, all, ROOT).wait().map_err(failed)?;
        drop(own);
        let all = || cx.activation([devices * rows, vocab], "data_parallel.gathered_logits");
        let (part, mut all) =
            self.group.gather(logits, self.is_root().then(all), ROOT).wait().map_err(failed)?;
        let loss =
            all.as_mut().zip(targets).map(|(all, targets)| loss_of(cx, all.view_mut(), &targets, numbers));
        let (all, dlogits) = self.group.scatter(all, part, ROOT).wait().map_err(failed)?;
        drop(all);
        let dx = head.logits_backward(cx, parameters, &x, dlogits.view());
        drop(dlogits);
        let loss = loss.unwrap_or_else(|| {
            let mut none = cx.statistics([1], "data_parallel.no_loss");
            cx.device.fill(none.view_mut(), 0.0);
            none
        });
        Ok((loss, Some(Arc::new(dx))))
    }
}

fn failed(error: CollectiveError) -> Failure {
    Failure(Box::new(error))
}

/// The loss `[1]` of all logits, which are replaced by their derivatives.
fn loss_of(cx: &Context, mut logits: ViewMut, targets: &Tensor, numbers: CrossEntropy) -> Tensor {
    let [rows, vocab] = logits.dims();
    let work = |dtype, shape: [usize; 2], name| cx.device.alloc(dtype, shape, Category::Workspace, name);
    let mut blocks = work(DType::F32, [rows, 4 * vocabulary_blocks(vocab)], "head.blocks");
    let mut statistics = work(DType::F32, [rows, 4], "head.statistics");
    let mut sum = cx.device.alloc(DType::F64, [1], Category::Workspace, "head.sum");
    let targets = targets.view();
    cx.device.logits_statistics(logits.reborrow(), targets, 0, blocks.view_mut(), statistics.view_mut());
    cx.device.run(VocabularyLoss {
        statistics: statistics.view().reshape([1, rows, 4]),
        blocks: blocks.view(),
        targets,
        first: 0,
        columns: vocab,
        classes: vocab,
        numbers,
        exponentials: Some(logits),
        weights: None,
        losses: None,
        loss: sum.view_mut(),
        accumulate: false,
    });
    let mut loss = cx.statistics([1], "head.loss");
    cx.device.scaled(sum.view(), numbers.scale, loss.view_mut());
    loss
}
