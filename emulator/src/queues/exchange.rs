//! Exchanges between devices, which a library queues: what is sent goes out when the work begins, and the work ends when everything
//! has come and everything that was sent was taken. Until then, the stream stands.

use std::sync::Arc;

use crate::checks::Finding;

use super::{Clock, Queues, StreamId, Work};

/// What a message is part of: both ends must say the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The function that was called, by its number.
    pub call: u32,
    /// The type of elements, by its number.
    pub element: u32,
    /// Elements.
    pub count: u64,
}

/// What connects a device with others.
pub trait Line: Send + Sync {
    /// Sends to a rank.
    fn send(&self, to: usize, header: Header, bytes: Vec<u8>);

    /// What has come from a rank first, if anything has.
    fn take(&self, from: usize) -> Option<(Header, Vec<u8>)>;

    /// How many messages were sent to a rank so far.
    fn sent_to(&self, to: usize) -> u64;

    /// How many messages a rank has taken of those that were sent to it.
    fn taken(&self, by: usize) -> u64;

    /// Whether the line was cut: exchanges on it end without results.
    fn is_cut(&self) -> bool;

    /// A header in words.
    fn describe(&self, header: Header) -> String;
}

/// A buffer that goes to a rank or comes from it.
#[derive(Clone, Copy, Debug)]
pub struct Parcel {
    /// The rank.
    pub rank: usize,
    /// Its place.
    pub address: u64,
    /// Its length.
    pub bytes: usize,
    /// What it is part of.
    pub header: Header,
}

/// An exchange.
#[derive(Clone)]
pub struct Exchange {
    /// The function that was called, for reports.
    pub name: &'static str,
    /// The line.
    pub line: Arc<dyn Line>,
    /// What is sent.
    pub sent: Vec<Parcel>,
    /// What comes.
    pub received: Vec<Parcel>,
    /// Copies within the device: from, to and bytes.
    pub copied: Vec<(u64, u64, usize)>,
    progress: Progress,
}

/// How far an exchange is.
#[derive(Clone, Default)]
struct Progress {
    /// The operation and its clock, once it has begun.
    begun: Option<(u32, Clock)>,
    /// By parcel: the bytes that have come, or what has come instead.
    arrived: Vec<Option<Result<Vec<u8>, Header>>>,
    /// For each parcel that was sent: how many messages its rank has taken when it has taken this.
    taken: Vec<u64>,
}

impl Exchange {
    /// An exchange over a line.
    pub fn new(name: &'static str, line: Arc<dyn Line>) -> Self {
        let (sent, received, copied) = Default::default();
        Self { name, line, sent, received, copied, progress: Progress::default() }
    }

    /// Whether there is something to do now: it has not begun, or it can end.
    pub(super) fn is_ready(&mut self) -> bool {
        self.progress.begun.is_none() || self.can_end()
    }

    fn can_end(&mut self) -> bool {
        if self.line.is_cut() {
            return true;
        }
        for (parcel, arrived) in self.received.iter().zip(&mut self.progress.arrived) {
            // Messages of one rank come in their order.
            if arrived.is_none() {
                *arrived = self.line.take(parcel.rank).map(|(header, bytes)| {
                    let same = header == parcel.header && bytes.len() == parcel.bytes;
                    if same { Ok(bytes) } else { Err(header) }
                });
            }
        }
        let sent = self.sent.iter().zip(&self.progress.taken);
        self.progress.arrived.iter().all(Option::is_some)
            && sent.into_iter().all(|(parcel, needed)| self.line.taken(parcel.rank) >= *needed)
    }
}

impl Queues {
    /// Queues an exchange.
    ///
    /// # Errors
    /// If the stream is captured.
    pub fn enqueue_exchange(
        &mut self,
        stream: StreamId,
        exchange: Exchange,
    ) -> Result<(), super::CaptureError> {
        if self.is_capturing(stream) {
            return Err(super::CaptureError::Unsupported);
        }
        self.enqueue(stream, Work::Exchange(Box::new(exchange)))
    }

    /// Does what can be done of the exchange that a stream has next; whether that was anything.
    pub(super) fn run_exchange(&mut self, stream: StreamId) -> bool {
        let Some(state) = self.streams.get_mut(&stream) else { return false };
        let (index, mut clock) = (state.index, state.clock.clone());
        let Some(mut queued) = state.queue.pop_front() else { return false };
        let Work::Exchange(exchange) = &mut queued.work else { return false };
        let has_begun = exchange.progress.begun.is_some();
        let failed = self.failure.is_some_and(Finding::is_fatal);
        if !has_begun && !failed {
            clock.join(&queued.host);
            let operation = self.operations.begin(index, &mut clock);
            if let Some(state) = self.streams.get_mut(&stream) {
                state.clock = clock.clone();
            }
            self.begin_exchange(exchange, operation, &clock);
            exchange.progress.begun = Some((operation, clock));
        }
        if failed || self.failure.is_some_and(Finding::is_fatal) {
            return true;
        }
        if exchange.can_end() {
            if !exchange.line.is_cut() {
                self.end_exchange(exchange);
            }
            return true;
        }
        if let Some(state) = self.streams.get_mut(&stream) {
            state.queue.push_front(queued);
        }
        !has_begun
    }

    /// Sends what is sent.
    fn begin_exchange(&mut self, exchange: &mut Exchange, operation: u32, clock: &Clock) {
        let Exchange { name, line, sent, received, progress, .. } = exchange;
        progress.arrived = received.iter().map(|_| None).collect();
        for parcel in sent {
            let bytes = self.exchanged_bytes(name, (parcel.address, parcel.bytes), (operation, clock));
            let Some(bytes) = bytes else { return };
            progress.taken.push(line.sent_to(parcel.rank) + 1);
            line.send(parcel.rank, parcel.header, bytes);
        }
    }

    /// The bytes of a range that was written.
    fn exchanged_bytes(
        &mut self,
        name: &str,
        (address, bytes): (u64, usize),
        by: (u32, &Clock),
    ) -> Option<Vec<u8>> {
        let place = self.range(name, address, bytes, false, by)?;
        if self.checks.unwritten && !self.memory.is_range_written(place, bytes) {
            let detail = format!("among {bytes} bytes that are sent");
            self.report(Finding::Unwritten, name, Some(address), detail);
        }
        Some(self.memory.bytes(place, bytes).to_vec())
    }

    /// Writes what has come.
    fn end_exchange(&mut self, exchange: &mut Exchange) {
        let Exchange { name, line, received, copied, progress, .. } = exchange;
        let Some((operation, clock)) = progress.begun.take() else { return };
        for (parcel, arrived) in received.iter().zip(progress.arrived.drain(..)) {
            let bytes = match arrived {
                Some(Ok(bytes)) => bytes,
                Some(Err(other)) => {
                    let (own, other, rank) =
                        (line.describe(parcel.header), line.describe(other), parcel.rank);
                    let detail = format!("{own} from rank {rank}, which has called {other}");
                    return self.report(Finding::Mismatch, name, Some(parcel.address), detail);
                }
                None => continue,
            };
            let Some(place) = self.range(name, parcel.address, parcel.bytes, true, (operation, &clock))
            else {
                return;
            };
            self.memory.bytes(place, bytes.len()).copy_from_slice(&bytes);
            self.memory.mark_range_written(place, bytes.len());
        }
        for &mut (from, to, bytes) in copied {
            if from == to {
                continue;
            }
            let Some(copy) = self.exchanged_bytes(name, (from, bytes), (operation, &clock)) else { return };
            let Some(place) = self.range(name, to, bytes, true, (operation, &clock)) else { return };
            self.memory.bytes(place, bytes).copy_from_slice(&copy);
            self.memory.mark_range_written(place, bytes);
        }
        self.exchanges += 1;
    }
}
