//! Numbers of any float type in any memory, as f32 in host memory.

use std::ops::Range;

use half::{bf16, f16};
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
            DType::BF16 => self.read_as::<bf16>(device),
            DType::F16 => self.read_as::<f16>(device),
            _ => self.read_as::<f32>(device),
        }
    }

    fn read_as<T: Element + Into<f32>>(&self, device: &Device) -> Result<Vec<f32>, DeviceError> {
        let mut numbers: Vec<T>;
        match self {
            Numbers::Device(view) => {
                numbers = vec![T::zeroed(); view.elements()];
                device.download(*view, &mut numbers)?;
            }
            Numbers::Stored(tensor, range) => {
                numbers = vec![T::zeroed(); range.len()];
                device.read_stored(tensor, range.clone(), &mut numbers)?;
            }
        }
        Ok(numbers.into_iter().map(Into::into).collect())
    }
}
