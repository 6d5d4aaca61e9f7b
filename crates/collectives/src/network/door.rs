//! `Door`: accepts the connections of ranks of other hosts to this rank. One thread accepts them, authenticates many at a time,
//! and keeps the connections until a group takes them.
//!
//! Whoever is not authenticated costs little ([`Guests`]). Only a peer that knows the job's secret gets a place in the table, and
//! only one that fits the job.

use std::collections::HashMap;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use super::Network;
use super::line::Line;
use crate::secure::{Authenticated, Guests, close_at_once, prepare_to_accept};
use crate::shared_memory::rank_cell::CHANNELS;

/// Time between two looks at guests that have taken too long.
const LOOK: Duration = Duration::from_secs(1);

/// Which connection of which group this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LineKey {
    pub(crate) channel: usize,
    /// World rank of the connecting side.
    pub(crate) from: usize,
    pub(crate) stream: usize,
}

impl LineKey {
    /// The hello of the connecting side: the key, and the world rank that it wants to reach.
    pub(crate) fn hello(self, to: usize) -> [u8; 16] {
        let numbers = [self.channel, self.from, self.stream, to].map(|number| (number as u32).to_le_bytes());
        numbers.as_flattened().try_into().expect("4 numbers of 4 bytes")
    }

    /// None if the peer is not a member of this job.
    fn from_hello(hello: &[u8], network: &Network, own: usize) -> Option<LineKey> {
        let numbers: [u8; 16] = hello.try_into().ok()?;
        let number = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| numbers[4 * at + i])) as usize;
        let (key, to) = (LineKey { channel: number(0), from: number(1), stream: number(2) }, number(3));
        // Of two ranks, the one with the higher number connects, and only ranks of other hosts do.
        let fits = key.channel < CHANNELS
            && key.stream < network.streams
            && to == own
            && key.from > own
            && key.from < network.hosts.world_size()
            && !network.hosts.ranks(network.host).contains(&key.from);
        fits.then_some(key)
    }
}

/// The listener of a rank, and the connections that wait for their group.
pub(crate) struct Door {
    arrivals: Arc<Arrivals>,
    thread: Option<JoinHandle<()>>,
}

struct Arrivals {
    lines: Mutex<HashMap<LineKey, Line>>,
    arrived: Condvar,
    closed: AtomicBool,
    /// Wakes the thread when the door closes.
    wake: OwnedFd,
}

impl Door {
    /// Starts to accept connections to the world rank `rank`.
    ///
    /// # Errors
    /// When the system refuses a thread or a descriptor.
    pub(crate) fn open(listener: TcpListener, network: Network, rank: usize) -> std::io::Result<Door> {
        prepare_to_accept(&listener)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (lines, arrived, closed) = (Mutex::default(), Condvar::new(), AtomicBool::new(false));
        let arrivals = Arc::new(Arrivals { lines, arrived, closed, wake });
        let guests = Guests::new(network.secret.clone(), network.identity(), network.protection());
        let reception = Reception { listener, network, rank, arrivals: Arc::clone(&arrivals), guests };
        let builder = std::thread::Builder::new().name("connections".into());
        let thread = Some(builder.spawn(move || reception.serve())?);
        Ok(Door { arrivals, thread })
    }

    /// The connection, if it arrives within `limit`.
    pub(crate) fn take(&self, key: LineKey, limit: Duration) -> Option<Line> {
        let lines = self.arrivals.lock();
        let absent = |lines: &mut HashMap<LineKey, Line>| !lines.contains_key(&key);
        let waited = self.arrivals.arrived.wait_timeout_while(lines, limit, absent);
        let (mut lines, _) = waited.unwrap_or_else(PoisonError::into_inner);
        lines.remove(&key)
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.arrivals.closed.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.arrivals.wake, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // No group has taken them, so they carry nothing that a peer waits for.
        self.arrivals.lock().values().for_each(|line| close_at_once(&line.socket, true));
    }
}

impl Arrivals {
    fn lock(&self) -> MutexGuard<'_, HashMap<LineKey, Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread's state.
struct Reception {
    listener: TcpListener,
    network: Network,
    rank: usize,
    arrivals: Arc<Arrivals>,
    guests: Guests,
}

impl Reception {
    fn serve(mut self) {
        while !self.arrivals.closed.load(Ordering::Acquire) {
            let listener = std::slice::from_ref(&self.listener);
            let served = self.guests.serve(listener, Some(self.arrivals.wake.as_fd()), LOOK);
            // Without the system's word on what happens, nobody can be let in.
            let Ok(left) = served else { return };
            left.into_iter().flatten().for_each(|guest| self.admit(guest));
        }
    }

    /// Keeps an authenticated connection, unless this rank has no place for it or has it already.
    fn admit(&self, guest: Authenticated) {
        let Authenticated { socket, established } = guest;
        let Some(key) = LineKey::from_hello(&established.hello, &self.network, self.rank) else { return };
        let Ok(line) = Line::new(socket, established) else { return };
        self.arrivals.lock().entry(key).or_insert(line);
        self.arrivals.arrived.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_testing::hostile::Random;

    use crate::hosts::Hosts;
    use crate::network::Wire;
    use crate::secure::Secret;

    /// Two hosts of two ranks.
    fn network() -> Network {
        Network {
            hosts: Hosts::new(vec![2, 2]),
            host: 0,
            job: [1; 16],
            epoch: 0,
            secret: Secret::from_bytes([2; 32]),
            addresses: vec!["127.0.0.1:1".parse().unwrap(); 4],
            plaintext: false,
            streams: 2,
            wire: Wire::Tcp,
        }
    }

    #[test]
    fn only_connections_that_the_job_can_need_get_a_place() {
        let (network, key) = (network(), LineKey { channel: 3, from: 2, stream: 1 });
        let from = |key: LineKey, to: usize| LineKey::from_hello(&key.hello(to), &network, 1);
        assert_eq!(from(key, 1), Some(key));
        // To another rank, from the own host or a rank below, of a channel, a stream or a rank that does not exist.
        assert_eq!(from(key, 0), None);
        for other in [
            LineKey { from: 0, ..key },
            LineKey { from: 1, ..key },
            LineKey { from: 4, ..key },
            LineKey { channel: CHANNELS, ..key },
            LineKey { stream: 2, ..key },
        ] {
            assert_eq!(from(other, 1), None, "{other:?}");
        }
        for number in 0..1000 {
            let mut random = Random::of_case("hellos", number);
            let length = random.below(40);
            let hello = random.bytes(length);
            if let Some(key) = LineKey::from_hello(&hello, &network, 1) {
                assert!(key.channel < CHANNELS && key.from < 4 && key.stream < 2 && length == 16);
            }
        }
    }
}
