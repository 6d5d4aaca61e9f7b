//! Summed gradients and parameters for callers that read them, or move them their own way: a parameter server, DataParallel.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use phalanx_collectives::CollectiveError;
use phalanx_plan::program::{Buffer, GradientPlace, Role};
use phalanx_tensor::blocks::dequantised;
use phalanx_tensor::{DType, DeviceError, Element, Memory, Tensor, View};

use super::Chunks;

/// Elements that are read at a time for host memory.
const WINDOW: usize = 1 << 20;

impl Chunks {
    /// Calls `see` with the summed gradients of this rank's shards of a stage as f32 in host memory, after a step: the parameter of its
    /// network, the elements of this rank's part of it, and the gradient, in pieces of any length, still multiplied by the loss scale. Over
    /// the data axis each element comes once. With delayed updates they belong to the update that runs; those of the step before are shown.
    ///
    /// # Errors
    /// When the device failed.
    ///
    /// # Panics
    /// With [`Options::gradients_in_place`](super::Options::gradients_in_place) and
    /// [`Options::update_in_backward`](super::Options::update_in_backward): the update overwrites or frees them.
    pub fn read_gradients(
        &self,
        stage: usize,
        mut see: impl FnMut(usize, Range<u64>, &[f32]),
    ) -> Result<(), DeviceError> {
        let (held, described) = (&self.held[stage], &self.described.stages[stage]);
        for c in 0..held.map.trained {
            let (of, shard) = (described.first_chunk + c, held.map.shard(c));
            let (role, first) = match described.sum(&self.described.policies, c) {
                Role::Gradient => (Role::Gradient, 0),
                role => (role, held.map.updated(c).start),
            };
            let place = described.place(&self.described.policies, c);
            let is_kept = matches!(place, GradientPlace::Buffer | GradientPlace::Elsewhere);
            assert!(is_kept, "the update has used up the gradients of chunk {c}");
            for start in shard.clone().step_by(WINDOW) {
                let window = start..(start + WINDOW).min(shard.end);
                let mut piece = vec![0.0; window.len()];
                self.read_row((role, of), window.start - first..window.end - first, &mut piece)?;
                for segment in held.map.layout.segments(c, window.start as u64..window.end as u64) {
                    let inside = segment.in_chunk.start as usize - window.start
                        ..segment.in_chunk.end as usize - window.start;
                    see(segment.parameter, segment.in_parameter, &piece[inside]);
                }
            }
        }
        Ok(())
    }

    /// The resident buffers with some contents of a chunk: a row of tiles, or one.
    pub(super) fn row(&self, role: Role, of: usize) -> Vec<Buffer> {
        self.rows.get(&(role, of)).into_iter().flat_map(|row| row.clone()).map(Buffer).collect()
    }

    /// Each buffer of a row that has numbers of `range`: which of its numbers these are, and their place in the range.
    pub(super) fn split(
        &self,
        (role, of): (Role, usize),
        range: &Range<usize>,
    ) -> Vec<(Buffer, Range<usize>, Range<usize>)> {
        let ((place, c), row) = (self.place_of_chunk(of), self.row(role, of));
        let (mut parts, mut first) = (Vec::new(), 0);
        for (tile, buffer) in row.iter().copied().enumerate() {
            let elements = match role {
                // A tile in which no parameter has the state is in its place nevertheless.
                Role::State(at) if row.len() > 1 => {
                    self.described.stages[place].chunks[c].states[usize::from(at)][tile]
                }
                _ => self.spec(buffer).elements,
            };
            let tile = first..first + elements as usize;
            first = tile.end;
            let inside = range.start.max(tile.start)..range.end.min(tile.end);
            if !inside.is_empty() {
                let within = inside.start - range.start..inside.end - range.start;
                parts.push((buffer, inside.start - tile.start..inside.end - tile.start, within));
            }
        }
        parts
    }

    /// Numbers `range` of a row as f32, behind everything that was issued before.
    pub(super) fn read_row(
        &self,
        of: (Role, usize),
        range: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        for (buffer, inside, within) in self.split(of, &range) {
            let out = &mut out[within];
            match self.spec(buffer).dtype {
                DType::F32 => self.read(buffer, inside, out)?,
                DType::BF16 => {
                    let mut numbers = vec![bf16::ZERO; out.len()];
                    self.read(buffer, inside, &mut numbers)?;
                    numbers.convert_to_f32_slice(out);
                }
                DType::F16 => {
                    let mut numbers = vec![f16::ZERO; out.len()];
                    self.read(buffer, inside, &mut numbers)?;
                    numbers.convert_to_f32_slice(out);
                }
                blocks => {
                    let mut words = vec![0u32; blocks.bytes_of(inside.len()) / size_of::<u32>()];
                    self.read(buffer, inside, &mut words)?;
                    out.copy_from_slice(&dequantised(blocks, &words));
                }
            }
        }
        Ok(())
    }

    /// Elements of a resident buffer in any memory, in their own type; those in blocks as words.
    fn read<T: Element>(
        &self,
        buffer: Buffer,
        range: Range<usize>,
        out: &mut [T],
    ) -> Result<(), DeviceError> {
        let tensor = self.buffers[buffer.0 as usize].as_ref().expect("nothing is in flight between phases");
        match tensor.memory() {
            Memory::Device => self.device.download(self.view(buffer).range(range).typed(T::DTYPE), out),
            _ => self.device.read_stored(tensor, range, out),
        }
    }

    /// Passes what this rank stores of the parameters through `change`, chunk by chunk: whole chunks, or its shards. An error loses
    /// the chunk.
    ///
    /// # Errors
    /// Those of `change`.
    pub fn lend_parameters(
        &mut self,
        mut change: impl FnMut(Tensor) -> Result<Tensor, CollectiveError>,
    ) -> Result<(), CollectiveError> {
        self.lend(Role::Parameters, |parameters, _| change(parameters))
    }

    /// The same for the gradients of trained chunks, between two steps of a rank without others, with the factor of the last step that was
    /// judged.
    ///
    /// # Errors
    /// Those of `change`.
    pub fn lend_gradients(
        &mut self,
        change: impl FnMut(Tensor, View) -> Result<Tensor, CollectiveError>,
    ) -> Result<(), CollectiveError> {
        self.lend(Role::Gradient, change)
    }

    fn lend(
        &mut self,
        role: Role,
        mut change: impl FnMut(Tensor, View) -> Result<Tensor, CollectiveError>,
    ) -> Result<(), CollectiveError> {
        for buffer in self.buffers_with(role) {
            let tensor = self.take(buffer);
            self.put(buffer, change(tensor, self.factor.view())?);
        }
        Ok(())
    }
}
