//! Numbers of any float type in any memory, as f32 in host memory.

use std::ops::Range;

use half::{bf16, f16};
use phalanx_tensor::blocks::dequantised;
use phalanx_tensor::{DType, Device, DeviceError, Element, Tensor, View};

/// Location of the numbers.
pub(super) enum Numbers<'a> {
    /// In device memory.
    Device(View<'a>),
    /// Elements of a tensor in any memory.
    Stored(&'a Tensor, Range<usize>),
}

impl Numbers<'_> {
    /// Reads them after everything that was issued before.
    pub(super) fn read(&self, device: &Device) -> Result<Vec<f32>, DeviceError> {
        let dtype = match self {
            Numbers::Device(view) => view.dtype(),
            Numbers::Stored(tensor, _) => tensor.dtype(),
        };
        match dtype {
            DType::BF16 => Ok(self.read_as::<bf16>(device)?.into_iter().map(Into::into).collect()),
            DType::F16 => Ok(self.read_as::<f16>(device)?.into_iter().map(Into::into).collect()),
            blocks if blocks.is_blocks() => Ok(dequantised(blocks, &self.read_as::<u32>(device)?)),
            _ => self.read_as::<f32>(device),
        }
    }

    fn read_as<T: Element>(&self, device: &Device) -> Result<Vec<T>, DeviceError> {
        let view = match self {
            Numbers::Device(view) => *view,
            Numbers::Stored(tensor, range) => tensor.view().range(range.clone()),
        };
        let mut numbers = vec![T::zeroed(); view.bytes() / T::DTYPE.bytes()];
        match self {
            Numbers::Device(view) => device.download(view.typed(T::DTYPE), &mut numbers)?,
            Numbers::Stored(tensor, range) => device.read_stored(tensor, range.clone(), &mut numbers)?,
        }
        Ok(numbers)
    }
}
