//! Sums over hosts by direct exchange: H hosts, one step. A rank adds its host's subtrees of every region, sends them to
//! the rank with its lane on the region's host, and there they are added to the sum of all.
//!
//! A region of S bytes costs each other host S bytes for each of its subtrees (one, if its ranks are an aligned power of
//! two; 16-bit sums of several ranks go as f32). No ring: a ring would add the hosts one after the other, in an order
//! that is not the tree's, so its bits would differ from those of one host; direct exchange sends as many bytes.
//!
//! Regions are cut in chunks. While a chunk is added, the next one is under way.

use phalanx_simd::sums::{self, Partial};
use phalanx_tensor::DType;

use crate::call::summed;
use crate::error::CollectiveError;
use crate::network::exchange::Exchange;
use crate::network::layout::Layout;
use crate::network::staging::Staging;
use crate::shared_memory::memory::MemoryRange;
use crate::shared_memory::transfer::Transfer;

/// Maximum number of bytes of a chunk for one host, and of the chunks for all of them.
const CHUNK_BYTES: usize = 1 << 20;
const CHUNKS_BYTES: usize = 4 << 20;
/// Chunks begin at multiples of so many elements.
const CHUNK_ALIGN: usize = 64;

/// A part of the buffers whose sum one host makes. Every rank of a lane lists the same regions.
pub(crate) struct Region {
    pub(crate) host: usize,
    /// The first element in every rank's source.
    pub(crate) start: usize,
    pub(crate) elements: usize,
    /// Memory that receives the sum, if this rank's host makes it.
    pub(crate) target: *mut u8,
}

/// Memory of the sums of a group.
#[derive(Default)]
pub(crate) struct PartialSums {
    /// Two, because one chunk is under way while another is added.
    staging: [Staging; 2],
    pub(crate) own: Staging,
    /// The partial sums of the own regions of the chunks in `staging`, by region and subtree.
    partials: [Vec<Partial>; 2],
}

// SAFETY: the addresses in `partials` are used only within a call, by the thread that runs it.
unsafe impl Send for PartialSums {}

/// One run over all chunks of the regions.
struct Run<'a> {
    t: &'a Transfer,
    regions: &'a [Region],
    sums: &'a mut PartialSums,
    chunk: usize,
    /// Cache lines of staging that a chunk needs.
    lines: usize,
}

/// Sums all regions; `done` is called for each chunk of an own region when its sum is in the target: with its first
/// element and its length. Regions of a host follow each other in the same order in every rank.
pub(crate) fn run(
    x: &mut Exchange,
    t: &Transfer,
    sums: &mut PartialSums,
    regions: &[Region],
    mut done: impl FnMut(&Exchange, usize, usize),
) -> Result<(), CollectiveError> {
    let longest = regions.iter().map(|region| region.elements).max().unwrap_or(0);
    let hosts: Vec<usize> = regions.iter().map(|region| region.host).collect();
    let Chunks { elements: chunk, lines, .. } = Chunks::new(x.layout, t.dtype, &hosts, longest);
    let chunks = longest.div_ceil(chunk);
    let mut run = Run { t, regions, sums, chunk, lines };
    if chunks > 0 {
        run.post(x, 0);
    }
    for number in 0..chunks {
        x.settle()?;
        if number + 1 < chunks {
            run.post(x, number + 1);
            x.kick()?;
        }
        run.add(x, number, &mut done);
    }
    x.settle()
}

/// Sizes of the chunks into which regions are cut, and of their memory.
pub(crate) struct Chunks {
    /// Elements of a chunk of a region, the same in every rank of a lane.
    pub(crate) elements: usize,
    /// Cache lines of staging for one chunk of every region, of which two are on their way.
    pub(crate) lines: usize,
    /// Cache lines for the sums of the own host.
    pub(crate) own_lines: usize,
}

impl Chunks {
    /// For regions that these hosts sum, of at most `longest` elements. Every rank lists the regions of all hosts.
    pub(crate) fn new(layout: &Layout, dtype: DType, regions: &[usize], longest: usize) -> Chunks {
        let hosts = layout.hosts();
        let max = |count: &dyn Fn(usize) -> usize| (0..hosts).map(count).max().unwrap_or(1).max(1);
        let regions_of = |host: usize| regions.iter().filter(|region| **region == host).count();
        let subtrees_of = |host: usize| layout.subtrees_of(host).count();
        let (parts, subtrees) = (max(&regions_of), max(&subtrees_of));
        let bytes = (CHUNKS_BYTES / (hosts - 1).max(1)).min(CHUNK_BYTES) / (parts * subtrees);
        let width = summed(dtype).wide_bytes();
        let max_elements = (bytes / width).max(CHUNK_ALIGN) / CHUNK_ALIGN * CHUNK_ALIGN;
        let elements = max_elements.min(longest.next_multiple_of(CHUNK_ALIGN)).max(CHUNK_ALIGN);
        let (own_regions, own_subtrees) = (regions_of(layout.own), subtrees_of(layout.own));
        // What is sent for the regions of others, and what arrives for the own ones.
        let sent = own_subtrees * (regions.len() - own_regions);
        let received = own_regions * (layout.subtrees.len() - own_subtrees);
        let part = Staging::lines_for(elements * width);
        Chunks { elements, lines: (sent + received) * part, own_lines: own_subtrees * part }
    }
}

impl Run<'_> {
    /// The first element and the length of chunk `number` of a region.
    fn part(&self, region: &Region, number: usize) -> (usize, usize) {
        let start = (number * self.chunk).min(region.elements);
        (region.start + start, (region.elements - start).min(self.chunk))
    }

    /// Bytes of an element of the sum of a subtree on the wire.
    fn width(&self, is_single: bool) -> usize {
        if is_single { self.t.dtype.bytes() } else { summed(self.t.dtype).wide_bytes() }
    }

    /// Sends the own host's sums of a chunk to the other hosts, and prepares to receive theirs.
    fn post(&mut self, x: &mut Exchange, number: usize) {
        let half = number % 2;
        self.sums.staging[half].reset(self.lines);
        for region in self.regions.iter().filter(|region| region.host != x.layout.own) {
            self.send(x, region, number);
        }
        let (layout, subtrees) = (x.layout, x.layout.subtrees.len());
        let unknown = Partial { address: std::ptr::null(), is_wide: false };
        self.sums.partials[half].clear();
        self.sums.partials[half].resize(self.regions.len() * subtrees, unknown);
        for (at, region) in self.regions.iter().enumerate().filter(|(_, region)| region.host == layout.own) {
            let (_, elements) = self.part(region, number);
            for (index, subtree) in layout.subtrees.iter().enumerate() {
                if subtree.host == layout.own {
                    continue;
                }
                let bytes = elements * self.width(subtree.is_single());
                let address = self.sums.staging[half].take(bytes);
                x.receive(subtree.host, MemoryRange { address, bytes });
                let partial = Partial { address, is_wide: !subtree.is_single() };
                self.sums.partials[half][at * subtrees + index] = partial;
            }
        }
    }

    fn send(&mut self, x: &mut Exchange, region: &Region, number: usize) {
        let (start, elements) = self.part(region, number);
        let (layout, offset) = (x.layout, start * self.t.dtype.bytes());
        for (_, subtree) in layout.subtrees_of(layout.own) {
            let bytes = elements * self.width(subtree.is_single());
            if bytes == 0 {
                continue;
            }
            let address = if subtree.is_single() {
                x.meeting.source(subtree.ranks.start).cast_mut().wrapping_add(offset)
            } else {
                let address = self.sums.staging[number % 2].take(bytes);
                self.sum_subtree(x, subtree.ranks.clone(), offset, address, elements);
                address
            };
            x.send(region.host, MemoryRange { address, bytes });
        }
    }

    fn sum_subtree(
        &self,
        x: &mut Exchange,
        ranks: std::ops::Range<usize>,
        offset: usize,
        target: *mut u8,
        elements: usize,
    ) {
        let isa = x.meeting.isa();
        let sources = &x.meeting.sources_at(offset)[ranks];
        // SAFETY: the ranks are on this host and every source holds the whole (Meeting compared), unwritten while it is
        // read: only this lane writes its slice, after it was sent. The target is staging of this rank.
        unsafe { sums::sum_wide(isa, summed(self.t.dtype), sources, target, elements) };
    }

    /// Adds a chunk of the own regions, whose partial sums have arrived.
    fn add(&mut self, x: &mut Exchange, number: usize, done: &mut impl FnMut(&Exchange, usize, usize)) {
        let half = number % 2;
        let (layout, subtrees) = (x.layout, x.layout.subtrees.len());
        let regions = self.regions;
        for (at, region) in regions.iter().enumerate().filter(|(_, region)| region.host == layout.own) {
            let (start, elements) = self.part(region, number);
            if elements == 0 {
                continue;
            }
            let own = layout.subtrees_of(layout.own).count();
            self.sums.own.reset(own * Staging::lines_for(elements * summed(self.t.dtype).wide_bytes()));
            let offset = start * self.t.dtype.bytes();
            for (index, subtree) in layout.subtrees_of(layout.own) {
                let is_wide = !subtree.is_single();
                let address = if is_wide {
                    let address = self.sums.own.take(elements * self.width(false));
                    self.sum_subtree(x, subtree.ranks.clone(), offset, address, elements);
                    address
                } else {
                    x.meeting.source(subtree.ranks.start).cast_mut().wrapping_add(offset)
                };
                self.sums.partials[half][at * subtrees + index] = Partial { address, is_wide };
            }
            let partials = &self.sums.partials[half][at * subtrees..(at + 1) * subtrees];
            let target = region.target.wrapping_add((start - region.start) * self.t.dtype.bytes());
            let (isa, dtype, accumulate) = (x.meeting.isa(), self.t.dtype, self.t.accumulate);
            // SAFETY: the partial sums are staging of this rank or the own sources, which nobody writes but this lane;
            // the target is a buffer of this host that the call gives to this lane, or the same place of a source.
            unsafe {
                sums::combine(isa, summed(dtype), &layout.tree, partials, target, elements, accumulate);
            }
            done(x, start, elements);
        }
    }
}
