//! The placement of a tensor: for each axis of the mesh, replicated, sharded, or a partial sum.
//!
//! The idea is GSPMD's (Xu et al., arXiv 2105.04663) and DTensor's, but here nothing is derived from it: code
//! that was written by hand is checked against it in the dry run, and what does not fit is a [`Fault`].

use serde::{Deserialize, Serialize};

use super::{PhaseName, Site};

/// A direction of the mesh of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Ranks along it hold different layers.
    Pipeline,
    /// Ranks along it compute different samples.
    Data,
    /// Ranks along it hold parts of the same matrices.
    Tensor,
}

impl Axis {
    /// All axes, outermost first.
    pub const ALL: [Axis; 3] = [Axis::Pipeline, Axis::Data, Axis::Tensor];

    /// Name as groups and messages spell it.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Pipeline => "pipeline",
            Axis::Data => "data",
            Axis::Tensor => "tensor",
        }
    }
}

/// Placement of a tensor along one axis: the part of it that each rank holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Every rank holds the same values.
    #[default]
    Replicated,
    /// Every rank holds its part of this dimension.
    Shard(u8),
    /// The values are the sum of what the ranks hold.
    Partial,
}

impl std::fmt::Display for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Placement::Replicated => write!(f, "replicated"),
            Placement::Shard(dimension) => write!(f, "sharded in dimension {dimension}"),
            Placement::Partial => write!(f, "partial sum"),
        }
    }
}

/// A placement for every axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Placements([Placement; 3]);

impl Placements {
    /// The same values everywhere.
    pub const REPLICATED: Placements = Placements([Placement::Replicated; 3]);

    /// The placement along one axis.
    pub const fn get(&self, axis: Axis) -> Placement {
        self.0[axis as usize]
    }

    /// The same with another placement along one axis.
    #[must_use]
    pub const fn with(mut self, axis: Axis, placement: Placement) -> Placements {
        self.0[axis as usize] = placement;
        self
    }
}

impl std::fmt::Display for Placements {
    /// `tensor: partial sum`; `replicated` when it is so on every axis.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut separator = "";
        for axis in Axis::ALL {
            let placement = self.get(axis);
            if placement != Placement::Replicated {
                write!(f, "{separator}{}: {placement}", axis.name())?;
                separator = ", ";
            }
        }
        if separator.is_empty() { write!(f, "replicated") } else { Ok(()) }
    }
}

/// A tensor that is not placed as its reader needs it: a collective is missing, one too many, or another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// Phase in which it was found; None before the first.
    pub phase: Option<PhaseName>,
    /// Name of the tensor: `h.3.mlp.out`.
    pub tensor: String,
    /// The axis along which it is wrong.
    pub axis: Axis,
    /// Description of the fault: the placement found, the one expected, and the collective that is missing or too much. It is the
    /// rest of a sentence that begins with the tensor's name.
    pub what: String,
    /// Who reads it.
    pub site: Site,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Fault { phase, tensor, axis, what, site } = self;
        let phase = phase.map_or("", PhaseName::name);
        write!(f, "phase `{phase}`, axis `{}`, at {site}: `{tensor}` {what}", axis.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_print_what_is_not_replicated() {
        let sharded = Placements::REPLICATED.with(Axis::Data, Placement::Shard(1));
        for (placements, text) in [
            (Placements::REPLICATED, "replicated"),
            (Placements::REPLICATED.with(Axis::Tensor, Placement::Partial), "tensor: partial sum"),
            (
                sharded.with(Axis::Pipeline, Placement::Partial),
                "pipeline: partial sum, data: sharded in dimension 1",
            ),
            (sharded.with(Axis::Data, Placement::Replicated), "replicated"),
        ] {
            assert_eq!(placements.to_string(), text);
        }
        assert_eq!(sharded.get(Axis::Data), Placement::Shard(1));
        assert_eq!(sharded.get(Axis::Tensor), Placement::Replicated);
    }
}
