//! Streams.

use std::ffi::{c_int, c_uint, c_void};

use super::{Driver, Status, call_in_context, call_waiting, entry_points, put};
use crate::queues::{HostCall, HostWord, Work};

/// `CU_STREAM_NON_BLOCKING`: the stream is not ordered with the default stream.
const NON_BLOCKING: c_uint = 1;

/// `CU_STREAM_WAIT_VALUE_GEQ`: the stream goes on from a value on.
const FROM_VALUE_ON: c_uint = 0;

impl Driver {
    fn create_stream(&mut self, out: *mut usize, flags: c_uint) -> Result<(), Status> {
        if flags > NON_BLOCKING {
            return Err(Status::INVALID_VALUE);
        }
        let stream = self.queues.create_stream(flags != NON_BLOCKING);
        let card = self.card()?;
        if let Some(connections) = self.config.connections {
            self.queues.share_queue(stream, (card << 8) | (self.streams_made[card] % connections));
        }
        self.streams_made[card] += 1;
        put(out, stream as usize)
    }
}

entry_points! {
    /// Makes a stream.
    cuStreamCreate(out: *mut usize, flags: c_uint) call_in_context |driver| { driver.create_stream(out, flags) }

    /// Makes a stream. The priority makes no difference.
    cuStreamCreateWithPriority(out: *mut usize, flags: c_uint, _priority: c_int) call_in_context |driver| {
        driver.create_stream(out, flags)
    }

    /// Ends a stream behind its work.
    cuStreamDestroy_v2(stream: usize) call_waiting |driver| {
        let stream = driver.stream(stream)?;
        if stream == 0 {
            return Err(Status::INVALID_HANDLE);
        }
        driver.queues.destroy_stream(stream);
        Ok(())
    }

    /// Waits for the work of a stream.
    cuStreamSynchronize(stream: usize) call_waiting |driver| {
        let stream = driver.stream(stream)?;
        if driver.queues.is_capturing(stream) {
            return Err(Status::STREAM_CAPTURE_UNSUPPORTED);
        }
        driver.queues.synchronize(stream);
        Ok(())
    }

    /// Whether the work of a stream has ended.
    cuStreamQuery(stream: usize) call_in_context |driver| {
        let stream = driver.stream(stream)?;
        if driver.queues.is_capturing(stream) {
            return Err(Status::STREAM_CAPTURE_UNSUPPORTED);
        }
        if driver.queues.query(stream) { Ok(()) } else { Err(Status::NOT_READY) }
    }

    /// Lets the next work of a stream wait for an event. One that was never recorded is no reason to wait.
    cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint) call_in_context |driver| {
        let stream = driver.stream(stream)?;
        if flags > 1 {
            return Err(Status::INVALID_VALUE);
        }
        let Some(point) = driver.events.get(event)?.point.clone() else { return Ok(()) };
        if !driver.queues.join_capture(stream, &point)? {
            driver.queues.enqueue(stream, Work::Wait(point))?;
        }
        Ok(())
    }

    /// Queues a call of a function of the host.
    cuLaunchHostFunc(stream: usize, function: Option<unsafe extern "C" fn(*mut c_void)>, argument: *mut c_void)
        call_in_context |driver| {
        let stream = driver.stream(stream)?;
        let function = function.ok_or(Status::INVALID_VALUE)?;
        let call = HostCall { function, argument: argument as usize };
        Ok(driver.queues.enqueue(stream, Work::Call(call))?)
    }

    /// Lets the next work of a stream wait until a word of host memory that is pinned has reached a value. Words of the device's memory,
    /// and other conditions, are not supported.
    cuStreamWaitValue32_v2(stream: usize, address: u64, value: c_uint, flags: c_uint) call_in_context |driver| {
        let stream = driver.stream(stream)?;
        if flags != FROM_VALUE_ON {
            return Err(Status::NOT_SUPPORTED);
        }
        let address = address as usize;
        if !address.is_multiple_of(4) || !driver.is_pinned(address, 4) {
            return Err(Status::INVALID_VALUE);
        }
        Ok(driver.queues.enqueue(stream, Work::WaitValue(HostWord { address, value }))?)
    }
}
