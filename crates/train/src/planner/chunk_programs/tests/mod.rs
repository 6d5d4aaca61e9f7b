//! The programs of chunks against dry runs, which execute them: in each phase, the same allocations, frees, collectives and waits of chunks,
//! with the same bytes and in the same order, and block runs between the same ones of them.

mod happenings;

use std::collections::BTreeMap;
use std::fmt::Debug;

use phalanx_layers::Kind;
use phalanx_models::{Arch, Gpt2, Keys};
use phalanx_optim::{Extent, Optimizer, StateSpec, UpdateRule, UpdateStep, UpdatedParameter};
use phalanx_parallel::zero::{ChunkResidence, Residence};
use phalanx_plan::ZeroStage;
use phalanx_plan::program::{Buffer, Op, PHASES, Pass, Program, Token, Work};
use phalanx_plan::trace::{Category, CollectiveOp, Event, Memory, PhaseName, Trace};
use phalanx_system::random::SplitMix64;
use phalanx_testing::sweeps;

use crate::config::{
    Checkpointing, CheckpointingWord, Chunk, ChunkWord, DeviceKind, Float, LoraBase, Reduce, RunConfig, Sum,
    Tier, UpdateOn,
};
use crate::engine::rank::{Batch, Rank};
use crate::engine::spec::Spec;
use crate::planner::dry_run::{NEVER, on_meta};
use happenings::{Happening, Shown, is_of_chunks, shown};

/// The number of random configurations.
const COUNT: usize = 200;

/// Work in flight in a program.
#[derive(Clone, Copy)]
enum Flight {
    /// A collective, with its number if the dry run records it.
    Collective(Option<u32>),
    /// A copy, with the number of its last part if the dry run records its wait.
    Copy(Option<u32>),
    HostWork,
}

/// Plays programs behind each other.
struct Player<'a> {
    spec: &'a Spec,
    allocations: u32,
    collectives: u32,
    copies: u32,
    flights: BTreeMap<Token, (Work, Flight)>,
}

impl Player<'_> {
    /// Returns whether a dry run records the collectives of a group: all, or on devices that the host cannot address those of several
    /// ranks.
    fn records(&self, group: &str) -> bool {
        let axes = self.spec.mesh.axes;
        let ranks = match group {
            "data" => axes.data,
            "tensor" => axes.tensor,
            "world" => axes.world_size(),
            _ => axes.pipeline,
        };
        ranks > 1 || self.spec.device.host_addressable
    }

    /// The collective of a work.
    fn collective(&self, program: &Program, work: Work) -> Happening {
        let (op, group, whole) = match work {
            Work::AllGather { into, .. } => (CollectiveOp::AllGather, "data", into),
            Work::ReduceScatter { from, .. } => (CollectiveOp::ReduceScatter, "data", from),
            Work::AllReduce { group, buffer } => (CollectiveOp::AllReduce, group.name(), buffer),
            _ => unreachable!("no collective"),
        };
        let spec = program.spec(whole);
        let dtype = spec.dtype.moved();
        Happening::Collective { op, group, dtype, count: spec.bytes() / dtype.bytes() as u64 }
    }

    /// A copy; returns the number of its last part if the dry run records its wait.
    fn copy(&mut self, program: &Program, work: Work, shown: &mut Shown) -> Option<u32> {
        let (reads, writes) = (program.reads(work), program.writes(work));
        let (from, into) = (program.spec(reads[0]), program.spec(writes[0]));
        let memories = [from.memory, into.memory];
        let (row, moved, elements) = match work {
            Work::FromTiles { .. } => (reads, into, into.elements),
            Work::ToTiles { is_part: true, .. } if self.spec.zero.stage != ZeroStage::Zero => {
                (writes, from, from.elements / self.spec.mesh.axes.data as u64)
            }
            _ => (writes, from, from.elements),
        };
        let start = if program.spec(row[0]).is_resident { moved.start } else { 0 };
        let mut first = 0;
        for tile in row {
            let own = first..first + program.spec(*tile).elements;
            first = own.end;
            let elements = own.end.min(start + elements).saturating_sub(own.start.max(start));
            if elements > 0 {
                let bytes = from.dtype.bytes_of(elements as usize) as u64;
                shown.happenings.push(Happening::Copy { memories, bytes });
                self.copies += 1;
            }
        }
        let is_recorded = !self.spec.device.host_addressable || memories.contains(&Memory::Disk);
        is_recorded.then(|| self.copies - 1)
    }

    /// A copy of a staged buffer, which is waited for at once.
    fn staged(&mut self, program: &Program, buffer: Buffer, memories: [Memory; 2], shown: &mut Shown) {
        shown.happenings.push(Happening::Copy { memories, bytes: program.spec(buffer).bytes() });
        shown.happenings.push(Happening::WaitForCopy { copy: self.copies });
        self.copies += 1;
    }

    /// A collective; returns its number if the dry run records it.
    fn call(&mut self, program: &Program, work: Work, shown: &mut Shown) -> Option<u32> {
        let call = self.collective(program, work);
        let Happening::Collective { group, .. } = call else { unreachable!("a collective") };
        if !self.records(group) {
            return None;
        }
        if !self.spec.device.host_addressable {
            let to_host = [Memory::Device, Memory::Host];
            program.reads(work).iter().for_each(|from| self.staged(program, *from, to_host, shown));
            let reads_target = match work {
                Work::AllGather { from, into } => from == into,
                Work::ReduceScatter { from, into, accumulates } => from == into || accumulates,
                _ => true,
            };
            if reads_target {
                self.staged(program, program.writes(work)[0], to_host, shown);
            }
        }
        shown.happenings.push(call);
        self.collectives += 1;
        Some(self.collectives - 1)
    }

    /// The end of a collective: what it wrote is copied back where it was staged.
    fn land(&mut self, program: &Program, work: Work, shown: &mut Shown) {
        if !self.spec.device.host_addressable {
            self.staged(program, program.writes(work)[0], [Memory::Host, Memory::Device], shown);
        }
    }

    fn play(&mut self, program: &Program) -> Shown {
        let mut shown = Shown::default();
        let mut taken = BTreeMap::new();
        for action in &program.actions {
            match action.op {
                Op::Take(buffer) => {
                    let spec = program.spec(buffer);
                    taken.insert(buffer, self.allocations);
                    self.allocations += 1;
                    let (name, bytes, memory) = (spec.name, spec.bytes(), spec.memory);
                    shown.happenings.push(Happening::Alloc { name, bytes, memory });
                }
                Op::Free(buffer) => shown.happenings.push(Happening::Free { allocation: taken[&buffer] }),
                Op::Run { operands, pass, .. } => {
                    let is_half = matches!(pass, Pass::Input | Pass::Weight);
                    shown.run(if is_half { Happening::HalfBackward } else { Happening::Runs });
                    let (reads, _) = program.operands(operands);
                    shown.uses.extend(reads.iter().map(|buffer| program.spec(*buffer).of as u32));
                }
                Op::Start { token, work } => {
                    let flight = match work {
                        Work::FromTiles { .. } | Work::ToTiles { .. } => {
                            Flight::Copy(self.copy(program, work, &mut shown))
                        }
                        Work::HostUpdate { .. } => Flight::HostWork,
                        _ => Flight::Collective(self.call(program, work, &mut shown)),
                    };
                    self.flights.insert(token, (work, flight));
                }
                Op::Wait(token) | Op::Land(token) => match self.flights.remove(&token) {
                    Some((_, Flight::Copy(copy))) => {
                        shown.happenings.extend(copy.map(|copy| Happening::WaitForCopy { copy }));
                    }
                    Some((work, Flight::Collective(Some(collective)))) => {
                        shown.happenings.push(Happening::Wait { collective });
                        self.land(program, work, &mut shown);
                    }
                    _ => {}
                },
                _ => {}
            }
        }
        shown
    }
}

/// The trace of phases behind `init` and `load`.
fn traced(spec: &Spec, rank: usize, phases: &[PhaseName]) -> Trace {
    let (device, mut engine) = on_meta(spec, rank, &Rank::new);
    let part = &spec.batch;
    let batch = Batch::of(part, part.micro_batch_size * part.micro_batches);
    let windows = Batch::of(part, part.micro_batch_size * part.evaluation_batches);
    engine.load(|_, _, _, _| Ok(())).expect(NEVER);
    for phase in phases {
        match phase {
            PhaseName::Step => drop(engine.step(1, &batch, false).expect(NEVER)),
            PhaseName::Diagnose => {
                drop(engine.diagnose(1, &batch, spec.batch.targets_per_step, 1.0).expect(NEVER));
            }
            PhaseName::Evaluate => drop(engine.evaluate(&windows).expect(NEVER)),
            _ => engine.save(|_, _| Ok(())).expect(NEVER),
        }
    }
    device.take_trace(rank)
}

/// The first difference of two lists, with what is around it.
fn difference<T: PartialEq + Debug>(what: &str, listed: &[T], found: &[T]) -> Result<(), String> {
    let at = listed.iter().zip(found).take_while(|(one, other)| one == other).count();
    if at == listed.len().max(found.len()) {
        return Ok(());
    }
    let around = |list: &[T]| {
        let lines =
            list[at.saturating_sub(3)..list.len().min(at + 4)].iter().map(|event| format!("\n  {event:?}"));
        lines.collect::<String>()
    };
    Err(format!("{what}: from {at} on the program has{}\nand the dry run{}", around(listed), around(found)))
}

/// Compares the programs of a rank with its dry run of some phases; returns the number of events that are equal.
fn compare(spec: &Spec, rank: usize, phases: &[PhaseName]) -> Result<usize, String> {
    let trace = traced(spec, rank, phases);
    let (_, engine) = on_meta(spec, rank, &Rank::new);
    let programs = engine.chunk_programs().map_err(|error| error.to_string())?.programs;
    difference("init", &stored(&programs[0]), &allocated(&trace))?;
    let mut player = Player { spec, allocations: 0, collectives: 0, copies: 0, flights: BTreeMap::new() };
    let mut compared = 0;
    for (phase, found) in phases.iter().zip(&shown(&trace)[2..]) {
        let program = programs.iter().find(|program| program.phase == *phase).unwrap();
        let listed = player.play(program).without_empty_runs(found);
        difference(&format!("{phase} of {phases:?}"), &listed.happenings, &found.happenings)?;
        difference(&format!("uses of {phase}"), &listed.uses, &found.uses)?;
        compared += listed.happenings.len();
    }
    Ok(compared)
}

/// A resident buffer.
type Stored = (&'static str, u64, Memory, Category);

/// The resident buffers of a program.
fn stored(program: &Program) -> Vec<Stored> {
    let residents = program.buffers.iter().filter(|buffer| buffer.is_resident);
    residents.map(|spec| (spec.name, spec.bytes(), spec.memory, spec.category)).collect()
}

/// Allocations of `init` for chunks.
fn allocated(trace: &Trace) -> Vec<Stored> {
    let of_chunks = trace.phases[0].events.iter().filter_map(|event| match event {
        Event::Alloc { name: "norm" | "norm.clip_factor", .. } => None,
        Event::Alloc { name, bytes, memory, category, site, .. } if is_of_chunks(*site) => {
            Some((*name, *bytes, *memory, *category))
        }
        _ => None,
    });
    of_chunks.collect()
}

/// Chooses the memories of states and parameters, or the place of gradients.
fn place(config: &mut RunConfig, pick: &mut impl FnMut(usize) -> usize) {
    let tiers = [Tier::Device, Tier::Host, Tier::Nvme];
    let (data, pipeline) = (config.data(), config.parallel.pipeline);
    let memory = &mut config.memory;
    (memory.buffer_mb, memory.update) =
        ([1.0 / 64.0, 1.0 / 32.0, 16.0][pick(3)], [UpdateOn::Device, UpdateOn::Host][pick(2)]);
    match pick(6) {
        0 => {}
        1 | 2 => {
            (memory.optimizer, memory.gradients) = (tiers[pick(3)], tiers[pick(3)]);
            if config.parallel.zero == 3 {
                memory.parameters = tiers[pick(3)];
            }
        }
        3 => {
            (memory.gradients_in_place, memory.buffer_mb) = (true, [1.0 / 64.0, 16.0][pick(2)]);
            config.precision.compute = [Float::Bf16, Float::F16][pick(2)];
            config.precision.accumulate = config.precision.compute;
            config.batch.global = data * pipeline;
        }
        4 => {
            (memory.optimizer, memory.gradients) = (Tier::Host, Tier::Host);
            (memory.delayed_update, memory.update) = (true, UpdateOn::Host);
            config.precision.compute = [Float::Bf16, Float::F16][pick(2)];
            config.precision.accumulate = [Float::F32, config.precision.compute][pick(2)];
        }
        _ => {
            (memory.update_in_backward, memory.optimizer) = (true, tiers[pick(3)]);
            config.precision.compute = [Float::F32, Float::Bf16][pick(2)];
            config.precision.accumulate = [Float::F32, config.precision.compute][pick(2)];
            config.optimizer.clip = 0.0;
            config.batch.global = data;
            if config.parallel.zero == 3 {
                memory.parameters = tiers[pick(3)];
            }
        }
    }
    if [memory.parameters, memory.gradients, memory.optimizer].contains(&Tier::Nvme) {
        memory.nvme_path = Some(std::path::Path::new(".").into());
    }
}

/// Returns whether every rank is to keep some chunks whole under stage 3.
fn keeps_some_whole(config: &RunConfig, picked: usize) -> bool {
    let memory = &config.memory;
    let tiers = [memory.optimizer, memory.parameters, memory.gradients];
    picked == 0 && config.parallel.zero == 3 && tiers == [Tier::Device; 3]
}

/// A random configuration, and its specification if there is one.
fn random_spec(random: &mut SplitMix64) -> Option<(String, Spec)> {
    let mut config = RunConfig::default();
    let mut pick = |count: usize| (random.next_u64() % count as u64) as usize;
    let schedules = ["model", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "gpipe"];
    let (pipeline, data, tensor) = ([1, 1, 1, 2, 3][pick(5)], 1 + pick(3), 1 + pick(2));
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
    parallel.schedule = schedules[pick(schedules.len())].into();
    parallel.zero = pick(4) as u8;
    parallel.sequence_parallel = tensor > 1 && pick(2) == 0;
    parallel.overlap = pick(3) > 0;
    config.memory.prefetch = pick(4);
    config.memory.chunk =
        [Chunk::Word(ChunkWord::Auto), Chunk::Word(ChunkWord::None), Chunk::Mebibytes(0.05)][pick(3)];
    config.memory.checkpointing = match pick(3) {
        0 => Checkpointing::Word(CheckpointingWord::None),
        1 => Checkpointing::Word(CheckpointingWord::Selective),
        _ => Checkpointing::Every(1 + pick(2)),
    };
    config.precision.compute = [Float::F32, Float::Bf16, Float::F16][pick(3)];
    config.precision.accumulate = [Float::F32, config.precision.compute][pick(2)];
    config.precision.communicate = [None, Some(Float::Bf16)][pick(2)];
    config.batch.reduce = [Reduce::Each, Reduce::Defer][pick(2)];
    config.batch.sum = [Sum::Running, Sum::Running, Sum::Tree][pick(3)];
    config.device.kind = [DeviceKind::Cpu, DeviceKind::Simulated][pick(2)];
    config.batch.micro = Some(1);
    config.batch.global = data * pipeline * (1 + pick(3));
    config.model.seq = 4;
    let trained: [&[&str]; 5] = [&[], &[], &["*.h.2.*", "*.ln_f.*"], &["*.bias"], &["*.wte.weight"]];
    config.model.trainable = trained[pick(5)].iter().map(|pattern| pattern.to_string()).collect();
    config.train.threads = Some(1);
    place(&mut config, &mut pick);
    let batch = data * (1 + pick(3));
    let mut spec = if pick(2) == 0 {
        // Frozen weights in blocks, which adapters stand beside.
        config.model.trainable.clear();
        (config.lora.rank, config.lora.base) = (Some(3), [LoraBase::Nf4, LoraBase::Q8_0][pick(2)]);
        let mut keys = Keys::default();
        let sizes = [("layers", 3), ("hidden", 128), ("heads", 8), ("kv_heads", 4), ("intermediate", 192)];
        sizes.into_iter().for_each(|(key, count)| keys.set(key, count));
        let model = Arch::named("llama")?.model(&keys, 67, 16).ok()?;
        Spec::new(&config, model, batch, 1).ok()?
    } else {
        let model = Gpt2 { layers: 6, hidden: 16, heads: 2, vocab: 50, positions: 8, ..Gpt2::default() };
        Spec::new(&config, model, batch, 1).ok()?
    };
    if pick(6) == 0 {
        spec = spec.with_optimizer(OfMatrices).ok()?;
    }
    spec.device.host_addressable = config.device.kind == DeviceKind::Cpu;
    if keeps_some_whole(&config, pick(3)) {
        let whole = [Residence::DEVICE.with_whole([0, 2])];
        spec.zero.residence = whole.into_iter().cycle().take(spec.mesh.stages.len()).collect();
    }
    let RunConfig { parallel, memory, precision, batch, model, device, .. } = &config;
    let (own, base) = (&spec.update.optimizer, config.lora.base);
    let text = format!(
        "{parallel:?} {memory:?} {precision:?} {batch:?} {:?} {device:?} {own:?} {base:?}",
        model.trainable
    );
    Some((text, spec))
}

/// A rule that needs matrices as a whole, and keeps a number of each of their rows.
struct OfMatrices;

impl UpdateRule for OfMatrices {
    fn extent(&self, of: &UpdatedParameter) -> Extent {
        if of.kind == Kind::Matrix { Extent::Whole } else { Extent::Elements }
    }

    fn states(&self, of: &UpdatedParameter) -> Vec<StateSpec> {
        match self.extent(of) {
            Extent::Whole => vec![StateSpec { name: "rows", shape: vec![of.shape[0]] }],
            _ => vec![StateSpec::like("momentum", of)],
        }
    }

    fn update(&self, _: &UpdateStep, _: &mut [f32], _: &[f32], _: &mut [&mut [f32]]) {}
}

#[test]
fn a_program_says_what_a_step_of_stage_3_does() {
    let mut config = RunConfig::default();
    (config.parallel.data, config.parallel.zero) = (Some(2), 3);
    (config.batch.micro, config.batch.global, config.model.seq) = (Some(1), 4, 4);
    config.memory.chunk = Chunk::Mebibytes(0.05);
    let model = Gpt2 { layers: 2, hidden: 16, heads: 2, vocab: 50, positions: 8, ..Gpt2::default() };
    let spec = Spec::new(&config, model, 2, 1).unwrap();
    assert!(compare(&spec, 0, &[PhaseName::Step]).unwrap() > 40);
}

#[test]
fn ranks_whose_collectives_differ_from_the_plan_are_named() {
    let mut config = RunConfig::default();
    (config.parallel.data, config.parallel.tensor, config.parallel.zero) = (Some(2), 2, 2);
    (config.batch.micro, config.batch.global, config.model.seq) = (Some(1), 4, 4);
    config.memory.chunk = Chunk::Mebibytes(0.05);
    let model = || Gpt2 { layers: 2, hidden: 16, heads: 2, vocab: 50, positions: 8, ..Gpt2::default() };
    let spec = Spec::new(&config, model(), 2, 1).unwrap();
    let agreements: Vec<u64> = (0..4).map(|rank| spec.chunk_programs(rank).unwrap().agreement()).collect();
    assert_eq!(agreements, [agreements[0]; 4]);
    let (_, engine) = on_meta(&spec, 3, &Rank::new);
    engine.check_programs(Some(agreements[0])).unwrap();
    config.memory.chunk = Chunk::Mebibytes(0.1);
    let other = Spec::new(&config, model(), 2, 1).unwrap().chunk_programs(0).unwrap().agreement();
    let error = engine.check_programs(Some(other)).unwrap_err().to_string();
    assert!(
        error.contains("rank 3 would start other collectives") && error.contains("--chunk-program 3"),
        "{error}"
    );
}

/// Names of what a run has that programs treat apart.
fn kinds(spec: &Spec) -> Vec<&'static str> {
    let zero = &spec.zero;
    let any = |is_so: fn(ChunkResidence) -> bool| {
        zero.residence.iter().flat_map(|stage| stage.described()).any(is_so)
    };
    let is_optimizer_away = any(|lies| lies.optimizer != Memory::Device);
    let kinds = [
        ("gradients elsewhere", any(|lies| lies.gradients != Memory::Device)),
        ("parameters elsewhere", any(|lies| lies.parameters != Memory::Device)),
        ("states elsewhere", is_optimizer_away),
        ("updates by the host", zero.updates_on_host && !spec.device.host_addressable && is_optimizer_away),
        ("delayed updates", zero.delayed_update),
        ("updates within backward", zero.update_in_backward),
        ("gradients in place", zero.gradients_in_place),
        ("blocks", spec.mesh.layout.kept.iter().any(Option::is_some)),
        ("an own rule", matches!(spec.update.optimizer, Optimizer::Own(_))),
        ("a tree", spec.batch.sums_by_tree),
    ];
    kinds.into_iter().filter(|(_, is_so)| *is_so).map(|(name, _)| name).collect()
}

#[test]
fn programs_say_what_dry_runs_do() {
    let count = if sweeps::are_whole() { 10 * COUNT } else { COUNT };
    let mut random = SplitMix64::new(3);
    let (mut compared, mut events, mut differences) = (0, 0, Vec::new());
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    while compared < count {
        let Some((config, spec)) = random_spec(&mut random) else { continue };
        let rank = (random.next_u64() % spec.world_size() as u64) as usize;
        let mut phases = vec![PhaseName::Step];
        phases.extend((0..4).map(|_| PHASES[(random.next_u64() % PHASES.len() as u64) as usize]));
        match compare(&spec, rank, &phases) {
            Ok(equal) => events += equal,
            Err(difference) => differences.push(format!("rank {rank}, {difference}\n{config}")),
        }
        kinds(&spec).into_iter().for_each(|kind| *seen.entry(kind).or_default() += 1);
        compared += 1;
    }
    let shown: Vec<&str> = differences.iter().take(4).map(|text| &text[..]).collect();
    assert!(differences.is_empty(), "{} of {count} differ: {}", differences.len(), shown.join("\n\n"));
    assert!(events > 100 * count, "{events} events");
    assert!(seen.len() == 10 && seen.values().all(|kind| *kind >= count / 50), "{seen:?}");
}
