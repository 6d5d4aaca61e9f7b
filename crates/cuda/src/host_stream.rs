//! The host's stream of a card: operations that the host's processor computes, in order, on a thread of their own.
//!
//! If an operation waits for the card, the thread waits for an event of the driver. If a stream of the card waits for
//! an operation, it waits for a word of host memory that holds the number of finished entries of the host's stream
//! (`cuStreamWaitValue32`). A function that the driver calls (`cuLaunchHostFunc`) could wait as well, but the driver
//! may call all of them on one thread, where one that waits would block the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;
use phalanx_plan::trace::Site;
use phalanx_tensor::backend::Call;
use phalanx_tensor::queues::{HasFailed, Job, QueueEvent, Queues};
use phalanx_tensor::{DeviceError, Kernels};

use crate::NAME;
use crate::driver::{Context, driver};
use crate::error::Error;
use crate::memory::HostBuffer;
use crate::streams::{Event, Streams};

/// The queues of the thread: one.
const QUEUE: usize = 0;

/// The host's stream.
pub(crate) struct HostStream {
    queues: Queues<HostJob>,
    shared: Arc<Shared>,
    /// The address of the word for streams of the card; None where the driver lets no stream wait for a word.
    word: Option<u64>,
}

/// Objects that the thread uses.
struct Shared {
    context: Arc<Context>,
    kernels: Arc<dyn Kernels>,
    /// The number of entries that are over, in its lower 32 bits.
    over: HostBuffer,
}

#[expect(clippy::large_enum_variant, reason = "a job is queued in a box")]
enum Body {
    /// Computes.
    Call(Call<'static>),
    /// Waits for the card.
    AfterCard(Arc<Event>),
}

struct HostJob {
    /// None once it has begun.
    body: Option<Body>,
    call: &'static str,
    site: Site,
    shared: Arc<Shared>,
}

/// Returns whether the loaded driver lets streams wait for words.
fn has_words() -> bool {
    let names: [&[u8]; 2] = [b"cuStreamWaitValue32_v2", b"cuMemHostGetDevicePointer_v2"];
    // SAFETY: the driver is loaded; nothing is called.
    names.iter().all(|name| unsafe { sys::culib().get::<unsafe extern "C" fn()>(*name).is_ok() })
}

impl HostStream {
    /// Starts the thread.
    pub(crate) fn start(context: &Arc<Context>, kernels: Arc<dyn Kernels>) -> Result<HostStream, Error> {
        let over = HostBuffer::new(context, size_of::<u32>())?;
        let mut word = 0;
        // A driver that gives no address lets no stream wait for the word, which costs a run nothing else.
        // SAFETY: the context is current, the memory is the driver's, for cards.
        let maps = has_words()
            && unsafe { driver!(cuMemHostGetDevicePointer_v2(&mut word, over.base().cast(), 0)) }.is_ok();
        let shared = Arc::new(Shared { context: Arc::clone(context), kernels, over });
        let queues = Queues::start(&["cuda-host"], "the card's device").map_err(Error::Thread)?;
        Ok(HostStream { queues, shared, word: (maps && word != 0).then_some(word) })
    }

    /// Issues an operation.
    pub(crate) fn launch(&self, call: Call<'static>) {
        let (name, site) = (call.name, call.site);
        self.shared.context.made.count_host_operation();
        self.issue(Body::Call(call), name, site);
    }

    /// Makes all later work of the host's stream run after an event of the card.
    pub(crate) fn wait_for_card(&self, event: Arc<Event>, site: Site) {
        self.issue(Body::AfterCard(event), "wait", site);
    }

    fn issue(&self, body: Body, call: &'static str, site: Site) {
        let shared = Arc::clone(&self.shared);
        self.queues.issue(QUEUE, HostJob { body: Some(body), call, site, shared });
    }

    /// Number of entries that were issued so far.
    pub(crate) fn issued(&self) -> u64 {
        self.queues.record(QUEUE).number
    }

    /// Makes all later work of a stream of the card run after entry `number`. The context is current.
    pub(crate) fn wait_on_card(
        &self,
        streams: &mut Streams,
        stream: usize,
        number: u64,
    ) -> Result<(), Error> {
        let event = self.queues.issued(QueueEvent { queue: QUEUE, number });
        if self.queues.has_happened(event) {
            return Ok(());
        }
        match self.word {
            Some(word) => streams.wait_for_word(stream, word, event.number as u32),
            None => {
                // The failure is reported by the next synchronisation.
                let _ = self.synchronize(event.number);
                Ok(())
            }
        }
    }

    /// Blocks the calling thread until entry `number` is over.
    ///
    /// # Errors
    /// The first failure of an entry so far.
    pub(crate) fn synchronize(&self, number: u64) -> Result<(), DeviceError> {
        let event = QueueEvent { queue: QUEUE, number };
        if !self.queues.has_happened(event) {
            self.shared.context.made.count_wait();
        }
        self.queues.synchronize(event)
    }

    /// The first failure of an entry so far.
    pub(crate) fn check(&self) -> Result<(), DeviceError> {
        self.queues.check()
    }

    /// No entry that has not begun runs from here on.
    pub(crate) fn fail(&self, failure: &DeviceError) {
        self.queues.fail(failure.clone());
    }

    /// Returns when all entries are over or left out.
    pub(crate) fn end(&self) {
        let _ = self.queues.synchronize(self.queues.record(QUEUE));
    }
}

impl Job for HostJob {
    fn run(&mut self, _: QueueEvent, _: &HasFailed) -> Result<(), String> {
        match self.body.take() {
            None => Ok(()),
            Some(Body::Call(call)) => {
                call.execute(&*self.shared.kernels);
                Ok(())
            }
            Some(Body::AfterCard(event)) => {
                let waited = self.shared.context.enter().and_then(|()| event.synchronize());
                waited.map_err(|error| error.to_string())
            }
        }
    }

    fn failure(&self, reason: String) -> DeviceError {
        DeviceError { device: NAME, call: self.call, site: self.site, reason }
    }

    fn over(&mut self, at: QueueEvent) {
        // An event that was not waited for is given back.
        self.body = None;
        let word = self.shared.over.base().cast::<u32>();
        // SAFETY: the word lies in the buffer, whose pages are aligned; the card only reads it.
        unsafe { AtomicU32::from_ptr(word) }.store(at.number as u32, Ordering::Release);
    }
}
