//! How the ranks of a communicator reach each other, as threads or as processes of one machine: each connects to a hub, a thread of the
//! process that has made the invitation, which passes their frames on.

use std::collections::{HashMap, VecDeque};
use std::io::{Read, Result, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::queues::{Header, Line};

/// Bytes before the contents of a frame: sender, receiver, kind, call, element, count, length.
const FRAME: usize = 4 * 5 + 8 * 2;

/// What a frame is.
const HELLO: u32 = 1;
const WELCOME: u32 = 2;
const DATA: u32 = 3;
const TAKEN: u32 = 4;

/// One frame.
#[derive(Clone, Debug, Default)]
struct Frame {
    from: u32,
    to: u32,
    kind: u32,
    call: u32,
    element: u32,
    count: u64,
    bytes: Vec<u8>,
}

impl Frame {
    fn write(&self, to: &mut impl Write) -> Result<()> {
        let mut all = Vec::with_capacity(FRAME + self.bytes.len());
        for number in [self.from, self.to, self.kind, self.call, self.element] {
            all.extend(number.to_le_bytes());
        }
        all.extend(self.count.to_le_bytes());
        all.extend((self.bytes.len() as u64).to_le_bytes());
        all.extend(&self.bytes);
        to.write_all(&all)
    }

    fn read(from: &mut impl Read) -> Result<Frame> {
        let mut head = [0; FRAME];
        from.read_exact(&mut head)?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let mut bytes = vec![0; long(28) as usize];
        from.read_exact(&mut bytes)?;
        let (call, element, count) = (word(12), word(16), long(20));
        Ok(Frame { from: word(0), to: word(4), kind: word(8), call, element, count, bytes })
    }
}

/// Opens a hub for one communicator; its port.
pub(super) fn open() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    std::thread::Builder::new().name("nccl hub".to_string()).spawn(move || {
        // Without one of its ranks, a communicator never comes to be, as with the library.
        let _ = serve(&listener);
    })?;
    Ok(port)
}

/// Waits for all ranks, tells them whether they can communicate, and passes on what they send.
fn serve(listener: &TcpListener) -> Result<()> {
    let mut ranks: HashMap<u32, (TcpStream, u64)> = HashMap::new();
    let mut needed = 1;
    let mut is_wrong = false;
    while ranks.len() < needed {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let hello = Frame::read(&mut stream)?;
        if hello.kind != HELLO {
            continue;
        }
        // In `to` is the number of ranks, in `count` the card.
        is_wrong |= !ranks.is_empty() && needed != hello.to as usize;
        is_wrong |= ranks.values().any(|(_, card)| *card == hello.count);
        needed = hello.to as usize;
        is_wrong |= ranks.insert(hello.from, (stream, hello.count)).is_some();
    }
    let mut writers = HashMap::new();
    for (rank, (stream, _)) in &ranks {
        writers.insert(*rank, Mutex::new(stream.try_clone()?));
    }
    let writers = Arc::new(writers);
    for (rank, (mut stream, _)) in ranks {
        let welcome = Frame { kind: WELCOME, count: u64::from(is_wrong), to: rank, ..Frame::default() };
        welcome.write(&mut stream)?;
        let writers = Arc::clone(&writers);
        std::thread::Builder::new().name("nccl hub".to_string()).spawn(move || {
            while let Ok(frame) = Frame::read(&mut stream) {
                if let Some(to) = writers.get(&frame.to) {
                    // A rank that is gone takes nothing.
                    let _ = frame.write(&mut *to.lock().unwrap_or_else(PoisonError::into_inner));
                }
            }
        })?;
    }
    Ok(())
}

/// How far a communicator is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not all ranks have come.
    Joining,
    /// It can be used.
    Ready,
    /// Two ranks have one card, or the ranks disagree.
    Refused,
}

/// What has come, by rank.
struct Inbox {
    stage: Stage,
    waiting: Vec<VecDeque<(Header, Vec<u8>)>>,
    taken: Vec<u64>,
}

/// One rank's connection to the others.
pub(super) struct Connection {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    /// The number of the card.
    pub(super) card: usize,
    stream: Mutex<TcpStream>,
    inbox: Mutex<Inbox>,
    sent: Vec<AtomicU64>,
    is_cut: AtomicBool,
    /// Whether each rank was reached before.
    pub(super) reached: Mutex<Vec<bool>>,
    /// Bytes of the card's memory that it has taken.
    pub(super) memory: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Connection {
    /// Connects to the hub at `port`.
    pub(super) fn join(port: u16, [rank, ranks]: [usize; 2], card: usize) -> Result<Arc<Connection>> {
        let mut stream = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
        stream.set_nodelay(true)?;
        let (from, to, count) = (rank as u32, ranks as u32, card as u64);
        Frame { from, to, kind: HELLO, count, ..Frame::default() }.write(&mut stream)?;
        let reader = stream.try_clone()?;
        let waiting = (0..ranks).map(|_| VecDeque::new()).collect();
        let connection = Arc::new(Connection {
            rank,
            ranks,
            card,
            stream: Mutex::new(stream),
            inbox: Mutex::new(Inbox { stage: Stage::Joining, waiting, taken: vec![0; ranks] }),
            sent: (0..ranks).map(|_| AtomicU64::new(0)).collect(),
            is_cut: AtomicBool::new(false),
            reached: Mutex::new(vec![false; ranks]),
            memory: AtomicUsize::new(0),
        });
        let inbox = Arc::clone(&connection);
        std::thread::Builder::new().name("nccl".to_string()).spawn(move || inbox.receive(reader))?;
        Ok(connection)
    }

    fn receive(&self, mut reader: TcpStream) {
        while let Ok(frame) = Frame::read(&mut reader) {
            let mut inbox = lock(&self.inbox);
            let from = (frame.from as usize).min(self.ranks - 1);
            match frame.kind {
                WELCOME => inbox.stage = if frame.count == 0 { Stage::Ready } else { Stage::Refused },
                DATA => {
                    let header = Header { call: frame.call, element: frame.element, count: frame.count };
                    inbox.waiting[from].push_back((header, frame.bytes));
                }
                TAKEN => inbox.taken[from] += 1,
                _ => {}
            }
        }
    }

    pub(super) fn stage(&self) -> Stage {
        lock(&self.inbox).stage
    }

    /// Ends it: exchanges that wait end without results.
    pub(super) fn cut(&self) {
        self.is_cut.store(true, Ordering::Release);
        let _ = lock(&self.stream).shutdown(std::net::Shutdown::Both);
    }

    fn write(&self, frame: &Frame) {
        // A rank that is gone receives nothing: who waits for it waits, as with the library.
        let _ = frame.write(&mut *lock(&self.stream));
    }
}

impl Line for Connection {
    fn send(&self, to: usize, header: Header, bytes: Vec<u8>) {
        self.sent[to].fetch_add(1, Ordering::Relaxed);
        let Header { call, element, count } = header;
        self.write(&Frame { from: self.rank as u32, to: to as u32, kind: DATA, call, element, count, bytes });
    }

    fn take(&self, from: usize) -> Option<(Header, Vec<u8>)> {
        let taken = lock(&self.inbox).waiting[from].pop_front()?;
        let (own, to) = (self.rank as u32, from as u32);
        self.write(&Frame { from: own, to, kind: TAKEN, ..Frame::default() });
        Some(taken)
    }

    fn sent_to(&self, to: usize) -> u64 {
        self.sent[to].load(Ordering::Relaxed)
    }

    fn taken(&self, by: usize) -> u64 {
        lock(&self.inbox).taken[by]
    }

    fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Acquire)
    }

    fn describe(&self, header: Header) -> String {
        let call = super::NAMES.get(header.call as usize).copied().unwrap_or("an unknown function");
        format!("{call} of {} elements of type {}", header.count, header.element)
    }
}
