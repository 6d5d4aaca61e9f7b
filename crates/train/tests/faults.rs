//! Numbers that are not finite, written on one rank into an activation, a gradient or a parameter: with f16
//! all ranks skip the step together and keep every bit; where there is no loss scale to lower, all ranks stop
//! before the update and name the tensor, its block and the rank.

use crate::rig;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::rig::{Pieces, pairs, same_bits};
use phalanx_checkpoint::HuggingFaceDir;
use phalanx_layers::{
    Activation, AnyLayer, AnyOwn, AnySaved, Call, Context, Failure, Layer, Network, ParameterSpec,
};
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::Tensor;
use phalanx_train::config::{Float, PrecisionConfig};
use phalanx_train::state::{Kept, PARAMETERS};
use phalanx_train::{Groups, Rank, RunConfig, RunError, RunPlan, Spec};

/// Tensor into which a value that is not finite is written.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    /// The first element of the block's output.
    Output,
    /// The first element of the gradient of the block's n-th parameter.
    Gradient(usize),
    /// The first element of the gradient of the block's input.
    InputGradient,
}

/// A planted fault.
#[derive(Clone, Copy, Debug)]
struct Fault {
    /// Block of the network.
    block: usize,
    at: At,
    value: f32,
    /// The faulty rank; all ranks when `None`.
    rank: Option<usize>,
    /// The description of the tensor in the message.
    name: &'static str,
}

/// Parameter 8 of a block of GPT-2 is the weight of `mlp.c_fc`.
const FAULTS: [Fault; 4] = [
    Fault { block: 1, at: At::Output, value: f32::NAN, rank: Some(0), name: "output of block h.0" },
    Fault {
        block: 0,
        at: At::Output,
        value: f32::INFINITY,
        rank: Some(1),
        name: "output of block embedding",
    },
    Fault {
        block: 2,
        at: At::Gradient(8),
        value: f32::NEG_INFINITY,
        rank: Some(2),
        name: "gradient of transformer.h.1.mlp.c_fc.weight (block h.1",
    },
    Fault {
        block: 2,
        at: At::InputGradient,
        value: f32::NAN,
        rank: Some(1),
        name: "gradient of the input of block h.1",
    },
];

/// A layer that writes the fault while it is armed.
struct Faulty {
    layer: Box<dyn AnyLayer>,
    fault: Fault,
    armed: Arc<AtomicBool>,
}

impl Faulty {
    fn poison(&self, at: At, cx: &Context, x: &mut Activation) {
        if self.fault.at == at && self.armed.load(Ordering::Relaxed) {
            let x: &mut Tensor = Arc::get_mut(x).expect("nobody else holds what a block has just made");
            cx.device.fill(x.view_mut().range(0..1), self.fault.value);
        }
    }
}

impl Layer for Faulty {
    type Own = AnyOwn;

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.layer.parameters()
    }

    fn forward(&self, cx: &Context, call: Call) -> Result<(Activation, AnySaved), Failure> {
        let (mut y, saved) = self.layer.forward(cx, call)?;
        self.poison(At::Output, cx, &mut y);
        Ok((y, saved))
    }

    fn backward(&self, cx: &Context, saved: AnySaved, call: Call) -> Result<Option<Activation>, Failure> {
        let parameters = call.parameters;
        let mut dx = self.layer.backward(cx, saved, call)?;
        if let (At::Gradient(index), true) = (self.fault.at, self.armed.load(Ordering::Relaxed)) {
            let mut gradient = parameters.gradient(index).expect("all parameters are trained");
            let (gradient, _) = gradient.write();
            cx.device.fill(gradient.range(0..1), self.fault.value);
        }
        if let Some(dx) = &mut dx {
            self.poison(At::InputGradient, cx, dx);
        }
        Ok(dx)
    }
}

/// The model's network, with the fault in one block on the faulty rank while `armed`.
fn network(spec: &Spec, fault: Fault, groups: &Groups, armed: &Arc<AtomicBool>) -> Network {
    let rank = groups.world.rank();
    let mut network = spec.network(&groups.tensor);
    if fault.rank.is_none_or(|faulty| faulty == rank) {
        let block = network.blocks.remove(fault.block);
        let layer = Box::new(Faulty { layer: block.layer, fault, armed: Arc::clone(armed) });
        network.blocks.insert(fault.block, phalanx_layers::Block { layer, ..block });
    }
    network
}

fn config(world: usize, stage: u8, precision: fn(&mut PrecisionConfig)) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    (config.parallel.data, config.parallel.zero) = (Some(world), stage);
    config.batch.global = 2 * world;
    config.batch.micro = stage.is_multiple_of(2).then_some(1);
    precision(&mut config.precision);
    config
}

fn bf16(p: &mut PrecisionConfig) {
    p.compute = Float::Bf16;
}

/// Scales 4, 2, 1, then stuck.
fn f16(p: &mut PrecisionConfig) {
    (p.compute, p.initial_scale_power, p.hysteresis) = (Float::F16, 2, 1);
}

/// Steps with a fault in step 2 and later in `armed`; each rank's last outcome and what it held before.
struct Ended {
    /// For each step: the text of the error, or whether it was skipped.
    steps: Vec<Result<bool, String>>,
    /// Before the first step, and after each.
    held: Vec<Pieces>,
}

/// Runs until an error or the end of `armed`, which tells for each step whether the fault happens.
fn run(config: &RunConfig, fault: Fault, armed: &[bool]) -> Vec<Ended> {
    let (model, _) = rig::golden_config();
    let steps = rig::golden_steps();
    let switch = Arc::new(AtomicBool::new(false));
    let make = |spec: &Spec, groups: &Groups| network(spec, fault, groups, &switch);
    let body = |engine: &mut Rank, _: usize| {
        engine.import(&HuggingFaceDir::open(&rig::golden().join("gpt2")).unwrap()).unwrap();
        let mut ended = Ended { steps: Vec::new(), held: vec![rig::pieces(engine)] };
        for (i, armed) in armed.iter().enumerate() {
            // No rank is inside a step: the last one ended with a collective of all ranks.
            engine.group().barrier().wait().unwrap();
            switch.store(*armed, Ordering::Relaxed);
            engine.group().barrier().wait().unwrap();
            let batch = rig::batch(engine, config, &steps[i]);
            let done = engine.step(i as u64 + 1, &batch, false);
            engine.save(|_, _| Ok(())).unwrap();
            ended.held.push(rig::pieces(engine));
            match done {
                Ok(outcome) => ended.steps.push(Ok(outcome.skipped)),
                Err(error) => {
                    assert!(matches!(error, RunError::NonFinite(_)), "{error}");
                    ended.steps.push(Err(error.to_string()));
                    break;
                }
            }
        }
        ended
    };
    rig::on_ranks(&model, config, &make, &body).1
}

/// Returns whether a rank holds the same as before step `step`, counted from 0.
fn kept(ended: &Ended, step: usize) -> bool {
    let (before, after) = (&ended.held[step], &ended.held[step + 1]);
    pairs(before, after).all(|(a, b)| (a.0, &a.1, a.2) == (b.0, &b.1, b.2) && same_bits(&a.3, &b.3))
}

/// All ranks ended with the same error in the last step, before it changed anything; gives its text.
#[track_caller]
fn stopped(what: &str, ended: &[Ended]) -> String {
    let last = ended[0].steps.len() - 1;
    let text = ended[0].steps[last].clone().expect_err(what);
    for rank in ended {
        assert_eq!(rank.steps[last].as_ref(), Err(&text), "{what}");
        assert!(kept(rank, last), "{what}: a step that stops the run changes nothing");
    }
    text
}

#[test]
fn without_a_loss_scale_all_ranks_stop_and_name_the_tensor() {
    for (precision, bits) in [((|_| {}) as fn(&mut PrecisionConfig), "f32"), (bf16, "bf16")] {
        for stage in 0..=3 {
            for fault in FAULTS {
                let what = format!("{bits}, stage {stage}, {fault:?}");
                let ended = run(&config(3, stage, precision), fault, &[false, true, true]);
                let text = stopped(&what, &ended);
                assert_eq!(ended[0].steps.len(), 2, "{what}: it stops at once");
                assert!(!kept(&ended[0], 0), "{what}: the first step is applied");
                let rank = fault.rank.unwrap();
                let micro = if stage.is_multiple_of(2) { "micro-batch 1 of 2) on" } else { " on" };
                let words = [fault.name, &format!("{micro} rank {rank} is not finite (1 of ")];
                assert!(text.starts_with(&format!("step 2: {}", fault.name)), "{what}: {text}");
                assert!(words.iter().all(|words| text.contains(words)), "{what}: {text}");
                assert!(text.contains("optimizer.lr") && text.contains("lr 3e-3"), "{what}: {text}");
            }
        }
    }
}

#[test]
fn with_a_loss_scale_all_ranks_skip_together_and_go_on() {
    for stage in 0..=3 {
        for fault in FAULTS {
            let what = format!("stage {stage}, {fault:?}");
            let ended = run(&config(3, stage, f16), fault, &[false, true, false]);
            for rank in &ended {
                assert_eq!(rank.steps, [Ok(false), Ok(true), Ok(false)], "{what}");
                assert_eq!([0, 1, 2].map(|step| kept(rank, step)), [false, true, false], "{what}");
            }
        }
    }
}

#[test]
fn a_loss_scale_that_cannot_fall_stops_all_ranks() {
    for stage in 0..=3 {
        let fault = FAULTS[stage as usize];
        let ended = run(&config(3, stage, f16), fault, &[true; 9]);
        let text = stopped("f16", &ended);
        let before = &ended[0].steps[..ended[0].steps.len() - 1];
        assert_eq!(before, [Ok(true), Ok(true)], "scales 4 and 2 are tried");
        for words in [fault.name, "loss scale 1,", "precision.min_loss_scale", "step 3"] {
            assert!(text.contains(words), "no {words:?} in: {text}");
        }
    }
}

#[test]
fn one_rank_alone_names_itself() {
    for precision in [|_: &mut PrecisionConfig| {}, bf16] {
        let fault = Fault { rank: Some(0), ..FAULTS[2] };
        let text = stopped("1 rank", &run(&config(1, 0, precision), fault, &[true]));
        assert!(text.contains(fault.name) && text.contains("on rank 0"), "{text}");
    }
}

/// Each rank's gradient fits in f16, and their sum does not.
#[test]
fn a_sum_over_ranks_that_overflows_is_told_apart() {
    for stage in 0..=3 {
        let sent_in_f16 = |p: &mut PrecisionConfig| p.communicate = Some(Float::F16);
        let fault = Fault { value: 6e4, rank: None, ..FAULTS[2] };
        let text = stopped("f16 sum", &run(&config(2, stage, sent_in_f16), fault, &[true]));
        for words in [
            "sum over ranks of the gradient of transformer.h.1.mlp.c_fc.weight",
            "precision.communicate",
            "(1 of",
        ] {
            assert!(text.contains(words), "stage {stage}: no {words:?} in: {text}");
        }
    }
}

/// Stage 3 shards parameters: the owner of the element sends it to all ranks, and the lowest rank is named.
#[test]
fn a_parameter_is_named_where_it_is_first_used() {
    const NAME: &str = "transformer.h.0.ln_2.weight";
    let (model, _) = rig::golden_config();
    let steps = rig::golden_steps();
    for (precision, bits) in [((|_| {}) as fn(&mut PrecisionConfig), "f32"), (bf16, "bf16"), (f16, "f16")] {
        for stage in 0..=3 {
            let config = config(3, stage, precision);
            let body = |engine: &mut Rank, rank: usize| {
                let dir = HuggingFaceDir::open(&rig::golden().join("gpt2")).unwrap();
                let poisoned = rank == 1 || stage == 3;
                let read =
                    |kept: &Kept, spec: &ParameterSpec, elements: std::ops::Range<u64>, out: &mut [f32]| {
                        let state = kept.state;
                        out.fill(0.0);
                        if state == PARAMETERS {
                            dir.read_f32(&spec.name, elements.clone(), out)?;
                        }
                        if state == PARAMETERS && spec.name == NAME && poisoned && elements.contains(&7) {
                            out[7 - elements.start as usize] = f32::NAN;
                        }
                        Ok(())
                    };
                engine.load(read).unwrap();
                let mut number = 0;
                loop {
                    number += 1;
                    let batch = rig::batch(engine, &config, &steps[0]);
                    if let Err(error) = engine.step(number, &batch, false) {
                        break error.to_string();
                    }
                }
            };
            let (_, texts) =
                rig::on_ranks(&model, &config, &|spec, groups| spec.network(&groups.tensor), &body);
            let rank = if stage == 3 { 0 } else { 1 };
            let words = format!("parameter {NAME} (block h.0");
            for text in texts {
                let right = text.contains(&words) && text.contains(&format!("on rank {rank} "));
                assert!(right && text.contains("(1 of 32 elements)"), "{bits}, stage {stage}: {text}");
            }
        }
    }
}

/// Its tensors are those of a step without the update; how they are packed may differ.
#[test]
fn a_diagnosis_needs_no_more_than_a_step() {
    let (model, _) = rig::golden_config();
    for world in [1, 2, 3] {
        for stage in 0..=3 {
            for rank in RunPlan::new(rig::spec(&model, &config(world, stage, |_| {}))).unwrap().ranks {
                let peak = |phase| rank.memory.phase(phase).unwrap().peak.bytes;
                assert!(peak(PhaseName::Diagnose) <= peak(PhaseName::Step), "{world} ranks, stage {stage}");
            }
        }
    }
}
