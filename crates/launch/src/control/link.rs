//! One connection of the control plane: a thread reads messages, and another writes them, or a sign of life when there are
//! none.

use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Builder;
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

/// Time between two looks whether the peer's system has what was sent, of which nothing wakes.
const LOOK: Duration = Duration::from_millis(1);

/// A peer that was heard within this time is there.
const HEARD: Duration = Duration::from_secs(1);

/// Maximum time that counts as silence between two looks: when this process did not run, the peer is not charged with that.
const COUNTED_MAX: Duration = Duration::from_millis(500);

/// A message from a link, or the end of it.
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

    /// Takes all arrivals, each with the host that sent it.
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
    ended: Arc<Ended>,
}

/// Flags that the reader and the writer have ended.
#[derive(Default)]
struct Ended {
    threads: Mutex<[bool; 2]>,
    changed: Condvar,
}

impl Ended {
    fn set(&self, thread: usize) {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)[thread] = true;
        self.changed.notify_all();
    }

    /// Waits for `limit` at most, as long as `waits` for others to end.
    fn after(&self, limit: Duration, waits: impl Fn([bool; 2]) -> bool) -> [bool; 2] {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(threads, limit, |threads| waits(*threads));
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Time for which the peer was silent, as of the last look.
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
        let ended = Arc::new(Ended::default());
        start("control-read", host, &ended, 0, read)?;
        start("control-write", host, &ended, 1, write)?;
        let silence = Mutex::new(Silence { heard: 0, looked: Instant::now(), time: Duration::ZERO });
        Ok(Link { outbox: Some(outbox), waiting, heard: count, silence, socket, ended })
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

    /// Returns whether no more messages come.
    #[cfg(test)]
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.after(Duration::ZERO, |_| false)[0]
    }

    /// Time since the peer was last heard. It counts only the time in which this process ran and looked.
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

    /// Returns whether bytes have come that the thread has not read yet: on a busy machine, it may get no core for long.
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
        let left = |closing: Duration| closing.saturating_sub(since.elapsed());
        let mut pause = HEARTBEAT;
        loop {
            // How long it may take depends on whether the peer is heard meanwhile.
            let left = left(CLOSING[usize::from(self.silent_for() < HEARD)]);
            let is_written = pause == LOOK;
            match self.ended.after(pause.min(left), |[reader, writer]| !reader && (is_written || !writer)) {
                _ if left.is_zero() => break,
                [true, _] => break,
                [_, true] if secure::unacknowledged_bytes(&self.socket) == 0 => break,
                [_, true] => pause = LOOK,
                [_, false] => {}
            }
        }
        let _ = self.socket.shutdown(Shutdown::Write);
        let [is_over, _] = self.ended.after(left(CLOSING[0]), |[reader, _]| !reader);
        if !is_over && self.silent_for() >= HEARD {
            // A peer that says nothing, although something comes at every heartbeat, takes nothing either.
            secure::close_at_once(&self.socket, true);
        }
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// Starts a thread of a link, the `thread`-th of those that have `ended`.
fn start(
    name: &str,
    host: usize,
    ended: &Arc<Ended>,
    thread: usize,
    run: impl FnOnce() + Send + 'static,
) -> std::io::Result<()> {
    let ended = Arc::clone(ended);
    let run = move || {
        run();
        ended.set(thread);
    };
    let started = Builder::new().name(format!("{name}-{host}")).spawn(run);
    started.map(drop).map_err(|error| refused_thread("a thread of the control plane", &error))
}
