//! The update of each chunk within backward, as soon as its gradient is reduced: PyTorch's "optimizer step in backward", and
//! LOMO's fusion of gradients and update (arXiv 2306.09782). No gradient outlives the update of its chunk, and optimizer states
//! that lie elsewhere are read beside backward's kernels, in the order in which backward completes chunks.
//!
//! It is for updates that need no number of all gradients: neither a clipping factor nor a loss scale. The norm is computed
//! after backward, from the same sums of squares as otherwise. A gradient is looked at before its own update: from the first one
//! that is not finite, this rank changes nothing more in the step. What it has updated before stays so, and the caller must end
//! the run.
//!
//! Chunks whose gradients are summed over another axis after backward (a table that several stages share) are updated behind it.

use std::collections::VecDeque;

use phalanx_collectives::CollectiveError;
use phalanx_tensor::{Category, DType, PendingCopy, Tensor};

use super::Zero;
use super::gradient_buffers::{Chunk, GradientBuffers, GradientPlace};
use super::gradients::GradientChunks;
use super::host_update::HostUpdate;
use super::update::{Step, stepped};

/// A parameter whose summed gradient is not finite on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotFinite {
    /// Its number in the model.
    pub parameter: usize,
    /// Elements of the gradient that are not finite.
    pub count: u64,
    /// Elements of the gradient that this rank updates.
    pub elements: u64,
}

/// The updates of the step that runs.
pub(super) struct InBackward {
    step: Step,
    /// By what gradients are multiplied: 1, `[1]`.
    factor: Tensor,
    on_host: Option<HostUpdate>,
    /// True once the first tiles have begun to come.
    reads: bool,
    /// Chunks whose update waits for the counts of their elements that are not finite, by parameter.
    counting: VecDeque<(usize, PendingCopy)>,
    found: Option<NotFinite>,
}

impl GradientChunks {
    /// The next chunk that an update within backward waits for, if its gradients are reduced.
    pub(super) fn take_reduced(&mut self) -> Option<usize> {
        self.reduced.pop_front()
    }

    /// Frees the gradients of a chunk: its update within backward has been issued.
    pub(super) fn free_updated(&mut self, c: usize) {
        assert!(self.places[c] == GradientPlace::Update, "gradients of chunk {c} are kept");
        self.chunks[c] = Chunk::Here(GradientBuffers::Away);
    }

    /// Returns whether the reduced gradients of a chunk outlive its update.
    pub(super) fn are_kept(&self, c: usize) -> bool {
        matches!(self.places[c], GradientPlace::Buffer | GradientPlace::Elsewhere)
    }
}

impl Zero {
    /// Begins a step whose chunks are updated within its backward, if the options say so: before
    /// forward. `number` counts updates from 1. Unless it `applies`, nothing is changed.
    ///
    /// # Errors
    /// When the device failed.
    pub fn begin_updates(&mut self, number: u64, lr: f32, applies: bool) -> Result<(), CollectiveError> {
        if !self.options.update_in_backward {
            return Ok(());
        }
        let mut factor = self.device.alloc(DType::F32, [1], Category::Workspace, "update.factor");
        self.device.fill(factor.view_mut(), 1.0);
        let on_host = self.begin_on_host(factor.view())?;
        let step = Step { number, lr, applies };
        let (counting, found) = (VecDeque::new(), None);
        self.in_backward = Some(InBackward { step, factor, on_host, reads: false, counting, found });
        Ok(())
    }

    /// Ends the updates that [`Zero::begin_updates`] began: chunks that wait for sums over other axes are updated, and
    /// everything returns to its place. `applies`: whether all ranks agree that these updates may be applied. Returns the first
    /// gradient that is not finite, because of which this rank has stopped to update.
    ///
    /// # Errors
    /// As for [`Zero::update`].
    pub fn finish_updates(&mut self, applies: bool) -> Result<Option<NotFinite>, CollectiveError> {
        let Some(mut updates) = self.in_backward.take() else { return Ok(None) };
        updates.step.applies &= applies;
        let behind = self.order.chunks[self.order.within()..].to_vec();
        for c in behind {
            self.update_chunk(c, updates.step, updates.factor.view(), updates.on_host.as_mut())?;
        }
        self.end_update(updates.on_host)?;
        Ok(updates.found)
    }

    /// Backward begins: the first tiles begin to come.
    pub(super) fn read_ahead(&mut self) {
        let Some(mut updates) = self.in_backward.take() else { return };
        if !std::mem::replace(&mut updates.reads, true) {
            self.read_first_tiles(updates.on_host.as_mut());
        }
        self.in_backward = Some(updates);
    }

    /// Updates the chunks whose gradients are reduced and known to be finite; `all`: waits until they are known.
    pub(super) fn update_reduced(&mut self, all: bool) -> Result<(), CollectiveError> {
        let Some(mut updates) = self.in_backward.take() else { return Ok(()) };
        // All counts are on their way to the host before the first tile returns there: a count behind tiles would arrive after them,
        // and nothing is computed while the host waits for it.
        while let Some(c) = self.gradients.take_reduced() {
            let counts = self.count_not_finite(c);
            updates.counting.push_back((c, counts));
        }
        // Where calls run later, the counts of a chunk arrive while the next block is computed.
        let waiting_max = usize::from(!all && !self.device.is_host_addressable());
        while updates.counting.len() > waiting_max {
            self.update_first(&mut updates)?;
        }
        self.in_backward = Some(updates);
        Ok(())
    }

    /// Backward is over: waits for the reductions that still run, and updates their chunks.
    pub(super) fn update_rest(&mut self) -> Result<(), CollectiveError> {
        if self.in_backward.is_none() {
            return Ok(());
        }
        loop {
            let (gradients, mut cx) = self.gradients_in_surroundings();
            let arrived = gradients.arrive_first(&mut cx)?;
            self.update_reduced(!arrived)?;
            if !arrived {
                return Ok(());
            }
        }
    }

    /// Counts a chunk for the norm, and starts to bring to the host how many elements of each gradient are not finite, of what
    /// this rank updates.
    fn count_not_finite(&mut self, c: usize) -> PendingCopy {
        let Zero { device, map, squares, gradients, parameters, options, .. } = self;
        let shard = map.shard(c);
        squares.count(device, map, c, gradients.summed(parameters, map, c, shard));
        let of_chunk = map.layout.parameters(c);
        let shape = [of_chunk.len()];
        let mut counts = device.alloc(DType::F32, shape, Category::Workspace, "update.not_finite");
        device.fill(counts.view_mut(), 0.0);
        let stepped = stepped(map, options.stage, c);
        for segment in map.layout.segments(c, stepped.start as u64..stepped.end as u64) {
            let elements = segment.in_chunk.start as usize..segment.in_chunk.end as usize;
            let at = segment.parameter - of_chunk.start;
            let count = counts.view_mut().range(at..at + 1);
            device.count_non_finite(gradients.summed(parameters, map, c, elements), count);
        }
        let there = device.alloc_host(DType::F32, shape, Category::Workspace, "update.not_finite");
        device.copy_to_host(counts, there)
    }

    /// Updates the chunk whose gradients were counted first, and frees them.
    fn update_first(&mut self, updates: &mut InBackward) -> Result<(), CollectiveError> {
        let Some((c, counts)) = updates.counting.pop_front() else { return Ok(()) };
        let (_, counts) = counts.wait()?;
        if !self.device.is_meta() && updates.found.is_none() {
            updates.found = self.not_finite(c, counts.host_slice());
            updates.step.applies &= updates.found.is_none();
        }
        drop(counts);
        self.update_chunk(c, updates.step, updates.factor.view(), updates.on_host.as_mut())?;
        self.gradients.free_updated(c);
        Ok(())
    }

    /// The last parameter of a chunk, which backward comes to first, that has elements that are not finite, from the count of each.
    fn not_finite(&self, c: usize, counts: &[f32]) -> Option<NotFinite> {
        let first = self.map.layout.parameters(c).start;
        let at = counts.iter().rposition(|count| *count > 0.0)?;
        let stepped = stepped(&self.map, self.options.stage, c);
        let segments = self.map.layout.segments(c, stepped.start as u64..stepped.end as u64);
        let own = segments.filter(|segment| segment.parameter == first + at);
        Some(NotFinite {
            parameter: self.map.numbers[first + at],
            count: counts[at] as u64,
            elements: own.map(|segment| segment.in_chunk.end - segment.in_chunk.start).sum(),
        })
    }
}
