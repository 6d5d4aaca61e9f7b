//! The symbolic execution of one phase.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use crate::program::action::{Action, Buffer, Guard, Op, SumGroup, Token, Work};
use crate::program::chunks::{RankChunks, StageChunks};
use crate::program::demand::BlockRun;
use crate::program::list::{BufferSpec, Extent, Program, Role};
use crate::trace::PhaseName;
use crate::zero::ZeroStage;

use super::contents::{Contents, Part, Terms, Value};
use super::{CheckError, Invariant, MemoryPeaks, error};

/// A broken invariant, and what was found.
pub(super) type Broken = (Invariant, String);

/// A rank between two phases.
#[derive(Clone)]
pub(super) struct State {
    /// Contents of the resident buffers.
    residents: Vec<Contents>,
    flights: BTreeMap<Token, Flight>,
    updates: u32,
    /// Updates whose parameters have come: delayed ones come later.
    landed: u32,
    phases: u32,
}

/// Work in flight.
#[derive(Clone)]
struct Flight {
    work: Work,
    reads: Vec<Buffer>,
    writes: Vec<Buffer>,
}

impl State {
    /// Behind the load.
    pub(super) fn new(rank: &RankChunks, program: &Program) -> State {
        let loaded = |buffer: usize| {
            let spec = &program.buffers[buffer];
            let mut contents = Contents::unset(tiles(rank, spec));
            match spec.role {
                Role::Parameters => contents.set_whole(Value::Parameters(0)),
                Role::State(_) | Role::Master => contents.set_whole(Value::States(0)),
                _ => {}
            }
            contents
        };
        let residents = (0..program.residents()).map(loaded).collect();
        State { residents, flights: BTreeMap::new(), updates: 0, landed: 0, phases: 0 }
    }

    /// The work in flight.
    pub(super) fn carried(&self) -> Vec<Token> {
        self.flights.keys().copied().collect()
    }
}

/// The writers and the micro-batches of a chunk's gradient.
pub(super) struct Writers {
    pub(super) blocks: usize,
    pub(super) micro_batches: usize,
}

/// A phase that is executed.
pub(super) struct Walk<'a> {
    pub(super) rank: &'a RankChunks,
    pub(super) program: &'a Program,
    pub(super) demand: Vec<BlockRun>,
    pub(super) writers: BTreeMap<usize, Writers>,
    contents: Vec<Option<Contents>>,
    flights: BTreeMap<Token, Flight>,
    /// For each buffer: works in flight that read it, and that write it.
    touched: Vec<[u16; 2]>,
    live: MemoryPeaks,
    pub(super) peaks: MemoryPeaks,
    budget: Option<MemoryPeaks>,
    pub(super) updates: u32,
    pub(super) landed: u32,
    /// True if a delayed update runs as the phase begins.
    is_pending: bool,
    pub(super) phase: u32,
    pub(super) ran: usize,
    /// Pauses so far that are not behind a block run, and whether one follows the last block run.
    pub(super) pauses: usize,
    pub(super) is_paused: bool,
    /// Chunks of which some gradients are written in the current micro-batch: the next layer adds to them.
    pub(super) begun: BTreeSet<usize>,
    /// Chunk and tile of each update.
    pub(super) updated: BTreeSet<(usize, usize)>,
    /// Chunks whose counts of what is not finite the host has read.
    pub(super) masked: BTreeSet<usize>,
    /// Parts of chunks whose sums are looked at.
    pub(super) looked: BTreeSet<Part>,
    /// Pieces of stored sums that were written, with the axis of the sum.
    pub(super) written_back: BTreeSet<(usize, u32, &'static str)>,
    pub(super) has_norm: bool,
    pub(super) applies: Option<bool>,
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        rank: &'a RankChunks,
        program: &'a Program,
        state: State,
        budget: Option<MemoryPeaks>,
    ) -> Walk<'a> {
        let mut contents: Vec<Option<Contents>> = state.residents.into_iter().map(Some).collect();
        contents.resize(program.buffers.len(), None);
        let mut live = MemoryPeaks::default();
        for spec in program.buffers.iter().filter(|spec| spec.is_resident) {
            live.0[spec.memory as usize] += spec.bytes();
        }
        let of_stage = rank.stages.iter().flat_map(|stage| {
            let writers = stage.writers().into_iter().enumerate();
            let micro_batches = rank.policies.micro_batches;
            writers.map(move |(c, w)| (stage.first_chunk + c, Writers { blocks: w.len(), micro_batches }))
        });
        let mut walk = Walk {
            rank,
            program,
            demand: rank.demand(program.phase),
            writers: of_stage.collect(),
            contents,
            flights: BTreeMap::new(),
            touched: vec![[0; 2]; program.buffers.len()],
            live,
            peaks: live,
            budget,
            updates: state.updates,
            landed: state.landed,
            is_pending: state.flights.keys().any(|token| token.updated_tile().is_some()),
            phase: state.phases + 1,
            ran: 0,
            pauses: 0,
            is_paused: true,
            begun: BTreeSet::new(),
            updated: BTreeSet::new(),
            masked: BTreeSet::new(),
            looked: BTreeSet::new(),
            written_back: BTreeSet::new(),
            has_norm: false,
            applies: None,
        };
        state.flights.into_iter().for_each(|(token, flight)| walk.fly(token, flight));
        walk
    }

    /// Executes the phase; `applies` is the decision, once it is fetched.
    pub(super) fn run(&mut self, applies: bool) -> Result<State, CheckError> {
        let program = self.program;
        let fail = |number, (broken, fact)| error(program, number, broken, fact);
        for (number, action) in program.actions.iter().enumerate() {
            let runs = self.is_run(action).map_err(|broken| fail(number, broken))?;
            if runs {
                self.act(action.op, applies).map_err(|broken| fail(number, broken))?;
            }
        }
        self.end().map_err(|broken| fail(program.actions.len(), broken))
    }

    fn is_run(&self, action: &Action) -> Result<bool, Broken> {
        let Guard { apply, pending } = action.when;
        let unknown = || (Invariant::Guard, "the decision is not known yet".to_string());
        let applies = match apply {
            Some(value) => self.applies.ok_or_else(unknown)? == value,
            None => true,
        };
        Ok(applies && pending.is_none_or(|value| value == self.is_pending))
    }

    pub(super) fn name(&self, buffer: Buffer) -> String {
        self.program.name(buffer)
    }

    pub(super) fn of(&self, buffer: Buffer) -> usize {
        self.program.spec(buffer).of
    }

    /// Contents of a buffer that is touched now.
    pub(super) fn touch(&mut self, buffer: Buffer, writes: bool) -> Result<&mut Contents, Broken> {
        let at = buffer.0 as usize;
        let [reading, writing] = self.touched[at];
        let is_there = self.contents[at].is_some();
        expect(is_there, Invariant::Presence, || format!("{} is not there", self.name(buffer)))?;
        // Work in flight has its buffers; the host's updates of several tiles read one factor.
        let is_shared = !writes && matches!(self.program.spec(buffer).role, Role::Factor(_));
        let is_free = writing == 0 && (reading == 0 || is_shared);
        expect(is_free, Invariant::Flight, || format!("{} is in flight", self.name(buffer)))?;
        Ok(self.contents[at].as_mut().expect("it is there"))
    }

    pub(super) fn read(&mut self, buffer: Buffer) -> Result<Contents, Broken> {
        self.touch(buffer, false).cloned()
    }

    fn fly(&mut self, token: Token, flight: Flight) {
        flight.reads.iter().for_each(|b| self.touched[b.0 as usize][0] += 1);
        flight.writes.iter().for_each(|b| self.touched[b.0 as usize][1] += 1);
        self.flights.insert(token, flight);
    }

    fn land(&mut self, token: Token) -> bool {
        let Some(flight) = self.flights.remove(&token) else { return false };
        flight.reads.iter().for_each(|b| self.touched[b.0 as usize][0] -= 1);
        flight.writes.iter().for_each(|b| self.touched[b.0 as usize][1] -= 1);
        true
    }

    fn act(&mut self, op: Op, applies: bool) -> Result<(), Broken> {
        let is_early = self.pauses == 0 || !self.changes_sums(op);
        expect(is_early, Invariant::Demand, || "the rank reads the sums of gradients already".into())?;
        if let Op::Convert { from, into }
        | Op::Add { from, into }
        | Op::CopyPart { from, into }
        | Op::Pack { from, into }
        | Op::Unpack { from, into }
        | Op::Count { from, into }
        | Op::CountNotFinite { from, into } = op
        {
            self.check_reach(from)?;
            self.check_reach(into)?;
        }
        match op {
            Op::Take(buffer) => self.take(buffer),
            Op::Free(buffer) => self.free(buffer),
            Op::Run { operands, .. } => {
                let (reads, writes) = self.program.operands(operands);
                self.run_block(op.block_run().expect("a block run"), reads, writes)
            }
            Op::Pause => self.pause(),
            Op::Clear(buffer) => {
                self.touch(buffer, true)?;
                let was_begun = self.begun.remove(&self.of(buffer));
                expect(was_begun, Invariant::Terms, || "no layer has written since the last clear".into())
            }
            Op::Convert { from, into } => self.convert(from, into),
            Op::Add { from, into } => self.add(from, into),
            Op::CopyPart { from, into } => self.copy_part(from, into),
            Op::Restore { from, into } => self.restore(from, into),
            Op::Pack { from, into } => self.pack(from, into),
            Op::Unpack { from, into } => self.unpack(from, into),
            Op::Look(buffer) => {
                self.expect_sums()?;
                self.look_at(buffer)
            }
            Op::Count { from, into } => self.count(from, into),
            Op::Total { from, into } => self.total(from, into),
            Op::Norm(buffer) => {
                self.expect_sums()?;
                let norms = self.read(buffer)?.own();
                let stages = self.rank.stages.iter().filter(|stage| stage.trained > 0).count();
                let is_complete = self.numbers(&norms, true).is_some_and(|of| of.len() == stages);
                self.has_norm = is_complete;
                expect(is_complete, Invariant::Norm, || format!("the norm has {norms}"))
            }
            Op::Fetch => {
                let first = self.applies.replace(applies).is_none();
                expect(self.pauses == 2 && first, Invariant::Norm, || "no norm to decide by".into())
            }
            Op::Update { gradient, parameters, states } => {
                self.update((gradient, parameters), self.program.operands(states))
            }
            Op::Factor(buffer) => {
                let factor = Value::Factor(self.phase);
                self.touch(buffer, true)?.set_whole(factor);
                self.check_reach(buffer)
            }
            Op::Swap(one, other) => self.swap(one, other),
            Op::CountNotFinite { from, into } => self.count_not_finite(from, into),
            Op::Mask(buffer) => self.mask(buffer),
            Op::Start { token, work } => self.start(token, work),
            Op::Wait(token) => expect(self.land(token), Invariant::Wait, || "nothing to wait for".into()),
            Op::Land(token) => {
                self.land(token);
                Ok(())
            }
        }
    }

    fn swap(&mut self, one: Buffer, other: Buffer) -> Result<(), Broken> {
        let [first, second] = [one, other].map(|b| *self.program.spec(b));
        let are_alike =
            (first.elements, first.memory, first.dtype) == (second.elements, second.memory, second.dtype);
        expect(are_alike, Invariant::Reach, || "buffers that differ are swapped".into())?;
        let theirs = self.touch(other, true)?.clone();
        let own = std::mem::replace(self.touch(one, true)?, theirs);
        *self.touch(other, true)? = own;
        Ok(())
    }

    fn take(&mut self, buffer: Buffer) -> Result<(), Broken> {
        let spec = self.program.spec(buffer);
        let empty = Contents::unset(tiles(self.rank, spec));
        let before = self.contents[buffer.0 as usize].replace(empty);
        expect(before.is_none(), Invariant::Pairing, || format!("{} is taken", self.name(buffer)))?;
        let memory = spec.memory as usize;
        self.live.0[memory] += spec.bytes();
        self.peaks.0[memory] = self.peaks.0[memory].max(self.live.0[memory]);
        let fits = self.budget.is_none_or(|budget| self.live.0[memory] <= budget.0[memory]);
        expect(fits, Invariant::Memory, || format!("{} bytes", self.live.0[memory]))
    }

    fn free(&mut self, buffer: Buffer) -> Result<(), Broken> {
        self.touch(buffer, true)?;
        let spec = self.program.spec(buffer);
        expect(!spec.is_resident, Invariant::Pairing, || format!("{} is resident", self.name(buffer)))?;
        self.live.0[spec.memory as usize] -= spec.bytes();
        self.contents[buffer.0 as usize] = None;
        Ok(())
    }

    fn run_block(&mut self, run: BlockRun, reads: &[Buffer], writes: &[Buffer]) -> Result<(), Broken> {
        let next = self.demand.get(self.ran);
        expect(next == Some(&run), Invariant::Demand, || format!("{next:?} comes next"))?;
        expect(self.is_paused, Invariant::Demand, || "no pause is behind the run before".into())?;
        (self.ran, self.is_paused) = (self.ran + 1, false);
        for buffer in reads {
            self.check_reach(*buffer)?;
            let (here, seen) = (self.read(*buffer)?, self.current(*buffer));
            let is_seen = here.own() == seen && self.others_are(&here, &seen);
            expect(is_seen, Invariant::Version, || self.differs(*buffer, &here))?;
        }
        for buffer in writes {
            let (is_first, phase) = (self.begun.insert(self.of(*buffer)), self.phase);
            let here = self.touch(*buffer, true)?;
            let own = (run.micro_batch as u32, run.block as u16);
            let terms = match &here.own() {
                _ if is_first => Some(BTreeSet::from([own])),
                Value::Gradient(t) if t.phase == phase && t.over.is_empty() && !t.runs.contains(&own) => {
                    let mut runs = t.runs.clone();
                    runs.insert(own);
                    Some(runs)
                }
                _ => None,
            };
            let found = here.own();
            let Some(runs) = terms else {
                return Err((Invariant::Terms, format!("{} has {found}", self.name(*buffer))));
            };
            here.set_whole(Value::Gradient(Rc::new(Terms { phase, runs, over: Vec::new() })));
        }
        Ok(())
    }

    /// The parameters of a chunk behind all updates that have come so far; frozen ones have none.
    fn current(&self, buffer: Buffer) -> Value {
        Value::Parameters(if self.writers.contains_key(&self.of(buffer)) { self.landed } else { 0 })
    }

    /// Returns whether the parts of other ranks have a value, where there are any: under stage 0, and on one rank, each rank updates all.
    fn others_are(&self, here: &Contents, value: &Value) -> bool {
        let policies = &self.rank.policies;
        here.others == *value || policies.data_ranks == 1 || policies.stage == ZeroStage::Zero
    }

    fn differs(&self, buffer: Buffer, here: &Contents) -> String {
        format!("{} has {} and {}", self.name(buffer), here.own(), here.others)
    }

    fn start(&mut self, token: Token, work: Work) -> Result<(), Broken> {
        let is_known = self.flights.contains_key(&token);
        expect(!is_known, Invariant::Wait, || "it is in flight already".into())?;
        let program = self.program;
        let (reads, writes) = (program.reads(work), program.writes(work));
        let into = writes[0];
        match work {
            Work::HostUpdate { .. } => self.host_update(reads, writes)?,
            Work::AllGather { from, .. } => {
                let own = self.read(from)?.own();
                if self.program.spec(from).role == Role::Parameters && from != into {
                    let fits = own == self.current(from);
                    expect(fits, Invariant::Version, || format!("it gathers {own}"))?;
                }
                self.touch(into, true)?.set_whole(own);
            }
            Work::ReduceScatter { from, accumulates, .. } => {
                let own = self.read(from)?.own();
                let terms = self.written(from, &own)?;
                let before = self.touch(into, true)?.own();
                let own = match accumulates {
                    true => self.sum(self.of(into), (&before, true), &terms.runs)?,
                    false => {
                        Value::Gradient(Rc::new(Terms { over: vec![SumGroup::Data], ..(*terms).clone() }))
                    }
                };
                let target = self.touch(into, true)?;
                (target.others, _) = (Value::Unset, target.set(own));
            }
            Work::FromTiles { .. } | Work::ToTiles { .. } => self.copy_between(work)?,
            Work::AllReduce { group, buffer } => self.all_reduce(group, buffer)?,
        }
        self.fly(token, Flight { work, reads: reads.to_vec(), writes: writes.to_vec() });
        let Some(kind) = self.kind(work, into) else { return Ok(()) };
        let of_kind = |other: &&Flight| self.kind(other.work, other.writes[0]) == Some(kind);
        let count = self.flights.values().filter(of_kind).count();
        let fits = count <= self.program.in_flight_max[kind];
        expect(fits, Invariant::InFlight, || format!("{count} works are in flight"))
    }

    /// The kind of work that the plan counts: gathers of parameters, or reductions of gradients.
    fn kind(&self, work: Work, into: Buffer) -> Option<usize> {
        if !work.is_collective() {
            return None;
        }
        match self.program.spec(into).role {
            Role::Gathered => Some(0),
            Role::Gradient | Role::Sum | Role::Partial(_) | Role::Rounded => Some(1),
            _ => None,
        }
    }

    /// The end of the phase.
    fn end(&mut self) -> Result<State, Broken> {
        let missing = self.demand.len() - self.ran;
        expect(missing == 0, Invariant::Demand, || format!("{missing} block runs are missing"))?;
        let residents = self.program.residents();
        let left = (residents..self.contents.len()).find(|at| self.contents[*at].is_some());
        let name = |at: usize| format!("{} stays", self.name(Buffer(at as u32)));
        expect(left.is_none(), Invariant::Pairing, || left.map_or(String::new(), name))?;
        let (phase, policies) = (self.program.phase, &self.rank.policies);
        let may_stay = |token: &Token| match token.published_chunk() {
            Some(_) => policies.host_addressable,
            None => token.updated_tile().is_some(),
        };
        let stays = self.flights.keys().all(|token| phase != PhaseName::Save && may_stay(token));
        expect(stays, Invariant::Wait, || format!("{} works stay in flight", self.flights.len()))?;
        expect(self.begun.is_empty(), Invariant::Terms, || "gradients are not reduced".into())?;
        let pauses = self.pauses_of(phase);
        let are_all = self.is_paused && self.pauses == pauses;
        expect(are_all, Invariant::Demand, || format!("{} pauses instead of {pauses}", self.pauses))?;
        let all: BTreeSet<Part> = self.rank.stages.iter().flat_map(|s| self.parts(s, |_| true)).collect();
        let is_seen = phase != PhaseName::Diagnose || policies.in_backward || self.looked == all;
        expect(is_seen, Invariant::Terms, || "some sums are not looked at".into())?;
        let mut applies = false;
        if phase == PhaseName::Step {
            // Within backward, updates are issued whatever is decided: the rank masks them.
            applies =
                self.applies.ok_or((Invariant::Update, "no decision".to_string()))? || policies.in_backward;
            let tiles = |stage: &StageChunks| {
                let of = |c| stage.tiles(policies, c).map_or(1, <[u64]>::len);
                (0..stage.trained).map(of).sum::<usize>()
            };
            let all: usize = self.rank.stages.iter().map(tiles).sum();
            let (found, expected) = (self.updated.len(), if applies { all } else { 0 });
            expect(found == expected, Invariant::Update, || format!("{found} tiles are updated"))?;
        }
        if policies.delayed {
            self.landed += u32::from(self.is_pending && (applies || phase == PhaseName::Save));
        } else {
            self.landed += u32::from(applies);
        }
        self.updates += u32::from(applies);
        let contents: Vec<Contents> = self.contents[..residents].iter().flatten().cloned().collect();
        for (at, here) in contents.iter().enumerate() {
            self.check_current(Buffer(at as u32), here)?;
        }
        let flights = std::mem::take(&mut self.flights);
        let (updates, landed, phases) = (self.updates, self.landed, self.phase);
        Ok(State { residents: contents, flights, updates, landed, phases })
    }

    /// Checks that what stays between phases has seen all updates.
    fn check_current(&self, buffer: Buffer, here: &Contents) -> Result<(), Broken> {
        let spec = self.program.spec(buffer);
        let expected = match spec.role {
            Role::Parameters => self.current(buffer),
            Role::State(_) | Role::Master => Value::States(self.updates),
            _ => return Ok(()),
        };
        let others = spec.extent != Extent::Whole || self.others_are(here, &expected);
        expect(here.own() == expected && others, Invariant::Version, || self.differs(buffer, here))
    }
}

pub(super) fn expect(holds: bool, broken: Invariant, fact: impl FnOnce() -> String) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err((broken, fact())) }
}

/// Number of tiles that a buffer has of what the rank updates of its chunk.
pub(super) fn tiles(rank: &RankChunks, spec: &BufferSpec) -> usize {
    let is_of_chunk = !matches!(spec.role, Role::Terms | Role::Factor(_) | Role::Squares | Role::Norms);
    if !is_of_chunk || matches!(spec.extent, Extent::Tile(_)) {
        return 1;
    }
    let stage = rank.stages.iter().rfind(|stage| stage.first_chunk <= spec.of).expect("the stage of a chunk");
    stage.tiles(&rank.policies, spec.of - stage.first_chunk).map_or(1, <[u64]>::len)
}
