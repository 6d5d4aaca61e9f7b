//! A tensor in a checkpoint, as its manifest describes it: a shape, and the pieces that hold its elements.

use std::ops::Range;

use phalanx_plan::Stripe;
use phalanx_plan::trace::DType;
use serde::{Deserialize, Serialize};

use crate::limits;
use crate::tensor_file::elements;

/// A whole tensor on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredTensor {
    /// `parameters`, `exp_avg` ...
    pub state: String,
    /// Name of the parameter.
    pub name: String,
    /// Type of an element.
    pub dtype: DType,
    /// Global shape.
    #[serde(deserialize_with = "limits::shape")]
    pub shape: Vec<usize>,
    /// Its pieces, ordered by stripe and then by element, without gaps or overlaps.
    pub pieces: Vec<StoredPiece>,
}

/// A part of a tensor, contiguous in one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredPiece {
    /// Name of the file in the checkpoint's folder.
    pub file: String,
    /// Offset of the piece in the file, in bytes.
    pub offset: u64,
    /// The part of the tensor that it belongs to; all of it when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe: Option<Stripe>,
    /// First element and the one after the last, of the flattened tensor or of the stripe.
    pub range: [u64; 2],
    /// Checksum of its bytes, in hexadecimal.
    pub blake3: String,
}

impl StoredTensor {
    /// Elements of the whole tensor.
    pub fn elements(&self) -> u64 {
        elements(&self.shape).expect("checked when the manifest was made or read")
    }

    /// State and name, as files and messages spell them.
    pub fn label(&self) -> String {
        format!("{}/{}", self.state, self.name)
    }
}

impl StoredPiece {
    /// The stripe whose elements `range` counts, in a tensor of `whole` elements.
    pub fn stripe_in(&self, whole: u64) -> Stripe {
        self.stripe.unwrap_or_else(|| Stripe::whole(whole))
    }

    /// The sort key of pieces: how the tensor was cut, which stripe, which elements.
    pub(crate) fn order(&self) -> (u64, u64, u64, [u64; 2]) {
        let Stripe { run, ranks, rank } = self.stripe.unwrap_or(Stripe { run: 0, ranks: 1, rank: 0 });
        (ranks, run, rank, self.range)
    }

    /// The piece in elements of its tensor, or of its stripe.
    pub fn elements(&self) -> Range<u64> {
        self.range[0]..self.range[1]
    }

    /// The piece in bytes of its file.
    pub fn bytes(&self, dtype: DType) -> Range<u64> {
        self.offset..self.offset + (self.range[1] - self.range[0]) * dtype.bytes() as u64
    }
}

/// The name of a tensor, or of a stripe of it, in messages.
pub(crate) fn part(label: &str, stripe: Option<Stripe>) -> String {
    stripe.map_or_else(|| label.to_string(), |stripe| format!("{label} ({stripe})"))
}
