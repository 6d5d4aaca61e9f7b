//! Element types.

use serde::{Deserialize, Serialize};

/// Element type of a tensor or of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary64: norms and their partial sums.
    F64,
    /// IEEE binary32.
    F32,
    /// Upper half of binary32.
    BF16,
    /// IEEE binary16.
    F16,
    /// Token ids and other indices.
    U32,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::U32 => 4,
            DType::BF16 | DType::F16 => 2,
        }
    }

    /// Name as configurations and files spell it.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::U32 => "u32",
        }
    }
}
