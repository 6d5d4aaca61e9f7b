//! Descriptions of operations, matrices and preferences, with the attributes that can be set.

use super::{BlasStatus, Outcome};
use crate::queues::Element;

/// The type of elements of a code (`cudaDataType_t`).
fn element_of(code: i32) -> Outcome<Element> {
    match code {
        0 => Ok(Element::F32),
        2 => Ok(Element::F16),
        14 => Ok(Element::Bf16),
        // Known types that are not supported here, and what is no type.
        1..=35 => Err(BlasStatus::NOT_SUPPORTED),
        _ => Err(BlasStatus::INVALID_VALUE),
    }
}

/// What happens to sums before they are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Epilogue {
    /// A bias for each row is added.
    pub bias: bool,
    /// GELU is applied.
    pub gelu: bool,
    /// The sums before GELU are stored.
    pub aux: bool,
    /// The sums are multiplied by the derivative of GELU of what was stored.
    pub gelu_gradient: bool,
    /// The sum of each row is stored as the gradient of the bias.
    pub bias_gradient: bool,
}

impl Epilogue {
    fn from_code(code: u32) -> Outcome<Self> {
        let none = Self::default();
        Ok(match code {
            1 => none,
            4 => Self { bias: true, ..none },
            32 => Self { gelu: true, ..none },
            36 => Self { gelu: true, bias: true, ..none },
            160 => Self { gelu: true, aux: true, ..none },
            164 => Self { gelu: true, aux: true, bias: true, ..none },
            192 => Self { gelu_gradient: true, ..none },
            208 => Self { gelu_gradient: true, bias_gradient: true, ..none },
            // ReLU, and gradients of a bias beside the product of A or B.
            2 | 6 | 130 | 134 | 136 | 152 | 256 | 512 => return Err(BlasStatus::NOT_SUPPORTED),
            _ => return Err(BlasStatus::INVALID_VALUE),
        })
    }

    /// Whether it reads or writes the vector of the bias.
    pub fn has_vector(self) -> bool {
        self.bias || self.bias_gradient
    }

    /// Whether it reads or writes the auxiliary matrix.
    pub fn has_aux(self) -> bool {
        self.aux || self.gelu_gradient
    }
}

/// An operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// Whether factors are rounded to TF32.
    pub tf32: bool,
    /// Whether A and B are transposed.
    pub transposed: [bool; 2],
    /// What happens before sums are stored.
    pub epilogue: Epilogue,
    /// Address of the bias or its gradient.
    pub bias: u64,
    /// Its type, if it was given; else that of D.
    pub bias_element: Option<Element>,
    /// Address of the auxiliary matrix.
    pub aux: u64,
    /// From column to column of it, in elements.
    pub aux_leading: i64,
    /// Its type, if it was given; else that of D.
    pub aux_element: Option<Element>,
}

/// The number of an attribute's bytes.
fn number<const N: usize>(value: &[u8]) -> Outcome<[u8; N]> {
    value.try_into().map_err(|_| BlasStatus::INVALID_VALUE)
}

fn int(value: &[u8]) -> Outcome<i32> {
    Ok(i32::from_ne_bytes(number(value)?))
}

fn long(value: &[u8]) -> Outcome<u64> {
    Ok(u64::from_ne_bytes(number(value)?))
}

/// Accepts an attribute only as it is by default.
fn only(found: i64, default: i64) -> Outcome<()> {
    if found == default { Ok(()) } else { Err(BlasStatus::NOT_SUPPORTED) }
}

impl Operation {
    /// An operation with the types of sums (`cublasComputeType_t`) and of alpha and beta.
    pub fn new(compute: i32, scale: i32) -> Outcome<Self> {
        let tf32 = match compute {
            // CUBLAS_COMPUTE_32F, and without fast modes
            68 | 69 => false,
            // CUBLAS_COMPUTE_32F_FAST_TF32
            77 => true,
            64 | 65 | 70..=75 | 78 => return Err(BlasStatus::NOT_SUPPORTED),
            _ => return Err(BlasStatus::INVALID_VALUE),
        };
        if element_of(scale)? != Element::F32 {
            return Err(BlasStatus::NOT_SUPPORTED);
        }
        Ok(Self {
            tf32,
            transposed: [false; 2],
            epilogue: Epilogue::default(),
            bias: 0,
            bias_element: None,
            aux: 0,
            aux_leading: 0,
            aux_element: None,
        })
    }

    /// Sets an attribute (`cublasLtMatmulDescAttributes_t`).
    pub fn set(&mut self, attribute: u32, value: &[u8]) -> Outcome<()> {
        match attribute {
            // Pointer mode, and what would transpose C.
            2 | 5 => only(i64::from(int(value)?), 0)?,
            3 | 4 => {
                self.transposed[attribute as usize - 3] = match int(value)? {
                    0 => false,
                    1 | 2 => true,
                    _ => return Err(BlasStatus::INVALID_VALUE),
                }
            }
            7 => self.epilogue = Epilogue::from_code(int(value)? as u32)?,
            8 => self.bias = long(value)?,
            11 => self.aux = long(value)?,
            12 => self.aux_leading = long(value)? as i64,
            22 => self.aux_element = Some(element_of(int(value)?)?),
            26 => self.bias_element = Some(element_of(int(value)?)?),
            // Types of the whole operation, the part of C, strides of batches, multiprocessors, scales of 8-bit types.
            0 | 1 | 6 | 10 | 13..=21 | 23..=25 => return Err(BlasStatus::NOT_SUPPORTED),
            _ => return Err(BlasStatus::INVALID_VALUE),
        }
        Ok(())
    }
}

/// A matrix, stored by columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Its type.
    pub element: Element,
    /// Its size.
    pub rows: usize,
    /// Its size.
    pub columns: usize,
    /// From column to column, in elements.
    pub leading: usize,
}

impl Layout {
    /// A matrix.
    pub fn new(kind: i32, rows: u64, columns: u64, leading: i64) -> Outcome<Self> {
        let element = element_of(kind)?;
        if rows == 0 || columns == 0 || leading < rows as i64 {
            return Err(BlasStatus::INVALID_VALUE);
        }
        let (rows, columns, leading) = (rows as usize, columns as usize, leading as usize);
        Ok(Self { element, rows, columns, leading })
    }

    /// Sets an attribute (`cublasLtMatrixLayoutAttribute_t`).
    pub fn set(&mut self, attribute: u32, value: &[u8]) -> Outcome<()> {
        let mut changed = *self;
        match attribute {
            0 => changed.element = element_of(int(value)?)?,
            // The order: by columns. One matrix.
            1 => only(i64::from(int(value)?), 0)?,
            5 => only(i64::from(int(value)?), 1)?,
            2 => changed.rows = long(value)? as usize,
            3 => changed.columns = long(value)? as usize,
            4 => changed.leading = long(value)? as usize,
            6 | 7 => return Err(BlasStatus::NOT_SUPPORTED),
            _ => return Err(BlasStatus::INVALID_VALUE),
        }
        *self = changed;
        Ok(())
    }
}

/// Which algorithms are wanted.
#[derive(Clone, Copy, Debug)]
pub struct Preference {
    /// The largest workspace in bytes.
    pub workspace: u64,
    /// What the addresses of A, B, C and D are multiples of.
    pub alignment: [u64; 4],
}

impl Default for Preference {
    /// As the library has it: no workspace, and addresses as `cudaMalloc` gives them.
    fn default() -> Self {
        Self { workspace: 0, alignment: [256; 4] }
    }
}

impl Preference {
    /// Sets an attribute (`cublasLtMatmulPreferenceAttributes_t`).
    pub fn set(&mut self, attribute: u32, value: &[u8]) -> Outcome<()> {
        match attribute {
            1 => self.workspace = long(value)?,
            // Search mode and reduction schemes: all algorithms here add in one order.
            0 | 3 => _ = int(value)?,
            5..=8 => {
                let bytes = int(value)? as u32;
                if !bytes.is_power_of_two() {
                    return Err(BlasStatus::INVALID_VALUE);
                }
                self.alignment[attribute as usize - 5] = u64::from(bytes);
            }
            2 | 4 | 9..=13 => return Err(BlasStatus::NOT_SUPPORTED),
            _ => return Err(BlasStatus::INVALID_VALUE),
        }
        Ok(())
    }
}
