//! Writes a GGUF file of version 3, as llama.cpp and the programs that build on it read: keys with values, a list of tensors, and their
//! numbers, each tensor at a multiple of 32 bytes. Source: docs/gguf.md of ggml; the quantisation is that of its reference
//! (`quantize_row_q8_0_ref`). The same keys and numbers give the same bytes.
//!
//! Tensors stream through a window, so none is held whole here.

use std::io::Write;
use std::path::Path;

use phalanx_plan::trace::DType;
use phalanx_system::files::AtomicFile;
use phalanx_tensor::blocks::{self, Q8_0_BYTES, Q8_0_SCALED, quantise_q8_0};

use crate::hugging_face_export::{ReadTensor, WINDOW_ELEMENTS};
use crate::narrow::{Narrow, too_large};
use crate::tensor_file::elements;
use crate::{CheckpointError, Result};

/// First bytes of every GGUF file.
pub const GGUF_MAGIC: &str = "GGUF";

const VERSION: u32 = 3;

/// Multiple of bytes at which tensors begin, which programs assume.
const ALIGNMENT: u64 = 32;

/// The value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// A whole number.
    U32(u32),
    /// A number.
    F32(f32),
    /// True or false.
    Bool(bool),
    /// Text.
    Text(String),
    /// Texts.
    Texts(Vec<String>),
    /// Whole numbers with sign.
    I32s(Vec<i32>),
    /// Numbers.
    F32s(Vec<f32>),
}

/// Storage type of the numbers of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufType {
    /// f32, not rounded.
    F32,
    /// Rounded to nearest even.
    F16,
    /// Rounded to nearest even.
    Bf16,
    /// 32 of a row by whole numbers from -127 to 127, times a scale in f16.
    Q8_0,
}

/// A tensor of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// Its name.
    pub name: String,
    /// Its extents, the one whose elements are neighbours last. (The file has them reversed.)
    pub shape: Vec<usize>,
    /// Storage type of its numbers; [`GgufType::Q8_0`] only if 32 divides the last extent.
    pub stored: GgufType,
}

impl GgufType {
    /// Number of the type in a file.
    fn number(self) -> u32 {
        match self {
            GgufType::F32 => 0,
            GgufType::F16 => 1,
            GgufType::Q8_0 => 8,
            GgufType::Bf16 => 30,
        }
    }

    /// Number of a file most of whose tensors have this type, under the key `general.file_type`.
    pub fn file_type(self) -> u32 {
        match self {
            GgufType::F32 => 0,
            GgufType::F16 => 1,
            GgufType::Q8_0 => 7,
            GgufType::Bf16 => 32,
        }
    }

    /// The type of these for a row of `width` elements: 16 bits where blocks do not divide it.
    #[must_use]
    pub fn for_rows_of(self, width: usize) -> GgufType {
        if self == GgufType::Q8_0 && !width.is_multiple_of(Q8_0_SCALED) { GgufType::F16 } else { self }
    }

    /// Bytes of so many elements.
    fn bytes(self, elements: u64) -> u64 {
        match self {
            GgufType::F32 => 4 * elements,
            GgufType::F16 | GgufType::Bf16 => 2 * elements,
            GgufType::Q8_0 => elements / Q8_0_SCALED as u64 * Q8_0_BYTES as u64,
        }
    }
}

/// Writes the file `path` with these keys and tensors; replaces what has the name. `read(tensor, range, out)` must fill `out` with those elements of
/// the flattened tensor; it is called in order, with at most 262,144 elements at a time. Returns the bytes of the file.
///
/// # Errors
/// [`CheckpointError::Write`], [`CheckpointError::TooLarge`], or what `read` returned: then what had the name remains.
///
/// # Panics
/// When a shape has 2^64 elements or more, or a row is not whole blocks.
pub fn write_gguf(
    path: &Path,
    keys: &[(String, GgufValue)],
    tensors: &[GgufTensor],
    read: &mut ReadTensor<'_>,
) -> Result<u64> {
    let head = head(keys, tensors);
    let mut file = AtomicFile::create(path).map_err(CheckpointError::writing(path))?;
    let mut written = 0;
    let mut write = |bytes: &[u8]| {
        written += bytes.len() as u64;
        file.write_all(bytes).map_err(CheckpointError::writing(path))
    };
    write(&head)?;
    let mut rounding = Rounding::default();
    let mut window = vec![0f32; WINDOW_ELEMENTS];
    for (index, tensor) in tensors.iter().enumerate() {
        let count = count(tensor);
        let mut done = 0;
        while done < count {
            let next = count.min(done + WINDOW_ELEMENTS as u64);
            let values = &mut window[..(next - done) as usize];
            read(index, done..next, values)?;
            write(rounding.bytes(tensor, done, values)?)?;
            done = next;
        }
        write(&vec![0; padding(tensor.stored.bytes(count))])?;
    }
    file.commit().map_err(CheckpointError::writing(path))?;
    Ok(written)
}

/// Elements of a tensor.
fn count(tensor: &GgufTensor) -> u64 {
    let GgufTensor { name, shape, stored } = tensor;
    let row = *shape.last().expect("a tensor has an extent");
    assert_eq!(stored.for_rows_of(row), *stored, "rows of {name} are not whole blocks");
    elements(shape).expect("a tensor has fewer than 2^64 elements")
}

/// Bytes from a position to the next multiple of the alignment.
fn padding(bytes: u64) -> usize {
    (bytes.next_multiple_of(ALIGNMENT) - bytes) as usize
}

/// Everything before the first tensor.
fn head(keys: &[(String, GgufValue)], tensors: &[GgufTensor]) -> Vec<u8> {
    let mut head = Head(GGUF_MAGIC.as_bytes().to_vec());
    head.u32(VERSION);
    head.u64(tensors.len() as u64);
    head.u64(keys.len() as u64);
    for (key, value) in keys {
        head.text(key);
        head.value(value);
    }
    let mut offset = 0;
    for tensor in tensors {
        head.text(&tensor.name);
        head.u32(tensor.shape.len() as u32);
        tensor.shape.iter().rev().for_each(|extent| head.u64(*extent as u64));
        head.u32(tensor.stored.number());
        head.u64(offset);
        offset += tensor.stored.bytes(count(tensor)).next_multiple_of(ALIGNMENT);
    }
    let padded = head.0.len() + padding(head.0.len() as u64);
    head.0.resize(padded, 0);
    head.0
}

/// The bytes of the beginning of a file.
struct Head(Vec<u8>);

impl Head {
    fn u32(&mut self, number: u32) {
        self.0.extend(number.to_le_bytes());
    }

    fn u64(&mut self, number: u64) {
        self.0.extend(number.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.u64(text.len() as u64);
        self.0.extend(text.as_bytes());
    }

    /// The number of a type, and the value.
    fn value(&mut self, value: &GgufValue) {
        const U32: u32 = 4;
        const I32: u32 = 5;
        const F32: u32 = 6;
        const BOOL: u32 = 7;
        const TEXT: u32 = 8;
        const ARRAY: u32 = 9;
        let array = |head: &mut Head, of: u32, length: usize| {
            head.u32(ARRAY);
            head.u32(of);
            head.u64(length as u64);
        };
        match value {
            GgufValue::U32(number) => {
                self.u32(U32);
                self.u32(*number);
            }
            GgufValue::F32(number) => {
                self.u32(F32);
                self.0.extend(number.to_le_bytes());
            }
            GgufValue::Bool(given) => {
                self.u32(BOOL);
                self.0.push(u8::from(*given));
            }
            GgufValue::Text(text) => {
                self.u32(TEXT);
                self.text(text);
            }
            GgufValue::Texts(texts) => {
                array(self, TEXT, texts.len());
                texts.iter().for_each(|text| self.text(text));
            }
            GgufValue::I32s(numbers) => {
                array(self, I32, numbers.len());
                self.0.extend_from_slice(bytemuck::cast_slice(numbers));
            }
            GgufValue::F32s(numbers) => {
                array(self, F32, numbers.len());
                self.0.extend_from_slice(bytemuck::cast_slice(numbers));
            }
        }
    }
}

/// Rounds numbers, into buffers that it keeps.
#[derive(Default)]
struct Rounding {
    narrow: Narrow,
    blocks: Vec<u8>,
}

impl Rounding {
    /// The bytes of the elements of a tensor from `start` on.
    fn bytes<'a>(&'a mut self, tensor: &GgufTensor, start: u64, values: &'a [f32]) -> Result<&'a [u8]> {
        let (bytes, word) = match tensor.stored {
            GgufType::F32 => (self.narrow.bytes(DType::F32, values), "f32"),
            GgufType::F16 => (self.narrow.bytes(DType::F16, values), "f16"),
            GgufType::Bf16 => (self.narrow.bytes(DType::BF16, values), "bf16"),
            GgufType::Q8_0 => {
                self.blocks.clear();
                self.blocks.extend(values.as_chunks().0.iter().flat_map(quantise_q8_0));
                let too_large = values.iter().position(|value| value.abs() > blocks::largest(DType::Q8_0));
                (too_large.map_or(Ok(&self.blocks[..]), Err), "q8_0")
            }
        };
        bytes.map_err(|at| too_large(&tensor.name, start, at, values, word))
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    /// Compares a block with the result of `gguf.quants.quantize` of the package gguf 0.19 for the same numbers.
    #[test]
    fn blocks_are_those_of_the_reference() {
        let mut block: [f32; Q8_0_SCALED] = std::array::from_fn(|i| i as f32 - 15.5);
        block[0] = 127.0;
        block[1] = 0.5;
        block[2] = -0.5;
        let out = quantise_q8_0(&block);
        assert_eq!(out[..2], f16::ONE.to_le_bytes());
        let numbers: Vec<i8> = out[2..].iter().map(|byte| *byte as i8).collect();
        // Halves go away from zero: -12.5 to -13, 0.5 to 1.
        let expected: Vec<i8> =
            [127, 1, -1].into_iter().chain((3..32i8).map(|i| if i < 16 { i - 16 } else { i - 15 })).collect();
        assert_eq!(numbers, expected);
        assert!(quantise_q8_0(&[0.0; Q8_0_SCALED]).iter().all(|byte| *byte == 0));
    }
}
