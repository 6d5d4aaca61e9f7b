//! Runs a configuration on ranks that are threads of the test, each with an arena that replays its plan,
//! and gives back losses and the whole state.
#![allow(dead_code, reason = "each test file uses its own part of the rig")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use phalanx_checkpoint::{Checkpoint, HuggingFaceDir};
use phalanx_collectives::{Endpoint, Group, Solo, threads};
use phalanx_layers::Network;
use phalanx_models::Gpt2;
use phalanx_parallel::zero::Extent;
use phalanx_plan::Peak;
use phalanx_tensor::{Arena, Cpu, Device, Region};
use phalanx_train::config::{Float, PrecisionConfig};
use phalanx_train::rank::{Batch, Rank};
use phalanx_train::{RunConfig, RunPlan, Spec};

/// The folder of golden values.
pub fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden")
}

/// The golden model and a configuration that fits it: 8 sequences a step, AdamW as the goldens have it.
pub fn golden_config() -> (Gpt2, RunConfig) {
    let dir = HuggingFaceDir::open(&golden().join("gpt2")).unwrap();
    let model = Gpt2::from_config(dir.config()).unwrap();
    let mut config = RunConfig::default();
    config.model.layers = model.layers;
    config.model.hidden = model.hidden;
    config.model.heads = model.heads;
    config.model.seq = 16;
    config.batch.global = 8;
    config.optimizer.lr = 3e-3;
    config.optimizer.clip = 0.5;
    config.schedule.kind = phalanx_train::config::ScheduleKind::Constant;
    config.train.steps = 20;
    config.train.threads = Some(1);
    (model, config)
}

/// Element types, as changes to a configuration.
pub type Policy = (&'static str, fn(&mut PrecisionConfig));

/// Every way to compute, sum and send that has its own code.
pub const POLICIES: [Policy; 6] = [
    ("bf16", |p| p.compute = Float::Bf16),
    ("f16", |p| f16(p, 24)),
    ("bf16, summed in bf16", |p| (p.compute, p.accumulate) = (Float::Bf16, Float::Bf16)),
    ("bf16, sent in bf16", |p| (p.compute, p.communicate) = (Float::Bf16, Some(Float::Bf16))),
    ("f32, sent in bf16", |p| p.communicate = Some(Float::Bf16)),
    ("f16, summed in f16, sent in bf16", |p| {
        f16(p, 20);
        (p.accumulate, p.communicate) = (Float::F16, Some(Float::Bf16));
    }),
];

/// With a first loss scale at which gradients overflow (of activations at 2^24; of parameters, which are
/// sums over tokens, at 2^20), and a window that the next steps fill.
fn f16(p: &mut PrecisionConfig, power: u32) {
    p.compute = Float::F16;
    p.initial_scale_power = power;
    p.hysteresis = 1;
    p.loss_scale_window = 2;
}

/// What a run of some steps leaves.
#[derive(Clone, Debug)]
pub struct Ran {
    pub losses: Vec<f32>,
    pub grad_norms: Vec<f32>,
    pub skipped: Vec<bool>,
    /// By "state/parameter": all elements, put together from the ranks.
    pub state: State,
    /// By rank: measured.
    pub peaks: Vec<Peak>,
    /// By rank: planned.
    pub planned: Vec<Peak>,
}

/// By "state/parameter": all elements.
pub type State = BTreeMap<String, Vec<f32>>;

/// Sequences of every step: `[steps][global]` of `seq + 1` tokens.
pub type Steps = Vec<Vec<Vec<u32>>>;

/// Checkpoints around a run.
#[derive(Clone, Default)]
pub struct Checkpoints {
    /// To start from, instead of the golden weights.
    pub restore: Option<PathBuf>,
    /// Folder for one of the last step.
    pub save: Option<PathBuf>,
}

/// Trains from the golden weights on `steps`, on as many threads-as-ranks as the configuration says.
pub fn run(model: &Gpt2, config: &RunConfig, steps: &[Vec<Vec<u32>>]) -> Ran {
    run_between(model, config, steps, &Checkpoints::default())
}

/// As [`run`], from and to a checkpoint.
pub fn run_between(
    model: &Gpt2,
    config: &RunConfig,
    steps: &[Vec<Vec<u32>>],
    checkpoints: &Checkpoints,
) -> Ran {
    let network = |spec: &Spec, _: usize| spec.network();
    let (plan, parts) =
        on_ranks(model, config, &network, &|engine, _| one_rank(engine, config, steps, checkpoints));
    for part in &parts {
        assert!(same_bits(&part.losses, &parts[0].losses), "all ranks report the same losses");
        assert!(same_bits(&part.grad_norms, &parts[0].grad_norms), "all ranks report the same norms");
        assert_eq!(part.skipped, parts[0].skipped, "all ranks skip the same steps");
    }
    Ran {
        losses: parts[0].losses.clone(),
        grad_norms: parts[0].grad_norms.clone(),
        skipped: parts[0].skipped.clone(),
        peaks: parts.iter().map(|p| p.peak).collect(),
        planned: plan.ranks.iter().map(|r| r.memory.peak).collect(),
        state: merge(&plan, parts.into_iter().map(|p| p.pieces)),
    }
}

/// Makes the engine of every rank, each a thread over an arena that replays its plan, with the layers that
/// `network` makes for its number, and runs `body` on all of them.
pub fn on_ranks<T: Send>(
    model: &Gpt2,
    config: &RunConfig,
    network: &(dyn Fn(&Spec, usize) -> Network + Sync),
    body: &(dyn Fn(&mut Rank, usize) -> T + Sync),
) -> (RunPlan, Vec<T>) {
    config.check().unwrap();
    let spec = Spec::new(config, model.clone(), config.batch.global, config.train.threads.unwrap()).unwrap();
    let plan = RunPlan::new(spec).unwrap();
    for rank in &plan.ranks {
        let peak = |phase| rank.memory.phase(phase).unwrap().peak.bytes;
        assert!(peak("diagnose") <= peak("step"), "a diagnosis needs no more than a step");
    }
    let groups: Vec<Arc<dyn Group>> = match plan.spec.world {
        1 => vec![Arc::new(Solo::new("data"))],
        world => threads(world).into_iter().map(|e: Endpoint| e.group("data")).collect(),
    };
    let one = |rank: usize, group: Arc<dyn Group>| {
        let memory = plan.ranks[rank].memory.clone();
        let region = Region::anonymous(memory.arena_bytes as usize).unwrap();
        let device = Device::new(Cpu::new(plan.spec.threads), Arena::replaying(memory, region));
        let mut engine =
            Rank::with_network(device, group, &plan.spec, network(&plan.spec, rank), &plan.orders);
        body(&mut engine, rank)
    };
    let done = std::thread::scope(|scope| {
        let one = &one;
        let spawned: Vec<_> = groups
            .into_iter()
            .enumerate()
            .map(|(rank, group)| scope.spawn(move || one(rank, group)))
            .collect();
        spawned.into_iter().map(|t| t.join().unwrap()).collect()
    });
    (plan, done)
}

struct Part {
    losses: Vec<f32>,
    grad_norms: Vec<f32>,
    skipped: Vec<bool>,
    pieces: Pieces,
    peak: Peak,
}

fn one_rank(
    engine: &mut Rank,
    config: &RunConfig,
    steps: &[Vec<Vec<u32>>],
    checkpoints: &Checkpoints,
) -> Part {
    let done = match &checkpoints.restore {
        None => {
            engine.import(&HuggingFaceDir::open(&golden().join("gpt2")).unwrap()).unwrap();
            0
        }
        Some(dir) => {
            let checkpoint = Checkpoint::open(dir).unwrap();
            engine.restore(&checkpoint).unwrap();
            checkpoint.step()
        }
    };
    let (mut losses, mut grad_norms, mut skipped) = (Vec::new(), Vec::new(), Vec::new());
    for (number, sequences) in steps.iter().enumerate() {
        let batch = batch(engine, config, sequences);
        let outcome = engine.step(done + number as u64 + 1, &batch, false).unwrap();
        losses.push(outcome.loss);
        grad_norms.push(outcome.grad_norm);
        skipped.push(outcome.skipped);
    }
    let mut windows = Batch::with_rows(config.batch.global / config.parallel.data, config.model.seq);
    windows.tokens.fill(1);
    losses.push(engine.evaluate(&windows).unwrap());
    match &checkpoints.save {
        None => engine.save(|_, _| Ok(())).unwrap(),
        Some(dir) => {
            let step = done + steps.len() as u64;
            engine.save_checkpoint(dir, step, &serde_json::json!({ "step": step })).map(drop).unwrap()
        }
    }
    let peak = engine.device().arena().peak().unwrap();
    Part { losses, grad_norms, skipped, pieces: pieces(engine), peak }
}

/// This rank's part of the sequences of a step.
pub fn batch(engine: &Rank, config: &RunConfig, sequences: &[Vec<u32>]) -> Batch {
    let (rank, world) = (engine.group().rank(), engine.group().world_size());
    let (micro, micro_batches, seq) = (config.micro(), config.micro_batches(), config.model.seq);
    let mut batch = Batch::with_rows(micro * micro_batches, seq);
    for m in 0..micro_batches {
        for row in 0..micro {
            let sequence = &sequences[(m * world + rank) * micro + row];
            let at = (m * micro + row) * seq;
            batch.tokens[at..at + seq].copy_from_slice(&sequence[..seq]);
            batch.targets[at..at + seq].copy_from_slice(&sequence[1..]);
        }
    }
    batch
}

/// What a rank owns: state and parameter, first element, elements.
pub type Pieces = Vec<(usize, usize, u64, Vec<f32>)>;

/// Everything that a rank owns. Parameters must be settled.
pub fn pieces(engine: &Rank) -> Pieces {
    let mut pieces = Vec::new();
    for state in 0..engine.zero().state_count() {
        for piece in engine.zero().pieces(state, Extent::Owned) {
            let mut out = vec![0f32; (piece.in_parameter.end - piece.in_parameter.start) as usize];
            engine.zero().read(state, &piece, 0..out.len(), &mut out);
            pieces.push((state, piece.parameter, piece.in_parameter.start, out));
        }
    }
    pieces
}

fn merge(plan: &RunPlan, parts: impl Iterator<Item = Pieces>) -> State {
    let mut merged = State::new();
    let network = plan.spec.model.network();
    let names = |state: usize| if state == 0 { "parameters" } else { plan.spec.rule.states()[state - 1] };
    for (state, parameter, start, values) in parts.flatten() {
        let parameter = &network.parameters[parameter];
        let whole = merged
            .entry(format!("{}/{}", names(state), parameter.name))
            .or_insert_with(|| vec![f32::NAN; parameter.elements()]);
        whole[start as usize..start as usize + values.len()].copy_from_slice(&values);
    }
    merged
}

/// Bit equality: NaN is NaN, 0 is not -0.
pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Stops the test at the first tensor of which a bit differs.
#[track_caller]
pub fn assert_same_state(what: &str, a: &State, b: &State) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (tensor, values) in a {
        assert!(same_bits(values, &b[tensor]), "{what}: {tensor} differs");
    }
}

/// `[steps][global]` sequences of the golden run.
pub fn golden_steps() -> Steps {
    let tokens = golden_tensor("adamw.safetensors", "tokens");
    tokens
        .chunks(8 * 17)
        .map(|step| step.chunks(17).map(|s| s.iter().map(|t| *t as u32).collect()).collect())
        .collect()
}

/// A golden tensor as f32 (ids are small integers).
pub fn golden_tensor(file: &str, name: &str) -> Vec<f32> {
    let bytes = std::fs::read(golden().join(file)).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = tensors.tensor(name).unwrap();
    let word = |b: &[u8]| [b[0], b[1], b[2], b[3]];
    match tensor.dtype() {
        safetensors::Dtype::F32 => tensor.data().chunks(4).map(|b| f32::from_le_bytes(word(b))).collect(),
        safetensors::Dtype::I32 => {
            tensor.data().chunks(4).map(|b| i32::from_le_bytes(word(b)) as f32).collect()
        }
        other => panic!("golden of type {other:?}"),
    }
}
