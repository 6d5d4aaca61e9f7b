//! Results of the synchronous engine for the golden run on one rank, for tests of other strategies.

use phalanx_checkpoint::HuggingFaceDir;
use phalanx_cpu::Cpu;
use phalanx_models::Gpt2;
use phalanx_parallel::zero::Selection;
use phalanx_tensor::{Arena, Device};
use phalanx_train::rank::{Batch, Rank};
use phalanx_train::{Groups, RunConfig};

use crate::rig::{State, golden, spec};

/// The golden weights.
pub fn weights() -> HuggingFaceDir {
    HuggingFaceDir::open(&golden().join("gpt2")).unwrap()
}

/// Sequences as tokens and targets.
pub fn fill(batch: &mut Batch, sequences: &[Vec<u32>]) {
    for (row, sequence) in sequences.iter().enumerate() {
        let seq = sequence.len() - 1;
        batch.tokens[row * seq..(row + 1) * seq].copy_from_slice(&sequence[..seq]);
        batch.targets[row * seq..(row + 1) * seq].copy_from_slice(&sequence[1..]);
    }
}

/// The results of a synchronous run.
pub struct Synchronous {
    pub losses: Vec<f32>,
    pub grad_norms: Vec<f32>,
    /// For each "state/parameter": all elements.
    pub state: State,
}

/// Every step on one rank, from the golden weights.
pub fn synchronous(model: &Gpt2, config: &RunConfig, steps: &[Vec<Vec<u32>>]) -> Synchronous {
    let spec = spec(model, config);
    let device = Device::new(Cpu::new(1), Arena::heap());
    let mut rank = Rank::new(device, Groups::alone(&spec), &spec).unwrap();
    rank.import(&weights()).unwrap();
    run_synchronous(&mut rank, 0, steps)
}

/// Steps after `done`.
pub fn run_synchronous(rank: &mut Rank, done: u64, steps: &[Vec<Vec<u32>>]) -> Synchronous {
    let (mut losses, mut grad_norms) = (Vec::new(), Vec::new());
    for (number, sequences) in steps.iter().enumerate() {
        let mut batch = Batch::with_rows(sequences.len(), sequences[0].len() - 1);
        fill(&mut batch, sequences);
        let outcome = rank.step(done + number as u64 + 1, &batch, false).unwrap();
        losses.push(outcome.loss);
        grad_norms.push(outcome.grad_norm);
    }
    rank.save(|_, _| Ok(())).unwrap();
    Synchronous { losses, grad_norms, state: state_of(rank) }
}

/// Returns the parameters and optimizer states of a rank of one stage.
pub fn state_of(rank: &Rank) -> State {
    let mut state = State::new();
    let [stage] = rank.stages() else { panic!("one stage") };
    for (number, name) in rank.chunks().state_names(0).into_iter().enumerate() {
        for piece in rank.chunks().spans(0, number, Selection::Owned) {
            let mut out = vec![0f32; (piece.elements.end - piece.elements.start) as usize];
            rank.chunks().read_span(number, &piece, 0..out.len(), &mut out).unwrap();
            state.insert(format!("{name}/{}", stage.network.parameters[piece.parameter].name), out);
        }
    }
    state
}
