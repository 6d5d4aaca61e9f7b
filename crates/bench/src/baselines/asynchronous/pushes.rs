//! Statistics over the pushes of all workers. Every server receives each push of each worker once, so the server of a
//! rank knows the losses of all workers, although the rank computes only its own.

use std::collections::BTreeMap;

use phalanx_train::metrics::Staleness;

/// The pushes that a server received since the statistics were last taken.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pushes {
    /// Number of pushes, including skipped ones.
    pub count: u64,
    /// Number of pushes of all runs up to the last one counted here.
    pub total: u64,
    /// Sum of the losses of these pushes.
    pub loss_sum: f64,
    /// Sum of the gradient norms of these pushes, before clipping.
    pub grad_norm_sum: f64,
    /// Number of applied gradients by staleness: the updates of other workers that their parameters had not seen.
    pub staleness: BTreeMap<u64, u64>,
}

impl Pushes {
    /// Counts a push with its loss and gradient norm. `staleness` is that of its gradient; None if it was skipped.
    pub(super) fn add(&mut self, [loss, grad_norm]: [f32; 2], staleness: Option<u64>) {
        self.count += 1;
        self.total += 1;
        self.loss_sum += f64::from(loss);
        self.grad_norm_sum += f64::from(grad_norm);
        if let Some(staleness) = staleness {
            *self.staleness.entry(staleness).or_default() += 1;
        }
    }

    /// Returns the statistics and starts new ones.
    pub(super) fn take(&mut self) -> Pushes {
        let total = self.total;
        std::mem::replace(self, Pushes { total, ..Pushes::default() })
    }

    /// Adds later statistics of the same server.
    pub fn extend(&mut self, later: Pushes) {
        self.count += later.count;
        self.total = later.total;
        self.loss_sum += later.loss_sum;
        self.grad_norm_sum += later.grad_norm_sum;
        for (staleness, count) in later.staleness {
            *self.staleness.entry(staleness).or_default() += count;
        }
    }

    /// Mean loss; NaN without pushes.
    pub fn loss(&self) -> f32 {
        (self.loss_sum / self.count as f64) as f32
    }

    /// Mean gradient norm; NaN without pushes.
    pub fn grad_norm(&self) -> f32 {
        (self.grad_norm_sum / self.count as f64) as f32
    }

    /// The staleness of the applied gradients, with the seconds that the worker of this rank waited.
    pub(super) fn staleness(&self, waited_s: f64) -> Staleness {
        let applied: u64 = self.staleness.values().sum();
        let sum: f64 =
            self.staleness.iter().map(|(staleness, count)| *staleness as f64 * *count as f64).sum();
        Staleness {
            staleness: sum / applied.max(1) as f64,
            staleness_max: self.staleness.keys().copied().max().unwrap_or(0),
            staleness_counts: self.staleness.iter().map(|(staleness, count)| (*staleness, *count)).collect(),
            waited_s,
        }
    }
}
