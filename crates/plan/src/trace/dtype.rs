//! Element types.

use serde::{Deserialize, Serialize};

use crate::chunks::BLOCK;

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
    /// Numbers of 8 bits in blocks, of which 32 share a scale (GGUF's): weights that are only read. No file here has them.
    #[serde(skip_deserializing)]
    Q8_0,
    /// Codes of 4 bits in blocks, of which 64 share a scale (QLoRA's): weights that are only read. No file here has them.
    #[serde(skip_deserializing)]
    Nf4,
}

impl DType {
    /// Bytes of one element.
    ///
    /// # Panics
    /// For a type of blocks.
    pub const fn bytes(self) -> usize {
        assert!(!self.is_blocks(), "an element of a block has no bytes of its own");
        self.block_bytes()
    }

    /// Elements that are stored together: tensors of this type are cut at multiples of them.
    pub const fn block(self) -> usize {
        match self {
            DType::Q8_0 | DType::Nf4 => BLOCK as usize,
            _ => 1,
        }
    }

    /// Bytes of the elements that are stored together.
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::U32 => 4,
            DType::BF16 | DType::F16 => 2,
            // A scale of 16 bits and 32 numbers.
            DType::Q8_0 => BLOCK as usize / 32 * 34,
            // Codes; codes of scales; smallest scale and step.
            DType::Nf4 => BLOCK as usize / 2 + BLOCK as usize / 64 + 8,
        }
    }

    /// Returns whether elements are stored in blocks.
    pub const fn is_blocks(self) -> bool {
        self.block() > 1
    }

    /// Bytes of so many elements: whole blocks.
    pub const fn bytes_of(self, elements: usize) -> usize {
        assert!(elements.is_multiple_of(self.block()), "a part of a block");
        elements / self.block() * self.block_bytes()
    }

    /// The type whose elements copies and messages of this one have: words for blocks.
    #[must_use]
    pub const fn moved(self) -> DType {
        if self.is_blocks() { DType::U32 } else { self }
    }

    /// Name as configurations and files spell it.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::U32 => "u32",
            DType::Q8_0 => "q8_0",
            DType::Nf4 => "nf4",
        }
    }
}
