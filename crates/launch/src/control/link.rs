//! One connection of the control plane: a thread reads messages, and another writes them, or a sign of life when there are
//! none.

use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use phalanx_collectives::secure;
use phalanx_tensor::refused_thread;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{RecvFlags, recv};

use crate::control::HEARTBEAT;
use crate::control::message::{MESSAGE_MAX, Message};

/// Messages that may wait for a slow peer. States of ranks are left out beyond half of it.
const OUTBOX: usize = 1024;

/// Time that closing a connection may take: with a peer that is not heard, and with one that is, but is busy.
const CLOSING: [Duration; 2] = [Duration::from_millis(300), Duration::from_secs(5)];

/// A peer that was heard within this time is there.
const HEARD: Duration = Duration::from_secs(1);

/// Maximum time that counts as silence between two looks: when this process did not run, the peer is not charged with that.
const COUNTED_MAX: Duration = Duration::from_millis(500);

/// What came over a link.
pub(crate) enum Arrival {
    Message(Message),
    /// The connection is closed; the reason.
    Closed(String),
}

/// Collects what comes over all links, and wakes who waits for it.
pub(crate) struct Inbox {
    sender: Sender<(usize, Arrival)>,
    receiver: Mutex<Receiver<(usize, Arrival)>>,
    wake: Arc<OwnedFd>,
}

impl Inbox {
    pub(crate) fn new() -> std::io::Result<Inbox> {
        let (sender, receiver) = mpsc::channel();
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Inbox { sender, receiver: Mutex::new(receiver), wake })
    }

    /// Readable when something has come.
    pub(crate) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// What has come, by the host that sent it.
    pub(crate) fn take(&self) -> Vec<(usize, Arrival)> {
        // Emptied first, so that what comes meanwhile wakes again.
        let _ = rustix::io::read(&*self.wake, &mut [0u8; 8][..]);
        self.receiver.lock().unwrap_or_else(PoisonError::into_inner).try_iter().collect()
    }
}

/// A connection with the launcher of another host.
pub(crate) struct Link {
    outbox: Option<SyncSender<Vec<u8>>>,
    /// Messages in the outbox.
    waiting: Arc<AtomicU64>,
    /// Number of times that the peer was heard.
    heard: Arc<AtomicU64>,
    silence: Mutex<Silence>,
    socket: TcpStream,
    /// The reader and the writer.
    threads: [JoinHandle<()>; 2],
}

/// How long the peer was silent, as it was seen at the last look.
struct Silence {
    heard: u64,
    looked: Instant,
    time: Duration,
}

impl Link {
    /// Starts the threads of a connection with the launcher of `host`. `socket` is that of the connection.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub(crate) fn new(
        connection: secure::Connection,
        socket: TcpStream,
        host: usize,
        inbox: &Inbox,
    ) -> std::io::Result<Link> {
        let (mut sender, mut receiver) = connection.split();
        let count = Arc::new(AtomicU64::new(0));
        let (arrivals, wake, heard) = (inbox.sender.clone(), Arc::clone(&inbox.wake), Arc::clone(&count));
        let read = move || {
            let arrived = |arrival| {
                // Fails when the control plane is gone, and nobody waits.
                let _ = arrivals.send((host, arrival));
                let _ = rustix::io::write(&*wake, &1u64.to_ne_bytes());
            };
            loop {
                let message = receiver.receive(MESSAGE_MAX);
                heard.fetch_add(1, Ordering::Relaxed);
                match message.map(|bytes| Message::decode(&bytes)) {
                    Ok(Some(Message::Alive)) => {}
                    Ok(Some(message)) => arrived(Arrival::Message(message)),
                    Ok(None) => return arrived(Arrival::Closed("it sent what is no message".to_string())),
                    Err(error) => return arrived(Arrival::Closed(error.to_string())),
                }
            }
        };
        let (outbox, messages) = mpsc::sync_channel::<Vec<u8>>(OUTBOX);
        let waiting = Arc::new(AtomicU64::new(0));
        let left = Arc::clone(&waiting);
        let write = move || {
            loop {
                let bytes = match messages.recv_timeout(HEARTBEAT) {
                    Ok(bytes) => {
                        left.fetch_sub(1, Ordering::Relaxed);
                        bytes
                    }
                    Err(RecvTimeoutError::Timeout) => Message::Alive.encode(),
                    Err(RecvTimeoutError::Disconnected) => return,
                };
                if sender.send(&bytes).is_err() {
                    // The reader sees the end, too, and reports it.
                    return sender.close();
                }
            }
        };
        let threads = [start("control-read", host, read)?, start("control-write", host, write)?];
        let silence = Mutex::new(Silence { heard: 0, looked: Instant::now(), time: Duration::ZERO });
        Ok(Link { outbox: Some(outbox), waiting, heard: count, silence, socket, threads })
    }

    /// Sends a message; one that does not fit the outbox of a peer that does not read is lost with the connection.
    pub(crate) fn send(&self, bytes: Vec<u8>, may_be_left_out: bool) {
        let Some(outbox) = &self.outbox else { return };
        let waiting = self.waiting.load(Ordering::Relaxed);
        if may_be_left_out && waiting > OUTBOX as u64 / 2 {
            return;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        if let Err(TrySendError::Full(_)) = outbox.try_send(bytes) {
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }

    /// Whether nothing more comes.
    #[cfg(test)]
    pub(crate) fn has_ended(&self) -> bool {
        self.threads[0].is_finished()
    }

    /// How long the peer has not been heard, as far as this process has run, and has looked.
    pub(crate) fn silent_for(&self) -> Duration {
        let (now, heard) = (Instant::now(), self.heard.load(Ordering::Relaxed));
        let mut silence = self.silence.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = now.duration_since(silence.looked).min(COUNTED_MAX);
        silence.looked = now;
        silence.time = match heard != silence.heard || self.has_something_to_read() {
            true => Duration::ZERO,
            false => silence.time + passed,
        };
        silence.heard = heard;
        silence.time
    }

    /// Whether something has come that the thread did not take yet: on a busy machine, it may get no core for long.
    fn has_something_to_read(&self) -> bool {
        recv(&self.socket, &mut [0u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT)
            .is_ok_and(|(_, bytes)| bytes > 0)
    }
}

impl Drop for Link {
    /// Sends what waits, until the peer's system has it, says that nothing more comes, and reads for a moment until the peer has closed
    /// its side, too: bytes that nobody has read would make the system discard what is under way. A peer that is not heard is not waited
    /// for; one that is may be busy, and so may this machine.
    fn drop(&mut self) {
        self.outbox = None;
        let since = Instant::now();
        let [reader, writer] = &self.threads;
        let is_sent = || writer.is_finished() && secure::unacknowledged_bytes(&self.socket) == 0;
        while !is_sent()
            && !reader.is_finished()
            && since.elapsed() < CLOSING[usize::from(self.silent_for() < HEARD)]
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = self.socket.shutdown(Shutdown::Write);
        while !reader.is_finished() && since.elapsed() < CLOSING[0] {
            std::thread::sleep(Duration::from_millis(1));
        }
        if !reader.is_finished() && self.silent_for() >= HEARD {
            // A peer that says nothing, although something comes at every heartbeat, takes nothing either.
            secure::close_at_once(&self.socket, true);
        }
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

fn start(name: &str, host: usize, run: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    let thread = Builder::new().name(format!("{name}-{host}")).spawn(run);
    thread.map_err(|error| refused_thread("a thread of the control plane", &error))
}
