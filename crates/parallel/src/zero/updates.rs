//! Updates of parameters, tile by tile: by kernels of the device, or by the host's processor where optimizer states lie (ZeRO-Offload,
//! arXiv 2101.06840).

use std::ops::Range;

use phalanx_plan::program::{Buffer, BufferSpec, Extent, Role, Token, WITHIN_BACKWARD};
use phalanx_tensor::{Device, Tensor, View, ViewMut};

use super::Chunks;
use super::executor::Flight;
use super::rules::Tensors;

/// The numbers of one update.
#[derive(Clone, Copy, Debug)]
pub struct Update {
    /// Number of the update, from 1.
    pub number: u64,
    /// Learning rate.
    pub lr: f32,
    /// False for a step without targets, in updates within backward, and after a gradient that is not finite: tiles are still moved, as
    /// planned, but no parameter changes (rounded ones are written again).
    pub applies: bool,
}

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

/// Elements of a chunk that are updated, with a gradient of them and the factor by which it is multiplied.
struct Part<'a> {
    of: usize,
    range: Range<usize>,
    gradient: Option<(BufferSpec, View<'a>)>,
    factor: View<'a>,
}

impl Chunks {
    /// The update of the phase that begins, or of the step that was judged.
    pub fn set_update(&mut self, update: Update) {
        self.update = update;
    }

    /// Writes the factor by which updates multiply gradients: 1 within backward, which knows no norm.
    pub(super) fn write_factor(&mut self, buffer: Buffer) {
        let role = self.spec(buffer).role;
        self.change(buffer, |chunks, to| match role {
            Role::Factor(WITHIN_BACKWARD) => chunks.device.fill(to, 1.0),
            _ => chunks.device.copy(chunks.factor.view(), to),
        });
    }

    /// The elements of a chunk on which an update works: those of a tile that one of its buffers has, or all that the rank updates.
    fn updated(&self, of: usize, buffers: impl Iterator<Item = Buffer>) -> Range<usize> {
        let is_tile = |spec: &BufferSpec| matches!(spec.extent, Extent::Tile(_)) && spec.role != Role::Scaled;
        match buffers.map(|buffer| self.spec(buffer)).find(is_tile) {
            Some(tile) => self.elements(&tile),
            None => {
                let (held, c) = self.held(of);
                held.map.updated(c)
            }
        }
    }

    /// Updates a tile, or what this rank updates of a chunk.
    pub(super) fn update_on_device(
        &mut self,
        gradient: Buffer,
        parameters: Buffer,
        (read, states): (&[Buffer], &[Buffer]),
    ) {
        let is_scaled = |buffer: &&Buffer| self.spec(**buffer).role == Role::Scaled;
        let scaled: Vec<Buffer> = read.iter().filter(is_scaled).copied().collect();
        let own_factor = read.iter().copied().find(|buffer| !scaled.contains(buffer));
        let of = self.spec(parameters).of;
        let written: Vec<Buffer> =
            [parameters].into_iter().chain(states.iter().copied()).chain(scaled).collect();
        let range = self.updated(of, written.iter().copied().chain([gradient]));
        let specs: Vec<BufferSpec> = written.iter().map(|buffer| self.spec(*buffer)).collect();
        let mut tensors: Vec<Tensor> = written.iter().map(|buffer| self.take(*buffer)).collect();
        let part = Part {
            of,
            range,
            gradient: Some((self.spec(gradient), self.view(gradient))),
            factor: own_factor.map_or(self.factor.view(), |factor| self.view(factor)),
        };
        self.issue(&self.device, part, &specs, &mut tensors);
        written.into_iter().zip(tensors).for_each(|(buffer, tensor)| self.put(buffer, tensor));
    }

    /// Starts the host's update of a tile. Its factor stays in its place.
    pub(super) fn update_on_host(&mut self, token: Token, (read, written): (&[Buffer], &[Buffer])) -> Flight {
        let [gradient, factor] = *read else { panic!("a gradient and its factor are read, not {read:?}") };
        let buffers: Vec<Buffer> = written.iter().copied().chain([gradient]).collect();
        let of = self.spec(gradient).of;
        let range = self.updated(of, buffers.iter().copied());
        let specs: Vec<BufferSpec> = buffers.iter().map(|buffer| self.spec(*buffer)).collect();
        let tensors = buffers.iter().map(|buffer| self.take(*buffer)).collect();
        let name = if token.updated_tile().is_some() { "delayed_update" } else { "update" };
        let work = self.device.run_on_host(name, tensors, |host, tensors| {
            let part = Part { of, range, gradient: None, factor: self.view(factor) };
            self.issue(host, part, &specs, tensors);
        });
        Flight::Host(work, buffers)
    }

    /// Issues the update of some elements of a chunk; `specs` describe the tensors that have them.
    fn issue(&self, device: &Device, part: Part, specs: &[BufferSpec], tensors: &mut [Tensor]) {
        let (held, c) = self.held(part.of);
        let first = held.map.updated(c).start;
        for piece in held.rules.pieces(&held.map, c, &part.range) {
            let (mut states, mut master, mut own, mut scaled) = (Vec::new(), None, None, None);
            let mut gradient =
                part.gradient.map(|(spec, view)| view.range(self.inside(&spec, &piece.in_chunk)));
            for (spec, tensor) in specs.iter().zip(tensors.iter_mut()) {
                match spec.role {
                    Role::State(at) => {
                        let (number, places) = &held.states[c][usize::from(at)];
                        let local = piece.in_chunk.start - first..piece.in_chunk.end - first;
                        let Some(numbers) = places.numbers(&local) else { continue };
                        let before = match spec.extent {
                            Extent::Tile(tile) => places.before(held.tiles[c][tile as usize].start),
                            _ => 0,
                        };
                        states.push((
                            *number,
                            tensor.view_mut().range(numbers.start - before..numbers.end - before),
                        ));
                    }
                    Role::Scaled => {
                        let elements = held.rules.scaled_elements(&piece);
                        scaled = elements.map(|elements| tensor.view_mut().range(0..elements));
                    }
                    Role::Master => {
                        master = Some(tensor.view_mut().range(self.inside(spec, &piece.in_chunk)))
                    }
                    Role::Parameters | Role::Updated => {
                        own = Some(tensor.view_mut().range(self.inside(spec, &piece.in_chunk)));
                    }
                    _ => gradient = Some(tensor.view().range(self.inside(spec, &piece.in_chunk))),
                }
            }
            let own = own.expect("an update has parameters");
            let (parameters, rounded) = match master {
                Some(master) => (master, Some(own)),
                None => (own, None),
            };
            if !self.update.applies {
                // The place of rounded parameters may be one that only an update fills.
                rounded.into_iter().for_each(|rounded| device.convert(parameters.as_view(), rounded));
                continue;
            }
            let gradient = gradient.expect("an update has a gradient");
            let tensors = Tensors { parameters, rounded, gradient, factor: part.factor, scaled, states };
            let numbers = (self.update.number, self.update.lr);
            self.optimizer.apply(device, held.rules.update(piece.rule, numbers, tensors));
        }
    }

    /// Updates the only chunk of the rank, all of which lies in device memory, with a `gradient` of what it updates and a `factor` that are
    /// not its own.
    ///
    /// # Panics
    /// With several chunks.
    pub fn update_with(&mut self, update: Update, gradient: View, factor: View) {
        assert_eq!(self.held.iter().map(|held| held.tiles.len()).sum::<usize>(), 1, "one chunk");
        self.update = update;
        let roles = |spec: &BufferSpec| matches!(spec.role, Role::Parameters | Role::State(_) | Role::Master);
        let residents = self.programs[0].residents();
        let written: Vec<Buffer> = (0..residents as u32).map(Buffer).collect();
        let written: Vec<Buffer> = written.into_iter().filter(|b| roles(&self.spec(*b))).collect();
        let specs: Vec<BufferSpec> = written.iter().map(|buffer| self.spec(*buffer)).collect();
        let mut tensors: Vec<Tensor> = written.iter().map(|buffer| self.take(*buffer)).collect();
        let range = self.held[0].map.updated(0);
        let own = BufferSpec { role: Role::Gradient, ..specs[0] };
        self.issue(
            &self.device,
            Part { of: 0, range, gradient: Some((own, gradient)), factor },
            &specs,
            &mut tensors,
        );
        written.into_iter().zip(tensors).for_each(|(buffer, tensor)| self.put(buffer, tensor));
    }

    /// Counts the elements that are not finite of each gradient of a chunk, of what this rank updates.
    pub(super) fn count_not_finite(&mut self, from: Buffer, into: Buffer) {
        let source = self.spec(from);
        self.change(into, |chunks, mut counts: ViewMut| {
            chunks.device.fill(counts.reborrow(), 0.0);
            let (held, c) = chunks.held(source.of);
            let first = held.map.layout.parameters(c).start;
            for (p, part) in held.map.parameters_in(c, &held.map.updated(c)) {
                let gradient = chunks.view(from).range(chunks.inside(&source, &part));
                chunks.device.count_non_finite(gradient, counts.reborrow().range(p - first..p - first + 1));
            }
        });
    }

    /// Reads such counts: from the first gradient on that is not finite, this rank changes nothing more in the step. The last parameter of
    /// the chunk, which backward comes to first, is named.
    pub(super) fn mask(&mut self, counts: Buffer) {
        let of = self.spec(counts).of;
        let tensor = self.take(counts);
        let numbers = tensor.host_numbers();
        self.put(counts, tensor);
        let Some(at) = numbers.iter().rposition(|count| *count > 0.0) else { return };
        self.update.applies = false;
        let (held, c) = self.held(of);
        let p = held.map.layout.parameters(c).start + at;
        let own = held.map.parameters_in(c, &held.map.updated(c)).filter(|(own, _)| *own == p);
        let elements = own.map(|(_, part)| part.len() as u64).sum();
        let found = NotFinite { parameter: held.map.numbers[p], count: numbers[at] as u64, elements };
        self.running.found.get_or_insert(found);
    }
}
