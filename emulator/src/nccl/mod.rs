//! A double of NCCL: bytes move between devices of one machine, whose ranks are threads or processes, in the order of the driver's streams
//! and with the driver's checks of memory.
//!
//! Checked beyond what the library does: both ends of a message call the same function with the same count and type; ranks have cards of
//! their own; calls that belong to a group are inside of one. A call ends when its bytes have come and the others have taken theirs: who
//! relies on buffers inside the library waits forever. A rank that is gone is not noticed, as in the library. Of its functions, those are
//! here that the engine calls: none that adds.

mod hub;

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver;
use crate::queues::{Exchange, Header, Line, Parcel};
use hub::{Connection, Stage};

/// What a function of the library returns (`ncclResult_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct NcclResult(pub c_int);

#[allow(missing_docs)]
impl NcclResult {
    pub const SUCCESS: Self = Self(0);
    pub const UNHANDLED_CUDA: Self = Self(1);
    pub const SYSTEM: Self = Self(2);
    pub const INVALID_ARGUMENT: Self = Self(4);
    pub const INVALID_USAGE: Self = Self(5);
    pub const IN_PROGRESS: Self = Self(7);
}

/// The functions of messages, by the number in their headers. A send and its recv have one.
const NAMES: [&str; 4] = ["", "ncclAllGather", "ncclBroadcast", "ncclSend or ncclRecv"];
const ALL_GATHER: u32 = 1;
const BROADCAST: u32 = 2;
const MESSAGE: u32 = 3;

/// Bytes of an element by the number of its type (`ncclDataType_t`).
const WIDTHS: [usize; 12] = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1];

/// An invitation (`ncclUniqueId`).
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// How an invitation begins.
const MAGIC: [u8; 8] = *b"phxnccl1";

/// What every configuration begins with (`ncclConfig_t`), and whether calls wait.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct CommunicatorConfig {
    /// Bytes of the configuration.
    pub size: usize,
    /// 0xcafebeef
    pub magic: u32,
    /// The version of the library that the caller knows.
    pub version: u32,
    /// Whether calls wait; `i32::MIN` for the default, which they do.
    pub blocking: c_int,
}

/// Communicators are indices plus this.
const FIRST_HANDLE: usize = 0xcc11_0000;

static CONNECTIONS: Mutex<Vec<Option<Arc<Connection>>>> = Mutex::new(Vec::new());

type Outcome<T> = Result<T, NcclResult>;

thread_local! {
    /// The calls of the group that the thread has begun, each with its stream.
    static CALLS: RefCell<Option<Vec<(usize, Exchange)>>> = const { RefCell::new(None) };
}

fn with_communicators<T>(body: impl FnOnce(&mut Vec<Option<Arc<Connection>>>) -> T) -> T {
    body(&mut CONNECTIONS.lock().unwrap_or_else(PoisonError::into_inner))
}

fn communicator(handle: usize) -> Outcome<Arc<Connection>> {
    with_communicators(|all| {
        let known = handle.checked_sub(FIRST_HANDLE).and_then(|index| all.get(index).cloned());
        known.flatten().ok_or(NcclResult::INVALID_ARGUMENT)
    })
}

/// A communicator that calls may use: all ranks have joined, and the context is that of its card.
fn ready(handle: usize) -> Outcome<Arc<Connection>> {
    let communicator = communicator(handle)?;
    let is_ready = communicator.stage() == Stage::Ready && driver::current_card() == Some(communicator.card);
    if is_ready { Ok(communicator) } else { Err(NcclResult::INVALID_USAGE) }
}

/// Takes memory for each rank that a communicator has not exchanged data with before, as the library does when it first does so.
fn reach(communicator: &Connection, mut ranks: impl Iterator<Item = usize>) -> Outcome<()> {
    let mut reached = communicator.reached.lock().unwrap_or_else(PoisonError::into_inner);
    ranks.try_for_each(|rank| {
        if rank != communicator.rank && !std::mem::replace(&mut reached[rank], true) {
            let taken = driver::take_for_connection().map_err(|_| NcclResult::UNHANDLED_CUDA)?;
            communicator.memory.fetch_add(taken, Ordering::Relaxed);
        }
        Ok(())
    })
}

fn end(handle: usize) -> Outcome<()> {
    let communicator = communicator(handle)?;
    communicator.cut();
    driver::give_back(communicator.card, communicator.memory.swap(0, Ordering::Relaxed));
    with_communicators(|all| all[handle - FIRST_HANDLE] = None);
    Ok(())
}

fn put<T>(out: *mut T, value: T) -> Outcome<()> {
    if out.is_null() {
        return Err(NcclResult::INVALID_ARGUMENT);
    }
    // SAFETY: callers of the library's functions promise that their result pointers are valid.
    unsafe { out.write(value) };
    Ok(())
}

/// The bytes of so many elements of a type.
fn bytes_of(count: usize, element: c_int, addresses: &[u64]) -> Outcome<usize> {
    let width = usize::try_from(element).ok().and_then(|element| WIDTHS.get(element));
    let bytes = width.and_then(|width| count.checked_mul(*width));
    let is_given = count == 0 || addresses.iter().all(|address| *address != 0);
    bytes.filter(|_| is_given).ok_or(NcclResult::INVALID_ARGUMENT)
}

/// Queues a call, or adds it to the thread's group.
fn queue(stream: usize, exchange: Exchange) -> Outcome<()> {
    let alone = CALLS.with_borrow_mut(|group| match group {
        Some(calls) => {
            calls.push((stream, exchange));
            None
        }
        None => Some(exchange),
    });
    alone.map_or(Ok(()), |exchange| queue_alone(stream, exchange))
}

fn queue_alone(stream: usize, exchange: Exchange) -> Outcome<()> {
    driver::queue_exchange(stream, exchange).map_err(|_| NcclResult::UNHANDLED_CUDA)
}

/// The calls of a group that have one stream, as one.
fn merged(calls: Vec<(usize, Exchange)>) -> Vec<(usize, Exchange)> {
    let mut merged: Vec<(usize, Exchange)> = Vec::new();
    for (stream, call) in calls {
        match merged.iter_mut().find(|(of, into)| *of == stream && Arc::ptr_eq(&into.line, &call.line)) {
            Some((_, into)) => {
                into.sent.extend(call.sent);
                into.received.extend(call.received);
                into.copied.extend(call.copied);
            }
            None => merged.push((stream, call)),
        }
    }
    merged
}

fn join(out: *mut usize, ranks: c_int, id: UniqueId, rank: c_int, config: CommunicatorConfig) -> Outcome<()> {
    let card = driver::current_card().ok_or(NcclResult::INVALID_USAGE)?;
    let fits = id.0.starts_with(&MAGIC) && ranks >= 1 && (0..ranks).contains(&rank);
    let is_known = config.magic == 0xcafe_beef
        && config.size >= size_of::<CommunicatorConfig>()
        && config.version >= 21400;
    if !fits || !is_known {
        return Err(NcclResult::INVALID_ARGUMENT);
    }
    let port = u16::from_le_bytes([id.0[8], id.0[9]]);
    let joined = Connection::join(port, [rank as usize, ranks as usize], card);
    let connection = joined.map_err(|_| NcclResult::SYSTEM)?;
    let handle = with_communicators(|all| {
        all.push(Some(Arc::clone(&connection)));
        FIRST_HANDLE + all.len() - 1
    });
    put(out, handle)?;
    if config.blocking == 0 {
        return Err(NcclResult::IN_PROGRESS);
    }
    while connection.stage() == Stage::Joining {
        std::thread::sleep(std::time::Duration::from_micros(100));
    }
    if connection.stage() == Stage::Ready { Ok(()) } else { Err(NcclResult::INVALID_USAGE) }
}

/// One side of a message.
fn message(
    name: &'static str,
    address: u64,
    count: usize,
    element: c_int,
    peer: c_int,
    handle: usize,
) -> Outcome<(Exchange, Parcel)> {
    let communicator = ready(handle)?;
    let bytes = bytes_of(count, element, &[address])?;
    let rank = usize::try_from(peer).ok().filter(|peer| *peer < communicator.ranks);
    let rank = rank.ok_or(NcclResult::INVALID_ARGUMENT)?;
    reach(&communicator, std::iter::once(rank))?;
    let header = Header { call: MESSAGE, element: element as u32, count: count as u64 };
    Ok((Exchange::new(name, communicator as Arc<dyn Line>), Parcel { rank, address, bytes, header }))
}

/// Declares functions of the library.
macro_rules! entry_points {
    ($($(#[$meta:meta])* $name:ident($($arg:ident: $kind:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        /// Pointers must be valid as the manual of the library says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $kind),*) -> NcclResult {
            let body = || -> Outcome<()> { $body };
            body().err().unwrap_or(NcclResult::SUCCESS)
        }
    )*};
}

entry_points! {
    /// The version of the library: 2.27.5.
    ncclGetVersion(out: *mut c_int) { put(out, 22705) }

    /// Makes an invitation.
    ncclGetUniqueId(out: *mut UniqueId) {
        let port = hub::open().map_err(|_| NcclResult::SYSTEM)?;
        let mut id = UniqueId([0; 128]);
        id.0[..8].copy_from_slice(&MAGIC);
        id.0[8..10].copy_from_slice(&port.to_le_bytes());
        put(out, id)
    }

    /// Makes this rank's part of a communicator, on the card of the thread's context.
    ncclCommInitRankConfig(out: *mut usize, ranks: c_int, id: UniqueId, rank: c_int, config: *mut CommunicatorConfig) {
        if config.is_null() {
            return Err(NcclResult::INVALID_ARGUMENT);
        }
        // SAFETY: the caller gives a configuration, which begins like this in every version.
        join(out, ranks, id, rank, unsafe { *config })
    }

    /// Whether a communicator has failed, or goes on with the last call.
    ncclCommGetAsyncError(handle: usize, out: *mut NcclResult) {
        let state = match communicator(handle)?.stage() {
            Stage::Joining => NcclResult::IN_PROGRESS,
            Stage::Ready => NcclResult::SUCCESS,
            Stage::Refused => NcclResult::INVALID_USAGE,
        };
        put(out, state)
    }

    /// Begins to end a communicator.
    ncclCommFinalize(handle: usize) { ready(handle).map(drop) }

    /// Ends a communicator.
    ncclCommDestroy(handle: usize) { end(handle) }

    /// Ends a communicator with all that is in flight.
    ncclCommAbort(handle: usize) {
        while !driver::config().aborts {
            std::thread::park();
        }
        end(handle)
    }

    /// Begins a group: its calls run at once when it ends.
    ncclGroupStart() {
        CALLS.with_borrow_mut(|group| match group {
            Some(_) => Err(NcclResult::INVALID_USAGE),
            None => {
                *group = Some(Vec::new());
                Ok(())
            }
        })
    }

    /// Ends a group.
    ncclGroupEnd() {
        let calls = CALLS.with_borrow_mut(Option::take).ok_or(NcclResult::INVALID_USAGE)?;
        merged(calls).into_iter().try_for_each(|(stream, exchange)| queue_alone(stream, exchange))
    }

    /// Part r of `whole` becomes the part of rank r.
    ncclAllGather(part: u64, whole: u64, count: usize, element: c_int, handle: usize, stream: usize) {
        let communicator = ready(handle)?;
        let bytes = bytes_of(count, element, &[part, whole])?;
        let header = Header { call: ALL_GATHER, element: element as u32, count: count as u64 };
        let (own, ranks) = (communicator.rank, communicator.ranks);
        reach(&communicator, 0..ranks)?;
        let mut exchange = Exchange::new(NAMES[1], communicator as Arc<dyn Line>);
        let slot = |rank: usize| whole + (rank * bytes) as u64;
        for rank in (0..ranks).filter(|rank| *rank != own) {
            exchange.sent.push(Parcel { rank, address: part, bytes, header });
            exchange.received.push(Parcel { rank, address: slot(rank), bytes, header });
        }
        exchange.copied.push((part, slot(own), bytes));
        queue(stream, exchange)
    }

    /// `to` becomes the root's `from`.
    ncclBroadcast(
        from: u64, to: u64, count: usize, element: c_int, root: c_int, handle: usize, stream: usize,
    ) {
        let communicator = ready(handle)?;
        let bytes = bytes_of(count, element, &[from, to])?;
        let header = Header { call: BROADCAST, element: element as u32, count: count as u64 };
        let (own, ranks) = (communicator.rank, communicator.ranks);
        reach(&communicator, 0..ranks)?;
        let root = usize::try_from(root).ok().filter(|root| *root < ranks);
        let root = root.ok_or(NcclResult::INVALID_ARGUMENT)?;
        let mut exchange = Exchange::new(NAMES[2], communicator as Arc<dyn Line>);
        if root == own {
            let others = (0..ranks).filter(|rank| *rank != own);
            exchange.sent.extend(others.map(|rank| Parcel { rank, address: from, bytes, header }));
            exchange.copied.push((from, to, bytes));
        } else {
            exchange.received.push(Parcel { rank: root, address: to, bytes, header });
        }
        queue(stream, exchange)
    }

    /// Sends to a rank.
    ncclSend(from: u64, count: usize, element: c_int, peer: c_int, handle: usize, stream: usize) {
        let (mut exchange, parcel) = message("ncclSend", from, count, element, peer, handle)?;
        exchange.sent.push(parcel);
        queue(stream, exchange)
    }

    /// Receives from a rank.
    ncclRecv(to: u64, count: usize, element: c_int, peer: c_int, handle: usize, stream: usize) {
        let (mut exchange, parcel) = message("ncclRecv", to, count, element, peer, handle)?;
        exchange.received.push(parcel);
        queue(stream, exchange)
    }
}

/// The text of a result.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(result: NcclResult) -> *const c_char {
    let text = match result {
        NcclResult::SUCCESS => c"no error",
        NcclResult::UNHANDLED_CUDA => c"unhandled cuda error",
        NcclResult::SYSTEM => c"unhandled system error",
        NcclResult::INVALID_ARGUMENT => c"invalid argument",
        NcclResult::INVALID_USAGE => c"invalid usage",
        NcclResult::IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// What is known about the last failure.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_communicator: *mut c_void) -> *const c_char {
    c"".as_ptr()
}
