//! Streams: a queue and a thread each (`phalanx_tensor::queues`), with delays, requested failures and the race checker.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use phalanx_plan::trace::Stream;
use phalanx_tensor::backend::{DiskTransfer, StreamEvent, Timer};
use phalanx_tensor::operations::Operation;
use phalanx_tensor::queues::{HasFailed, Job, QueueEvent, Queues};
use phalanx_tensor::{Access, DeviceError, Kernels};

use crate::delays::delay;
use crate::failures::{Failure, Requests};
use crate::races::{Caller, Race, Races, STREAM_NAMES, index};
use crate::{Error, NAME, Options};

/// A call that was issued: what runs it, and what it does to which memory.
pub(crate) struct Work {
    pub(crate) run: Run,
    /// The ranges that it reads and writes, in the addresses of tensors.
    pub(crate) uses: Vec<(Range<usize>, Access)>,
    /// Why the device does not run it.
    pub(crate) refused: Option<String>,
}

/// A queued call, with all that its thread needs to run it.
pub(crate) struct Run {
    /// None once it has begun.
    pub(crate) body: Option<Body>,
    pub(crate) by: Caller,
    /// Time that its bytes take between the memories.
    pub(crate) between_memories: Duration,
    pub(crate) is_copy: bool,
    pub(crate) failure: Option<Failure>,
    pub(crate) kernels: Arc<dyn Kernels>,
    pub(crate) options: Options,
}

/// The work of a call.
#[expect(clippy::large_enum_variant, reason = "a run is queued in a box")]
pub(crate) enum Body {
    Kernel {
        /// Its operands lie in memory that the worker can access.
        operation: Operation<'static>,
        timer: Option<Timer>,
        /// Host bytes that the operation reads.
        uploaded: Vec<u64>,
    },
    Transfer(DiskTransfer<'static>),
}

/// Records of the issued calls. A lock on them orders the calls.
struct Issued {
    races: Option<Races>,
    requests: Requests,
}

/// The streams of a device and their threads.
pub(crate) struct Streams {
    queues: Queues<Run>,
    issued: Mutex<Issued>,
}

impl Streams {
    pub(crate) fn start(options: Options) -> Result<Streams, Error> {
        let issued = Issued { races: options.check_races.then(Races::new), requests: Requests::default() };
        let queues = Queues::start(&STREAM_NAMES, "the simulated device").map_err(Error::Thread)?;
        Ok(Streams { queues, issued: Mutex::new(issued) })
    }

    /// Nothing panics under this lock. The queues' own lock is taken under it, never the other way round.
    fn lock(&self) -> MutexGuard<'_, Issued> {
        self.issued.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the failure of a call, if it is the first.
    fn fail(&self, by: Caller, reason: String) {
        self.queues.fail(failed(by, reason));
    }

    pub(crate) fn plan_failure(&self, call: u64, failure: Failure) {
        self.lock().requests.add(call, failure);
    }

    pub(crate) fn calls(&self) -> u64 {
        self.lock().requests.calls()
    }

    /// Issues a call to a stream.
    pub(crate) fn issue(&self, stream: Stream, work: Work) {
        let Work { mut run, uses, refused } = work;
        let stream = index(stream);
        let mut issued = self.lock();
        run.failure = issued.requests.next(run.is_copy);
        let by = run.by;
        if let Some(reason) = refused {
            self.fail(by, reason);
        }
        if let Some(races) = &mut issued.races {
            // Nothing else is issued under this lock.
            races.issue(stream, self.queues.record(stream).number + 1);
            let found: Vec<Race> = uses
                .into_iter()
                .filter_map(|(range, access)| races.access(stream, range, access, by))
                .collect();
            if let Some(race) = found.first() {
                self.fail(by, race.to_string());
            }
        }
        self.queues.issue(stream, run);
    }

    pub(crate) fn record(&self, stream: Stream) -> StreamEvent {
        let mut issued = self.lock();
        let QueueEvent { queue, number } = self.queues.record(index(stream));
        if let Some(races) = &mut issued.races {
            races.record(queue, number);
        }
        StreamEvent { stream, number }
    }

    pub(crate) fn wait(&self, stream: Stream, event: StreamEvent) {
        let mut issued = self.lock();
        let event = self.queues.issued(of_queue(event));
        if let Some(races) = &mut issued.races {
            races.wait(index(stream), event.queue, event.number);
        }
        self.queues.wait(index(stream), event);
    }

    /// Blocks until an event has happened.
    pub(crate) fn synchronize(&self, event: StreamEvent) -> Result<(), DeviceError> {
        let mut issued = self.lock();
        let event = self.queues.issued(of_queue(event));
        if let Some(races) = &mut issued.races {
            races.synchronize(event.queue, event.number);
        }
        drop(issued);
        self.queues.synchronize(event)
    }

    /// The host reads bytes that a call is given.
    pub(crate) fn host_reads(&self, range: &Range<usize>, by: Caller) {
        // The failure is kept, for the next synchronisation.
        let _ = self.check_host_access(range, Access::Read, by);
    }

    pub(crate) fn check_host_access(
        &self,
        range: &Range<usize>,
        access: Access,
        by: Caller,
    ) -> Result<(), DeviceError> {
        let race = self.lock().races.as_ref().and_then(|races| races.host_access(range, access));
        if let Some(race) = race {
            self.fail(by, race.to_string());
        }
        self.queues.check()
    }
}

fn of_queue(event: StreamEvent) -> QueueEvent {
    QueueEvent { queue: index(event.stream), number: event.number }
}

fn failed(by: Caller, reason: String) -> DeviceError {
    let Caller { call, site } = by;
    DeviceError { device: NAME, call, site, reason }
}

impl Job for Run {
    /// Runs the call after its delay.
    fn run(&mut self, at: QueueEvent, failed: &HasFailed) -> Result<(), String> {
        let Options { seed, max_delay, delayed_share, .. } = self.options;
        sleep(delay(seed, at.queue, at.number, max_delay, delayed_share));
        if failed.get() {
            return Ok(());
        }
        if let Some(reason) = self.failure.and_then(Failure::reason) {
            return Err(reason.to_string());
        }
        let start = Instant::now();
        let slow = if let Some(Failure::SlowCopy(longer)) = self.failure { longer } else { Duration::ZERO };
        sleep(self.between_memories.saturating_add(slow));
        self.body.take().map_or(Ok(()), |body| body.execute(&*self.kernels, start))
    }

    fn failure(&self, reason: String) -> DeviceError {
        failed(self.by, reason)
    }
}

impl Body {
    /// `start` is when its copy between memories began.
    fn execute(self, kernels: &dyn Kernels, start: Instant) -> Result<(), String> {
        match self {
            Body::Transfer(transfer) => transfer.execute(),
            Body::Kernel { operation, timer, uploaded } => {
                kernels.execute(operation);
                if let Some(timer) = timer {
                    timer.add(start.elapsed());
                }
                drop(uploaded);
                Ok(())
            }
        }
    }
}

fn sleep(time: Duration) {
    if !time.is_zero() {
        std::thread::sleep(time);
    }
}
