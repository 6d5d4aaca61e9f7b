//! Every mesh of 8 ranks or fewer against one rank: `cargo run --release -p phalanx-train --example meshes`.
//!
//! Trains a tiny GPT-2 and a tiny BERT for 20 steps with accumulation and clipping, on every (pipeline, data, tensor)
//! with every schedule, every ZeRO stage, sequence parallelism off and on, each rank a thread over an arena that
//! replays its plan. Losses, gradients of the last step and parameters are held against one rank, and all runs of one
//! mesh against each other, bit for bit. Prints the tables of docs/parallelism.md; ends with an error when
//! something does not hold. With a number, only meshes of that many ranks.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program of its own, for a terminal")]

#[path = "../tests/rig/mod.rs"]
mod rig;

use std::sync::Arc;

use phalanx_models::{Bert, Dropouts, Gpt2, Model};
use phalanx_plan::pipeline::{Plan, generate, in_flight};
use phalanx_train::RunConfig;
use phalanx_train::config::{CutBy, OptimizerKind, ScheduleKind};
use rig::{Ran, State, Steps, same_bits};

const SEQ: usize = 8;
const VOCAB: usize = 67;
const STEPS: usize = 20;
const SCHEDULES: [&str; 6] = ["model", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"];

/// What a mesh asks of a tiny model and its batch: heads, sequences and stages that divide.
#[derive(Clone, Copy)]
struct Sizes {
    layers: usize,
    heads: usize,
    micro: usize,
    micro_batches: usize,
    global: usize,
}

impl Sizes {
    fn of([pipeline, data, tensor]: [usize; 3]) -> Sizes {
        let (micro_batches, even) = (pipeline.max(2), 8usize.is_multiple_of(tensor));
        let (heads, micro) = if even { (8, 2) } else { (tensor, tensor) };
        // Two stages a rank for those schedules that have them; embedding, norm and head are blocks, too.
        Sizes {
            layers: (2 * pipeline).max(6) - 3,
            heads,
            micro,
            micro_batches,
            global: data * micro_batches * micro,
        }
    }

    fn hidden(self) -> usize {
        4 * self.heads
    }
}

fn model(family: &str, sizes: Sizes) -> Arc<dyn Model> {
    let Sizes { layers, heads, .. } = sizes;
    let (hidden, dropout) = (sizes.hidden(), Dropouts::default());
    match family {
        "gpt2" => Gpt2 { layers, hidden, heads, vocab: VOCAB, positions: SEQ, eps: 1e-5, dropout }.into(),
        "bert" => {
            let (intermediate, eps) = (4 * hidden, 1e-12);
            Bert { layers, hidden, heads, intermediate, vocab: VOCAB, positions: SEQ, eps, dropout }.into()
        }
        other => panic!("no family {other}"),
    }
}

fn config(family: &str, [pipeline, data, tensor]: [usize; 3], sizes: Sizes) -> RunConfig {
    let mut config = RunConfig::default();
    config.model.arch = family.into();
    (config.model.layers, config.model.hidden, config.model.heads) =
        (sizes.layers, sizes.hidden(), sizes.heads);
    config.model.seq = SEQ;
    config.batch.global = sizes.global;
    config.batch.micro = Some(sizes.micro);
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
    // Momentum is linear in the gradients, so their differences bound those of the parameters.
    (config.optimizer.kind, config.optimizer.lr, config.optimizer.clip) = (OptimizerKind::Sgd, 0.05, 0.5);
    config.schedule.kind = ScheduleKind::Constant;
    config.train.steps = STEPS as u64;
    config.train.threads = Some(1);
    config
}

/// Ids that repeat every few tokens, so that there is something to learn.
fn steps(global: usize) -> Steps {
    let id = |step: usize, row: usize, t: usize| ((step * 7 + row * 13 + t * (3 + row % 5)) % VOCAB) as u32;
    let sequence = |step, row| (0..=SEQ).map(|t| id(step, row, t)).collect();
    (0..STEPS).map(|step| (0..global).map(|row| sequence(step, row)).collect()).collect()
}

/// Largest difference of two states, each tensor's against its own largest element.
fn apart(a: &State, b: &State) -> f32 {
    let of = |(name, values): (&String, &Vec<f32>)| {
        let largest = values.iter().fold(f32::MIN_POSITIVE, |m, x| m.max(x.abs()));
        let differences = values.iter().zip(&b[name]).map(|(x, y)| (x - y).abs() / largest);
        differences.fold(0.0, |m, d| if d.is_nan() { f32::INFINITY } else { m.max(d) })
    };
    a.iter().map(of).fold(0.0, f32::max)
}

fn parameters(ran: &Ran) -> State {
    ran.state
        .iter()
        .filter(|(name, _)| name.starts_with("parameters/"))
        .map(|(n, v)| (n.clone(), v.clone()))
        .collect()
}

/// What sums in another order may differ by, relative to the largest element of a tensor: half a unit of the last
/// place for every addition on the longest way to a gradient. Each of the blocks forward and backward adds at most
/// two times (4 hidden + 2 heads-wide sums + 2 norms): 12 hidden; the head hidden and the vocabulary; a gradient the
/// tokens of a step. Twenty steps of momentum 0.9 carry ten times a step's difference into the parameters' own.
fn tolerance(sizes: Sizes) -> f32 {
    let hidden = sizes.hidden();
    let additions = sizes.layers * 2 * 12 * hidden + 2 * hidden + VOCAB + sizes.global * SEQ;
    additions as f32 * 2f32.powi(-24)
}

struct Row {
    runs: usize,
    loss: f32,
    gradient: f32,
    parameter: f32,
    bits: bool,
    peaks: bool,
}

fn main() {
    let only: Option<usize> = std::env::args().nth(1).map(|n| n.parse().expect("a number of ranks"));
    let mut failures = Vec::new();
    for family in ["gpt2", "bert"] {
        println!(
            "\n| {family}: pipeline x data x tensor | sequence parallel | runs | loss | gradients | parameters | tolerance | same bits | peak == plan |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
        for mesh in meshes().into_iter().filter(|m| only.is_none_or(|n| m.iter().product::<usize>() == n)) {
            for sequence in [false, true] {
                if sequence && mesh[2] == 1 {
                    continue;
                }
                let row = hold(family, mesh, sequence);
                let limit = tolerance(Sizes::of(mesh));
                let [p, d, t] = mesh;
                let word = |yes: bool| if yes { "yes" } else { "**no**" };
                println!(
                    "| {p} x {d} x {t} | {} | {} | {:.1e} | {:.1e} | {:.1e} | {limit:.1e} | {} | {} |",
                    if sequence { "on" } else { "off" },
                    row.runs,
                    row.loss,
                    row.gradient,
                    row.parameter,
                    word(row.bits),
                    word(row.peaks)
                );
                let within = row.loss <= limit && row.gradient <= limit && row.parameter <= limit;
                if !(within && row.bits && row.peaks) {
                    failures.push(format!("{family} {mesh:?} {sequence}"));
                }
            }
        }
    }
    activations();
    assert!(failures.is_empty(), "these do not hold: {failures:?}");
}

fn meshes() -> Vec<[usize; 3]> {
    let mut all = Vec::new();
    for p in 1..=8 {
        for d in 1..=8 {
            for t in 1..=8 {
                if p * d * t <= 8 {
                    all.push([p, d, t]);
                }
            }
        }
    }
    all
}

/// Runs a mesh with every schedule and stage.
fn hold(family: &str, mesh: [usize; 3], sequence: bool) -> Row {
    let sizes = Sizes::of(mesh);
    let model = model(family, sizes);
    let steps = steps(sizes.global);
    let one = rig::run_fresh(&model, &config(family, [1, 1, 1], sizes), &steps);
    let mut row = Row { runs: 0, loss: 0.0, gradient: 0.0, parameter: 0.0, bits: true, peaks: true };
    let mut first: Option<Ran> = None;
    for schedule in SCHEDULES {
        for zero in 0..=3 {
            let mut config = config(family, mesh, sizes);
            (config.parallel.zero, config.parallel.schedule) = (zero, schedule.into());
            config.parallel.sequence_parallel = sequence;
            let ran = rig::run_fresh(&model, &config, &steps);
            let loss =
                ran.losses.iter().zip(&one.losses).map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f32::max);
            row.loss = row.loss.max(loss);
            row.gradient = row.gradient.max(apart(&one.gradients, &ran.gradients));
            row.parameter = row.parameter.max(apart(&parameters(&one), &parameters(&ran)));
            row.peaks &= ran.step_peaks == ran.step_planned;
            row.runs += 1;
            let first = first.get_or_insert_with(|| ran.clone());
            let same = |a: &State, b: &State| a.iter().all(|(name, values)| same_bits(values, &b[name]));
            row.bits &= same_bits(&first.losses, &ran.losses) && same(&first.state, &ran.state);
        }
        // One rank has one order of everything.
        if mesh[0] == 1 {
            break;
        }
    }
    row
}

/// Activations of each rank of a pipeline of 4, by schedule.
fn activations() {
    println!(
        "\n| schedule, 4 ranks, 8 micro-batches | rank | micro-batches in flight (to I / to W) | activations \
         planned, bytes | measured |"
    );
    println!("|---|---|---|---|---|");
    for schedule in SCHEDULES {
        let sizes = Sizes { layers: 8, heads: 8, micro: 2, micro_batches: 8, global: 16 };
        let mut config = config("gpt2", [4, 1, 1], sizes);
        config.parallel.schedule = schedule.into();
        config.parallel.cut = CutBy::Uniform;
        let ran = rig::run_fresh(&model("gpt2", sizes), &config, &steps(sizes.global)[..2]);
        let plan: Plan = schedule.parse().expect("a name");
        let flight = in_flight(&generate(plan, 4, sizes.micro_batches).expect("a schedule"));
        let measured: Vec<u64> = ran.step_peaks.iter().map(|peak| peak.activations).collect();
        for (rank, planned) in ran.step_planned.iter().enumerate() {
            let held = &flight.ranks[rank];
            println!(
                "| {schedule} | {rank} | {} / {} | {} | {} |",
                held.to_input, held.to_weight, planned.activations, measured[rank]
            );
        }
    }
}
