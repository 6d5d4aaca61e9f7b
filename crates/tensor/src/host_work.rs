//! Operations that the host's processor computes on tensors in host memory, on a stream of their own: beside the kernels of
//! a device, and beside copies ([`Device::run_after`] orders them). On a device whose kernels run at the call, they do too.

use phalanx_plan::trace::{Memory, Site, Stream};

use crate::access::Access;
use crate::backend::{DeviceError, StreamEvent};
use crate::buffer::Tensor;
use crate::device::Device;
use crate::flights::InFlight;

/// Host work that was issued: it owns its tensors until it is done.
#[must_use = "host work is over only when it was waited for"]
pub struct PendingHostWork {
    device: Device,
    tensors: Option<Vec<Tensor>>,
    flights: Vec<InFlight>,
    done: StreamEvent,
}

impl PendingHostWork {
    /// Blocks until the work is over; gives back its tensors.
    ///
    /// # Errors
    /// When the device failed.
    #[track_caller]
    pub fn wait(mut self) -> Result<Vec<Tensor>, DeviceError> {
        let site = Site::caller();
        let backend = &self.device.backend;
        backend.synchronize(self.done)?;
        for tensor in self.tensors.iter().flatten() {
            backend.check_host_access(tensor.view(), Access::Write, "PendingHostWork::wait", site)?;
        }
        self.flights.clear();
        Ok(self.tensors.take().expect("taken once, here"))
    }

    /// The event that ends the work.
    pub fn done(&self) -> StreamEvent {
        self.done
    }
}

impl Drop for PendingHostWork {
    fn drop(&mut self) {
        let Some(tensors) = self.tensors.take() else { return };
        if self.device.backend.synchronize(self.done).is_err() {
            // As for a copy.
            std::mem::forget(tensors);
        }
        self.flights.clear();
    }
}

impl Device {
    /// Issues operations for the host's processor, named `name` where their tensors are reported to be in use. `issue` gets
    /// the device on which to issue them, and the tensors, all in host memory. Operations may also read other tensors in host
    /// memory; whoever owns them keeps them until the work is over. Copies from or to any of them start when it is over.
    #[track_caller]
    pub fn run_on_host(
        &self,
        name: &'static str,
        mut tensors: Vec<Tensor>,
        issue: impl FnOnce(&Device, &mut [Tensor]),
    ) -> PendingHostWork {
        let site = Site::caller();
        for tensor in &tensors {
            let memory = tensor.memory();
            assert_eq!(memory, Memory::Host, "{name}: the host computes in its own memory");
        }
        let flights = tensors.iter().map(|tensor| tensor.in_flight(Access::Write, name, site)).collect();
        issue(&self.on_stream(Stream::Host), &mut tensors);
        let done = self.backend.record(Stream::Host);
        PendingHostWork { device: self.clone(), tensors: Some(tensors), flights, done }
    }
}
