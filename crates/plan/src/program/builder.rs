//! Writes the actions of a program: declares buffers, names work in flight, and notes which place in the source made an action.

use std::collections::BTreeMap;

use crate::trace::{Category, DType, Memory, PhaseName, Site};
use crate::zero::ZeroStage;

use super::action::{Action, Buffer, Decision, Guard, Op, SiteNumber, Span, Token, Work};
use super::chunks::{GradientBuffering, GradientPlace, Policies, RankChunks, StageChunks};
use super::demand::BlockRun;
use super::list::{BufferSpec, Extent, Program, Role, Stop};

/// Buffers in which contents stay, one behind another.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) first: Buffer,
    pub(super) tiles: u16,
}

impl Row {
    /// One buffer.
    pub(super) fn of(first: Buffer) -> Row {
        Row { first, tiles: 1 }
    }
}

/// A program that is being written.
pub(super) struct Builder {
    program: Program,
    /// By role, chunk, tile and stop.
    known: BTreeMap<(Role, usize, u32, Stop), Buffer>,
    sites: BTreeMap<(&'static str, u32), SiteNumber>,
    started: u32,
    when: Guard,
}

impl Builder {
    /// An empty program, with the resident buffers of a rank.
    pub(super) fn new(rank: &RankChunks, phase: PhaseName) -> Builder {
        let gathers =
            |stage: &StageChunks| stage.uses.iter().map(Vec::len).max().unwrap_or(0) + rank.policies.prefetch;
        let reductions = (rank.policies.reductions_behind() + 1) * rank.stages.len();
        let program = Program {
            phase,
            buffers: Vec::new(),
            numbers: Vec::new(),
            operands: Vec::new(),
            actions: Vec::new(),
            sites: Vec::new(),
            first_blocks: rank.stages.iter().map(|stage| (stage.index, stage.first_block)).collect(),
            in_flight_max: [rank.stages.iter().map(gathers).sum(), reductions],
        };
        let (known, sites) = (BTreeMap::new(), BTreeMap::new());
        let mut builder = Builder { program, known, sites, started: 0, when: Guard::default() };
        rank.stages.iter().for_each(|stage| builder.declare_stage(stage, &rank.policies));
        builder.declare(scalars(Role::Norms, 0, rank.norms, "norm.squares_of_parameters"));
        builder
    }

    /// Declares what a stage stores, in the order in which it is allocated.
    fn declare_stage(&mut self, stage: &StageChunks, policies: &Policies) {
        let accumulate = policies.precision.accumulate;
        let part_of = |c: usize| stage.chunks[c].elements / policies.data_ranks;
        let device = |role, c: usize, extent: Extent, dtype, (category, name)| {
            let elements = if extent == Extent::Whole { stage.chunks[c].elements } else { part_of(c) };
            let (memory, of) = (Memory::Device, stage.first_chunk + c);
            let (stop, start, is_resident) = (Stop::Home, 0, true);
            BufferSpec { role, of, extent, stop, start, elements, memory, dtype, category, name, is_resident }
        };
        for c in (0..stage.chunks.len()).filter(|c| stage.chunks[*c].parameters == Memory::Device) {
            let is_part = stage.is_gathered(policies.stage, c);
            let extent = if is_part { Extent::Part } else { Extent::Whole };
            let named = (Category::Parameters, "parameter_chunk");
            self.declare(device(Role::Parameters, c, extent, stage.chunks[c].dtype, named));
        }
        let buffering = policies.buffering();
        for c in (0..stage.trained).filter(|c| stage.place(policies, *c) == GradientPlace::Buffer) {
            let named = (Category::Gradients, "gradient_chunk");
            if matches!(buffering, GradientBuffering::InPlace | GradientBuffering::Pair) {
                self.declare(device(Role::Gradient, c, Extent::Whole, accumulate, named));
            }
            if matches!(buffering, GradientBuffering::Pair | GradientBuffering::Transient) {
                self.declare(device(Role::Sum, c, Extent::Part, accumulate, named));
            }
        }
        (0..stage.chunks.len()).for_each(|c| self.declare_stored(stage, policies, c));
        if policies.delayed {
            self.declare_delayed(stage, policies);
        }
        self.declare(scalars(Role::Squares, stage.index, stage.squares, "norm.squares"));
    }

    /// Declares what is stored in tiles where kernels do not reach it: states, master weights, and parameters outside of device memory.
    fn declare_stored(&mut self, stage: &StageChunks, policies: &Policies, c: usize) {
        let spec = &stage.chunks[c];
        let optimizer = (Category::Optimizer, spec.optimizer);
        let states = (0..).zip(&spec.states).map(|(number, numbers)| {
            (Role::State(number), DType::F32, optimizer, "optimizer_state", numbers)
        });
        let mut stored: Vec<_> = states.collect();
        if policies.precision.has_master() {
            stored.push((Role::Master, DType::F32, optimizer, "master_weights", &spec.tiles));
        }
        stored.retain(|_| c < stage.trained && stage.is_updated);
        if spec.parameters != Memory::Device {
            let own = (Category::Parameters, spec.parameters);
            stored.push((Role::Parameters, spec.dtype, own, "parameter_chunk", &spec.tiles));
        }
        if c < stage.trained && spec.gradients != Memory::Device {
            let (own, dtype) = ((Category::Gradients, spec.gradients), policies.precision.accumulate);
            stored.push((Role::Sum, dtype, own, "gradient_chunk", &spec.gradient_tiles));
        }
        for (role, dtype, (category, memory), name, tiles) in stored {
            let (of, stop, start, is_resident) = (stage.first_chunk + c, Stop::Home, 0, true);
            let spec = |extent, elements: u64| BufferSpec {
                role,
                of,
                extent,
                stop,
                start,
                elements: elements.max(1),
                memory,
                dtype,
                category,
                name,
                is_resident,
            };
            if policies.reaches(memory) {
                let extent = if policies.stage == ZeroStage::Zero { Extent::Whole } else { Extent::Part };
                self.declare(spec(extent, tiles.iter().sum()));
            } else {
                for (tile, elements) in (0..).zip(tiles) {
                    self.declare(spec(Extent::Tile(tile), *elements));
                }
            }
        }
    }

    /// Declares what delayed updates need beside it: a second place of gradients, updated parameters, scaled gradients, and two factors.
    fn declare_delayed(&mut self, stage: &StageChunks, policies: &Policies) {
        for c in 0..stage.trained {
            let of = stage.first_chunk + c;
            let row = |row: Row| (0..u32::from(row.tiles)).map(move |tile| Buffer(row.first.0 + tile));
            for tile in (0..).zip(stage.scaled(policies, c)).filter(|(_, elements)| *elements > 0) {
                let (extent, elements) = (Extent::Tile(tile.0), tile.1);
                let (category, name) = (Category::Workspace, "update.host_window");
                let host = factor(Memory::Host);
                let role = Role::Scaled;
                self.declare(BufferSpec {
                    role,
                    of,
                    extent,
                    elements,
                    category,
                    name,
                    is_resident: true,
                    ..host
                });
            }
            for stored in row(self.row(Role::Sum, of)) {
                self.declare(BufferSpec { role: Role::Twin, ..*self.spec(stored) });
            }
            for stored in row(self.row(Role::Master, of)) {
                let (category, name) = (Category::Parameters, "parameter_chunk");
                let (role, dtype) = (Role::Updated, policies.precision.compute);
                self.declare(BufferSpec { role, dtype, category, name, ..*self.spec(stored) });
            }
        }
        for number in [1, 2] {
            let (role, of) = (Role::Factor(number), stage.index);
            self.declare(BufferSpec { role, of, is_resident: true, ..factor(Memory::Host) });
        }
    }

    fn declare(&mut self, spec: BufferSpec) -> Buffer {
        let buffer = Buffer(self.program.buffers.len() as u32);
        self.program.buffers.push(spec);
        self.program.numbers.push(buffer);
        self.known.insert(key(&spec), buffer);
        buffer
    }

    /// The buffer with this role of a chunk, which is resident or was taken before; of a row of tiles, the first.
    pub(super) fn buffer(&self, role: Role, of: usize) -> Buffer {
        self.known[&(role, of, 0, Stop::Home)]
    }

    /// The buffer with this role of a tile, where it stays.
    pub(super) fn tile(&self, role: Role, of: usize, tile: usize) -> Buffer {
        self.known[&(role, of, tile as u32, Stop::Home)]
    }

    /// The buffers in which contents with this role stay, one behind another.
    pub(super) fn row(&self, role: Role, of: usize) -> Row {
        let first = self.buffer(role, of);
        let is_of_row = |spec: &&BufferSpec| spec.is_resident && (spec.role, spec.of) == (role, of);
        let row = self.program.buffers[first.0 as usize..].iter().take_while(is_of_row);
        Row { first, tiles: row.count() as u16 }
    }

    /// The description of a buffer.
    pub(super) fn spec(&self, buffer: Buffer) -> &BufferSpec {
        self.program.spec(buffer)
    }

    /// Takes a buffer for a collective.
    #[track_caller]
    pub(super) fn take(
        &mut self,
        role: Role,
        of: usize,
        elements: u64,
        (dtype, name): (DType, &'static str),
    ) -> Buffer {
        let (extent, stop, category) = (Extent::Whole, Stop::Home, Category::Communication);
        let memory = Memory::Device;
        let is_resident = false;
        self.take_as(BufferSpec {
            role,
            of,
            extent,
            stop,
            start: 0,
            elements,
            memory,
            dtype,
            category,
            name,
            is_resident,
        })
    }

    /// Takes a buffer for what visits the device: on it, or in host memory on the way there.
    #[track_caller]
    pub(super) fn take_visitor(&mut self, of: BufferSpec, stop: Stop) -> Buffer {
        let (memory, name) = match stop {
            Stop::Passage => (Memory::Host, "passage"),
            Stop::Home | Stop::Device => (Memory::Device, "visitor"),
        };
        let category = Category::Workspace;
        self.take_as(BufferSpec { stop, memory, name, category, is_resident: false, ..of })
    }

    #[track_caller]
    pub(super) fn take_as(&mut self, spec: BufferSpec) -> Buffer {
        let known = self.known.get(&key(&spec)).copied().filter(|known| *self.spec(*known) == spec);
        let buffer = known.unwrap_or_else(|| self.declare(spec));
        self.emit(Op::Take(buffer));
        buffer
    }

    /// Appends an action.
    #[track_caller]
    pub(super) fn emit(&mut self, op: Op) {
        let site = Site::caller();
        let next = SiteNumber(self.program.sites.len() as u16);
        let made_by = *self.sites.entry((site.file, site.line)).or_insert(next);
        if made_by == next {
            self.program.sites.push(site);
        }
        self.program.actions.push(Action { op, when: self.when, made_by });
    }

    /// Counts a sum for the norm, which no other phase than a step takes.
    #[track_caller]
    pub(super) fn count(&mut self, from: Buffer, into: Buffer) {
        if self.program.phase == PhaseName::Step {
            self.emit(Op::Count { from, into });
        }
    }

    /// Starts work that ends in the phase.
    #[track_caller]
    pub(super) fn start(&mut self, work: Work) -> Token {
        let token = self.next_token();
        self.emit(Op::Start { token, work });
        token
    }

    /// The name of the next work that ends in the phase.
    pub(super) fn next_token(&mut self) -> Token {
        self.started += 1;
        Token::of_phase(self.started)
    }

    /// Appends a block run with its operands.
    #[track_caller]
    pub(super) fn run(&mut self, run: BlockRun, reads: Vec<Buffer>, writes: Vec<Buffer>) {
        let operands = self.operands(reads, writes);
        let BlockRun { stage, block, pass, micro_batch } = run;
        let (stage, block, micro_batch) = (stage as u16, block as u16, micro_batch as u32);
        self.emit(Op::Run { pass, stage, block, micro_batch, operands });
    }

    /// Appends operands.
    pub(super) fn operands(&mut self, reads: Vec<Buffer>, writes: Vec<Buffer>) -> Span {
        let start = self.program.operands.len() as u32;
        let span = Span { start, reads: reads.len() as u16, writes: writes.len() as u16 };
        self.program.operands.extend(reads.into_iter().chain(writes));
        span
    }

    /// The actions that `body` appends are skipped unless the decision has this value.
    pub(super) fn only_if(&mut self, decision: Decision, value: bool, body: impl FnOnce(&mut Builder)) {
        let before = self.when;
        match decision {
            Decision::Apply => self.when.apply = Some(value),
            Decision::Pending => self.when.pending = Some(value),
        }
        body(self);
        self.when = before;
    }

    pub(super) fn finish(self) -> Program {
        self.program
    }
}

/// Resident numbers of the norm, f64.
fn scalars(role: Role, of: usize, elements: u64, name: &'static str) -> BufferSpec {
    let (extent, stop, memory) = (Extent::Whole, Stop::Home, Memory::Device);
    let (dtype, category, is_resident) = (DType::F64, Category::Workspace, true);
    BufferSpec { role, of, extent, stop, start: 0, elements, memory, dtype, category, name, is_resident }
}

/// The buffer of a factor.
pub(super) fn factor(memory: Memory) -> BufferSpec {
    let (role, extent, category, name) =
        (Role::Factor(0), Extent::Whole, Category::Workspace, "update.factor");
    let stop = if memory == Memory::Device { Stop::Device } else { Stop::Home };
    let (dtype, is_resident) = (DType::F32, false);
    BufferSpec {
        role,
        of: 0,
        extent,
        stop,
        start: 0,
        elements: 1,
        memory,
        dtype,
        category,
        name,
        is_resident,
    }
}

/// Key of a buffer: role, chunk, tile and stop. Where contents stay, they are in tiles or not; visitors may be both.
fn key(spec: &BufferSpec) -> (Role, usize, u32, Stop) {
    let tile = match (spec.extent, spec.stop) {
        (Extent::Tile(tile), Stop::Home) => tile,
        (Extent::Tile(tile), _) => tile + 1,
        _ => 0,
    };
    (spec.role, spec.of, tile, spec.stop)
}
