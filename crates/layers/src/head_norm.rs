//! RMS norms of queries and keys.

use std::sync::Arc;

use phalanx_tensor::{Heads, LayerNormBackward, Tensor};
use phalanx_trace::{Axis, Placement, Placements};

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::failure::Result;
use crate::init::Init;
use crate::layer::{Context, Layer, Rebuild};
use crate::parameter::{Kind, ParameterSpec};
use crate::saved::{Saved, Shared};

/// RMS norms of the queries and of the keys among packed queries, keys and values (Henry et al., arXiv 2010.04245), each with a weight
/// of its own; values pass.
pub struct HeadNorm {
    /// Names of the weights, of queries and of keys.
    pub names: [String; 2],
    /// The heads that this layer has.
    pub heads: Heads,
    /// What one norm is over.
    pub over: NormOver,
    /// Added to the mean square.
    pub eps: f32,
    /// Whether other ranks have other heads, so that the gradients are terms of a sum over them.
    pub partial: bool,
}

/// What a norm of queries or keys is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOver {
    /// The elements of a head; all heads share a weight (Qwen3).
    EachHead,
    /// The elements of all heads (OLMo 2).
    AllHeads,
}

/// What backward reads beside the input: `1 / sqrt(avg(x²) + eps)` of queries and of keys, `[batch * seq * norms of a row]`.
pub type SavedHeadNorm = [Tensor; 2];

impl HeadNorm {
    /// Queries and keys: the first column of each, its norms in a row, and elements of a norm.
    fn parts(&self) -> [(usize, usize, usize); 2] {
        let Heads { heads, kv_heads, head_dim, .. } = self.heads;
        [(0, heads), (heads * head_dim, kv_heads)].map(|(first, count)| match self.over {
            NormOver::EachHead => (first, count, head_dim),
            NormOver::AllHeads => (first, 1, count * head_dim),
        })
    }

    /// Columns of `x` in memory of their own, as rows of norms. Ranks that divide heads divide these rows.
    fn part(&self, cx: &Context, x: &Tensor, (first, norms, width): (usize, usize, usize)) -> Tensor {
        let [rows, _] = x.shape().rows_cols();
        let mut part = cx.activation([rows, norms * width], "head_norm.part");
        cx.device.copy_columns(x.view(), first, part.view_mut(), 0);
        let placements = cx.device.placements(part.view());
        let part = part.reshape([rows * norms, width]);
        if self.over == NormOver::EachHead {
            let as_rows = |all: Placements, axis: &Axis| match all.get(*axis) {
                Placement::Shard(1) => all.with(*axis, Placement::Shard(0)),
                _ => all,
            };
            let placements = Axis::ALL.iter().fold(placements, as_rows);
            cx.device.place(part.view(), placements);
        }
        part
    }

    /// Writes columns back, and places them as the others.
    fn put_back(
        &self,
        cx: &Context,
        part: Tensor,
        x: &mut Tensor,
        (first, norms, width): (usize, usize, usize),
    ) {
        let [rows, columns] = x.shape().rows_cols();
        let part = part.reshape([rows, norms * width]);
        cx.device.place(part.view(), cx.device.placements(x.view().reshape([rows, columns])));
        cx.device.copy_columns(part.view(), 0, x.view_mut(), first);
    }

    /// y; writes the statistics.
    fn compute(&self, cx: &Context, parameters: Parameters, x: &Tensor, own: &mut SavedHeadNorm) -> Tensor {
        let mut y = cx.activation(x.shape(), "head_norm.y");
        cx.device.copy(x.view(), y.view_mut());
        for (index, part) in self.parts().into_iter().enumerate() {
            let before = self.part(cx, x, part);
            let mut after = cx.activation(before.shape(), "head_norm.after");
            let weight = (parameters.value(index), None);
            let statistics = (None, own[index].view_mut());
            cx.device.layer_norm(before.view(), weight, self.eps, after.view_mut(), statistics);
            drop(before);
            self.put_back(cx, after, &mut y, part);
        }
        y
    }
}

impl Layer for HeadNorm {
    type Own = SavedHeadNorm;

    fn parameters(&self) -> Vec<ParameterSpec> {
        let of = |(name, (_, _, width)): (&String, _)| ParameterSpec {
            partial: self.partial,
            ..ParameterSpec::new(name.clone(), Kind::Norm, [width], Init::Ones)
        };
        self.names.iter().zip(self.parts()).map(of).collect()
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: `[batch, seq, qkv_width]` of [`Heads`] -> y: the same
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<SavedHeadNorm>)> {
        let Call { parameters, x, sum, .. } = call;
        let [rows, _] = x.shape().rows_cols();
        let mut own = self.parts().map(|(_, norms, _)| cx.statistics([rows * norms], "head_norm.rstd"));
        let y = self.compute(cx, parameters, &x, &mut own);
        Ok((cx.plus(y, sum), Saved::new(own).with_input(x)))
    }

    fn backward(&self, cx: &Context, saved: Saved<SavedHeadNorm>, call: Call) -> Result<Option<Activation>> {
        let Call { parameters, x: dy, sum, .. } = call;
        let Saved { x, own, .. } = saved;
        let x = x.into_held();
        let mut dx = cx.owned(dy, "head_norm.dx");
        for (index, part) in self.parts().into_iter().enumerate() {
            let (x, dy) = (self.part(cx, &x, part), self.part(cx, &dx, part));
            let mut after = cx.activation(x.shape(), "head_norm.after");
            let mut slot = parameters.gradient(index);
            let (gradient, accumulate) = slot.as_mut().map(|slot| slot.write()).unzip();
            cx.device.run(LayerNormBackward {
                x: x.view(),
                gamma: parameters.value(index),
                mean: None,
                rstd: own[index].view(),
                dy: dy.view(),
                dx: after.view_mut(),
                accumulate_input: false,
                gradients: [gradient, None],
                accumulate_parameters: accumulate.unwrap_or(false),
            });
            drop((x, dy));
            self.put_back(cx, after, &mut dx, part);
        }
        Ok(Some(cx.plus(dx, sum)))
    }

    fn rebuild(&self) -> Option<Rebuild> {
        Some(Rebuild { reads_input: true, always: false })
    }

    /// Recomputes the output; the statistics are written again, with the same values.
    fn output(
        &self,
        cx: &Context,
        parameters: Parameters,
        x: &Shared,
        own: &mut SavedHeadNorm,
    ) -> Result<Activation> {
        Ok(Arc::new(self.compute(cx, parameters, x.held(), own)))
    }
}
