//! A rank's way into its host: joins the job, gets an arena that peers can read, makes groups.

use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

use phalanx_simd::Isa;
use phalanx_tensor::{Region, refused_thread};

use crate::call::{Buffers, Call};
use crate::error::CollectiveError;
use crate::group::Group;
use crate::pending::Pending;
use crate::shared_memory::channel::{Channel, Transfer};
use crate::shared_memory::control::{Abort, CHANNELS, Control, Life};
use crate::shared_memory::memory::{Arenas, Memory};
use crate::shared_memory::stream::Stream;
use crate::statistics::Statistics;

/// How the groups of an endpoint behave.
#[derive(Clone)]
pub struct Options {
    /// Whether calls run beside the submitter, on a thread of the group; otherwise submitting waits.
    pub overlap: bool,
    /// The instruction set to sum and copy with, at most what the processor has. The bits are the same with all.
    pub isa: Isa,
    /// How long a peer may be missing before the job ends.
    pub deadline: Duration,
    /// How long a peer may be missing before people are told.
    pub notice_after: Duration,
    /// How people are told: one line. Nobody is, by default.
    pub notice: Arc<dyn Fn(&str) + Send + Sync>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            overlap: true,
            isa: Isa::detect(),
            deadline: Duration::from_secs(300),
            notice_after: Duration::from_secs(10),
            notice: Arc::new(|_| ()),
        }
    }
}

/// A rank's share of the job, alive until its endpoint and its groups are dropped.
pub(crate) struct Host {
    pub(crate) control: Arc<Control>,
    pub(crate) memory: Memory,
    pub(crate) rank: usize,
    /// The thread that notes steps: while it waits, the rank stands. Other threads of a rank may wait for messages that
    /// need not come. Unknown before the first note, when there is one thread.
    main: OnceLock<ThreadId>,
}

impl Host {
    fn new(control: Arc<Control>, memory: Memory, rank: usize) -> Arc<Host> {
        let cell = control.rank(rank);
        cell.sign();
        cell.life.store(Life::JOINED, Ordering::Release);
        Arc::new(Host { control, memory, rank, main: OnceLock::new() })
    }

    /// The reason why the job has ended, if it has.
    pub(crate) fn aborted(&self) -> Result<(), CollectiveError> {
        if !self.control.is_aborted() {
            return Ok(());
        }
        match self.control.aborted() {
            Some(Abort { disagreement: true, reason, .. }) => {
                Err(CollectiveError::Disagreement { report: reason })
            }
            Some(Abort { rank, reason, .. }) => Err(CollectiveError::Aborted { rank, reason }),
            None => Ok(()),
        }
    }

    /// Runs `wait`, in which this thread waits for a call of `channel`; lets others see it if this is the main thread.
    pub(crate) fn blocked_on<T>(&self, channel: usize, wait: impl FnOnce() -> T) -> T {
        if self.main.get().is_some_and(|main| *main != std::thread::current().id()) {
            return wait();
        }
        let cell = self.control.rank(self.rank);
        cell.block_on(Some(channel));
        let result = wait();
        cell.block_on(None);
        result
    }

    /// Ends the job in this rank's name.
    pub(crate) fn abort(&self, reason: &str) -> CollectiveError {
        self.control.abort(Abort { rank: self.rank, disagreement: false, reason: reason.to_string() });
        CollectiveError::Aborted { rank: self.rank, reason: reason.to_string() }
    }

    /// Ends the job because a call failed; what all ranks can know of it goes to all.
    pub(crate) fn abort_because(&self, error: &CollectiveError) {
        let (rank, disagreement, reason) = match error {
            CollectiveError::Disagreement { report } => (self.rank, true, report.clone()),
            CollectiveError::Aborted { rank, reason } => (*rank, false, reason.clone()),
            CollectiveError::Missing { rank, .. }
            | CollectiveError::Left { rank, .. }
            | CollectiveError::Unreadable { rank, .. } => (*rank, false, error.to_string()),
            CollectiveError::Device(_) => (self.rank, false, error.to_string()),
        };
        self.control.abort(Abort { rank, disagreement, reason });
    }

    /// Called by what a rank owns when it is dropped: a rank that unwinds ends the job.
    pub(crate) fn abort_if_panicking(&self) {
        if std::thread::panicking() && !self.control.is_aborted() {
            let activity = self.control.last_activity(self.rank);
            let thread = std::thread::current().name().unwrap_or("without a name").to_string();
            let _ = self.abort(&format!("thread {thread} panicked; {activity}"));
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.control.rank(self.rank).life.store(Life::LEFT, Ordering::Release);
        self.control.wake_all();
    }
}

/// One rank's access to the job that it belongs to. Dropping it while its thread panics ends the job.
pub struct Endpoint {
    host: Arc<Host>,
    options: Options,
    channels: AtomicUsize,
}

/// One endpoint per rank of a job whose ranks are threads of this process. Their groups take tensors of
/// any host memory.
pub fn threads(world_size: usize) -> Vec<Endpoint> {
    let region = Region::anonymous(Control::bytes(world_size)).expect("memory for a control block");
    let control = Arc::new(Control::create(region, world_size, cores()));
    let host = |rank| Host::new(Arc::clone(&control), Memory::Threads, rank);
    (0..world_size).map(|rank| Endpoint::new(host(rank))).collect()
}

/// The endpoint of `rank` in a process that a launcher started with the descriptors of
/// [`crate::HostJob::inherited_fds`], which it takes over: once per process. They are closed to programs
/// that this one starts.
///
/// # Errors
/// When a descriptor is not open, or the control block was made for another world.
pub fn join(
    control_fd: RawFd,
    arena_fds: &[RawFd],
    rank: usize,
    world_size: usize,
) -> std::io::Result<Endpoint> {
    let invalid = |text: String| std::io::Error::new(std::io::ErrorKind::InvalidInput, text);
    if rank >= world_size || arena_fds.len() != world_size {
        return Err(invalid(format!("rank {rank} of {world_size} ranks with {} arenas", arena_fds.len())));
    }
    let control_fd = take_over(control_fd)?;
    let arenas = arena_fds.iter().map(|fd| take_over(*fd)).collect::<std::io::Result<Vec<_>>>()?;
    let bytes = rustix::fs::fstat(&control_fd)?.st_size as usize;
    if bytes < Control::bytes(1) {
        return Err(invalid(format!("a control block of {bytes} bytes")));
    }
    let control = Control::open(Region::shared(control_fd.as_fd(), bytes)?, world_size)?;
    let memory = Memory::Processes(Arenas::new(arenas));
    Ok(Endpoint::new(Host::new(Arc::new(control), memory, rank)))
}

pub(crate) fn take_over(fd: RawFd) -> std::io::Result<OwnedFd> {
    if fd <= 2 {
        let text = format!("descriptor {fd} is not one of a job");
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, text));
    }
    // SAFETY: the launcher left this descriptor open for this process to take, and the caller passes it
    // once; what it refers to is checked before use.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    if let Err(error) = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC) {
        // Not open: nothing to close.
        std::mem::forget(fd);
        return Err(error.into());
    }
    Ok(fd)
}

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

impl Endpoint {
    fn new(host: Arc<Host>) -> Endpoint {
        Endpoint { host, options: Options::default(), channels: AtomicUsize::new(0) }
    }

    /// The same with other options for the groups that it will make.
    pub fn with_options(mut self, options: Options) -> Endpoint {
        let isa = options.isa.limit(Isa::detect());
        self.options = Options { isa, ..options };
        self
    }

    /// This rank's number on the host.
    pub fn rank(&self) -> usize {
        self.host.rank
    }

    /// The instruction set that the groups sum and copy with.
    pub fn isa(&self) -> Isa {
        self.options.isa
    }

    /// Ranks of the job.
    pub fn world_size(&self) -> usize {
        self.host.control.world_size()
    }

    /// This rank's memory, which peers can read: once per rank, before its first collective. Threads get
    /// private memory.
    ///
    /// # Errors
    /// When the system refuses, or has not that much memory to give.
    pub fn arena(&self, bytes: usize) -> std::io::Result<Region> {
        let available = available_bytes().unwrap_or(u64::MAX);
        if bytes as u64 > available {
            let text = format!("an arena of {bytes} bytes where {available} are available");
            return Err(std::io::Error::new(std::io::ErrorKind::OutOfMemory, text));
        }
        let region = match &self.host.memory {
            Memory::Threads => Region::anonymous(bytes)?,
            Memory::Processes(arenas) => arenas.create(self.host.rank, bytes)?,
        };
        let cell = self.host.control.rank(self.host.rank);
        cell.arena_bytes.store(region.bytes() as u64, Ordering::Release);
        Ok(region)
    }

    /// A group of all ranks. All ranks make the same groups in the same order.
    pub fn group(&self, name: &'static str) -> Arc<dyn Group> {
        self.sub_group(name, &Vec::from_iter(0..self.world_size()))
    }

    /// A group of the ranks in `members`, this one among them; a member's place there is its rank. Every
    /// rank of the job makes as many groups, each rank its own.
    pub fn sub_group(&self, name: &'static str, members: &[usize]) -> Arc<dyn Group> {
        self.sub_group_with(name, members, self.options.overlap)
    }

    /// The same whose calls always run beside the submitter: for messages that two ranks send each other at once.
    pub fn sub_group_beside(&self, name: &'static str, members: &[usize]) -> Arc<dyn Group> {
        self.sub_group_with(name, members, true)
    }

    /// In place of a group that other ranks of the job make and this one is no member of.
    pub fn no_group(&self) {
        self.channels.fetch_add(1, Ordering::Relaxed);
    }

    fn sub_group_with(&self, name: &'static str, members: &[usize], overlap: bool) -> Arc<dyn Group> {
        assert!(members.iter().all(|m| *m < self.world_size()), "{members:?} of {}", self.world_size());
        let index = self.channels.fetch_add(1, Ordering::Relaxed);
        assert!(index < CHANNELS, "an endpoint makes at most {CHANNELS} groups");
        let host = Arc::clone(&self.host);
        let channel = Channel::new(host, self.options.clone(), name, index, members.to_vec());
        Arc::new(SharedMemory {
            name,
            members: members.to_vec(),
            rank: channel.rank(),
            world_size: channel.world_size(),
            host: Arc::clone(&self.host),
            overlap,
            stream: Arc::new(Stream::new(channel)),
            owner: Mutex::new(None),
        })
    }

    /// Notes what this rank is at, for whoever asks when it is missing.
    pub fn note(&self, step: u64) {
        self.host.main.get_or_init(|| std::thread::current().id());
        let cell = self.host.control.rank(self.host.rank);
        cell.step.store(step + 1, Ordering::Relaxed);
        cell.sign();
    }

    /// This rank has done its work. A process that ends before it has said so has failed, whatever its exit code.
    pub fn finish(&self) {
        self.host.control.rank(self.host.rank).finish();
    }

    /// Ends the job for all ranks, with this rank as the cause: every wait returns it within a second.
    pub fn abort(&self, reason: &str) {
        let _ = self.host.abort(reason);
    }

    /// Whether the job still runs: long work without collectives looks here from time to time.
    ///
    /// # Errors
    /// The reason why it has ended.
    pub fn check(&self) -> Result<(), CollectiveError> {
        self.host.aborted()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.host.abort_if_panicking();
    }
}

/// Bytes that the system could still give, by its own estimate.
fn available_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// A group over an endpoint.
struct SharedMemory {
    name: &'static str,
    members: Vec<usize>,
    rank: usize,
    world_size: usize,
    host: Arc<Host>,
    overlap: bool,
    stream: Arc<Stream>,
    /// The owner thread, from the first call that overlaps.
    owner: Mutex<Option<JoinHandle<()>>>,
}

impl Group for SharedMemory {
    fn name(&self) -> &'static str {
        self.name
    }
    fn members(&self) -> &[usize] {
        &self.members
    }
    fn rank(&self) -> usize {
        self.rank
    }
    fn world_size(&self) -> usize {
        self.world_size
    }

    fn submit(&self, mut call: Call) -> Pending<Buffers> {
        let transfer = Transfer::new(&mut call, self.world_size);
        let ticket = if self.overlap {
            self.ensure_owner();
            self.stream.enqueue(transfer)
        } else {
            self.stream.run(transfer)
        };
        Pending::started(call.buffers, Arc::clone(&self.stream) as _, ticket)
    }

    fn take_statistics(&self) -> Statistics {
        self.stream.tally.take()
    }
}

impl SharedMemory {
    fn ensure_owner(&self) {
        let mut owner = self.owner.lock().expect("no panic under this lock");
        if owner.is_none() {
            match self.stream.own(self.name) {
                Ok(thread) => *owner = Some(thread),
                // Callers that wait could run the calls, but two ranks that send to each other would both wait.
                Err(error) => {
                    let whose = format!("the thread of group {}", self.name);
                    self.stream.fail(self.host.abort(&refused_thread(&whose, &error).to_string()));
                }
            }
        }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        self.host.abort_if_panicking();
        self.stream.close();
        if let Some(owner) = self.owner.lock().ok().and_then(|mut owner| owner.take()) {
            let _ = owner.join();
        }
    }
}
