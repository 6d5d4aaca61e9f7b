//! The loss is the mean over the targets that count: of the global batch in a step, of the windows in an evaluation.
//! The oracle adds in f64 what runs with a single target give, one for each target.

use crate::rig;
use std::sync::{Arc, Mutex};

use crate::rig::{Checkpoints, LEFT_OUT, Ran, Steps, assert_same_state, pairs, run_spec, same_bits};
use phalanx_cpu::CpuFactory;
use phalanx_data::DataError;
use phalanx_tensor::IGNORED;
use phalanx_train::config::{Float, Tier};
use phalanx_train::rank::{Batch, MeanLoss};
use phalanx_train::{DataSource, RunConfig, RunPlan, Spec, Training, on_threads};

/// Targets that each sequence of a step keeps, as `t % stride == 0`; 0 keeps none. No two replicas or micro-batches of
/// any layout below have as many.
const STRIDES: [usize; 8] = [0, 16, 1, 5, 0, 3, 9, 2];

/// Loss and gradient norm of the first of [`sparse_steps`], by PyTorch 2.15 in f64 on `golden/gpt2`:
/// `F.cross_entropy(logits, targets, ignore_index=-100)`, which divides by the number of targets that count.
const PYTORCH: [f64; 2] = [4.595_550_444_704_881, 2.839_072_906_314_833_7];

/// The steps of the golden run, of which only some targets count.
pub fn sparse_steps() -> Steps {
    let mut steps = rig::golden_steps();
    for (sequence, stride) in steps.iter_mut().flat_map(|step| step.iter_mut().zip(STRIDES)) {
        let targets = sequence[1..].iter_mut().enumerate();
        targets.filter(|(t, _)| stride == 0 || t % stride > 0).for_each(|(_, target)| *target |= LEFT_OUT);
    }
    steps
}

/// The places of all targets that count.
fn counted(step: &[Vec<u32>]) -> Vec<(usize, usize)> {
    let places = step.iter().enumerate().flat_map(|(s, row)| (1..row.len()).map(move |t| (s, t)));
    places.filter(|(s, t)| step[*s][*t] < LEFT_OUT).collect()
}

fn run(config: &RunConfig, steps: &[Vec<Vec<u32>>]) -> Ran {
    let (model, _) = rig::golden_config();
    let spec = rig::spec(&model, config).counting_targets();
    run_spec(spec, config, steps, &Checkpoints::default())
}

/// The golden configuration on a mesh, under a ZeRO stage, with micro-batches of a size.
fn layout([pipeline, data, tensor]: [usize; 3], zero: u8, micro: usize) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor, parallel.zero) = (pipeline, Some(data), tensor, zero);
    config.batch.micro = Some(micro);
    config
}

#[test]
fn loss_and_gradients_are_means_over_the_targets_of_the_global_batch() {
    let steps = sparse_steps();
    let places = counted(&steps[0]);
    let (mut loss, mut gradients) = (0.0, std::collections::BTreeMap::<String, Vec<f64>>::new());
    for place in &places {
        let mut alone = steps[0].clone();
        for (s, t) in places.iter().filter(|other| *other != place) {
            alone[*s][*t] |= LEFT_OUT;
        }
        let ran = run(&layout([1, 1, 1], 0, 8), &[alone]);
        loss += f64::from(ran.losses[0]) / places.len() as f64;
        for (name, values) in ran.gradients {
            let sum = gradients.entry(name).or_insert_with(|| vec![0.0; values.len()]);
            sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += f64::from(x) / places.len() as f64);
        }
    }
    for (mesh, zero, micro) in [
        ([1, 1, 1], 0, 8),
        ([1, 1, 1], 0, 1),
        ([1, 2, 1], 0, 4),
        ([1, 2, 1], 2, 1),
        ([1, 4, 1], 3, 2),
        ([1, 4, 1], 1, 1),
        ([1, 1, 2], 0, 2),
        ([2, 1, 1], 0, 2),
        ([2, 2, 1], 1, 1),
    ] {
        let what = format!("mesh {mesh:?}, stage {zero}, micro-batches of {micro}");
        let ran = run(&layout(mesh, zero, micro), &steps[..1]);
        // Sums of fewer than 2^7 numbers in f32, each with an error of 2^-24: 2^-17 of the largest.
        let apart = (f64::from(ran.losses[0]) - loss).abs() / loss;
        assert!(apart < 2f64.powi(-17), "{what}: loss {} instead of {loss}", ran.losses[0]);
        for (found, expected) in [ran.losses[0], ran.grad_norms[0]].into_iter().zip(PYTORCH) {
            let apart = (f64::from(found) - expected).abs() / expected;
            assert!(apart < 2f64.powi(-17), "{what}: {found}, and {expected} by PyTorch");
        }
        for (name, expected) in &gradients {
            let largest = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
            let apart = pairs(&ran.gradients[name], expected).map(|(x, e)| (f64::from(*x) - e).abs());
            let apart = apart.fold(0.0, f64::max);
            assert!(apart <= 2f64.powi(-17) * largest, "{what}: {name} is {apart} of {largest} apart");
        }
    }
}

#[test]
fn counting_changes_no_bit_where_every_target_counts_and_stages_agree_where_not() {
    let (model, _) = rig::golden_config();
    let config = layout([1, 2, 1], 2, 2);
    let steps = rig::golden_steps();
    let plain = rig::run(&model, &config, &steps[..3]);
    let counting = run(&config, &steps[..3]);
    assert!(same_bits(&plain.losses, &counting.losses));
    assert_same_state("every target counts", &plain.state, &counting.state);
    let steps = &sparse_steps()[..3];
    let whole = run(&layout([1, 4, 1], 0, 1), steps);
    for (zero, overlap) in [(1, true), (2, false), (3, true)] {
        let mut config = layout([1, 4, 1], zero, 1);
        config.parallel.overlap = overlap;
        let ran = run(&config, steps);
        assert!(same_bits(&ran.losses, &whole.losses), "stage {zero}");
        assert_same_state(&format!("stage {zero}"), &ran.state, &whole.state);
    }
}

/// A step without a target leaves everything as it was, and the next one is that of a run without it.
#[test]
fn a_step_without_a_target_changes_nothing() {
    type Change = fn(&mut RunConfig);
    let early: Change = |config| {
        config.memory.update_in_backward = true;
        config.optimizer.clip = 0.0;
    };
    let changes: [(&str, Change); 5] = [
        ("f32", |_| {}),
        ("f16", |config| (config.precision.compute, config.precision.initial_scale_power) = (Float::F16, 10)),
        ("updates within backward", early),
        ("gradients in place", |config| {
            (config.precision.compute, config.precision.accumulate) = (Float::Bf16, Float::Bf16);
            config.memory.gradients_in_place = true;
        }),
        ("a delayed update", |config| {
            config.precision.compute = Float::Bf16;
            (config.memory.gradients, config.memory.optimizer) = (Tier::Host, Tier::Host);
            config.memory.delayed_update = true;
        }),
    ];
    let steps = sparse_steps();
    let mut empty = steps[1].clone();
    empty.iter_mut().flatten().for_each(|token| *token |= LEFT_OUT);
    for (what, change) in changes {
        let mut config = layout([1, 2, 1], 2, 4);
        change(&mut config);
        let with = run(&config, &[steps[0].clone(), empty.clone(), steps[1].clone()]);
        let without = run(&config, &steps[..2]);
        assert_eq!(with.skipped, [false, true, false], "{what}");
        assert!(with.losses[1].is_nan() && with.grad_norms[1] == 0.0, "{what}: {:?}", with.losses);
        let others = [with.losses[0], with.losses[2], with.losses[3]];
        assert!(same_bits(&others, &without.losses), "{what}: {others:?} {:?}", without.losses);
        assert_same_state(what, &with.state, &without.state);
    }
}

/// Samples of which every other one has no target, in batches of one.
fn sometimes(position: u64, tokens: &mut [u32], targets: &mut [u32]) {
    tokens.fill(3);
    targets.fill(IGNORED);
    if position.is_multiple_of(2) {
        targets[5] = 7;
    }
}

#[test]
fn a_caller_is_told_of_a_step_without_a_target() {
    let (model, mut config) = rig::golden_config();
    config.batch.global = 1;
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&lines);
    let training = Training::new(Spec::new(&config, model, 0, 1).unwrap(), sometimes, 4).unwrap();
    let training = training.with_notices(move |line| sink.lock().unwrap().push(line.to_string()));
    let losses = training.on_threads(&CpuFactory::new()).unwrap().swap_remove(0).unwrap();
    assert_eq!(losses.iter().map(|loss| loss.is_nan()).collect::<Vec<_>>(), [false, true, false, true]);
    let lines = lines.lock().unwrap();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].starts_with("step 2: every target of its batch is left out"), "{lines:?}");
}

#[test]
#[should_panic(expected = "has 1 targets where 16 are planned")]
fn targets_that_are_left_out_without_being_counted_are_refused() {
    let (model, mut config) = rig::golden_config();
    config.batch.global = 1;
    let plan = RunPlan::new(Spec::new(&config, model, 0, 1).unwrap()).unwrap();
    let mut batch = Batch::with_rows(1, config.model.seq);
    batch.targets[1..].fill(IGNORED);
    let step = |rank: &mut phalanx_train::Rank| rank.step(1, &batch, false).map(drop);
    on_threads(&CpuFactory::new(), &plan, step).unwrap().swap_remove(0).unwrap();
}

/// Windows of numbers that differ from window to window; the last target of every third one is left out.
struct Windows(usize);

impl DataSource for Windows {
    fn sample(&self, _: u64, _: &mut [u32], _: &mut [u32]) -> Result<(), DataError> {
        unreachable!("nothing is trained")
    }

    fn evaluated(&self) -> usize {
        self.0
    }

    fn window(&self, index: usize, tokens: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        assert!(index < self.0, "window {index} of {}", self.0);
        for (t, (token, target)) in tokens.iter_mut().zip(targets.iter_mut()).enumerate() {
            (*token, *target) = ((index * 7 + t) as u32 % 31, (index * 5 + 3 * t) as u32 % 31);
        }
        if index % 3 == 2 {
            targets[targets.len() - 1] = IGNORED;
        }
        Ok(())
    }
}

/// The evaluation of the first `windows` windows.
fn evaluate(config: &RunConfig, windows: usize, first: usize) -> MeanLoss {
    let (model, _) = rig::golden_config();
    let spec = Spec::new(config, model, windows, 1).unwrap().counting_targets();
    let plan = RunPlan::new(spec).unwrap();
    let ended = on_threads(&CpuFactory::new(), &plan, |rank| {
        rank.initialise(1).unwrap();
        let mut batch = Batch::with_rows(plan.spec.batch.evaluation_rows(), plan.spec.batch.seq);
        batch.fill_windows(&plan.spec.batch, rank.at().data, &Shifted(first, windows)).unwrap();
        rank.evaluate(&batch).unwrap()
    });
    let ended = ended.unwrap();
    assert!(ended.iter().all(|rank| *rank == ended[0]), "{ended:?}");
    ended[0]
}

/// Windows from a first one on.
struct Shifted(usize, usize);

impl DataSource for Shifted {
    fn sample(&self, position: u64, tokens: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        Windows(0).sample(position, tokens, targets)
    }

    fn evaluated(&self) -> usize {
        self.1
    }

    fn window(&self, index: usize, tokens: &mut [u32], targets: &mut [u32]) -> Result<(), DataError> {
        Windows(self.0 + self.1).window(self.0 + index, tokens, targets)
    }
}

#[test]
fn every_window_of_an_evaluation_counts_once_on_every_layout() {
    let alone = |window| evaluate(&layout([1, 1, 1], 0, 1), 1, window);
    let windows: Vec<MeanLoss> = (0..11).map(alone).collect();
    for count in [1, 2, 5, 7, 11] {
        let targets: usize = windows[..count].iter().map(|window| window.targets).sum();
        let sum = windows[..count].iter().map(|window| f64::from(window.loss) * window.targets as f64);
        let mean = sum.sum::<f64>() / targets as f64;
        for (mesh, global, micro) in [
            ([1, 1, 1], 1, 1),
            ([1, 1, 1], 3, 3),
            ([1, 1, 1], 8, 2),
            ([1, 1, 1], 64, 32),
            ([1, 2, 1], 8, 4),
            ([1, 4, 1], 8, 1),
            ([1, 4, 1], 32, 8),
            ([1, 1, 2], 6, 3),
            ([2, 1, 1], 8, 2),
            ([2, 2, 1], 8, 1),
        ] {
            let mut config = layout(mesh, 1, micro);
            config.batch.global = global;
            let found = evaluate(&config, count, 0);
            assert_eq!(found.targets, targets, "{count} windows, {mesh:?}, {global}, {micro}");
            // Sums of fewer than 2^7 numbers in f32.
            let apart = (f64::from(found.loss) - mean).abs() / mean;
            assert!(apart < 2f64.powi(-17), "{count} windows, {mesh:?}, {global}: {found:?} of {mean}");
        }
    }
}
