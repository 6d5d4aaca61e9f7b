//! The golden run: its model, its configuration, its batches, and what the synchronous engine makes of it on one
//! rank. For tests of other ways to train it.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use phalanx_checkpoint::HuggingFaceDir;
use phalanx_models::Gpt2;
use phalanx_parallel::zero::Extent;
use phalanx_tensor::{Arena, Cpu, Device};
use phalanx_train::rank::{Batch, Rank};
use phalanx_train::{Groups, RunConfig, Spec};

/// The folder of golden values.
pub fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden")
}

/// The golden weights.
pub fn weights() -> HuggingFaceDir {
    HuggingFaceDir::open(&golden().join("gpt2")).unwrap()
}

/// The golden model and a configuration that fits it: 8 sequences a step, AdamW as the goldens have it.
pub fn golden_config() -> (Gpt2, RunConfig) {
    let model = Gpt2::from_config(weights().config()).unwrap();
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

/// What a configuration makes of a model.
pub fn spec(model: &Gpt2, config: &RunConfig) -> Spec {
    config.check().unwrap();
    Spec::new(config, model.clone(), config.batch.global, config.train.threads.unwrap()).unwrap()
}

/// `[steps][8]` sequences of `seq + 1` tokens.
pub fn golden_steps() -> Vec<Vec<Vec<u32>>> {
    let bytes = std::fs::read(golden().join("adamw.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tokens = tensors.tensor("tokens").unwrap();
    let tokens: Vec<u32> =
        tokens.data().chunks(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    tokens.chunks(8 * 17).map(|step| step.chunks(17).map(<[u32]>::to_vec).collect()).collect()
}

/// Sequences as tokens and targets.
pub fn fill(batch: &mut Batch, sequences: &[Vec<u32>]) {
    for (row, sequence) in sequences.iter().enumerate() {
        let seq = sequence.len() - 1;
        batch.tokens[row * seq..(row + 1) * seq].copy_from_slice(&sequence[..seq]);
        batch.targets[row * seq..(row + 1) * seq].copy_from_slice(&sequence[1..]);
    }
}

/// What a synchronous run leaves.
pub struct Synchronous {
    pub losses: Vec<f32>,
    pub grad_norms: Vec<f32>,
    /// By "state/parameter".
    pub state: State,
}

/// By "state/parameter": all elements.
pub type State = BTreeMap<String, Vec<f32>>;

/// Every step on one rank, from the golden weights.
pub fn synchronous(model: &Gpt2, config: &RunConfig, steps: &[Vec<Vec<u32>>]) -> Synchronous {
    let spec = spec(model, config);
    let device = Device::new(Cpu::new(1), Arena::heap());
    let mut rank = Rank::new(device, Groups::alone(&spec), &spec, &BTreeMap::new());
    rank.import(&weights()).unwrap();
    run_synchronous(&mut rank, &spec, 0, steps)
}

/// Steps after `done`.
pub fn run_synchronous(rank: &mut Rank, spec: &Spec, done: u64, steps: &[Vec<Vec<u32>>]) -> Synchronous {
    let (mut losses, mut grad_norms) = (Vec::new(), Vec::new());
    for (number, sequences) in steps.iter().enumerate() {
        let mut batch = Batch::with_rows(sequences.len(), sequences[0].len() - 1);
        fill(&mut batch, sequences);
        let outcome = rank.step(done + number as u64 + 1, &batch, false).unwrap();
        losses.push(outcome.loss);
        grad_norms.push(outcome.grad_norm);
    }
    rank.save(|_, _| Ok(())).unwrap();
    let mut state = State::new();
    let [stage] = rank.stages() else { panic!("one stage") };
    let names = ["parameters"].into_iter().chain(spec.rule.states().iter().copied());
    for (number, name) in names.enumerate() {
        for piece in stage.zero.pieces(number, Extent::Owned) {
            let mut out = vec![0f32; (piece.in_parameter.end - piece.in_parameter.start) as usize];
            stage.zero.read(number, &piece, 0..out.len(), &mut out);
            state.insert(format!("{name}/{}", stage.network.parameters[piece.parameter].name), out);
        }
    }
    Synchronous { losses, grad_norms, state }
}

/// Bit equality: NaN is NaN, 0 is not -0.
pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Stops the test at the first tensor of which a bit differs.
#[track_caller]
pub fn assert_same_state(what: &str, a: &State, b: &State) {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>(), "{what}");
    for (tensor, values) in a {
        assert!(same_bits(values, &b[tensor]), "{what}: {tensor} differs");
    }
}
