//! RMS norms of queries and keys.

use std::sync::Arc;

use phalanx_tensor::{Heads, LayerNorm, LayerNormBackward, NormSums, RowNorm, Tensor, WholeSums};

use crate::activation::Activation;
use crate::call::{Call, Parameters};
use crate::failure::Result;
use crate::layer::{Context, Layer, Rebuild};
use crate::layer_norm::initial;
use crate::parameter::{Kind, ParameterSpec};
use crate::saved::{Saved, Shared};
use crate::share::{Pieces, Share};

/// RMS norms of the queries and of the keys among packed queries, keys and values (Henry et al., arXiv 2010.04245), each with a weight
/// of its own; values pass.
pub struct HeadNorm {
    /// Names of the weights, of queries and of keys.
    pub names: [String; 2],
    /// The heads that this layer has.
    pub heads: Heads,
    /// The elements over which one norm is taken.
    pub over: NormOver,
    /// Added to the mean square.
    pub eps: f32,
    /// True if gamma is 1 + weight (Gemma).
    pub from_one: bool,
    /// The other ranks' heads, if they have others.
    pub shared: Option<SharedHeads>,
}

/// Elements over which a norm of queries or keys is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOver {
    /// The elements of a head; all heads share a weight (Qwen3).
    EachHead,
    /// The elements of all heads (OLMo 2).
    AllHeads,
}

/// A sum of a tensor over the ranks that share the heads.
pub type SumOfShares = Box<dyn Fn(Tensor) -> Result<Tensor> + Send + Sync>;

/// The heads of all ranks, of which a layer has a share.
pub struct SharedHeads {
    /// All heads.
    pub all: Heads,
    /// This rank's share.
    pub share: Share,
    /// Sums over the ranks: norms over all heads need it, in both directions.
    pub sum: SumOfShares,
}

/// Tensors that backward reads beside the input: `1 / sqrt(avg(x²) + eps)` of queries and of keys, `[batch * seq, heads]`, or
/// over all heads `[batch * seq]`.
pub type SavedHeadNorm = [Tensor; 2];

impl HeadNorm {
    /// The norms of queries and of keys, and the elements of one.
    fn norms(&self) -> [(RowNorm, usize); 2] {
        let Heads { heads, kv_heads, head_dim, .. } = self.heads;
        [(0, heads), (heads * head_dim, kv_heads)].map(|(first, count)| {
            let norm = RowNorm { offset: f32::from(u8::from(self.from_one)), first, ..self.eps.into() };
            match self.over {
                NormOver::EachHead => (RowNorm { count, by_heads: true, ..norm }, head_dim),
                NormOver::AllHeads => (norm, count * head_dim),
            }
        })
    }

    /// Memory for a result, in which values are those of `x`.
    fn with_values(&self, cx: &Context, x: &Tensor, name: &'static str) -> Tensor {
        let first = self.heads.qkv_width() - self.heads.cache_width() / 2;
        let mut y = cx.activation(x.shape(), name);
        cx.device.copy_columns((x.view(), first), (y.view_mut(), first), self.heads.cache_width() / 2);
        y
    }

    /// For norms over heads of several ranks: the sums of x², or in backward of x times its part of the derivative, of queries and keys
    /// over all ranks, `[2, batch * seq]`.
    fn sums(
        &self,
        cx: &Context,
        parameters: Parameters,
        x: &Tensor,
        dy: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let Some(SharedHeads { sum, .. }) = self.shared.as_ref().filter(|_| self.over == NormOver::AllHeads)
        else {
            return Ok(None);
        };
        let [rows, _] = x.shape().rows_cols();
        let mut sums = cx.statistics([2, rows], "head_norm.sums");
        for (index, (norm, _)) in self.norms().into_iter().enumerate() {
            cx.device.run(NormSums {
                x: x.view(),
                gamma: parameters.value(index),
                norm,
                dy: dy.map(Tensor::view),
                sums: sums.view_mut().range(index * rows..(index + 1) * rows),
            });
        }
        sum(sums).map(Some)
    }

    /// The sums of queries or of keys, and of how many elements they are: keys that several ranks have are in them several times.
    fn whole<'a>(&self, index: usize, sums: Option<&'a Tensor>) -> Option<WholeSums<'a>> {
        let (sums, SharedHeads { share, .. }) = sums.zip(self.shared.as_ref())?;
        let [_, rows] = sums.dims();
        let (_, width) = self.norms()[index];
        Some(WholeSums {
            sums: sums.view().range(index * rows..(index + 1) * rows),
            elements: share.of * width,
        })
    }

    /// y; writes the statistics.
    fn compute(
        &self,
        cx: &Context,
        parameters: Parameters,
        x: &Tensor,
        own: &mut SavedHeadNorm,
    ) -> Result<Tensor> {
        let mut y = self.with_values(cx, x, "head_norm.y");
        let sums = self.sums(cx, parameters, x, None)?;
        for ((index, (norm, _)), rstd) in self.norms().into_iter().enumerate().zip(own) {
            cx.device.run(LayerNorm {
                x: x.view(),
                gamma: parameters.value(index),
                beta: None,
                norm,
                squares: self.whole(index, sums.as_ref()),
                y: y.view_mut(),
                mean: None,
                rstd: rstd.view_mut(),
            });
        }
        Ok(y)
    }
}

impl Layer for HeadNorm {
    type Own = SavedHeadNorm;

    /// Weights of heads are the same for all; of those over all heads, a rank has the elements of its heads.
    fn parameters(&self) -> Vec<ParameterSpec> {
        let init = initial(self.from_one);
        let new = |name: &String, width| ParameterSpec::new(name.clone(), Kind::Norm, [width], init);
        let named = self.names.iter().zip(self.norms());
        let Some(SharedHeads { all, share, .. }) = &self.shared else {
            return named.map(|(name, (_, width))| new(name, width)).collect();
        };
        let all = [Pieces::of(all.heads), Pieces { repeat: true, ..Pieces::of(all.kv_heads) }];
        let of = |((name, (_, width)), pieces): ((&String, (_, usize)), Pieces)| match self.over {
            NormOver::EachHead => ParameterSpec { partial: true, ..new(name, width) },
            NormOver::AllHeads => {
                let whole = new(name, pieces.count * self.heads.head_dim);
                whole.cut(0, pieces, *share).expect("the heads were divided so")
            }
        };
        named.zip(all).map(of).collect()
    }

    fn is_row_wise(&self) -> bool {
        true
    }

    /// x: `[batch, seq, qkv_width]` of [`Heads`] -> y: the same
    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, Saved<SavedHeadNorm>)> {
        let Call { parameters, x, sum, .. } = call;
        let [rows, _] = x.shape().rows_cols();
        let mut own = self.norms().map(|(norm, _)| match norm.by_heads {
            true => cx.statistics([rows, norm.count], "head_norm.rstd"),
            false => cx.statistics([rows], "head_norm.rstd"),
        });
        let y = self.compute(cx, parameters, &x, &mut own)?;
        Ok((cx.plus(y, sum), Saved::new(own).with_input(x)))
    }

    fn backward(&self, cx: &Context, saved: Saved<SavedHeadNorm>, call: Call) -> Result<Option<Activation>> {
        let Call { parameters, x: dy, sum, .. } = call;
        let Saved { x, own, .. } = saved;
        let x = x.into_held();
        let mut dx = self.with_values(cx, &dy, "head_norm.dx");
        let sums = self.sums(cx, parameters, &x, Some(&dy))?;
        for ((index, (norm, _)), rstd) in self.norms().into_iter().enumerate().zip(own) {
            let mut slot = parameters.gradient(index);
            let (gradient, accumulate) = slot.as_mut().map(|slot| slot.write()).unzip();
            cx.device.run(LayerNormBackward {
                x: x.view(),
                gamma: parameters.value(index),
                norm,
                products: self.whole(index, sums.as_ref()),
                mean: None,
                rstd: rstd.view(),
                dy: dy.view(),
                dx: dx.view_mut(),
                accumulate_input: false,
                gradients: [gradient, None],
                accumulate_parameters: accumulate.unwrap_or(false),
            });
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
        Ok(Arc::new(self.compute(cx, parameters, x.held(), own)?))
    }
}
