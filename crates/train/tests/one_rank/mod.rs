//! Compares meshes with one rank: for the example `meshes`, which runs all meshes, and the test of the same name, which
//! runs a selection.
#![allow(dead_code, reason = "the example and the test each use their own part")]

use std::sync::Arc;

use phalanx_models::{Bert, Gpt2, Model};
use phalanx_train::RunConfig;
use phalanx_train::config::{OptimizerKind, ScheduleKind};

use crate::rig::{self, Ran, State, Steps, pairs, relative_difference, same_bits};

const SEQ: usize = 8;
const VOCAB: usize = 67;
/// Every generated schedule.
pub const SCHEDULES: [&str; 7] = ["model", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"];

/// Sizes of a tiny model and its batch that a mesh divides evenly.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub layers: usize,
    pub heads: usize,
    pub micro_batch_size: usize,
    pub micro_batches: usize,
    pub global: usize,
}

impl Sizes {
    pub fn of([pipeline, data, tensor]: [usize; 3]) -> Sizes {
        let (micro_batches, even) = (pipeline.max(2), 8usize.is_multiple_of(tensor));
        let (heads, micro_batch_size) = if even { (8, 2) } else { (tensor, tensor) };
        // Two stages per rank for schedules that have them; embedding, norm and head are blocks, too.
        Sizes {
            layers: (2 * pipeline).max(6) - 3,
            heads,
            micro_batch_size,
            micro_batches,
            global: data * micro_batches * micro_batch_size,
        }
    }

    pub fn hidden(self) -> usize {
        4 * self.heads
    }
}

pub fn model(family: &str, sizes: Sizes) -> Arc<dyn Model> {
    let Sizes { layers, heads, .. } = sizes;
    let hidden = sizes.hidden();
    match family {
        "gpt2" => Gpt2 { layers, hidden, heads, vocab: VOCAB, positions: SEQ, ..Gpt2::default() }.into(),
        "bert" => {
            let (intermediate, vocab, positions) = (4 * hidden, VOCAB, SEQ);
            Bert { layers, hidden, heads, intermediate, vocab, positions, ..Bert::default() }.into()
        }
        other => panic!("no family {other}"),
    }
}

pub fn config(family: &str, [pipeline, data, tensor]: [usize; 3], sizes: Sizes) -> RunConfig {
    let mut config = RunConfig::default();
    config.model.arch = phalanx_models::Arch::named(family).expect("a known architecture");
    config.model.seq = SEQ;
    config.batch.global = sizes.global;
    config.batch.micro = Some(sizes.micro_batch_size);
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
    // Momentum is linear in the gradients, so their differences bound those of the parameters.
    (config.optimizer.kind, config.optimizer.lr, config.optimizer.clip) = (OptimizerKind::Sgd, 0.05, 0.5);
    config.schedule.kind = ScheduleKind::Constant;
    config.train.threads = Some(1);
    config
}

/// Token ids that repeat every few tokens, so that the loss falls.
pub fn steps(count: usize, global: usize) -> Steps {
    let id = |step: usize, row: usize, t: usize| ((step * 7 + row * 13 + t * (3 + row % 5)) % VOCAB) as u32;
    let sequence = |step, row| (0..=SEQ).map(|t| id(step, row, t)).collect();
    (0..count).map(|step| (0..global).map(|row| sequence(step, row)).collect()).collect()
}

/// Largest difference of two states, relative to the largest element of each tensor.
fn apart(a: &State, b: &State) -> f32 {
    assert!(a.keys().eq(b.keys()) && !a.is_empty(), "{:?} and {:?}", a.keys(), b.keys());
    let of = |(name, values): (&String, &Vec<f32>)| {
        let largest = values.iter().fold(f32::MIN_POSITIVE, |m, x| m.max(x.abs()));
        let differences = pairs(values, &b[name]).map(|(x, y)| (x - y).abs() / largest);
        differences.fold(0.0, |m, d| if d.is_nan() { f32::INFINITY } else { m.max(d) })
    };
    a.iter().map(of).fold(0.0, f32::max)
}

fn parameters(ran: &Ran) -> State {
    compared(&ran.state)
        .iter()
        .filter(|(name, _)| name.starts_with("parameters/"))
        .map(|(n, v)| (n.clone(), v.clone()))
        .collect()
}

/// State that is compared relative to the largest element of each tensor: query, key and value are one tensor. The bias of keys
/// adds the same number to all scores of a softmax, so its own gradient is zero but for rounding.
fn compared(state: &State) -> State {
    let mut all = State::new();
    for (name, values) in state {
        let joint = ["query", "key", "value"]
            .iter()
            .fold(name.clone(), |name, part| name.replace(&format!(".self.{part}."), ".self.qkv."));
        all.entry(joint).or_default().extend(values);
    }
    all
}

/// Tolerance for sums in another order, relative to the largest element of a tensor: half a unit of the last place for
/// every addition on the longest way to a gradient. Each of the blocks forward and backward adds at most two times (4
/// hidden + 2 heads-wide sums + 2 norms): 12 hidden; the head hidden and the vocabulary; a gradient the tokens of a
/// step. Twenty steps of momentum 0.9 carry ten times a step's difference into the parameters' own.
pub fn tolerance(sizes: Sizes) -> f32 {
    let hidden = sizes.hidden();
    let additions = sizes.layers * 2 * 12 * hidden + 2 * hidden + VOCAB + sizes.global * SEQ;
    additions as f32 * 2f32.powi(-24)
}

/// Largest differences of the runs of one mesh from one rank, whether the runs agree bit for bit, and whether their
/// peaks are the planned ones.
pub struct MeshResult {
    pub runs: usize,
    pub loss: f32,
    pub gradient: f32,
    pub parameter: f32,
    pub bits: bool,
    pub peaks: bool,
}

impl MeshResult {
    /// Returns whether differences are within `limit`, bits agree, and peaks are as planned.
    pub fn holds(&self, limit: f32) -> bool {
        let within = [self.loss, self.gradient, self.parameter].iter().all(|off| *off <= limit);
        self.runs > 0 && within && self.bits && self.peaks
    }
}

/// Runs a mesh with some schedules and ZeRO stages for some steps.
pub fn hold(
    family: &str,
    mesh: [usize; 3],
    sequence: bool,
    (schedules, stages): (&[&str], &[u8]),
    count: usize,
) -> MeshResult {
    let sizes = Sizes::of(mesh);
    let model = model(family, sizes);
    let steps = steps(count, sizes.global);
    let one = rig::run_fresh(&model, &config(family, [1, 1, 1], sizes), &steps);
    let mut row = MeshResult { runs: 0, loss: 0.0, gradient: 0.0, parameter: 0.0, bits: true, peaks: true };
    let mut first: Option<Ran> = None;
    for schedule in schedules {
        for zero in stages {
            let mut config = config(family, mesh, sizes);
            (config.parallel.zero, config.parallel.schedule) = (*zero, schedule.to_string());
            config.parallel.sequence_parallel = sequence;
            let ran = rig::run_fresh(&model, &config, &steps);
            row.loss = row.loss.max(relative_difference(&ran.losses, &one.losses));
            row.gradient = row.gradient.max(apart(&compared(&one.gradients), &compared(&ran.gradients)));
            row.parameter = row.parameter.max(apart(&parameters(&one), &parameters(&ran)));
            row.peaks &= ran.step_peaks == ran.step_planned;
            row.runs += 1;
            let first = first.get_or_insert_with(|| ran.clone());
            let same = |a: &State, b: &State| {
                a.keys().eq(b.keys()) && a.iter().all(|(name, values)| same_bits(values, &b[name]))
            };
            row.bits &= same_bits(&first.losses, &ran.losses) && same(&first.state, &ran.state);
        }
        // On one rank, all schedules have the same order of operations.
        if mesh[0] == 1 {
            break;
        }
    }
    row
}
