//! Runs a configuration on ranks that are threads of the test, each with an arena that replays its plan,
//! and gives back losses and the whole state.
#![allow(dead_code, reason = "each test file uses its own part of the rig")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use phalanx_checkpoint::{Checkpoint, HuggingFaceDir};
use phalanx_collectives::{Endpoint, Group, Solo, threads};
use phalanx_models::Gpt2;
use phalanx_parallel::zero::Extent;
use phalanx_plan::Peak;
use phalanx_tensor::{Arena, Cpu, Device, Region};
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

/// What a run of some steps leaves.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub losses: Vec<f32>,
    pub grad_norms: Vec<f32>,
    /// By "state/parameter": all elements, put together from the ranks.
    pub state: BTreeMap<String, Vec<f32>>,
    /// By rank: measured.
    pub peaks: Vec<Peak>,
    /// By rank: planned.
    pub planned: Vec<Peak>,
}

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
pub fn run(model: &Gpt2, config: &RunConfig, steps: &[Vec<Vec<u32>>]) -> Outcome {
    run_between(model, config, steps, &Checkpoints::default())
}

/// As [`run`], from and to a checkpoint.
pub fn run_between(
    model: &Gpt2,
    config: &RunConfig,
    steps: &[Vec<Vec<u32>>],
    checkpoints: &Checkpoints,
) -> Outcome {
    config.check().unwrap();
    let spec = Spec::new(config, model.clone(), config.batch.global, config.train.threads.unwrap()).unwrap();
    let plan = RunPlan::new(spec).unwrap();
    let world = plan.spec.world;
    let mut groups: Vec<Arc<dyn Group>> = match world {
        1 => vec![Arc::new(Solo::new("data"))],
        _ => threads(world).into_iter().map(|e: Endpoint| e.group("data")).collect(),
    };
    let plan = &plan;
    let parts = std::thread::scope(|scope| {
        let spawned: Vec<_> = groups
            .drain(..)
            .enumerate()
            .map(|(rank, group)| scope.spawn(move || one_rank(plan, rank, group, steps, checkpoints)))
            .collect();
        spawned.into_iter().map(|t| t.join().unwrap()).collect::<Vec<_>>()
    });
    merge(plan, parts)
}

struct Part {
    losses: Vec<f32>,
    grad_norms: Vec<f32>,
    pieces: Vec<(String, u64, Vec<f32>)>,
    peak: Peak,
}

fn one_rank(
    plan: &RunPlan,
    rank: usize,
    group: Arc<dyn Group>,
    steps: &[Vec<Vec<u32>>],
    checkpoints: &Checkpoints,
) -> Part {
    let spec = &plan.spec;
    let memory = plan.ranks[rank].memory.clone();
    let region = Region::anonymous(memory.arena_bytes as usize).unwrap();
    let device = Device::new(Cpu::new(spec.threads), Arena::replaying(memory, region));
    let mut engine = Rank::new(device, group, spec, &plan.orders);
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
    let mut batch = Batch::with_rows(spec.micro * spec.micro_batches, spec.seq);
    let (mut losses, mut grad_norms) = (Vec::new(), Vec::new());
    for (number, sequences) in steps.iter().enumerate() {
        for m in 0..spec.micro_batches {
            for row in 0..spec.micro {
                let sequence = &sequences[(m * spec.world + rank) * spec.micro + row];
                let at = (m * spec.micro + row) * spec.seq;
                batch.tokens[at..at + spec.seq].copy_from_slice(&sequence[..spec.seq]);
                batch.targets[at..at + spec.seq].copy_from_slice(&sequence[1..]);
            }
        }
        let outcome = engine.step(done + number as u64 + 1, &batch, false).unwrap();
        losses.push(outcome.loss);
        grad_norms.push(outcome.grad_norm);
    }
    let mut windows = Batch::with_rows(spec.micro * spec.evaluation_batches, spec.seq);
    windows.tokens.fill(1);
    losses.push(engine.evaluate(&windows).unwrap());
    let mut pieces = Vec::new();
    match &checkpoints.save {
        None => engine.save(|_, _| Ok(())).unwrap(),
        Some(dir) => {
            let step = done + steps.len() as u64;
            engine.save_checkpoint(dir, step, &serde_json::json!({ "step": step })).map(drop).unwrap()
        }
    }
    let names = |state: usize| if state == 0 { "parameters" } else { spec.rule.states()[state - 1] };
    let network = spec.model.network();
    for state in 0..engine.zero().state_count() {
        for piece in engine.zero().pieces(state, Extent::Owned) {
            let mut out = vec![0f32; (piece.in_parameter.end - piece.in_parameter.start) as usize];
            engine.zero().read(state, &piece, 0..out.len(), &mut out);
            let name = format!("{}/{}", names(state), network.parameters[piece.parameter].name);
            pieces.push((name, piece.in_parameter.start, out));
        }
    }
    Part { losses, grad_norms, pieces, peak: engine.device().arena().peak().unwrap() }
}

fn merge(plan: &RunPlan, parts: Vec<Part>) -> Outcome {
    let mut state: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    let network = plan.spec.model.network();
    let sizes: BTreeMap<_, _> = network.parameters.iter().map(|p| (p.name.clone(), p.elements())).collect();
    for (name, start, values) in parts.iter().flat_map(|p| &p.pieces) {
        let size = sizes[name.split_once('/').unwrap().1];
        let whole = state.entry(name.clone()).or_insert_with(|| vec![f32::NAN; size]);
        whole[*start as usize..*start as usize + values.len()].copy_from_slice(values);
    }
    for part in &parts {
        assert_eq!(part.losses, parts[0].losses, "all ranks report the same losses");
    }
    Outcome {
        losses: parts[0].losses.clone(),
        grad_norms: parts[0].grad_norms.clone(),
        state,
        peaks: parts.iter().map(|p| p.peak).collect(),
        planned: plan.ranks.iter().map(|r| r.memory.peak).collect(),
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
