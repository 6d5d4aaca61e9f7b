//! A carrier of messages between threads, in place of a library such as MPI: like it, it copies from buffer to buffer when both
//! ends are there, matches messages in their order, and cuts what is long.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{Error, Result};
use std::sync::{Arc, Mutex};

use phalanx_collectives::{Carrier, InFlight, Messenger};

/// Bytes of the longest message: few, so that buffers are cut.
const LONGEST: usize = 1000;

/// The messages of all ranks of a job.
#[derive(Default)]
pub struct Post {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    over: HashSet<u64>,
    routes: HashMap<Route, Ends>,
    closed: HashSet<usize>,
}

/// Group, and the world ranks of the sender and of the receiver.
type Route = (usize, usize, usize);

/// Messages of a route whose other end has not come yet: number, address and bytes.
#[derive(Default)]
struct Ends {
    sent: VecDeque<(u64, usize, usize)>,
    awaited: VecDeque<(u64, usize, usize)>,
}

impl Post {
    /// The carriers of all ranks of a job.
    pub fn carriers(world: usize) -> Vec<Arc<dyn Carrier>> {
        let post = Arc::new(Post::default());
        (0..world)
            .map(|rank| Arc::new(Office { post: Arc::clone(&post), rank }) as Arc<dyn Carrier>)
            .collect()
    }

    fn put(&self, rank: usize, route: Route, sends: bool, address: usize, bytes: usize) -> Result<u64> {
        let state = &mut *self.state.lock().unwrap();
        if state.closed.contains(&rank) {
            return Err(Error::other("the post is closed"));
        }
        assert!(bytes > 0 && bytes <= LONGEST, "a message of {bytes} bytes");
        state.next += 1;
        let id = state.next;
        let ends = state.routes.entry(route).or_default();
        (if sends { &mut ends.sent } else { &mut ends.awaited }).push_back((id, address, bytes));
        while !ends.sent.is_empty() && !ends.awaited.is_empty() {
            let (sent, from, bytes) = ends.sent.pop_front().unwrap();
            let (awaited, to, room) = ends.awaited.pop_front().unwrap();
            assert_eq!(bytes, room, "a message of another length");
            // SAFETY: both ends keep their memory until the message is over or they have closed the post, under the lock.
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
            state.over.extend([sent, awaited]);
        }
        Ok(id)
    }
}

struct Office {
    post: Arc<Post>,
    rank: usize,
}

impl Carrier for Office {
    fn name(&self) -> &str {
        "the post"
    }

    fn max_message_bytes(&self) -> usize {
        LONGEST
    }

    fn open(&self, number: usize, members: &[usize]) -> Result<Arc<dyn Messenger>> {
        let (post, members) = (Arc::clone(&self.post), members.to_vec());
        Ok(Arc::new(Letters { post, number, members, rank: self.rank }))
    }

    fn close(&self) {
        let mut state = self.post.state.lock().unwrap();
        state.closed.insert(self.rank);
        for ((_, from, to), ends) in &mut state.routes {
            if *from == self.rank {
                ends.sent.clear();
            }
            if *to == self.rank {
                ends.awaited.clear();
            }
        }
    }
}

struct Letters {
    post: Arc<Post>,
    number: usize,
    members: Vec<usize>,
    rank: usize,
}

impl Messenger for Letters {
    unsafe fn send(&self, to: usize, from: *const u8, bytes: usize) -> Result<InFlight> {
        let route = (self.number, self.rank, self.members[to]);
        let id = self.post.put(self.rank, route, true, from as usize, bytes)?;
        Ok(InFlight { id, received_bytes: None })
    }

    unsafe fn receive(&self, from: usize, to: *mut u8, bytes: usize) -> Result<InFlight> {
        let route = (self.number, self.members[from], self.rank);
        let id = self.post.put(self.rank, route, false, to as usize, bytes)?;
        Ok(InFlight { id, received_bytes: Some(bytes) })
    }

    fn is_over(&self, message: &InFlight) -> Result<bool> {
        Ok(self.post.state.lock().unwrap().over.remove(&message.id))
    }
}
