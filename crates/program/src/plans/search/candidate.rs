//! A candidate of a search: the keys that it sets, and the values that a search tries.

use phalanx_train::RunConfig;
use phalanx_train::config::{Checkpointing, CheckpointingWord, Chunk, ChunkWord, Float, Reduce, Tier};
use toml::Value;

use super::limits::Limits;

/// Parts of a rank's state that lie in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Placed {
    /// None.
    Device,
    /// Optimizer states.
    Optimizer,
    /// Optimizer states and gradients.
    Gradients,
    /// These and parameters, under ZeRO stage 3.
    Parameters,
}

impl Placed {
    const ALL: [Placed; 4] = [Placed::Device, Placed::Optimizer, Placed::Gradients, Placed::Parameters];

    /// The memories of optimizer states, gradients and parameters.
    pub fn tiers(self) -> [(&'static str, &'static str); 3] {
        let of = |from: Placed| if self >= from { "host" } else { "device" };
        [
            ("memory.optimizer", of(Placed::Optimizer)),
            ("memory.gradients", of(Placed::Gradients)),
            ("memory.parameters", of(Placed::Parameters)),
        ]
    }

    fn of(config: &RunConfig) -> Placed {
        let memory = &config.memory;
        match () {
            () if memory.parameters == Tier::Host => Placed::Parameters,
            () if memory.gradients == Tier::Host => Placed::Gradients,
            () if memory.optimizer == Tier::Host => Placed::Optimizer,
            () => Placed::Device,
        }
    }

    /// What lies in host memory, in words.
    pub fn words(self) -> &'static str {
        match self {
            Placed::Device => "device",
            Placed::Optimizer => "host",
            Placed::Gradients => "host, with gradients",
            Placed::Parameters => "host, with gradients and parameters",
        }
    }

    /// A word for tables.
    pub fn word(self) -> &'static str {
        match self {
            Placed::Device => "device",
            Placed::Optimizer => "opt host",
            Placed::Gradients => "opt+grad",
            Placed::Parameters => "all host",
        }
    }
}

/// A schedule with the stages of each rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scheduled {
    /// Name in configurations.
    pub name: String,
    /// Stages of each rank.
    pub chunks: usize,
}

impl Scheduled {
    fn new(name: &str, chunks: usize) -> Scheduled {
        Scheduled { name: name.to_string(), chunks }
    }

    /// The name, with the number of stages where that is a choice.
    pub fn word(&self) -> String {
        match self.name.as_str() {
            "interleaved" => format!("interleaved:{}", self.chunks),
            name => name.to_string(),
        }
    }
}

/// MiB of a chunk in f32 at most.
const CHUNK_MIB: f64 = 512.0;

/// How much backward recomputes, from nothing on.
pub const CHECKPOINTING: [&str; 3] = ["none", "selective", "block"];

/// A candidate. Schedules are numbers in [`Axes::schedules`], checkpointing one in [`Axes::checkpointing`], so that a search can hold very
/// many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Candidate {
    /// Sequences of a step.
    pub global: usize,
    /// Pipeline ranks.
    pub pipeline: usize,
    /// Replicas.
    pub data: usize,
    /// Tensor-parallel ranks.
    pub tensor: usize,
    /// ZeRO stage.
    pub zero: u8,
    /// The schedule.
    pub schedule: usize,
    /// Sequences of a micro-batch.
    pub micro: usize,
    /// What is recomputed.
    pub checkpointing: usize,
    /// What lies in host memory.
    pub placed: Placed,
    /// True if gradients are sent in the type that is computed in, and not in that in which they are added.
    pub sends_half: bool,
    /// True if gradients are reduced once in a step.
    pub defers: bool,
}

impl Candidate {
    /// Micro-batches of a replica.
    pub fn micro_batches(&self) -> usize {
        self.global / self.data / self.micro
    }

    /// What decides how well its memory is estimated.
    pub fn kind(&self) -> Kind {
        (self.pipeline, self.schedule, self.checkpointing, self.zero, self.placed, self.defers)
    }

    /// What of its kind decides most how well its time and memory are estimated.
    pub fn like(&self) -> Like {
        (self.pipeline > 1, self.tensor > 1, self.checkpointing, self.zero, self.placed, self.defers)
    }

    /// Returns whether this needs at least as much device memory as `other`, whose mesh and schedule it has: the rest is the same, or keeps
    /// more.
    pub fn needs_as_much_as(&self, other: &Candidate) -> bool {
        let mesh = |of: &Candidate| (of.pipeline, of.data, of.tensor, of.schedule, of.global, of.sends_half);
        mesh(self) == mesh(other)
            && self.micro >= other.micro
            && self.zero <= other.zero
            && self.checkpointing <= other.checkpointing
            && self.placed <= other.placed
            && self.defers >= other.defers
    }
}

/// Pipeline ranks, schedule, checkpointing, ZeRO stage, placement and reduction of candidates whose memory is estimated alike.
pub type Kind = (usize, usize, usize, u8, Placed, bool);

/// Several pipeline ranks, several tensor ranks, checkpointing, ZeRO stage, placement and reduction.
pub type Like = (bool, bool, usize, u8, Placed, bool);

/// The values of each key that a search tries.
#[derive(Clone, Debug)]
pub struct Axes {
    /// Sequences of a step.
    pub global: Vec<usize>,
    /// Tensor-parallel ranks.
    pub tensor: Vec<usize>,
    /// ZeRO stages.
    pub zero: Vec<u8>,
    /// Schedules of several pipeline ranks, and of one.
    pub schedules: Vec<Scheduled>,
    /// The first of them is that of one pipeline rank.
    pub alone: usize,
    /// Words and numbers.
    pub checkpointing: Vec<String>,
    /// Placements.
    pub placed: Vec<Placed>,
    /// True: gradients are sent in the type that is computed in.
    pub sends_half: Vec<bool>,
    /// True: gradients are reduced once in a step.
    pub defers: Vec<bool>,
    /// Word of the configuration for the type on the wire, where that is kept.
    communicate: Option<Float>,
    half: Float,
    accumulate: Float,
    sequence_parallel: bool,
    /// True: chunks have the size of a block.
    sets_chunk: bool,
    /// True: under ZeRO stage 3 a block is gathered while the one before it computes.
    sets_prefetch: bool,
}

impl Axes {
    /// The values for a run whose model can be divided among the ranks of `tensor`. `has_own_memory`: devices have a memory beside the host's.
    pub fn of(
        config: &RunConfig,
        limits: &Limits,
        tensor: Vec<usize>,
        blocks: usize,
        has_own_memory: bool,
    ) -> Axes {
        let kept = |key: &str, own: String, tried: Vec<String>| limits.values(key, own, tried);
        let (parallel, memory) = (&config.parallel, &config.memory);
        let own_checkpointing = match memory.checkpointing {
            Checkpointing::Word(CheckpointingWord::None) => "none".to_string(),
            Checkpointing::Word(CheckpointingWord::Selective) => "selective".to_string(),
            Checkpointing::Word(CheckpointingWord::Block) => "block".to_string(),
            Checkpointing::Every(every) => every.to_string(),
        };
        let own_reduce = if config.batch.reduce == Reduce::Defer { "defer" } else { "each" };
        let reduce = kept("batch.reduce", own_reduce.into(), vec!["each".into(), "defer".into()]);
        let zero = kept("parallel.zero", parallel.zero.to_string(), texts(&[0, 1, 2, 3]));
        Axes {
            global: numbers(kept(
                "batch.global",
                config.batch.global.to_string(),
                texts(&limits.globals(config.batch.global)),
            )),
            tensor: numbers(kept("parallel.tensor", parallel.tensor.to_string(), texts(&tensor))),
            zero: numbers(zero).into_iter().map(|stage| stage as u8).collect(),
            schedules: schedules(config, limits, blocks),
            alone: 0,
            checkpointing: kept(
                "memory.checkpointing",
                own_checkpointing,
                CHECKPOINTING.map(String::from).to_vec(),
            ),
            placed: placements(config, limits, has_own_memory),
            sends_half: wires(config, limits),
            defers: reduce.iter().map(|word| word == "defer").collect(),
            communicate: config.precision.communicate,
            half: config.precision.compute,
            accumulate: config.precision.accumulate,
            sequence_parallel: !limits.keeps("parallel.sequence_parallel") || parallel.sequence_parallel,
            sets_chunk: memory.chunk == Chunk::Word(ChunkWord::Auto),
            sets_prefetch: memory.chunk == Chunk::Word(ChunkWord::Auto) && !limits.keeps("memory.prefetch"),
        }
    }

    /// The type of gradients on the wire.
    pub fn on_the_wire(&self, is_half: bool) -> String {
        let float = if is_half { self.half } else { self.communicate.unwrap_or(self.accumulate) };
        phalanx_plan::trace::DType::from(float).name().to_string()
    }

    /// The same without sequence parallelism.
    #[must_use]
    pub fn without_sequence_parallelism(mut self) -> Axes {
        self.sequence_parallel = false;
        self
    }

    /// The keys of a candidate with their values. `block` are the elements of a block, which a chunk has where the configuration leaves its
    /// size open.
    pub fn settings(&self, of: &Candidate, block: u64) -> Vec<(&'static str, Value)> {
        let whole = |count: usize| Value::Integer(count as i64);
        let text = |text: &str| Value::String(text.to_string());
        let mut all = vec![
            ("batch.global", whole(of.global)),
            ("batch.micro", whole(of.micro)),
            ("parallel.pipeline", whole(of.pipeline)),
            ("parallel.data", whole(of.data)),
            ("parallel.tensor", whole(of.tensor)),
            ("parallel.sequence_parallel", Value::Boolean(self.sequence_parallel && of.tensor > 1)),
            ("parallel.zero", whole(of.zero.into())),
        ];
        if of.pipeline > 1 {
            let schedule = &self.schedules[of.schedule];
            all.push(("parallel.schedule", text(&schedule.name)));
            all.push(("parallel.chunks", whole(schedule.chunks)));
        }
        let word = &self.checkpointing[of.checkpointing];
        all.push(("memory.checkpointing", word.parse().map_or_else(|_| text(word), whole)));
        if self.placed.len() > 1 || of.placed != Placed::Device {
            all.extend(of.placed.tiers().map(|(key, tier)| (key, text(tier))));
        }
        if of.data > 1 && of.micro_batches() > 1 {
            all.push(("batch.reduce", text(if of.defers { "defer" } else { "each" })));
        }
        let communicate = if of.sends_half { Some(self.half) } else { self.communicate };
        if let Some(float) = communicate {
            all.push(("precision.communicate", text(phalanx_plan::trace::DType::from(float).name())));
        }
        if self.sets_chunk {
            // A chunk for each block, of at most 512 MiB of f32: larger ones are held whole while they are gathered and reduced.
            let mib = block as f64 / of.tensor as f64 * 4.0 / f64::from(1 << 20);
            all.push(("memory.chunk", Value::Float((mib.clamp(0.01, CHUNK_MIB) * 100.0).ceil() / 100.0)));
            if self.sets_prefetch && of.zero == 3 {
                all.push(("memory.prefetch", whole((mib / CHUNK_MIB).ceil().max(1.0) as usize)));
            }
        }
        all
    }
}

fn numbers(values: Vec<String>) -> Vec<usize> {
    values.iter().filter_map(|value| value.parse().ok()).collect()
}

fn texts(values: &[usize]) -> Vec<String> {
    values.iter().map(ToString::to_string).collect()
}

/// The schedule of one pipeline rank, and those of several.
fn schedules(config: &RunConfig, limits: &Limits, blocks: usize) -> Vec<Scheduled> {
    let parallel = &config.parallel;
    let own = Scheduled::new(&parallel.schedule, parallel.chunks);
    let names = ["1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"].map(String::from).to_vec();
    let names = limits.values("parallel.schedule", parallel.schedule.clone(), names);
    let chunks = [2, 3, 4, 6, 8].into_iter().filter(|chunks| 2 * chunks <= blocks).collect::<Vec<usize>>();
    let chunks = numbers(limits.values("parallel.chunks", parallel.chunks.to_string(), texts(&chunks)));
    let mut schedules = vec![own];
    for name in names {
        match name.as_str() {
            "interleaved" => {
                schedules.extend(chunks.iter().map(|chunks| Scheduled::new("interleaved", *chunks)))
            }
            name => schedules.push(Scheduled::new(name, parallel.chunks)),
        }
    }
    schedules
}

/// The placements of states.
fn placements(config: &RunConfig, limits: &Limits, has_own_memory: bool) -> Vec<Placed> {
    let memory = &config.memory;
    let own_placed = Placed::of(config);
    let free = has_own_memory && memory.placement.is_none() && memory.nvme_path.is_none();
    let placed = Placed::ALL.into_iter().filter(|placed| {
        let own = own_placed.tiers();
        let allowed = placed.tiers().iter().zip(own).all(|((key, tier), (_, own))| {
            limits
                .values(key, own.to_string(), vec!["device".into(), "host".into()])
                .iter()
                .any(|value| value == tier)
        });
        if free { allowed } else { *placed == own_placed }
    });
    placed.collect()
}

/// For each type in which gradients may be sent: true if it is that of computing, and not what the configuration says.
fn wires(config: &RunConfig, limits: &Limits) -> Vec<bool> {
    let has_half = config.precision.compute != Float::F32 && config.precision.accumulate == Float::F32;
    let half = config.precision.compute;
    let name = |float: Float| phalanx_plan::trace::DType::from(float).name().to_string();
    let own_communicate = name(config.precision.communicate.unwrap_or(config.precision.accumulate));
    let tried =
        if has_half { vec![own_communicate.clone(), name(half)] } else { vec![own_communicate.clone()] };
    let communicate = limits.values("precision.communicate", own_communicate.clone(), tried);
    let mut sends_half: Vec<bool> = communicate.iter().map(|word| *word != own_communicate).collect();
    sends_half.dedup();
    sends_half
}
