//! Parts of tensors that are stored in any memory, read into and written from host elements: for checkpoints and initial
//! values of what lies in host memory or on disk while no kernel needs it.

use std::ops::Range;

use phalanx_plan::trace::{Memory, Site};

use crate::access::Access;
use crate::backend::DeviceError;
use crate::buffer::Tensor;
use crate::device::Device;
use crate::view::{Element, View, ViewMut};

impl Device {
    /// Copies elements `range` of a tensor into host elements, after everything that was issued before. Not for dry runs.
    ///
    /// # Errors
    /// When the device failed.
    #[track_caller]
    pub fn read_stored<T: Element>(
        &self,
        from: &Tensor,
        range: Range<usize>,
        to: &mut [T],
    ) -> Result<(), DeviceError> {
        let part = from.view().range(range);
        let (site, part) = (Site::caller(), part.typed(part.dtype().moved()));
        assert_eq!((T::DTYPE, to.len()), (part.dtype(), part.elements()), "read_stored from {part:?}");
        match from.memory() {
            Memory::Device => self.download(part, to),
            Memory::Host => {
                self.backend.check_host_access(part, Access::Read, "read_stored", site)?;
                to.copy_from_slice(part.as_slice());
                Ok(())
            }
            Memory::Disk => {
                let memories = [Memory::Disk, Memory::Host];
                let done = self.start_copy("read_stored", memories, part, ViewMut::over(to), site);
                self.backend.synchronize(done)
            }
        }
    }

    /// Copies host elements into elements `range` of a tensor. Later work sees them. Not for dry runs.
    ///
    /// # Errors
    /// When the device failed.
    #[track_caller]
    pub fn write_stored<T: Element>(
        &self,
        from: &[T],
        to: &mut Tensor,
        range: Range<usize>,
    ) -> Result<(), DeviceError> {
        let (site, memory) = (Site::caller(), to.memory());
        let part = to.view_mut().range(range);
        let moved = part.dtype().moved();
        let part = part.typed(moved);
        assert_eq!((T::DTYPE, from.len()), (part.dtype(), part.elements()), "write_stored to {part:?}");
        match memory {
            Memory::Device => {
                self.upload(from, part);
                Ok(())
            }
            Memory::Host => {
                self.backend.check_host_access(part.as_view(), Access::Write, "write_stored", site)?;
                part.into_slice().copy_from_slice(from);
                Ok(())
            }
            Memory::Disk => {
                let from = View::over_bytes(bytemuck::cast_slice(from), T::DTYPE);
                let memories = [Memory::Host, Memory::Disk];
                let done = self.start_copy("write_stored", memories, from, part, site);
                self.backend.synchronize(done)
            }
        }
    }
}
