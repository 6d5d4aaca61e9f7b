//! Descriptor of a call, on which all ranks must agree before a byte moves.
//!
//! The numbers that are compared lie in one cache line; the call site follows as bytes of text, read
//! only to explain a disagreement, because a `&'static str` means nothing in another process.

use std::sync::atomic::{AtomicU64, Ordering};

use phalanx_plan::trace::{CollectiveOp, DType, Site, describe_tag};

use crate::shared_memory::text::Text;
use crate::shared_memory::word::Word;

/// One rank's side of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    /// Hash of the group's name and members.
    pub(crate) group: u32,
    /// Number of the call in its channel, from 1.
    pub(crate) sequence: u64,
    pub(crate) op: CollectiveOp,
    pub(crate) dtype: DType,
    pub(crate) accumulate: bool,
    /// True if devices move the bytes; then no buffer is offered.
    pub(crate) by_device: bool,
    /// Elements of the whole buffer.
    pub(crate) count: u64,
    /// Root, or the peer of a send or recv.
    pub(crate) root: Option<usize>,
    /// The tag of a send or recv.
    pub(crate) tag: Option<u64>,
    /// The start of the buffer that peers read (an address between threads, an offset in the arena between processes),
    /// and its length in bytes.
    pub(crate) source: u64,
    pub(crate) source_bytes: u64,
    /// In a group of several hosts: 1 + the start of the buffer that receives, and that peers on the same host write; 0
    /// for none.
    pub(crate) target: u64,
}

/// A descriptor in shared memory.
#[derive(Default)]
#[repr(C, align(64))]
pub(crate) struct DescriptorCell {
    kind: AtomicU64,
    sequence: AtomicU64,
    count: AtomicU64,
    root: AtomicU64,
    tag: AtomicU64,
    source: AtomicU64,
    source_bytes: AtomicU64,
    target: AtomicU64,
    site: Text<15>,
}

/// Element types by their number in a descriptor.
pub(crate) const DTYPES: [DType; 5] = [DType::F64, DType::F32, DType::BF16, DType::F16, DType::U32];

impl DescriptorCell {
    /// Written by the owner before it advances its counter.
    pub(crate) fn write(&self, d: &Descriptor, site: Site) {
        self.write_numbers(d);
        self.write_site(site);
    }

    /// Writes all but the call site.
    pub(crate) fn write_numbers(&self, d: &Descriptor) {
        let dtype = DTYPES.iter().position(|t| *t == d.dtype).expect("all types are listed") as u64;
        let flags = u64::from(d.by_device) << 2 | u64::from(d.tag.is_some()) << 1 | u64::from(d.accumulate);
        let kind = u64::from(d.group) << 32 | (d.op as u64) << 16 | dtype << 8 | flags;
        self.kind.store(kind, Ordering::Relaxed);
        self.sequence.store(d.sequence, Ordering::Relaxed);
        self.count.store(d.count, Ordering::Relaxed);
        self.root.store(d.root.map_or(u64::MAX, |r| r as u64), Ordering::Relaxed);
        self.tag.store(d.tag.unwrap_or(0), Ordering::Relaxed);
        self.source.store(d.source, Ordering::Relaxed);
        self.source_bytes.store(d.source_bytes, Ordering::Relaxed);
        self.target.store(d.target, Ordering::Relaxed);
    }

    /// Writes the call site.
    pub(crate) fn write_site(&self, site: Site) {
        self.site.write(site.file, site.line);
    }

    /// Visits the words of the cell.
    pub(crate) fn for_each_word(&self, visit: &mut impl FnMut(Word)) {
        let DescriptorCell { kind, sequence, count, root, tag, source, source_bytes, target, site } = self;
        for word in [kind, sequence, count, root, tag, source, source_bytes, target] {
            visit(Word::Eight(word));
        }
        site.for_each_word(visit);
    }

    /// None when the numbers name no operation or type: another program, or another version.
    pub(crate) fn read(&self) -> Option<Descriptor> {
        let kind = self.kind.load(Ordering::Relaxed);
        let root = self.root.load(Ordering::Relaxed);
        Some(Descriptor {
            group: (kind >> 32) as u32,
            sequence: self.sequence.load(Ordering::Relaxed),
            op: CollectiveOp::from_number((kind >> 16) as u8)?,
            dtype: *DTYPES.get((kind >> 8) as u8 as usize)?,
            accumulate: kind & 1 == 1,
            by_device: kind & 4 == 4,
            count: self.count.load(Ordering::Relaxed),
            tag: (kind & 2 == 2).then(|| self.tag.load(Ordering::Relaxed)),
            root: (root != u64::MAX).then_some(root as usize),
            source: self.source.load(Ordering::Relaxed),
            source_bytes: self.source_bytes.load(Ordering::Relaxed),
            target: self.target.load(Ordering::Relaxed),
        })
    }

    /// Number of the call; 0 when there was none yet.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Relaxed)
    }

    /// `reduce_scatter of 1024 f32, accumulating (call 3 of group data) at src/x.rs:10`
    pub(crate) fn describe(&self, group: &str) -> String {
        let Some(d) = self.read() else { return format!("a call of group {group} that cannot be read") };
        let tag = d.tag.map_or(String::new(), describe_tag);
        let accumulate = if d.accumulate { ", accumulating" } else { "" };
        let by = if d.by_device { ", between devices" } else { "" };
        let root = match (d.op, d.root) {
            (CollectiveOp::Send, Some(root)) => format!(" to rank {root}"),
            (CollectiveOp::Recv, Some(root)) => format!(" from rank {root}"),
            (_, Some(root)) => format!(" with root {root}"),
            (_, None) => String::new(),
        };
        format!(
            "{}{root} of {} {}{tag}{accumulate}{by} (call {} of group {group}) at {}",
            d.op.name(),
            d.count,
            d.dtype.name(),
            d.sequence,
            self.site.read()
        )
    }
}

impl Descriptor {
    /// Which of a slot's two descriptors this call uses.
    pub(crate) fn parity(&self) -> usize {
        (self.sequence % 2) as usize
    }

    /// Bytes that peers may read from member `rank` in this call.
    pub(crate) fn offered_bytes(&self, rank: usize, world_size: usize) -> u64 {
        use CollectiveOp::*;
        let is_root = self.root == Some(rank);
        let elements = match self.op {
            AllReduce | ReduceScatter | Reduce | AllToAll | Send => self.count,
            Broadcast | Scatter if is_root => self.count,
            Gather if !is_root => self.count / world_size as u64,
            AllGather => self.count / world_size as u64,
            Broadcast | Scatter | Gather | Recv | Barrier => 0,
        };
        if self.by_device { 0 } else { elements * self.dtype.bytes() as u64 }
    }

    /// Bytes that peers on the same host may write in member `rank`'s target, in a group of several hosts.
    pub(crate) fn written_bytes(&self, rank: usize, world_size: usize) -> u64 {
        use CollectiveOp::*;
        let is_root = self.root == Some(rank);
        let elements = match self.op {
            AllReduce | Broadcast | AllGather | AllToAll => self.count,
            Reduce | Gather if is_root => self.count,
            ReduceScatter | Scatter => self.count / world_size as u64,
            Reduce | Gather | Send | Recv | Barrier => 0,
        };
        if self.by_device { 0 } else { elements * self.dtype.bytes() as u64 }
    }

    /// Returns whether two ranks of a group call the same collective. Buffers may differ.
    pub(crate) fn agrees_with(&self, peer: &Descriptor) -> bool {
        let own = Descriptor { source: 0, source_bytes: 0, target: 0, ..*self };
        own == Descriptor { source: 0, source_bytes: 0, target: 0, ..*peer }
    }

    /// Returns whether this call of rank `a` and the call `other` of rank `b` are the two ends of one message.
    pub(crate) fn complements(&self, a: usize, other: &Descriptor, b: usize) -> bool {
        let ends = matches!(
            (self.op, other.op),
            (CollectiveOp::Send, CollectiveOp::Recv) | (CollectiveOp::Recv, CollectiveOp::Send)
        );
        let same = |d: &Descriptor| (d.group, d.sequence, d.dtype, d.count, d.tag, d.by_device);
        ends && (self.root, other.root) == (Some(b), Some(a)) && same(self) == same(other)
    }
}
