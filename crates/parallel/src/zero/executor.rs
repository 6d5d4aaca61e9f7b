//! The executor of programs: one match over their actions. It knows buffers, tokens and guards, and no strategy.

use std::ops::Range;
use std::sync::Arc;

use phalanx_collectives::{CollectiveError, Pending};
use phalanx_plan::program::{
    Action, BlockRun, Buffer, BufferSpec, Extent, Guard, Op, PHASES, Pass, Program, Role, SumGroup, Token,
    Work,
};
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Device, PendingHostWork, PendingTiles, Tensor, View, ViewMut};

use super::held::Held;
use super::{Chunks, NotFinite, Running, allocate};

/// Work in flight: it has its buffers until it is waited for.
pub(super) enum Flight {
    One(Pending<Tensor>, Buffer),
    Two(Pending<(Tensor, Tensor)>, [Buffer; 2]),
    /// A copy between a buffer and a row of tiles, by the first of them.
    Tiles(PendingTiles, [Buffer; 2]),
    Host(PendingHostWork, Vec<Buffer>),
}

/// Called with summed gradients: the place of the stage among those of the rank, the parameter of its network, and the gradient of what
/// this rank counts of it, which is still multiplied by the loss scale.
pub type SeeSums<'a> = &'a mut dyn FnMut(usize, usize, View);

impl Chunks {
    /// Begins a phase.
    ///
    /// # Panics
    /// If it has no program.
    pub fn begin(&mut self, phase: PhaseName) {
        let number = PHASES.iter().position(|other| *other == phase).expect("a phase with a program");
        let is_pending =
            self.expects_update || self.flights.keys().any(|token| token.updated_tile().is_some());
        self.running = Running::new(&self.programs[number], is_pending);
        let program = &self.running.program;
        self.buffers.truncate(program.residents());
        self.buffers.resize_with(program.buffers.len(), || None);
        for held in &mut self.held {
            held.written.fill(false);
        }
        for buffer in self.buffers_with(Role::Gradient) {
            self.device.forget_placements(self.view(buffer));
        }
    }

    /// The micro-batch of the block runs that come next.
    pub fn begin_micro_batch(&mut self, micro_batch: usize) {
        self.running.micro_batch = micro_batch;
    }

    /// Goes on to the run of a block: its parameters are readable then, and its gradients have memory.
    ///
    /// # Errors
    /// When a collective or the device fails.
    ///
    /// # Panics
    /// When another run comes next.
    pub(crate) fn enter(&mut self, stage: usize, block: usize, pass: Pass) -> Result<(), CollectiveError> {
        let run = BlockRun { stage, block, pass, micro_batch: self.running.micro_batch };
        if pass.reads_parameters() {
            let place = self.place_of(stage);
            let first = self.described.stages[place].first_chunk;
            self.held[place].map.chunks[block].iter().for_each(|c| self.device.record_use(first + c));
        }
        let next = self.go_on(&mut None)?;
        assert_eq!(next.and_then(Op::block_run), Some(run), "another run comes next");
        if let Some(Op::Run { operands, .. }) = next {
            self.running.operands = operands;
        }
        Ok(())
    }

    /// Goes on to the next pause: behind a block run, behind the sums of gradients, and behind the norm.
    ///
    /// # Errors
    /// When a collective or the device fails.
    ///
    /// # Panics
    /// When a block run comes next.
    pub fn pause(&mut self) -> Result<(), CollectiveError> {
        let next = self.go_on(&mut None)?;
        assert!(matches!(next, Some(Op::Pause)), "{next:?} comes next, and no pause");
        Ok(())
    }

    /// Goes on to the end of the phase. Of a step, `applies` says whether all ranks agree that its updates are applied. Returns the first
    /// gradient that is not finite, because of which this rank has stopped to update within backward.
    ///
    /// # Errors
    /// When a collective or the device fails.
    ///
    /// # Panics
    /// When a block run or a pause comes next.
    pub fn finish(
        &mut self,
        applies: bool,
        mut see: Option<SeeSums>,
    ) -> Result<Option<NotFinite>, CollectiveError> {
        self.running.applies = Some(applies);
        self.update.applies &= applies;
        let next = self.go_on(&mut see)?;
        assert!(next.is_none(), "{next:?} comes next, and not the end of the phase");
        Ok(self.running.found.take())
    }

    /// Executes actions up to the next block run or pause.
    fn go_on(&mut self, see: &mut Option<SeeSums>) -> Result<Option<Op>, CollectiveError> {
        let program = Arc::clone(&self.running.program);
        while let Some(action) = program.actions.get(self.running.at) {
            self.running.at += 1;
            if !self.is_guard_open(action) {
                continue;
            }
            match action.op {
                Op::Run { .. } | Op::Pause => return Ok(Some(action.op)),
                Op::Look(buffer) => {
                    let see = see.as_mut().expect("whoever diagnoses a step looks at its sums");
                    self.look(buffer, *see);
                }
                op => program.made_by(action).act(|| self.act(&program, op))?,
            }
        }
        Ok(None)
    }

    fn is_guard_open(&self, action: &Action) -> bool {
        let Guard { apply, pending } = action.when;
        let is_open = |wanted: Option<bool>, found: Option<bool>| wanted.is_none() || wanted == found;
        is_open(apply, self.running.applies) && is_open(pending, Some(self.running.is_pending))
    }

    fn act(&mut self, program: &Program, op: Op) -> Result<(), CollectiveError> {
        match op {
            // The caller goes on with them.
            Op::Run { .. } | Op::Pause | Op::Look(_) | Op::Fetch => {}
            Op::Take(buffer) => {
                self.running.zeroed.remove(&buffer);
                self.buffers[buffer.0 as usize] = Some(allocate(&self.device, program.spec(buffer)));
            }
            Op::Free(buffer) => drop(self.take(buffer)),
            Op::Swap(one, other) => self.buffers.swap(one.0 as usize, other.0 as usize),
            Op::Clear(buffer) => self.clear(buffer),
            Op::Convert { from, into } => {
                self.join(from, into, program.spec(from).role == Role::Rounded, Device::convert)
            }
            Op::Add { from, into } => {
                self.join(from, into, program.spec(from).role == Role::Rounded, Device::add)
            }
            Op::CopyPart { from, into } => {
                let is_part = !matches!(program.spec(into).role, Role::Factor(_));
                self.join(from, into, is_part, Device::copy);
            }
            Op::Restore { from, into } => self.join(from, into, true, Device::convert),
            Op::Pack { from, into } => self.pack(from, into),
            Op::Unpack { from, into } => self.unpack(from, into),
            Op::Count { from, into } => self.count(from, into),
            Op::Total { from, into } => self.total(from, into),
            Op::Norm(sums) => self.take_norm(sums),
            Op::Factor(buffer) => self.write_factor(buffer),
            Op::CountNotFinite { from, into } => self.count_not_finite(from, into),
            Op::Mask(counts) => self.mask(counts),
            Op::Update { gradient, parameters, states } => {
                self.update_on_device(gradient, parameters, program.operands(states));
            }
            Op::Start { token, work } => {
                let flight = self.start(program, (token, work));
                self.flights.insert(token, flight);
            }
            Op::Wait(token) | Op::Land(token) => {
                let flight = self.flights.remove(&token);
                // A dry run takes it that an update runs.
                let may_be_over = matches!(op, Op::Land(_)) || self.expects_update;
                assert!(flight.is_some() || may_be_over, "{token:?} is not in flight");
                flight.into_iter().try_for_each(|flight| self.land(flight))?;
            }
        }
        Ok(())
    }

    fn start(&mut self, program: &Program, (token, work): (Token, Work)) -> Flight {
        match work {
            Work::AllGather { from, into } if from == into => {
                let whole = self.take(into).moved();
                Flight::One(self.groups.data.all_gather_in_place(whole), into)
            }
            Work::AllGather { from, into } => {
                let (part, whole) = (self.take(from).moved(), self.take(into).moved());
                Flight::Two(self.groups.data.all_gather(part, whole), [from, into])
            }
            Work::ReduceScatter { from, into, .. } if from == into => {
                let whole = self.take(into);
                Flight::One(self.groups.data.reduce_scatter_in_place(whole), into)
            }
            Work::ReduceScatter { from, into, accumulates } => {
                let (whole, part) = (self.take(from), self.take(into));
                Flight::Two(self.groups.data.reduce_scatter(whole, part, accumulates), [from, into])
            }
            Work::AllReduce { group, buffer } => {
                self.prepare_sum(group, buffer);
                let terms = self.take(buffer);
                let group = match group {
                    SumGroup::Data => &self.groups.data,
                    SumGroup::Tensor => &self.groups.tensor,
                    SumGroup::World => &self.groups.world,
                    SumGroup::Tie => self.tie_of(program.spec(buffer).of),
                };
                Flight::One(group.all_reduce(terms), buffer)
            }
            Work::FromTiles { tiles, from, into } => {
                let (row, spec) = (self.take_row(from, tiles), program.spec(into));
                let start = if program.spec(from).is_resident { spec.start as usize } else { 0 };
                let target = self.take(into);
                Flight::Tiles(self.device.copy_from_tiles(row, start, target), [into, from])
            }
            Work::ToTiles { tiles, is_part, from, into } => {
                let (row, spec) = (self.take_row(into, tiles), program.spec(from));
                let start = if program.spec(into).is_resident { spec.start as usize } else { 0 };
                let part = if is_part { self.overlap(spec, spec) } else { 0..spec.elements as usize };
                let source = self.take(from);
                Flight::Tiles(self.device.copy_to_tiles(source, part, row, start), [from, into])
            }
            Work::HostUpdate { operands } => self.update_on_host(token, program.operands(operands)),
        }
    }

    /// Waits for work, and puts its buffers back.
    fn land(&mut self, flight: Flight) -> Result<(), CollectiveError> {
        match flight {
            Flight::One(pending, buffer) => self.put(buffer, pending.wait()?),
            Flight::Two(pending, [one, other]) => {
                let (first, second) = pending.wait()?;
                self.put(one, first);
                self.put(other, second);
            }
            Flight::Tiles(pending, [whole, first]) => {
                let (tensor, row) = pending.wait()?;
                self.put(whole, tensor);
                (first.0..).zip(row).for_each(|(tile, tensor)| self.put(Buffer(tile), tensor));
            }
            Flight::Host(pending, buffers) => {
                buffers
                    .into_iter()
                    .zip(pending.wait()?)
                    .for_each(|(buffer, tensor)| self.put(buffer, tensor));
            }
        }
        Ok(())
    }

    /// Takes a buffer out of its place.
    pub(super) fn take(&mut self, buffer: Buffer) -> Tensor {
        let tensor = self.buffers[buffer.0 as usize].take();
        tensor.unwrap_or_else(|| panic!("{} is not in its place", self.running.program.name(buffer)))
    }

    fn take_row(&mut self, first: Buffer, tiles: u16) -> Vec<Tensor> {
        (first.0..first.0 + u32::from(tiles)).map(|tile| self.take(Buffer(tile))).collect()
    }

    pub(super) fn put(&mut self, buffer: Buffer, tensor: Tensor) {
        self.buffers[buffer.0 as usize] = Some(tensor);
    }

    pub(super) fn spec(&self, buffer: Buffer) -> BufferSpec {
        *self.running.program.spec(buffer)
    }

    /// The contents of a buffer.
    pub(super) fn view(&self, buffer: Buffer) -> View<'_> {
        let tensor = self.buffers[buffer.0 as usize].as_ref();
        let tensor =
            tensor.unwrap_or_else(|| panic!("{} is not in its place", self.running.program.name(buffer)));
        tensor.view().typed(self.running.program.spec(buffer).dtype)
    }

    /// Lets `change` write a buffer, and read others.
    pub(super) fn change(&mut self, buffer: Buffer, change: impl FnOnce(&Chunks, ViewMut)) {
        let mut tensor = self.take(buffer);
        change(self, tensor.view_mut());
        self.put(buffer, tensor);
    }

    /// Reads a buffer, and writes it to another: all of it, or what both have of this rank's part of a chunk.
    fn join(
        &mut self,
        from: Buffer,
        into: Buffer,
        is_part: bool,
        operation: impl FnOnce(&Device, View, ViewMut),
    ) {
        let (source, target) = (self.spec(from), self.spec(into));
        let (read, written) = match is_part {
            true => {
                let overlap = self.overlap(&source, &target);
                [&source, &target].map(|spec| self.inside(spec, &overlap)).into()
            }
            false => (0..source.elements as usize, 0..target.elements as usize),
        };
        self.change(into, |chunks, to| {
            operation(&chunks.device, chunks.view(from).range(read), to.range(written));
        });
    }

    /// The stage of a chunk, by its place among those of the rank, and the chunk's number there.
    pub(super) fn place_of_chunk(&self, of: usize) -> (usize, usize) {
        let stages = &self.described.stages;
        let place = stages.iter().rposition(|stage| stage.first_chunk <= of).expect("a chunk of the rank");
        (place, of - stages[place].first_chunk)
    }

    /// The place of a pipeline stage among those of the rank.
    pub(super) fn place_of(&self, stage: usize) -> usize {
        let place = self.described.stages.iter().position(|own| own.index == stage);
        place.unwrap_or_else(|| panic!("stage {stage} is not of this rank"))
    }

    pub(super) fn held(&self, of: usize) -> (&Held, usize) {
        let (place, c) = self.place_of_chunk(of);
        (&self.held[place], c)
    }

    /// The elements of its chunk that a buffer has.
    pub(super) fn elements(&self, spec: &BufferSpec) -> Range<usize> {
        let (held, c) = self.held(spec.of);
        match spec.extent {
            Extent::Whole => held.map.whole(c),
            Extent::Part => held.map.shard(c),
            Extent::Tile(tile) => {
                let (first, tile) = (held.map.updated(c).start, &held.tiles[c][tile as usize]);
                first + tile.start..first + tile.end
            }
        }
    }

    /// The elements of a chunk that this rank updates and two buffers have.
    fn overlap(&self, one: &BufferSpec, other: &BufferSpec) -> Range<usize> {
        let (held, c) = self.held(one.of);
        let all = [self.elements(one), self.elements(other), held.map.updated(c)];
        let [start, end] =
            [all.iter().map(|range| range.start).max(), all.iter().map(|range| range.end).min()];
        start.unwrap_or(0)..end.unwrap_or(0)
    }

    /// Elements of a chunk, as elements of a buffer that has them.
    pub(super) fn inside(&self, spec: &BufferSpec, elements: &Range<usize>) -> Range<usize> {
        let first = self.elements(spec).start;
        elements.start - first..elements.end - first
    }
}
