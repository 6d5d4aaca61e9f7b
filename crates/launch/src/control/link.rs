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

use crate::control::HEARTBEAT;
use crate::control::message::{MESSAGE_MAX, Message};

/// Messages that may wait for a slow peer. States of ranks are left out beyond half of it.
const OUTBOX: usize = 1024;

/// Time that closing a connection may take.
const CLOSING: Duration = Duration::from_millis(300);

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
    /// Milliseconds from `opened` to when the peer was heard last.
    heard_ms: Arc<AtomicU64>,
    opened: Instant,
    socket: TcpStream,
    /// The reader and the writer.
    threads: [JoinHandle<()>; 2],
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
        let opened = Instant::now();
        let heard_ms = Arc::new(AtomicU64::new(0));
        let (arrivals, wake, heard) = (inbox.sender.clone(), Arc::clone(&inbox.wake), Arc::clone(&heard_ms));
        let read = move || {
            let arrived = |arrival| {
                // Fails when the control plane is gone, and nobody waits.
                let _ = arrivals.send((host, arrival));
                let _ = rustix::io::write(&*wake, &1u64.to_ne_bytes());
            };
            loop {
                let message = receiver.receive(MESSAGE_MAX);
                heard.store(opened.elapsed().as_millis() as u64, Ordering::Relaxed);
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
        Ok(Link { outbox: Some(outbox), waiting, heard_ms, opened, socket, threads })
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

    /// How long the peer has not been heard.
    pub(crate) fn silent_for(&self) -> Duration {
        let heard = Duration::from_millis(self.heard_ms.load(Ordering::Relaxed));
        self.opened.elapsed().saturating_sub(heard)
    }
}

impl Drop for Link {
    /// Sends what waits, says that nothing more comes, and reads until the peer has closed its side, too: bytes that nobody
    /// has read would make the system discard what the peer has not read yet. A peer that does neither is not waited for.
    fn drop(&mut self) {
        self.outbox = None;
        let until = Instant::now() + CLOSING;
        let [reader, writer] = &self.threads;
        let wait_for = |thread: &JoinHandle<()>| {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        wait_for(writer);
        let _ = self.socket.shutdown(Shutdown::Write);
        wait_for(reader);
        if !reader.is_finished() && self.silent_for() > 2 * HEARTBEAT {
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
