//! Events.

use std::ffi::c_uint;

use super::{Driver, Status, call_in_context, call_waiting, entry_points, put};
use crate::queues::{Point, Work};

/// `CU_EVENT_DISABLE_TIMING`
const NO_TIMING: c_uint = 2;

/// An event.
#[derive(Default)]
pub(super) struct Event {
    /// What it recorded last.
    pub(super) point: Option<Point>,
    has_time: bool,
}

impl Driver {
    fn record(&mut self, event: usize, stream: usize) -> Result<(), Status> {
        let stream = self.stream(stream)?;
        let point = Point::default();
        self.events.get_mut(event)?.point = Some(point.clone());
        Ok(self.queues.enqueue(stream, Work::Record(point))?)
    }

    fn elapsed(&self, out: *mut f32, start: usize, end: usize) -> Result<(), Status> {
        let time = |handle: usize| -> Result<std::time::Instant, Status> {
            let event = self.events.get(handle)?;
            let point = event.point.as_ref().filter(|_| event.has_time).ok_or(Status::INVALID_HANDLE)?;
            point.time().ok_or(Status::NOT_READY)
        };
        let (start, end) = (time(start)?, time(end)?);
        let seconds = end.saturating_duration_since(start).as_secs_f32()
            - start.saturating_duration_since(end).as_secs_f32();
        put(out, seconds * 1e3)
    }
}

entry_points! {
    /// Makes an event.
    cuEventCreate(out: *mut usize, flags: c_uint) call_in_context |driver| {
        let event = driver.events.add(Event { point: None, has_time: flags & NO_TIMING == 0 });
        put(out, event)
    }

    /// Ends an event.
    cuEventDestroy_v2(event: usize) call_in_context |driver| { driver.events.remove(event).map(|_| ()) }

    /// Records the present end of a stream.
    cuEventRecord(event: usize, stream: usize) call_in_context |driver| { driver.record(event, stream) }

    /// Waits until what an event recorded has ended.
    cuEventSynchronize(event: usize) call_waiting |driver| {
        if let Some(point) = driver.events.get(event)?.point.clone() {
            driver.queues.wait_for(&point);
        }
        Ok(())
    }

    /// Whether what an event recorded has ended.
    cuEventQuery(event: usize) call_in_context |driver| {
        match driver.events.get(event)?.point.clone() {
            Some(point) if !driver.queues.query_point(&point) => Err(Status::NOT_READY),
            _ => Ok(()),
        }
    }

    /// Milliseconds between two events: time of the host's processor, which says nothing about a card.
    cuEventElapsedTime(out: *mut f32, start: usize, end: usize) call_in_context |driver| { driver.elapsed(out, start, end) }

    /// Milliseconds between two events: time of the host's processor, which says nothing about a card.
    cuEventElapsedTime_v2(out: *mut f32, start: usize, end: usize) call_in_context |driver| { driver.elapsed(out, start, end) }
}
