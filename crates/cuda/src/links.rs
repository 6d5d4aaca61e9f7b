//! Links between cards: a communicator of NCCL for each, on a stream of its own.
//!
//! A stream of its own, because calls of two groups may wait for each other's peers: two ranks that send each other activations by two
//! groups would wait forever for each other on one stream. NCCL moves bytes; kernels of this crate sum them (`kernels/sum_parts.cu`), in
//! the order of the processor's sums. A link has at most one call in progress, and the host asks whether it is over.
//!
//! Loading a kernel may wait for everything that runs on the card, also for a call that waits for another rank, which may itself load a
//! kernel. So kernels are loaded only while no call runs on a link ([`Gate`]), and those of links before their first call.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};
use phalanx_tensor::DType;
use phalanx_tensor::links::{Invitation, LinkStep, Message, PartsSum, Span};

use crate::driver::{Context, check, driver};
use crate::error::Error;
use crate::memory::TensorMemory;
use crate::modules::{Launch, Modules};
use crate::nccl::{Communicator, Nccl};
use crate::programs::{Program, Source};

/// Time that ranks have to end a communicator together, before it is aborted.
const LEAVE: Duration = Duration::from_secs(1);

/// Threads of a block that sums.
const THREADS: u32 = 256;

/// Keeps loads of kernels and calls between cards apart.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    /// Calls between cards that run.
    calls: usize,
    is_loading: bool,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads kernels with `load`, while no call runs. A call that runs needs nothing of this rank any more but that its work goes on.
    pub(crate) fn load<T>(&self, load: impl FnOnce() -> T) -> T {
        let free = self.changed.wait_while(self.lock(), |state| state.calls > 0 || state.is_loading);
        free.unwrap_or_else(PoisonError::into_inner).is_loading = true;
        let _loading = Loading(self);
        load()
    }

    fn begin_call(&self) {
        let free = self.changed.wait_while(self.lock(), |state| state.is_loading);
        free.unwrap_or_else(PoisonError::into_inner).calls += 1;
    }

    fn end_call(&self) {
        self.lock().calls -= 1;
        self.changed.notify_all();
    }
}

/// A load in progress.
struct Loading<'a>(&'a Gate);

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.0.lock().is_loading = false;
        self.0.changed.notify_all();
    }
}

/// What a link does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The communicator is being made.
    Joining,
    /// Nothing.
    Idle,
    /// Steps of a call are issued one after the other.
    Issuing,
    /// All are issued; the event says when they are over.
    Issued,
}

/// One link.
pub(crate) struct CardLink {
    context: Arc<Context>,
    gate: Arc<Gate>,
    /// None once the link was ended.
    communicator: Option<Communicator>,
    stream: CUstream,
    done: CUevent,
    state: State,
    steps: VecDeque<LinkStep>,
}

// SAFETY: streams and events are handles of the driver, which may be used by any thread in which their context is current.
unsafe impl Send for CardLink {}

/// What issues the steps of a link.
pub(crate) struct Issuer<'a> {
    pub(crate) modules: &'a Modules,
    pub(crate) tensors: &'a TensorMemory,
    pub(crate) multiprocessors: u64,
}

impl Issuer<'_> {
    /// The address of a tensor's memory on the card.
    fn address(&self, of: Span) -> Result<u64, Error> {
        let distance = self.tensors.distance(of.address).ok_or_else(|| {
            Error::Unsupported("communication between cards was given host memory".to_string())
        })?;
        Ok(of.address.wrapping_add_signed(distance) as u64)
    }

    /// The addresses of messages.
    fn messages(&self, messages: &[Message]) -> Result<Vec<(usize, bool, u64, usize)>, Error> {
        let addressed = |message: &Message| {
            let Message { peer, is_sent, buffer } = *message;
            Ok((peer, is_sent, self.address(buffer)?, buffer.bytes))
        };
        messages.iter().map(addressed).collect()
    }

    fn launch_of_sum(&self, dtype: DType, elements: usize) -> Launch {
        let program = match dtype {
            DType::F64 => Program::sum_of_f64_parts(),
            dtype => Program::of(Source::SumParts, dtype),
        };
        let blocks = (elements as u64).div_ceil(4 * u64::from(THREADS)).min(16 * self.multiprocessors);
        Launch { program, kernel: "sum_parts", grid: [blocks, 1], threads: THREADS, shared_bytes: 0 }
    }

    /// Loads the kernels of sums.
    pub(crate) fn prepare(&self) -> Result<(), Error> {
        let dtypes = [DType::F32, DType::BF16, DType::F16, DType::F64];
        dtypes.into_iter().try_for_each(|dtype| self.modules.prepare(&self.launch_of_sum(dtype, 1)))
    }

    /// Issues a sum.
    ///
    /// # Safety
    /// As for [`CardLink::start`].
    unsafe fn sum(&self, sum: &PartsSum, stream: CUstream) -> Result<(), Error> {
        let [own, others, target] = [sum.own, sum.others, sum.target].map(|span| self.address(span));
        let mut arguments = [
            own?,
            others?,
            target?,
            sum.elements as u64,
            sum.rank as u64,
            sum.ranks as u64,
            u64::from(sum.accumulate),
        ];
        let launch = self.launch_of_sum(sum.dtype, sum.elements);
        // SAFETY: the caller's promise; the arguments are those of the kernel.
        unsafe { self.modules.launch(stream, &launch, &mut arguments) }
    }
}

impl CardLink {
    /// Begins to connect the card of `context`.
    pub(crate) fn join(
        context: &Arc<Context>,
        gate: &Arc<Gate>,
        nccl: &Arc<Nccl>,
        invitation: &Invitation,
        [rank, ranks]: [usize; 2],
    ) -> Result<CardLink, Error> {
        context.enter()?;
        let mut link = CardLink {
            context: Arc::clone(context),
            gate: Arc::clone(gate),
            communicator: None,
            stream: std::ptr::null_mut(),
            done: std::ptr::null_mut(),
            state: State::Joining,
            steps: VecDeque::new(),
        };
        let (mut lowest, mut highest) = (0, 0);
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let event = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        context.made.count_object();
        // SAFETY: the context is current. Communication goes first where both it and kernels of the step could run.
        unsafe {
            driver!(cuCtxGetStreamPriorityRange(&mut lowest, &mut highest))?;
            driver!(cuStreamCreateWithPriority(&mut link.stream, flags, highest))?;
            driver!(cuEventCreate(&mut link.done, event))?;
        }
        link.communicator = Some(nccl.join(invitation, rank, ranks)?);
        Ok(link)
    }

    /// The stream on which its calls run.
    pub(crate) fn stream(&self) -> CUstream {
        self.stream
    }

    /// Starts a call.
    ///
    /// # Safety
    /// The memory of the steps stays valid and ordered until the call is over or the link has ended.
    pub(crate) unsafe fn start(&mut self, steps: Vec<LinkStep>, issuer: &Issuer) -> Result<(), Error> {
        assert_eq!(self.state, State::Idle, "one call after the other");
        self.gate.begin_call();
        (self.state, self.steps) = (State::Issuing, steps.into());
        self.advance(issuer).map(drop)
    }

    /// Moves the link along; whether what was started is over.
    pub(crate) fn advance(&mut self, issuer: &Issuer) -> Result<bool, Error> {
        self.context.enter()?;
        let ended = || Error::Unsupported("the communicator of this group was ended".to_string());
        loop {
            // An issued call can fail as well.
            let is_done = self.communicator.as_mut().ok_or_else(ended)?.poll()?;
            match self.state {
                State::Idle => return Ok(true),
                _ if !is_done => return Ok(false),
                State::Joining => self.state = State::Idle,
                State::Issuing => match self.steps.pop_front() {
                    // SAFETY: who has started the call keeps its memory.
                    Some(step) => unsafe { self.issue(&step, issuer)? },
                    None => {
                        // SAFETY: both are of this context.
                        unsafe { driver!(cuEventRecord(self.done, self.stream))? };
                        self.state = State::Issued;
                    }
                },
                // SAFETY: the event is of this context.
                State::Issued => match unsafe { sys::cuEventQuery(self.done) } {
                    CUresult::CUDA_ERROR_NOT_READY => return Ok(false),
                    result => {
                        check(result, "cuEventQuery")?;
                        self.end_call();
                    }
                },
            }
        }
    }

    /// # Safety
    /// As for [`CardLink::start`].
    unsafe fn issue(&mut self, step: &LinkStep, issuer: &Issuer) -> Result<(), Error> {
        let stream = self.stream;
        let Some(communicator) = self.communicator.as_mut() else { return Ok(()) };
        // SAFETY: the caller's promise.
        unsafe {
            match step {
                LinkStep::AllGather { part, whole } => {
                    let (from, to) = (issuer.address(*part)?, issuer.address(*whole)?);
                    communicator.all_gather(from, to, part.bytes, stream)
                }
                LinkStep::Broadcast { buffer, root } => {
                    communicator.broadcast(issuer.address(*buffer)?, buffer.bytes, *root, stream)
                }
                LinkStep::Exchange(messages) => {
                    communicator.exchange(issuer.messages(messages)?.into_iter(), stream)
                }
                LinkStep::Copy { from, to } => {
                    let (from, to) = (issuer.address(*from)?, issuer.address(*to)?);
                    let bytes = self.copied(step);
                    driver!(cuMemcpyDtoDAsync_v2(to, from, bytes, stream))
                }
                LinkStep::Sum(sum) => issuer.sum(sum, stream),
            }
        }
    }

    fn copied(&self, step: &LinkStep) -> usize {
        if let LinkStep::Copy { to, .. } = step { to.bytes } else { 0 }
    }

    fn end_call(&mut self) {
        if matches!(self.state, State::Issuing | State::Issued) {
            self.gate.end_call();
        }
        self.state = State::Idle;
        self.steps.clear();
    }

    /// Ends the link whatever its state; nothing that was started on it runs any more.
    pub(crate) fn abandon(&mut self) {
        if self.context.enter().is_err() {
            return;
        }
        // Dropped, a communicator is aborted: its kernels end. Those of this crate behind them run to their end.
        if self.communicator.take().is_some() {
            // SAFETY: the stream is of this context. A lost card reports its failure elsewhere.
            let _ = unsafe { driver!(cuStreamSynchronize(self.stream)) };
        }
        self.end_call();
    }

    /// Ends an idle link together with the other ranks, if they come within a moment.
    pub(crate) fn leave(&mut self) {
        let is_idle = self.state == State::Idle && self.context.enter().is_ok();
        let Some(mut communicator) = self.communicator.take_if(|_| is_idle) else { return self.abandon() };
        if communicator.finalize().is_err() {
            return;
        }
        let since = Instant::now();
        loop {
            match communicator.poll() {
                Ok(true) => return communicator.destroy(),
                Ok(false) if since.elapsed() < LEAVE => std::thread::sleep(Duration::from_micros(200)),
                // Dropped, it is aborted.
                _ => return,
            }
        }
    }
}

impl Drop for CardLink {
    fn drop(&mut self) {
        self.abandon();
        if self.context.enter().is_err() {
            return;
        }
        // SAFETY: created in this context, destroyed once; null where their creation failed. A failure leaves them.
        unsafe {
            if !self.done.is_null() {
                let _ = driver!(cuEventDestroy_v2(self.done));
            }
            if !self.stream.is_null() {
                let _ = driver!(cuStreamDestroy_v2(self.stream));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn kernels_are_loaded_while_no_call_runs() {
        let gate = Gate::default();
        gate.begin_call();
        let (loaded, has_ended) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                gate.load(|| {
                    assert!(has_ended.load(Ordering::SeqCst), "a call runs");
                    loaded.store(true, Ordering::SeqCst);
                });
            });
            // Another call may begin while the load waits, so that calls that need each other all run.
            gate.begin_call();
            gate.end_call();
            std::thread::sleep(Duration::from_millis(20));
            assert!(!loaded.load(Ordering::SeqCst));
            has_ended.store(true, Ordering::SeqCst);
            gate.end_call();
        });
        assert!(loaded.load(Ordering::SeqCst));
    }
}
