//! Streams and events of the card.
//!
//! An event is the number of entries (calls and waits) that were issued to a stream so far, as on the simulated device. For
//! each such number that somebody asked for, a stream keeps an event of the driver until it has happened, and until nobody else waits
//! for it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};
use phalanx_plan::trace::Stream;
use phalanx_tensor::backend::Timer;

use crate::driver::{Context, check, driver};
use crate::error::Error;

/// Streams that are the card's.
const STREAMS: usize = 4;

/// The number of a stream of the card; None for those of the host.
pub(crate) fn index(stream: Stream) -> Option<usize> {
    match stream {
        Stream::Compute => Some(0),
        Stream::Communication => Some(1),
        Stream::ToDevice => Some(2),
        Stream::ToHost => Some(3),
        Stream::Disk | Stream::Host => None,
    }
}

/// An event of the driver. It is destroyed when nobody has it any more.
pub(crate) struct Event {
    event: CUevent,
    context: Arc<Context>,
}

// SAFETY: an event is a handle of the driver, which may be used by any thread in which its context is current.
unsafe impl Send for Event {}
// SAFETY: as above; the driver has its own locks.
unsafe impl Sync for Event {}

impl Event {
    /// Blocks the calling thread, in which the context is current, until it has happened.
    pub(crate) fn synchronize(&self) -> Result<(), Error> {
        // SAFETY: the event is of the current context.
        let query = || unsafe { sys::cuEventQuery(self.event) };
        // SAFETY: as above.
        self.context.wait(query, || unsafe { driver!(cuEventSynchronize(self.event)) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created in this context, destroyed once. A lost card reports its failure elsewhere.
            let _ = unsafe { driver!(cuEventDestroy_v2(self.event)) };
        }
    }
}

/// One stream.
struct Queue {
    stream: CUstream,
    /// Entries that were issued.
    issued: u64,
    /// The largest number that is known to have happened.
    done: u64,
    /// The numbers of entries that were recorded, ascending, with events that may not have happened yet.
    recorded: VecDeque<(u64, Arc<Event>)>,
}

/// A call whose time is taken.
struct Timing {
    start: Event,
    end: Event,
    timer: Timer,
}

/// The streams of a device.
pub(crate) struct Streams {
    context: Arc<Context>,
    queues: Vec<Queue>,
    /// Events that have happened, to be used again.
    free: Vec<Arc<Event>>,
    timings: Vec<Timing>,
}

// SAFETY: streams and events are handles of the driver, which may be used by any thread in which their context is current.
unsafe impl Send for Streams {}

impl Streams {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Streams, Error> {
        context.enter()?;
        // Made first: those that were created before a failure are destroyed with it.
        let mut streams = Streams {
            context: Arc::clone(context),
            queues: Vec::new(),
            free: Vec::new(),
            timings: Vec::new(),
        };
        for _ in 0..STREAMS {
            let mut stream = std::ptr::null_mut();
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the context is current.
            unsafe { driver!(cuStreamCreate(&mut stream, flags))? };
            streams.queues.push(Queue { stream, issued: 0, done: 0, recorded: VecDeque::new() });
        }
        Ok(streams)
    }

    /// The driver's stream, to which one entry is issued now.
    pub(crate) fn issue(&mut self, stream: usize) -> CUstream {
        self.queues[stream].issued += 1;
        self.queues[stream].stream
    }

    /// The driver's stream for computing.
    pub(crate) fn compute(&self) -> CUstream {
        self.queues[0].stream
    }

    /// Records everything that was issued to a stream so far; its number.
    pub(crate) fn record(&mut self, stream: usize) -> Result<u64, Error> {
        self.collect(stream)?;
        let number = self.queues[stream].issued;
        let known = self.queues[stream].recorded.back().is_some_and(|(last, _)| *last == number);
        if !known && number > 0 {
            let event = self.event()?;
            // SAFETY: both are of this context.
            unsafe { driver!(cuEventRecord(event.event, self.queues[stream].stream))? };
            self.queues[stream].recorded.push_back((number, event));
        }
        Ok(number)
    }

    /// The driver's event for a number; None when it has happened.
    pub(crate) fn pending(&self, stream: usize, number: u64) -> Option<Arc<Event>> {
        let queue = &self.queues[stream];
        if number <= queue.done {
            return None;
        }
        // A later event includes it.
        queue.recorded.iter().find(|(recorded, _)| *recorded >= number).map(|(_, event)| Arc::clone(event))
    }

    /// Makes all later work of `stream` run after entry `number` of another stream.
    pub(crate) fn wait(&mut self, stream: usize, of: usize, number: u64) -> Result<(), Error> {
        if stream == of {
            return Ok(());
        }
        if let Some(event) = self.pending(of, number) {
            let stream = self.issue(stream);
            // SAFETY: both are of this context.
            unsafe { driver!(cuStreamWaitEvent(stream, event.event, 0))? };
        }
        Ok(())
    }

    /// Makes all later work of `stream` run once the word at `address` of registered memory, an address of the card,
    /// has reached `value`.
    pub(crate) fn wait_for_word(&mut self, stream: usize, address: u64, value: u32) -> Result<(), Error> {
        let condition = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        let stream = self.issue(stream);
        // SAFETY: the stream is of this context; the word outlives the streams.
        unsafe { driver!(cuStreamWaitValue32_v2(stream, address, value, condition)) }
    }

    /// Blocks the host until entry `number` of a stream is over.
    pub(crate) fn synchronize(&mut self, stream: usize, number: u64) -> Result<(), Error> {
        if let Some(event) = self.pending(stream, number) {
            self.context.made.count_wait();
            event.synchronize()?;
            let done = &mut self.queues[stream].done;
            *done = number.max(*done);
        }
        self.collect(stream)?;
        self.add_times()
    }

    /// Blocks the host until everything is over, whatever fails.
    pub(crate) fn drain(&self) -> Result<(), Error> {
        self.context.enter()?;
        let mut first = Ok(());
        for queue in &self.queues {
            // SAFETY: the stream is of this context.
            let query = || unsafe { sys::cuStreamQuery(queue.stream) };
            // SAFETY: as above.
            let wait = || unsafe { driver!(cuStreamSynchronize(queue.stream)) };
            first = first.and(self.context.wait(query, wait));
        }
        first
    }

    /// Takes back the events that have happened.
    fn collect(&mut self, stream: usize) -> Result<(), Error> {
        let queue = &mut self.queues[stream];
        // The newest stays, so that recording again without new work needs no event.
        while queue.recorded.len() > 1 {
            let Some((number, event)) = queue.recorded.front() else { break };
            // Recorded anew, an event would not be what another thread waits for.
            if Arc::strong_count(event) > 1 || !has_happened(event)? {
                break;
            }
            queue.done = queue.done.max(*number);
            self.free.extend(queue.recorded.pop_front().map(|(_, event)| event));
        }
        Ok(())
    }

    fn event(&mut self) -> Result<Arc<Event>, Error> {
        match self.free.pop() {
            Some(event) => Ok(event),
            None => self.new_event(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map(Arc::new),
        }
    }

    fn new_event(&self, flags: sys::CUevent_flags) -> Result<Event, Error> {
        let mut event = std::ptr::null_mut();
        self.context.made.count_object();
        // SAFETY: the context is current.
        unsafe { driver!(cuEventCreate(&mut event, flags as u32))? };
        Ok(Event { event, context: Arc::clone(&self.context) })
    }

    /// Starts to take the time of what is issued next to a stream.
    pub(crate) fn start_timing(&mut self, stream: usize) -> Result<Event, Error> {
        self.timing_event(stream)
    }

    /// Ends it: the time goes to `timer` once it is known.
    pub(crate) fn end_timing(&mut self, stream: usize, start: Event, timer: Timer) -> Result<(), Error> {
        let end = self.timing_event(stream)?;
        self.timings.push(Timing { start, end, timer });
        Ok(())
    }

    fn timing_event(&self, stream: usize) -> Result<Event, Error> {
        let event = self.new_event(sys::CUevent_flags::CU_EVENT_DEFAULT)?;
        // SAFETY: both are of this context.
        unsafe { driver!(cuEventRecord(event.event, self.queues[stream].stream))? };
        Ok(event)
    }

    /// Adds the times of calls that are over to their profiles.
    fn add_times(&mut self) -> Result<(), Error> {
        let mut rest = Vec::new();
        for timing in std::mem::take(&mut self.timings) {
            if !has_happened(&timing.end)? {
                rest.push(timing);
                continue;
            }
            let mut milliseconds = 0f32;
            let (start, end) = (timing.start.event, timing.end.event);
            // SAFETY: both events were recorded with timing and have happened.
            unsafe { driver!(cuEventElapsedTime(&mut milliseconds, start, end))? };
            let time = Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) * 1e-3);
            timing.timer.profile.add(timing.timer.key, time);
        }
        self.timings = rest;
        Ok(())
    }
}

fn has_happened(event: &Event) -> Result<bool, Error> {
    // SAFETY: the event is of the current context.
    match unsafe { sys::cuEventQuery(event.event) } {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        result => check(result, "cuEventQuery").map(|()| true),
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return;
        }
        // A lost card reports its failure again; there is nothing left to do about it.
        let _ = self.drain();
        for queue in &self.queues {
            // SAFETY: created in this context, destroyed once.
            let _ = unsafe { driver!(cuStreamDestroy_v2(queue.stream)) };
        }
    }
}
