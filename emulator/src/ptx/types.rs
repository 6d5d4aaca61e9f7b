//! Fundamental types and state spaces of PTX.

/// A fundamental type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum ScalarType {
    B8,
    B16,
    B32,
    B64,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    Tf32,
    F32,
    F64,
    Pred,
}

use ScalarType::*;

const NAMES: [(&str, ScalarType); 20] = [
    ("b8", B8),
    ("b16", B16),
    ("b32", B32),
    ("b64", B64),
    ("u8", U8),
    ("u16", U16),
    ("u32", U32),
    ("u64", U64),
    ("s8", S8),
    ("s16", S16),
    ("s32", S32),
    ("s64", S64),
    ("f16", F16),
    ("f16x2", F16x2),
    ("bf16", Bf16),
    ("bf16x2", Bf16x2),
    ("tf32", Tf32),
    ("f32", F32),
    ("f64", F64),
    ("pred", Pred),
];

impl ScalarType {
    /// The type of a name without its dot.
    pub fn from_name(name: &str) -> Option<Self> {
        NAMES.iter().find(|(known, _)| *known == name).map(|&(_, kind)| kind)
    }

    /// Size in memory.
    pub fn bytes(self) -> usize {
        match self {
            B8 | U8 | S8 | Pred => 1,
            B16 | U16 | S16 | F16 | Bf16 => 2,
            B32 | U32 | S32 | F16x2 | Bf16x2 | Tf32 | F32 => 4,
            B64 | U64 | S64 | F64 => 8,
        }
    }

    /// Whether loads of it extend the sign.
    pub fn is_signed(self) -> bool {
        matches!(self, S8 | S16 | S32 | S64)
    }
}

/// A state space: one of the memories of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateSpace {
    /// An address that may lie in any of the following.
    Generic,
    /// Device memory.
    Global,
    /// Device memory that kernels only read.
    Const,
    /// Memory of a block.
    Shared,
    /// Memory of a thread.
    Local,
    /// Parameters of kernels and functions.
    Param,
}

impl StateSpace {
    /// The space of a name without its dot; `shared::cta` is the block's own shared memory.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "global" => Self::Global,
            "const" => Self::Const,
            "shared" | "shared::cta" => Self::Shared,
            "local" => Self::Local,
            "param" | "param::entry" | "param::func" => Self::Param,
            _ => return None,
        })
    }
}
