//! Links between cards: a communicator of NCCL for each, on a stream of its own.
//!
//! A stream of its own, because calls of two groups may wait for each other's peers: two ranks that send each other activations by two
//! groups would wait forever for each other on one stream. NCCL moves bytes; kernels of this crate sum them (`kernels/sum_parts.cu`), in
//! the order of the processor's sums. A link has at most one call in progress, and the host asks whether it is over.
//! Kernels are loaded while no call runs (`gate`), those of links before their first call. So a call that has begun, on which other ranks
//! may depend, takes no lock but that of its link.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};
use phalanx_tensor::DType;
use phalanx_tensor::links::{Follow, Invitation, LinkMark, LinkStep, Message, PartsSum, Span};

use crate::driver::{Context, check, driver};
use crate::error::Error;
use crate::gate::Gate;
use crate::memory::TensorMemory;
use crate::modules::{Launch, Modules};
use crate::nccl::{Communicator, Nccl};
use crate::programs::{Program, Source};
use crate::segment::launch_function;

/// Time that ranks have to end a communicator together, before it is aborted.
const LEAVE: Duration = Duration::from_secs(1);

/// Threads of a block that sums.
const THREADS: u32 = 256;

/// State of a link.
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
    /// The card has come to the call that was started last.
    begun: CUevent,
    done: CUevent,
    state: State,
    steps: VecDeque<LinkStep>,
    sums: Vec<SumKernel>,
    /// Marks of calls that have not started, in their order, with events of the compute stream.
    marks: VecDeque<(LinkMark, CUevent)>,
    /// Events that can be used again.
    free: Vec<CUevent>,
    marked: u64,
    /// The call that was started last.
    started: LinkMark,
    /// True if the compute stream follows it.
    is_followed: bool,
    /// True if a call has failed: the link is abandoned next.
    has_failed: bool,
}

// SAFETY: streams and events are handles of the driver, which may be used by any thread in which their context is current.
unsafe impl Send for CardLink {}

/// The kernel that sums parts of a type.
#[derive(Clone, Copy)]
struct SumKernel {
    dtype: DType,
    launch: Launch,
    function: sys::CUfunction,
}

impl SumKernel {
    /// Loads it.
    fn load(modules: &Modules, dtype: DType) -> Result<SumKernel, Error> {
        let program = match dtype {
            DType::F64 => Program::sum_of_f64_parts(),
            dtype => Program::of(Source::SumParts, dtype),
        };
        let grid = [16 * modules.multiprocessors(), 1];
        let launch = Launch { program, kernel: "sum_parts", grid, threads: THREADS, shared_bytes: 0 };
        Ok(SumKernel { dtype, launch, function: modules.prepare(&launch)? })
    }
}

/// The address of a tensor's memory on the card.
fn address(tensors: &TensorMemory, of: Span) -> Result<u64, Error> {
    let distance = tensors
        .distance(of.address)
        .ok_or_else(|| Error::Unsupported("communication between cards was given host memory".to_string()))?;
    Ok(of.address.wrapping_add_signed(distance) as u64)
}

impl CardLink {
    /// Begins to connect the card of `context`.
    pub(crate) fn join(
        context: &Arc<Context>,
        modules: &Modules,
        nccl: &Arc<Nccl>,
        invitation: &Invitation,
        [rank, ranks]: [usize; 2],
    ) -> Result<CardLink, Error> {
        context.enter()?;
        context.link();
        let sums = [DType::F32, DType::BF16, DType::F16, DType::F64];
        let sums = sums.into_iter().map(|dtype| SumKernel::load(modules, dtype)).collect::<Result<_, _>>()?;
        let mut link = CardLink {
            context: Arc::clone(context),
            gate: Arc::clone(modules.gate()),
            communicator: None,
            stream: std::ptr::null_mut(),
            begun: std::ptr::null_mut(),
            done: std::ptr::null_mut(),
            state: State::Joining,
            steps: VecDeque::new(),
            sums,
            marks: VecDeque::new(),
            free: Vec::new(),
            marked: 0,
            started: LinkMark(0),
            is_followed: false,
            has_failed: false,
        };
        let (mut lowest, mut highest) = (0, 0);
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        context.made.count_object();
        // SAFETY: the context is current. Communication goes first where both it and kernels of the step could run.
        unsafe {
            driver!(cuCtxGetStreamPriorityRange(&mut lowest, &mut highest))?;
            driver!(cuStreamCreateWithPriority(&mut link.stream, flags, highest))?;
        }
        (link.begun, link.done) = (link.event()?, link.event()?);
        link.communicator = Some(nccl.join(invitation, rank, ranks)?);
        Ok(link)
    }

    fn event(&self) -> Result<CUevent, Error> {
        let (mut event, flags) = (std::ptr::null_mut(), sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        self.context.made.count_object();
        // SAFETY: the context is current.
        unsafe { driver!(cuEventCreate(&mut event, flags as u32))? };
        Ok(event)
    }

    /// Marks what `compute` was given so far. The context is current.
    pub(crate) fn mark(&mut self, compute: CUstream) -> Result<LinkMark, Error> {
        let event = match self.free.pop() {
            Some(event) => event,
            None => self.event()?,
        };
        self.marked += 1;
        let mark = LinkMark(self.marked);
        self.marks.push_back((mark, event));
        // SAFETY: both are of this context.
        unsafe { driver!(cuEventRecord(event, compute))? };
        Ok(mark)
    }

    /// Starts a call behind a mark.
    ///
    /// # Safety
    /// The memory of the steps stays valid and ordered until the call is over or the link has ended.
    pub(crate) unsafe fn start(
        &mut self,
        steps: Vec<LinkStep>,
        after: LinkMark,
        tensors: &TensorMemory,
    ) -> Result<(), Error> {
        assert_eq!(self.state, State::Idle, "one call after the other");
        self.context.enter()?;
        let (mark, event) = self.marks.pop_front().expect("each call has a mark");
        assert_eq!(mark, after, "calls start in the order of their marks");
        // SAFETY: both are of this context. The event may be recorded anew from here on.
        unsafe {
            driver!(cuStreamWaitEvent(self.stream, event, 0))?;
            driver!(cuEventRecord(self.begun, self.stream))?;
        }
        self.free.push(event);
        self.gate.begin_call();
        (self.started, self.is_followed) = (after, false);
        (self.state, self.steps) = (State::Issuing, steps.into());
        self.advance(tensors).map(drop)
    }

    /// Returns whether the card has reached the call that was started last, and all of its steps are issued. A library
    /// may connect cards while the first of them is issued.
    pub(crate) fn has_begun(&self) -> Result<bool, Error> {
        if self.state == State::Issuing {
            return Ok(false);
        }
        self.context.enter()?;
        // SAFETY: the event is of this context.
        match unsafe { sys::cuEventQuery(self.begun) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check(result, "cuEventQuery").map(|()| true),
        }
    }

    /// Moves the link along; whether what was started is over.
    pub(crate) fn advance(&mut self, tensors: &TensorMemory) -> Result<bool, Error> {
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
                    Some(step) => unsafe { self.issue(&step, tensors)? },
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

    /// Lets what `compute` is given next run behind a call that has started. The context is current.
    pub(crate) fn follow(&mut self, call: LinkMark, compute: CUstream) -> Result<Follow, Error> {
        if self.communicator.is_none() || self.has_failed {
            return Ok(Follow::No);
        }
        match self.state {
            // The host has seen its end.
            _ if self.started != call => Ok(Follow::Ordered),
            State::Idle => Ok(Follow::Ordered),
            State::Joining | State::Issuing => Ok(Follow::NotYet),
            State::Issued => {
                // SAFETY: both are of this context; the event is not recorded anew before the call is over.
                unsafe { driver!(cuStreamWaitEvent(compute, self.done, 0))? };
                self.is_followed = true;
                Ok(Follow::Ordered)
            }
        }
    }

    /// The call in progress has failed; whether the compute stream follows it.
    pub(crate) fn fail(&mut self) -> bool {
        self.has_failed = true;
        self.is_followed && self.state == State::Issued
    }

    /// # Safety
    /// As for [`CardLink::start`].
    unsafe fn issue(&mut self, step: &LinkStep, tensors: &TensorMemory) -> Result<(), Error> {
        let (stream, at) = (self.stream, |span: Span| address(tensors, span));
        let Some(communicator) = self.communicator.as_mut() else { return Ok(()) };
        // SAFETY: the caller's promise.
        unsafe {
            match step {
                LinkStep::AllGather { part, whole } => {
                    communicator.all_gather(at(*part)?, at(*whole)?, part.bytes, stream)
                }
                LinkStep::Broadcast { buffer, root } => {
                    communicator.broadcast(at(*buffer)?, buffer.bytes, *root, stream)
                }
                LinkStep::Exchange(messages) => {
                    let addressed = |message: &Message| {
                        let Message { peer, is_sent, buffer } = *message;
                        Ok((peer, is_sent, at(buffer)?, buffer.bytes))
                    };
                    let messages: Vec<_> = messages.iter().map(addressed).collect::<Result<_, Error>>()?;
                    communicator.exchange(messages.into_iter(), stream)
                }
                LinkStep::Copy { from, to } => {
                    driver!(cuMemcpyDtoDAsync_v2(at(*to)?, at(*from)?, to.bytes, stream))
                }
                LinkStep::Sum(sum) => {
                    let [own, others, target] = [sum.own, sum.others, sum.target].map(at);
                    self.sum(sum, [own?, others?, target?])
                }
            }
        }
    }

    /// # Safety
    /// As for [`CardLink::start`].
    unsafe fn sum(&self, sum: &PartsSum, [own, others, target]: [u64; 3]) -> Result<(), Error> {
        let kernel = self.sums.iter().find(|kernel| kernel.dtype == sum.dtype);
        let name = sum.dtype.name();
        let kernel = kernel.ok_or_else(|| Error::Unsupported(format!("a sum of {name} of several ranks")))?;
        let elements = sum.elements as u64;
        let blocks = elements.div_ceil(4 * u64::from(THREADS)).min(kernel.launch.grid[0]);
        let launch = Launch { grid: [blocks, 1], ..kernel.launch };
        let [place, places] = [sum.place as u64, sum.places as u64];
        let accumulate = u64::from(sum.accumulate);
        let mut arguments = [own, others, target, elements, place, places, accumulate];
        // SAFETY: the caller's promise; the arguments are those of the kernel.
        unsafe { launch_function(kernel.function, self.stream, &launch, &mut arguments) }
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
            return self.end_call();
        }
        if let Some(communicator) = self.communicator.take() {
            self.abort(communicator);
        }
        self.end_call();
    }

    fn abort(&self, communicator: Communicator) {
        match communicator.abort() {
            // Its kernels have ended; those of this crate behind them run to their end.
            // SAFETY: the stream is of this context. A lost card reports its failure elsewhere.
            Ok(()) => drop(unsafe { driver!(cuStreamSynchronize(self.stream)) }),
            Err(why) => self.context.give_up(why),
        }
    }

    /// Ends an idle link together with the other ranks, if they come within a moment.
    pub(crate) fn leave(&mut self) {
        let is_idle = self.state == State::Idle && self.context.enter().is_ok();
        let Some(mut communicator) = self.communicator.take_if(|_| is_idle) else { return self.abandon() };
        if communicator.finalize().is_err() {
            return self.abort(communicator);
        }
        let since = Instant::now();
        loop {
            match communicator.poll() {
                Ok(true) => return communicator.destroy(),
                Ok(false) if since.elapsed() < LEAVE => std::thread::sleep(Duration::from_micros(200)),
                _ => return self.abort(communicator),
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
        let marks = self.marks.drain(..).map(|(_, event)| event);
        let events = marks.chain(self.free.drain(..)).chain([self.begun, self.done]);
        // SAFETY: created in this context, destroyed once; null where their creation failed. A failure leaves them.
        unsafe {
            for event in events.filter(|event| !event.is_null()) {
                let _ = driver!(cuEventDestroy_v2(event));
            }
            if !self.stream.is_null() {
                let _ = driver!(cuStreamDestroy_v2(self.stream));
            }
        }
    }
}
