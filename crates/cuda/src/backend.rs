//! The executor of a card: it turns calls into launches and copies on the card's streams, and keeps the first failure.
//!
//! Operations of the host's stream run on the processor, and transfers of the disk, on a thread of their own each. Everything returns
//! at once.

mod links;
mod staging;
mod waits;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUstream;
use phalanx_plan::trace::{Site, Stream};
use phalanx_tensor::backend::{Call, DiskTransfer, StreamEvent, Timer};
use phalanx_tensor::operation::Operands;
use phalanx_tensor::operations::{Elementwise, Operation};
use phalanx_tensor::{Backend, DeviceError, Immediate, Kernels, Links, ViewMut};

use crate::NAME;
use crate::blas::Blas;
use crate::bounds::Bounds;
use crate::driver::Context;
use crate::error::{Error, Notice};
use crate::faults::Faults;
use crate::graphs::{Graphs, STEPS_FULL};
use crate::host_stream::HostStream;
use crate::launch::{Gathered, Issue, Span};
use crate::links::CardLink;
use crate::memory::{CardMemory, Registered, TensorMemory};
use crate::modules::Modules;
use crate::nccl::Nccl;
use crate::segment::{Caller, Issuer, Segment, StepError};
use crate::streams::{Streams, index};
use links::LinksMemory;
use staging::Staging;

/// Offset at which scratch begins in its memory.
const SCRATCH_START: u64 = 256;

/// A card that computes.
pub(crate) struct Cuda {
    // In the order in which they are dropped: links end, then the streams wait for all work.
    links: Mutex<Vec<Arc<Mutex<CardLink>>>>,
    /// The first failure of a call that the compute stream follows. No lock is taken under this one.
    failed_link: Mutex<Option<DeviceError>>,
    nccl: Option<Arc<Nccl>>,
    links_memory: Mutex<LinksMemory>,
    notice: Box<Notice>,
    state: Mutex<State>,
    /// Streams of the card may wait for it, and it for them: what both were given runs before either goes.
    host: HostStream,
    modules: Modules,
    blas: Option<Blas>,
    scratch: CardMemory,
    scratch_bytes: u64,
    tensors: TensorMemory,
    _registered: Vec<Registered>,
    disk: Option<Immediate>,
    /// Threads of the processor's kernels.
    threads: usize,
    tf32: bool,
    bounds: Bounds,
    has_failed: AtomicBool,
    context: Arc<Context>,
}

/// State of the device that is used under a lock.
struct State {
    streams: Streams,
    faults: Faults,
    staging: Staging,
    /// Steps of the compute stream that were not issued yet.
    segment: Segment,
    /// Calls of the compute stream that come behind them, to be one launch.
    gathered: Option<Gathered>,
    /// None: steps are issued one by one.
    graphs: Option<Graphs>,
    /// The first failure.
    failure: Option<DeviceError>,
}

/// Parts from which a [`Cuda`] is made.
pub(crate) struct Parts {
    pub(crate) context: Arc<Context>,
    pub(crate) modules: Modules,
    /// The library for products, if it is there.
    pub(crate) blas: Option<Blas>,
    /// The library for communication between cards, if it is wanted.
    pub(crate) nccl: Option<Arc<Nccl>>,
    pub(crate) tensors: TensorMemory,
    pub(crate) scratch_bytes: u64,
    /// Host memory of the rank that the driver knows. It stays mapped as long as the device.
    pub(crate) registered: Vec<Registered>,
    pub(crate) host: Arc<dyn Kernels>,
    pub(crate) disk: Option<Immediate>,
    pub(crate) tf32: bool,
    /// True if repeated segments are launched as graphs.
    pub(crate) graphs: bool,
    /// Is told what is no error.
    pub(crate) notice: Box<Notice>,
}

impl Cuda {
    pub(crate) fn new(parts: Parts) -> Result<Cuda, Error> {
        let Parts { context, modules, blas, nccl, tensors, scratch_bytes, .. } = parts;
        let Parts { registered, host, disk, tf32, graphs, notice, .. } = parts;
        let threads = host.threads();
        let staging = Staging::new(&context)?;
        // The word of faults lies in front of the scratch.
        let scratch = CardMemory::new(&context, SCRATCH_START + scratch_bytes, "scratch of kernels")?;
        let mut streams = Streams::new(&context)?;
        let compute = streams.issue(index(Stream::Compute).unwrap_or_default());
        let state = State {
            faults: Faults::new(&context, scratch.start(), compute)?,
            streams,
            staging,
            segment: Segment::new(memory_of(&tensors, &scratch)),
            gathered: None,
            graphs: graphs.then(|| Graphs::new(&context)).flatten(),
            failure: None,
        };
        let host = HostStream::start(&context, host)?;
        Ok(Cuda {
            links: Mutex::default(),
            failed_link: Mutex::default(),
            links_memory: Mutex::default(),
            notice,
            nccl,
            host,
            state: Mutex::new(state),
            modules,
            blas,
            scratch,
            scratch_bytes,
            tensors,
            _registered: registered,
            disk,
            threads,
            tf32,
            bounds: Bounds::find(),
            has_failed: AtomicBool::new(false),
            context,
        })
    }

    /// The addresses of scratch.
    fn scratch(&self) -> Range<u64> {
        let start = self.scratch.start() + SCRATCH_START;
        start..start + self.scratch_bytes
    }

    /// Nothing panics under this lock but programmer's errors.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a failure, if it is the first.
    fn keep(&self, state: &mut State, result: Result<(), Error>, call: &'static str, site: Site) {
        if let Err(error) = result {
            state.failure.get_or_insert(DeviceError { device: NAME, call, site, reason: error.to_string() });
            self.has_failed.store(true, Ordering::Release);
        }
    }

    /// Gives operands the addresses of the card. Whether any is in host memory; and where the others are, if that is checked.
    fn move_operands(&self, operation: &mut Operation) -> (bool, Vec<(u64, usize)>) {
        let (mut on_host, mut on_card) = (false, Vec::new());
        operation.visit(&mut |operand| {
            if operand.bytes == 0 {
                return;
            }
            match self.tensors.distance(operand.address.as_ptr().addr()) {
                Some(distance) => {
                    *operand.address = operand.address.moved(distance);
                    if self.bounds.are_checked() {
                        on_card.push((operand.address.as_ptr().addr() as u64, operand.bytes));
                    }
                }
                None => on_host = true,
            }
        });
        (on_host, on_card)
    }

    /// Issues a call to a stream of the card, or keeps it to be launched together with others.
    fn issue(&self, state: &mut State, stream: Stream, mut call: Call) -> Result<(), Error> {
        let Some(queue) = index(stream) else { return Ok(()) };
        self.context.enter()?;
        let (on_host, on_card) = self.move_operands(&mut call.operation);
        let is_copy = matches!(call.operation, Operation::Elementwise(Elementwise::Copy(_)));
        if on_host && !is_copy {
            return Err(Error::Unsupported("a kernel was given host memory".to_string()));
        }
        let (is_compute, is_timed) = (stream == Stream::Compute, call.timer.is_some());
        let caller = Caller { call: call.name, site: call.site, bounds: on_card };
        if is_compute && !is_timed {
            if let Some(span) = Span::of(&call.operation) {
                state.streams.issue(queue);
                self.gather(state, span, &mut call.operation, caller);
                return Ok(());
            }
            self.end_gathered(state);
        } else if is_compute {
            self.flush(state);
        }
        let start = is_timed.then(|| state.streams.start_timing(queue)).transpose()?;
        let of_driver = state.streams.issue(queue);
        let mut apart = (!is_compute).then(|| Segment::new(memory_of(&self.tensors, &self.scratch)));
        let segment = apart.as_mut().unwrap_or(&mut state.segment);
        segment.begin(caller.clone());
        let mut issue = self.collector(&mut state.faults, segment, stream, &caller);
        match Span::of(&call.operation) {
            Some(span) => issue.gathered(Gathered::new(span, &mut call.operation, caller))?,
            None => issue.operation(call.operation)?,
        }
        match &mut apart {
            // SAFETY: the context is current; the caller of the backend keeps operands valid and ordered.
            Some(segment) => {
                // SAFETY: the context is current; the caller of the backend keeps operands valid and ordered.
                let issued = unsafe { segment.issue(self.issuer(of_driver), |_| Ok(())) };
                issued.map_err(|(error, ..)| error)?;
            }
            None if is_timed => self.flush_single(state),
            None if state.graphs.is_none() || state.segment.len() >= STEPS_FULL => self.flush(state),
            None => {}
        }
        match start.zip(call.timer) {
            Some((start, timer)) => state.streams.end_timing(queue, start, timer),
            None => Ok(()),
        }
    }

    /// Returns the [`Issue`] that turns an operation into steps of `segment`.
    fn collector<'a>(
        &'a self,
        faults: &'a mut Faults,
        segment: &'a mut Segment,
        stream: Stream,
        caller: &Caller,
    ) -> Issue<'a> {
        Issue {
            modules: &self.modules,
            blas: self.blas.as_ref(),
            segment: RefCell::new(segment),
            card: self.tensors.on_card(),
            scratch: (stream == Stream::Compute).then(|| self.scratch()),
            multiprocessors: u64::from(self.context.card.multiprocessors),
            tf32: self.tf32,
            faults,
            call: caller.call,
            site: caller.site,
        }
    }

    /// With what steps are issued.
    fn issuer(&self, stream: CUstream) -> Issuer<'_> {
        Issuer { modules: &self.modules, blas: self.blas.as_ref(), bounds: &self.bounds, stream }
    }

    /// Keeps a call of the compute stream, to be launched together with others.
    fn gather(&self, state: &mut State, span: Span, operation: &mut Operation, caller: Caller) {
        let span = match &mut state.gathered {
            Some(gathered) => match gathered.add(span, operation, &caller.bounds) {
                Ok(()) => return,
                Err(span) => span,
            },
            None => span,
        };
        self.end_gathered(state);
        if state.graphs.is_none() || state.segment.len() >= STEPS_FULL {
            self.flush(state);
        }
        state.gathered = Some(Gathered::new(span, operation, caller));
    }

    /// Makes a step of the calls of the compute stream that were kept. The context is current.
    fn end_gathered(&self, state: &mut State) {
        let Some(gathered) = state.gathered.take() else { return };
        let caller = gathered.caller.clone();
        state.segment.begin(caller.clone());
        let issue = self.collector(&mut state.faults, &mut state.segment, Stream::Compute, &caller);
        let result = issue.gathered(gathered);
        self.keep(state, result, caller.call, caller.site);
    }

    /// Issues what the compute stream was given so far. The context is current.
    fn flush(&self, state: &mut State) {
        self.end_gathered(state);
        // What comes behind a failure would compute with what nobody has computed.
        if state.segment.is_empty() || state.failure.is_some() {
            return state.segment.clear();
        }
        let issuer = self.issuer(state.streams.compute());
        match &mut state.graphs {
            None => self.flush_single(state),
            Some(graphs) => {
                // SAFETY: the context is current; the caller of the backend keeps operands valid and ordered.
                let result = unsafe { graphs.issue(&mut state.segment, issuer) };
                self.end_segment(state, result);
            }
        }
    }

    /// Issues the segment of the compute stream step by step. The context is current.
    fn flush_single(&self, state: &mut State) {
        let issuer = self.issuer(state.streams.compute());
        self.context.made.count_launches(state.segment.len());
        // SAFETY: as above.
        let result = unsafe { state.segment.issue(issuer, |_| Ok(())) };
        self.end_segment(state, result);
    }

    fn end_segment(&self, state: &mut State, result: Result<(), StepError>) {
        state.segment.clear();
        if let Err((error, call, site)) = result {
            self.keep(state, Err(error), call, site);
        }
    }

    /// Issues what the compute stream was given so far, and brings what its kernels report to the host. The context is current.
    fn end_compute(&self, state: &mut State) -> Result<(), Error> {
        self.flush(state);
        state.faults.fetch(state.streams.compute())
    }
}

/// The addresses of a card that its kernels are given: those of tensors, and of scratch with the word of faults.
fn memory_of(tensors: &TensorMemory, scratch: &CardMemory) -> [Range<u64>; 2] {
    let start = scratch.start();
    [tensors.on_card(), start..start + scratch.bytes() as u64]
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        NAME
    }

    fn threads(&self) -> usize {
        self.threads
    }

    fn is_host_addressable(&self) -> bool {
        false
    }

    fn links(&self) -> Option<&dyn Links> {
        self.nccl.as_ref().map(|_| self as &dyn Links)
    }

    fn launch(&self, stream: Stream, call: Call) {
        if self.has_failed.load(Ordering::Acquire) {
            return;
        }
        if stream == Stream::Host {
            let Call { operation, name, site, timer } = call;
            // SAFETY: by the contract of `launch`, the caller keeps the operands valid and ordered.
            let operation = unsafe { operation.detach() };
            return self.host.launch(Call { operation, name, site, timer });
        }
        let (name, site) = (call.name, call.site);
        let mut state = self.lock();
        let result = self.issue(&mut state, stream, call);
        self.keep(&mut state, result, name, site);
    }

    fn upload(&self, _: Stream, from: &[u8], to: ViewMut, site: Site, timer: Option<Timer>) {
        if self.has_failed.load(Ordering::Acquire) {
            return;
        }
        let address = to.address().as_ptr().addr();
        let to = self.tensors.distance(address).map(|distance| address.wrapping_add_signed(distance) as u64);
        let mut state = self.lock();
        let result = match to {
            Some(to) => self.stage(&mut state, from, to, timer),
            None => Err(Error::Unsupported("an upload was given host memory to write".to_string())),
        };
        self.keep(&mut state, result, "upload", site);
    }

    fn transfer(&self, transfer: DiskTransfer) {
        match &self.disk {
            Some(disk) => disk.transfer(transfer),
            None => {
                let (call, site) = (transfer.name, transfer.site);
                let result = Err(Error::Unsupported("the device has no disk memory".to_string()));
                self.keep(&mut self.lock(), result, call, site);
            }
        }
    }

    #[track_caller]
    fn record(&self, stream: Stream) -> StreamEvent {
        let Some(queue) = index(stream) else {
            return match &self.disk {
                _ if stream == Stream::Host => StreamEvent { stream, number: self.host.issued() },
                Some(disk) => disk.record(stream),
                None => StreamEvent { stream, number: 0 },
            };
        };
        if self.has_failed.load(Ordering::Acquire) {
            return StreamEvent { stream, number: 0 };
        }
        let mut state = self.lock();
        let number = self.context.enter().and_then(|()| {
            if stream == Stream::Compute {
                self.end_compute(&mut state)?;
            }
            state.streams.record(queue)
        });
        let number = number.unwrap_or_else(|error| {
            self.keep(&mut state, Err(error), "record", Site::caller());
            0
        });
        StreamEvent { stream, number }
    }

    #[track_caller]
    fn wait(&self, stream: Stream, event: StreamEvent) {
        if self.has_failed.load(Ordering::Acquire) {
            return;
        }
        match (index(stream), index(event.stream)) {
            (Some(queue), Some(of)) => {
                let mut state = self.lock();
                let result = self.context.enter().and_then(|()| {
                    if stream == Stream::Compute {
                        self.flush(&mut state);
                    }
                    state.streams.wait(queue, of, event.number)
                });
                self.keep(&mut state, result, "wait", Site::caller());
            }
            (None, Some(of)) if stream == Stream::Host => {
                let event = self.lock().streams.pending(of, event.number);
                if let Some(event) = event {
                    self.host.wait_for_card(event, Site::caller());
                }
            }
            // What the disk is given next may run at once.
            (None, Some(of)) => {
                // The failure is kept, for the next synchronisation.
                let _ = self.wait_for(of, event.number);
            }
            (Some(queue), None) if event.stream == Stream::Host => {
                let mut state = self.lock();
                let result = self.context.enter().and_then(|()| {
                    if stream == Stream::Compute {
                        self.flush(&mut state);
                    }
                    self.host.wait_on_card(&mut state.streams, queue, event.number)
                });
                self.keep(&mut state, result, "wait", Site::caller());
            }
            (None, None) if event.stream == Stream::Host => {
                if stream != Stream::Host {
                    // The failure is reported by the next synchronisation.
                    let _ = self.host.synchronize(event.number);
                }
            }
            (_, None) => {
                if let Some(disk) = self.disk.as_ref().filter(|_| event.stream == Stream::Disk) {
                    disk.wait(stream, event);
                }
            }
        }
    }

    fn synchronize(&self, event: StreamEvent) -> Result<(), DeviceError> {
        match (index(event.stream), &self.disk) {
            (Some(queue), _) => self.wait_for(queue, event.number),
            (None, Some(disk)) if event.stream == Stream::Disk => {
                disk.synchronize(event)?;
                self.check(self.lock())
            }
            (None, _) => {
                // A failure is kept, and is the first unless the card has failed before.
                let _ = self.host.synchronize(event.number);
                self.check(self.lock())
            }
        }
    }
}
