//! The collectives of tensor-parallel layers, by name.
//!
//! Under sequence parallelism rows are what is gathered and scattered: `[batch, seq, width]` in row-major order is
//! `t` consecutive spans of rows, so a gather puts them where they belong, whatever the batch.
//!
//! A test may have one of these collectives done wrongly ([`Mistake`]): the dry run must find every one.

use std::sync::Arc;

use phalanx_collectives::{CollectiveError, Group, Pending};
use phalanx_layers::{Activation, Context, Failure, Result};
use phalanx_tensor::{Category, Tensor};

/// A collective that is done wrongly on purpose, by its name.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Name of the place.
    pub at: &'static str,
    /// What is wrong.
    pub wrong: Wrong,
}

/// How a collective can be wrong.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// It is left out.
    Skipped,
    /// It is done twice.
    Doubled,
    /// It goes over another axis.
    OtherAxis,
}

/// A group, and what layers ask of it.
#[derive(Clone)]
pub struct Exchange {
    group: Arc<dyn Group>,
    mistake: Option<(Mistake, Arc<dyn Group>)>,
}

fn failed(error: CollectiveError) -> Failure {
    Failure(Box::new(error))
}

/// A tensor that is being summed; `None` where a mistake left that out.
#[must_use]
pub enum Summing {
    /// On its way.
    Started(Pending<Tensor>),
    /// On its way, of which this rank gets a part.
    Scattering(Pending<(Tensor, Tensor)>),
    /// Done already.
    Done(Tensor),
}

impl Summing {
    /// The sum, or this rank's part of it.
    ///
    /// # Errors
    /// When the collective failed.
    pub fn wait(self) -> Result<Tensor> {
        match self {
            Summing::Started(pending) => pending.wait().map_err(failed),
            Summing::Scattering(pending) => Ok(pending.wait().map_err(failed)?.1),
            Summing::Done(tensor) => Ok(tensor),
        }
    }
}

impl Exchange {
    /// Over `group`.
    pub fn new(group: Arc<dyn Group>) -> Exchange {
        Exchange { group, mistake: None }
    }

    #[doc(hidden)]
    #[must_use]
    pub fn mistaken(self, mistake: Option<Mistake>, elsewhere: Arc<dyn Group>) -> Exchange {
        Exchange { mistake: mistake.map(|mistake| (mistake, elsewhere)), ..self }
    }

    /// Ranks of the group.
    pub fn world_size(&self) -> usize {
        self.group.world_size()
    }

    /// This rank's place there.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// Whether the thing at `at`, which is no collective, is done at the wrong place.
    #[doc(hidden)]
    pub fn is_mistaken(&self, at: &'static str) -> bool {
        self.wrong(at).is_some()
    }

    fn wrong(&self, at: &'static str) -> Option<(Wrong, &Arc<dyn Group>)> {
        let (mistake, elsewhere) = self.mistake.as_ref()?;
        (mistake.at == at).then_some((mistake.wrong, elsewhere))
    }

    /// x becomes the sum over the ranks.
    ///
    /// # Errors
    /// When the collective failed before it was started: it waits where a mistake was planted.
    #[track_caller]
    pub fn all_reduce(&self, at: &'static str, x: Tensor) -> Result<Summing> {
        match self.wrong(at) {
            None => Ok(Summing::Started(self.group.all_reduce(x))),
            Some((Wrong::Skipped, _)) => Ok(Summing::Done(x)),
            Some((Wrong::Doubled, _)) => {
                let once = self.group.all_reduce(x).wait().map_err(failed)?;
                Ok(Summing::Started(self.group.all_reduce(once)))
            }
            Some((Wrong::OtherAxis, other)) => Ok(Summing::Started(other.all_reduce(x))),
        }
    }

    /// The rows of the sum over the ranks that are this rank's: x `[batch, seq, width]` -> `[1, rows / t, width]`.
    ///
    /// # Errors
    /// As [`Exchange::all_reduce`].
    #[track_caller]
    pub fn reduce_scatter(&self, cx: &Context, at: &'static str, x: Tensor) -> Result<Summing> {
        let [rows, width] = x.shape().rows_cols();
        let ranks = self.world_size();
        assert!(rows.is_multiple_of(ranks), "{rows} rows over {ranks} ranks");
        let mut shard = cx.activation([1, rows / ranks, width], "sequence.shard");
        let x = match self.wrong(at) {
            Some((Wrong::Doubled, _)) => self.group.all_reduce(x).wait().map_err(failed)?,
            Some((Wrong::OtherAxis, other)) => other.all_reduce(x).wait().map_err(failed)?,
            _ => x,
        };
        if let Some((Wrong::Skipped | Wrong::OtherAxis, _)) = self.wrong(at) {
            let start = self.rank() * (rows / ranks) * width;
            cx.device.copy(x.view().range(start..start + rows / ranks * width), shard.view_mut());
            return Ok(Summing::Done(shard));
        }
        Ok(Summing::Scattering(self.group.reduce_scatter(x, shard, false)))
    }

    /// All rows: x `[1, rows / t, width]` -> `[batch, seq, width]`.
    ///
    /// # Errors
    /// When the collective failed.
    #[track_caller]
    pub fn all_gather(&self, cx: &Context, at: &'static str, x: &Activation) -> Result<Activation> {
        let [rows, width] = x.shape().rows_cols();
        let [batch, seq] = cx.tokens;
        assert_eq!(rows * self.world_size(), batch * seq, "rows of a micro-batch of {batch} x {seq} tokens");
        let mut whole = cx.activation([batch, seq, width], "sequence.whole");
        cx.device.place(whole.view(), cx.device.placements(x.view()));
        let start = self.rank() * rows * width;
        cx.device.copy(x.view(), whole.view_mut().range(start..start + rows * width));
        if let Some((Wrong::Skipped, _)) = self.wrong(at) {
            return Ok(Arc::new(whole));
        }
        let gathered = self.group.all_gather_in_place(whole).wait().map_err(failed)?;
        if let Some((Wrong::Doubled, _)) = self.wrong(at) {
            return Ok(Arc::new(self.group.all_reduce(gathered).wait().map_err(failed)?));
        }
        Ok(Arc::new(gathered))
    }

    /// What every rank says of some rows, in the order of ranks: x `[rows, n]` -> `[t, rows, n]`.
    ///
    /// # Errors
    /// When the collective failed.
    #[track_caller]
    pub fn told_by_all(&self, cx: &Context, at: &'static str, x: Tensor) -> Result<Tensor> {
        let ([rows, n], ranks) = (x.dims(), self.world_size());
        let elements = rows * n;
        let all = cx.device.alloc(x.dtype(), [ranks, rows, n], Category::Workspace, "told_by_all");
        match self.wrong(at) {
            Some((Wrong::Skipped, _)) => {
                let mut all = all;
                for rank in 0..ranks {
                    let place = rank * elements..(rank + 1) * elements;
                    cx.device.copy(x.view(), all.view_mut().range(place));
                }
                Ok(all)
            }
            _ => Ok(self.group.all_gather(x, all).wait().map_err(failed)?.1),
        }
    }
}

/// A tensor that nobody else holds, to be sent or summed: itself, or a copy.
#[track_caller]
pub fn owned(cx: &Context, x: Activation) -> Tensor {
    Arc::try_unwrap(x).unwrap_or_else(|shared| {
        let mut copy =
            cx.device.alloc(shared.dtype(), shared.shape(), Category::Activations, "exchange.copy");
        cx.device.copy(shared.view(), copy.view_mut());
        copy
    })
}
