//! Layers that several holders divide among themselves. A layer knows its share, and no rank.

use crate::layer::Layer;
use crate::parameter::ParameterSpec;
use crate::share::{CannotCut, Share};

/// A layer between rows that every rank has whole and results of which each has a share. Implement it, and tensor parallelism divides
/// the layer.
pub trait Cut: Layer + Sized + 'static {
    /// The layer with a share of its outputs.
    ///
    /// # Errors
    /// When they cannot be dealt out evenly.
    fn outputs(self, share: Share) -> Result<Self, CannotCut>;

    /// The layer with a share of its inputs: its result is one term of a sum over the shares. A bias is taken out of it, and added to
    /// the sum once.
    ///
    /// # Errors
    /// When they cannot be dealt out evenly.
    fn inputs(self, share: Share) -> Result<(Self, Option<ParameterSpec>), CannotCut>;
}
