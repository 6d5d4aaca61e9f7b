//! Numbers as files store them: f32, or rounded to nearest even to bf16 or f16.

use half::{bf16, f16, slice::HalfFloatSliceExt};
use phalanx_plan::trace::DType;

use crate::CheckpointError;

/// Rounds numbers, into a buffer that it keeps.
#[derive(Default)]
pub(crate) struct Narrow {
    halves: Vec<u16>,
}

impl Narrow {
    /// The bytes of `values` as `dtype`. The error is the position of the first finite number that becomes infinite.
    ///
    /// # Panics
    /// For a type that is not F32, BF16 or F16.
    pub(crate) fn bytes<'a>(&'a mut self, dtype: DType, values: &'a [f32]) -> Result<&'a [u8], usize> {
        self.halves.resize(values.len(), 0);
        let infinite = match dtype {
            DType::F32 => return Ok(bytemuck::cast_slice(values)),
            DType::BF16 => {
                bytemuck::cast_slice_mut::<u16, bf16>(&mut self.halves).convert_from_f32_slice(values);
                bf16::INFINITY.to_bits()
            }
            DType::F16 => {
                bytemuck::cast_slice_mut::<u16, f16>(&mut self.halves).convert_from_f32_slice(values);
                f16::INFINITY.to_bits()
            }
            DType::F64 | DType::U32 | DType::Q8_0 | DType::Nf4 => {
                panic!("a model is not written as {}", dtype.name())
            }
        };
        let mut both = self.halves.iter().zip(values);
        match both.position(|(half, value)| half & 0x7fff == infinite && value.is_finite()) {
            Some(at) => Err(at),
            None => Ok(bytemuck::cast_slice(&self.halves)),
        }
    }
}

/// The error for element `start + at` of a tensor, `values[at]`, which the type `stored` does not have.
pub(crate) fn too_large(
    tensor: &str,
    start: u64,
    at: usize,
    values: &[f32],
    stored: &'static str,
) -> CheckpointError {
    let (tensor, element) = (tensor.to_string(), start + at as u64);
    CheckpointError::TooLarge { tensor, element, value: values[at], stored }
}
