//! Groups over links of devices: every operation against the naive oracle, bit for bit; calls that differ and ranks that stop are noticed
//! as on every transport. The links of these tests are mailboxes between threads, whose sums are those of the library.

use crate::support;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::table::{copies, messages, sums};
use crate::support::{HOSTS, Layout, ranks_on, sample, tensor};
use half::{bf16, f16};
use phalanx_collectives::linked::linked;
use phalanx_collectives::pretended::NoKernels;
use phalanx_collectives::{CollectiveError, Group, Isa, Options, element_of};
use phalanx_plan::trace::{Site, Stream};
use phalanx_tensor::backend::{Call, DiskTransfer, StreamEvent, Timer};
use phalanx_tensor::links::{
    INVITATION_BYTES, Invitation, LinkId, LinkMark, LinkStep, Message, PartsSum, Span,
};
use phalanx_tensor::{Arena, Backend, DType, Device, DeviceError, Immediate, Links, Memory, ViewMut};

/// Messages on their way: by the link, the sender and the receiver.
type Post = Mutex<HashMap<(u8, usize, usize), VecDeque<Vec<u8>>>>;

/// A device of the host's memory, with links.
struct LinkedHost {
    immediate: Immediate,
    post: Arc<Post>,
    links: Mutex<Vec<HostLink>>,
}

struct HostLink {
    /// Which link it is, the same for all its ranks.
    number: u8,
    rank: usize,
    ranks: usize,
    steps: VecDeque<LinkStep>,
    /// True once the messages of the first step were sent.
    is_sent: bool,
    abandoned: bool,
}

fn bytes(of: Span) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(of.address)
}

impl HostLink {
    /// Runs the first step, unless a message is missing; whether it is over.
    fn run(&mut self, post: &Post) -> bool {
        let Some(step) = self.steps.front().cloned() else { return true };
        let is_over = match step {
            LinkStep::Exchange(messages) => self.exchange(&messages, post),
            LinkStep::AllGather { part, whole } => {
                let slot = |q: usize| whole.range(q * part.bytes, part.bytes);
                let messages: Vec<Message> = (0..self.ranks)
                    .flat_map(|peer| {
                        [(true, part), (false, slot(peer))].map(|(is_sent, buffer)| Message {
                            peer,
                            is_sent,
                            buffer,
                        })
                    })
                    .collect();
                self.exchange(&messages, post)
            }
            LinkStep::Broadcast { buffer, root } if root == self.rank => {
                let all = (0..self.ranks).filter(|peer| *peer != root);
                let messages: Vec<_> = all.map(|peer| Message { peer, is_sent: true, buffer }).collect();
                self.exchange(&messages, post)
            }
            LinkStep::Broadcast { buffer, root } => {
                self.exchange(&[Message { peer: root, is_sent: false, buffer }], post)
            }
            LinkStep::Copy { from, to } => {
                assert_eq!(from.bytes, to.bytes);
                // SAFETY: the call owns both ranges, which do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(bytes(from), bytes(to), to.bytes) };
                true
            }
            LinkStep::Sum(sum) => {
                add(&sum);
                true
            }
        };
        if is_over {
            self.steps.pop_front();
            self.is_sent = false;
        }
        is_over
    }

    fn exchange(&mut self, messages: &[Message], post: &Post) -> bool {
        let mut post = post.lock().unwrap();
        if !self.is_sent {
            for message in messages.iter().filter(|message| message.is_sent) {
                // SAFETY: the call owns the range.
                let sent = unsafe { std::slice::from_raw_parts(bytes(message.buffer), message.buffer.bytes) };
                post.entry((self.number, self.rank, message.peer)).or_default().push_back(sent.to_vec());
            }
            self.is_sent = true;
        }
        let received = || messages.iter().filter(|message| !message.is_sent);
        let key = |message: &Message| (self.number, message.peer, self.rank);
        if received().any(|message| post.get(&key(message)).is_none_or(VecDeque::is_empty)) {
            return false;
        }
        for message in received() {
            let arrived = post.get_mut(&key(message)).unwrap().pop_front().unwrap();
            assert_eq!(arrived.len(), message.buffer.bytes, "a message of another length");
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(arrived.as_ptr(), bytes(message.buffer), arrived.len()) };
        }
        true
    }
}

fn add(sum: &PartsSum) {
    let part = sum.elements * sum.dtype.bytes();
    assert_eq!((sum.own.bytes, sum.target.bytes, sum.others.bytes), (part, part, part * (sum.places - 1)));
    let parts: Vec<*const u8> = (0..sum.places)
        .map(|rank| match rank.cmp(&sum.place) {
            std::cmp::Ordering::Equal => bytes(sum.own).cast_const(),
            std::cmp::Ordering::Less => bytes(sum.others.range(rank * part, part)).cast_const(),
            std::cmp::Ordering::Greater => bytes(sum.others.range((rank - 1) * part, part)).cast_const(),
        })
        .collect();
    // SAFETY: the call owns all ranges; the target is none of them, or this rank's own part.
    unsafe {
        phalanx_simd::sums::sum(
            Isa::detect(),
            element_of(sum.dtype).expect("checked"),
            &parts,
            bytes(sum.target),
            sum.elements,
            sum.accumulate,
        )
    };
}

impl Links for LinkedHost {
    fn invite(&self) -> Result<Invitation, DeviceError> {
        static NEXT: Mutex<u8> = Mutex::new(0);
        let mut next = NEXT.lock().unwrap();
        *next += 1;
        Ok([*next; INVITATION_BYTES])
    }

    fn join(&self, invitation: &Invitation, rank: usize, ranks: usize) -> Result<LinkId, DeviceError> {
        let (number, steps) = (invitation[INVITATION_BYTES - 1], VecDeque::new());
        let mut links = self.links.lock().unwrap();
        links.push(HostLink { number, rank, ranks, steps, is_sent: false, abandoned: false });
        Ok(LinkId(links.len() - 1))
    }

    fn mark(&self, _: LinkId) -> Result<LinkMark, DeviceError> {
        Ok(LinkMark(0))
    }

    unsafe fn start(&self, link: LinkId, steps: Vec<LinkStep>, _: LinkMark) -> Result<(), DeviceError> {
        let link = &mut self.links.lock().unwrap()[link.0];
        assert!(link.steps.is_empty() && !link.abandoned, "one call after the other");
        link.steps = steps.into();
        Ok(())
    }

    fn is_over(&self, link: LinkId) -> Result<bool, DeviceError> {
        let link = &mut self.links.lock().unwrap()[link.0];
        while !link.steps.is_empty() {
            if !link.run(&self.post) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn abandon(&self, link: LinkId) {
        let link = &mut self.links.lock().unwrap()[link.0];
        (link.abandoned, link.steps) = (true, VecDeque::new());
    }

    fn leave(&self, link: LinkId) {
        let link = &self.links.lock().unwrap()[link.0];
        assert!(link.steps.is_empty(), "left in the middle of a call");
    }
}

impl Backend for LinkedHost {
    fn name(&self) -> &'static str {
        "linked host"
    }
    fn threads(&self) -> usize {
        1
    }
    fn is_host_addressable(&self) -> bool {
        false
    }
    fn launch(&self, stream: Stream, call: Call) {
        self.immediate.launch(stream, call);
    }
    fn upload(&self, stream: Stream, from: &[u8], to: ViewMut, site: Site, timer: Option<Timer>) {
        self.immediate.upload(stream, from, to, site, timer);
    }
    fn transfer(&self, transfer: DiskTransfer) {
        self.immediate.transfer(transfer);
    }
    fn record(&self, stream: Stream) -> StreamEvent {
        self.immediate.record(stream)
    }
    fn wait(&self, stream: Stream, event: StreamEvent) {
        self.immediate.wait(stream, event);
    }
    fn synchronize(&self, event: StreamEvent) -> Result<(), DeviceError> {
        self.immediate.synchronize(event)
    }
    fn links(&self) -> Option<&dyn Links> {
        Some(self)
    }
}

fn linked_device(post: &Arc<Post>) -> Device {
    let immediate = Immediate::new(Arc::new(NoKernels));
    let backend = LinkedHost { immediate, post: Arc::clone(post), links: Mutex::default() };
    Device::with_memories(Arc::new(backend), Arena::heap(), Arena::heap_of(Memory::Host))
}

/// Runs `body` on each rank's group over links; results by rank.
fn on_links<T: Send>(
    layout: Layout,
    options: &Options,
    body: impl Fn(&dyn Group) -> T + Sync,
) -> Vec<std::thread::Result<T>> {
    let post = Arc::new(Post::default());
    ranks_on(layout, options, |endpoint| {
        let device = linked_device(&post);
        let group = linked(endpoint.group("data"), &device);
        group.connect().unwrap();
        body(&*group)
    })
}

fn everywhere(body: impl Fn(&dyn Group) + Sync) {
    let worlds = [2, 3, 4, 5, 8].map(Layout::Shared);
    for layout in worlds.into_iter().chain([HOSTS[1], HOSTS[3], HOSTS[7]]) {
        for overlap in [false, true] {
            // Without a thread of its own, a carrier's group is the same.
            let options = Options { overlap, ..Options::default() };
            for rank in on_links(layout, &options, &body) {
                rank.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
        }
    }
}

#[test]
fn sums_have_the_bits_of_the_tree() {
    everywhere(|g| {
        sums::<f32>(g);
        sums::<bf16>(g);
    });
}

#[test]
fn sums_of_other_types() {
    let options = Options::default();
    for rank in on_links(Layout::Shared(3), &options, |g| {
        sums::<f16>(g);
        sums::<f64>(g);
    }) {
        rank.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}

/// More than the parts of other ranks that a rank holds at once.
#[test]
fn long_sums_go_piece_by_piece() {
    let options = Options::default();
    let elements = 10_500_000;
    let sums = on_links(Layout::Shared(2), &options, |g| {
        let device = support::host();
        let x = tensor(&device, &vec![g.rank() as f32 + 0.5; elements]);
        let x = g.all_reduce(x).wait().unwrap();
        support::values::<f32>(&x).iter().all(|sum| *sum == 2.0)
    });
    assert!(sums.into_iter().all(|sum| sum.unwrap()));
}

#[test]
fn copies_and_messages() {
    everywhere(|g| {
        copies::<f32>(g);
        messages(g);
    });
}

#[test]
fn calls_that_differ_are_refused_before_a_byte_moves() {
    let options = Options { deadline: Duration::from_secs(20), ..Options::default() };
    let errors = on_links(Layout::Shared(2), &options, |g| {
        let device = support::host();
        let x = tensor(&device, &sample::<f32>(g.rank(), 100 + g.rank()));
        g.all_reduce(x).wait().unwrap_err()
    });
    for error in errors {
        let error = error.unwrap();
        assert!(matches!(error, CollectiveError::Disagreement { .. }), "{error}");
        assert!(error.to_string().contains("all_reduce of 101 f32, between devices"), "{error}");
    }
}

/// A rank that makes no call is named, and one whose device fails ends the job with its reason.
#[test]
fn a_rank_that_stops_is_named() {
    let options = Options { deadline: Duration::from_millis(600), ..Options::default() };
    let results = on_links(Layout::Shared(3), &options, |g| {
        if g.rank() == 1 {
            std::thread::sleep(Duration::from_secs(3));
            return None;
        }
        let device = support::host();
        Some(g.all_gather(tensor(&device, &[1f32; 8]), support::zeros(&device, DType::F32, 24)).wait())
    });
    for (rank, result) in results.into_iter().enumerate() {
        match result.unwrap() {
            None => assert_eq!(rank, 1),
            Some(Ok(_)) => panic!("rank {rank} went on"),
            Some(Err(error)) => assert!(error.to_string().contains("rank 1"), "{error}"),
        }
    }
}
