//! With sums by a tree, the number of replicas changes no bit of parameters, states, norms or losses.

use crate::rig;
use crate::rig::Ran;
use phalanx_models::Gpt2;
use phalanx_system::random::SplitMix64;
use phalanx_testing::sweeps;
use phalanx_train::config::{
    Checkpointing, CheckpointingWord, Chunk, Float, LoraBase, LoraConfig, LoraInit, Reduce, Sum, Tier,
};
use phalanx_train::rank::{Batch, Rank};
use phalanx_train::{RunConfig, RunPlan, Spec};

/// A random run with sums by a tree, on one replica.
fn random(random: &mut SplitMix64) -> (Gpt2, RunConfig) {
    let mut pick = |count: usize| (random.next_u64() % count as u64) as usize;
    let (model, mut config) = rig::golden_config();
    (config.batch.micro, config.batch.sum) = (Some(1), Sum::Tree);
    config.batch.reduce = [Reduce::Each, Reduce::Defer][pick(2)];
    config.parallel.pipeline = 1 + pick(2);
    let schedules = ["1f1b", "gpipe", "zb-h1", "interleaved"];
    config.parallel.schedule = schedules[pick(schedules.len())].into();
    config.parallel.tensor = if config.parallel.pipeline == 1 { 1 + pick(2) } else { 1 };
    config.precision.compute = [Float::F32, Float::Bf16, Float::F16, Float::F16][pick(4)];
    (config.precision.hysteresis, config.precision.loss_scale_window) = (1, 2);
    config.precision.initial_scale_power = 24;
    config.model.dropout = [0.0, 0.1][pick(2)];
    config.memory.checkpointing =
        [CheckpointingWord::None, CheckpointingWord::Block].map(Checkpointing::Word)[pick(2)];
    config.memory.chunk = [Chunk::Mebibytes(0.05), Chunk::Mebibytes(0.3)][pick(2)];
    (config.memory.optimizer, config.memory.gradients) =
        [(Tier::Device, Tier::Device), (Tier::Host, Tier::Device), (Tier::Host, Tier::Host)][pick(3)];
    config.parallel.overlap = pick(3) > 0;
    (model, config)
}

/// The same run on `data` replicas.
fn on(config: &RunConfig, data: usize, zero: u8) -> RunConfig {
    let mut config = config.clone();
    (config.parallel.data, config.parallel.zero) = (Some(data), zero);
    config
}

/// The loss of an evaluation of windows that differ, the last micro-batch without one.
fn evaluated(model: &Gpt2, config: &RunConfig) -> u32 {
    let plan = RunPlan::new(rig::spec(model, config).counting_targets()).unwrap();
    let losses = rig::on_planned_ranks(&plan, &|spec, groups| spec.network(&groups.tensor), &|engine, _| {
        engine.initialise(1).unwrap();
        let windows = windows(engine, config);
        engine.evaluate(&windows).unwrap().loss.to_bits()
    });
    assert!(losses.iter().all(|loss| *loss == losses[0]), "all ranks report the same loss");
    losses[0]
}

/// This replica's windows: neighbours among those of all, as `evaluation_rows` divides them.
fn windows(engine: &Rank, config: &RunConfig) -> Batch {
    let (seq, each) = (config.model.seq, config.batch.global / config.data());
    let mut windows = Batch::with_rows(each, seq);
    for row in 0..each {
        let window = engine.at().data * each + row;
        for at in 0..seq {
            windows.tokens[row * seq + at] = ((window * 31 + at * 7) % 60) as u32;
            let is_left_out = window + 1 == config.batch.global || (window + at).is_multiple_of(5);
            windows.targets[row * seq + at] =
                if is_left_out { phalanx_tensor::IGNORED } else { ((window + at * 3) % 60) as u32 };
        }
    }
    windows
}

#[test]
fn the_number_of_replicas_changes_no_bit() {
    let mut source = SplitMix64::new(11);
    let count = if sweeps::are_whole() { 200 } else { 10 };
    // In every other run, each sequence keeps another share of its targets, two of them none: whole micro-batches and ranks.
    let all = rig::golden_steps();
    let sparse = crate::targets::sparse_steps();
    let run = |model: &Gpt2, config: &RunConfig, number: usize| {
        let spec = rig::spec(model, config);
        match number % 2 {
            0 => rig::run_spec(spec, config, &all[..3], &rig::Checkpoints::default()),
            _ => rig::run_spec(spec.counting_targets(), config, &sparse[..3], &rig::Checkpoints::default()),
        }
    };
    let (mut skipped, mut compared) = (0, 0);
    for number in 0..count {
        let (model, config) = random(&mut source);
        if let Err(refusal) = Spec::new(&config, model.clone(), config.batch.global, 1) {
            panic!("{refusal}: {config:?}");
        }
        let alone: Ran = run(&model, &on(&config, 1, 0), number);
        let evaluation = evaluated(&model, &on(&config, 1, 0));
        skipped += alone.skipped.iter().filter(|skipped| **skipped).count();
        for (at, data) in [2, 4, 8].into_iter().enumerate() {
            let zero = ((number + at) % 4) as u8;
            let config = on(&config, data, zero);
            let RunConfig { parallel, batch, memory, precision, .. } = &config;
            let what = format!(
                "{number}: {data} replicas, stage {zero}: {parallel:?} {batch:?} {memory:?} {precision:?}"
            );
            if Spec::new(&config, model.clone(), config.batch.global, 1).is_err() {
                continue;
            }
            compared += 1;
            rig::assert_same_run(&what, &alone, &run(&model, &config, number));
            assert_eq!(evaluated(&model, &config), evaluation, "{what}: the loss of an evaluation");
        }
    }
    assert!(skipped > 0, "some steps are skipped");
    assert!(compared > 2 * count, "{compared} comparisons");
}

/// Adapters of each kind, beside a base in the type of computing and in blocks.
#[test]
fn the_number_of_replicas_changes_no_bit_of_adapters() {
    let lora = |change: fn(&mut LoraConfig)| {
        let mut lora = LoraConfig { rank: Some(3), alpha: Some(6.0), dropout: 0.1, ..LoraConfig::default() };
        change(&mut lora);
        lora
    };
    let cases = [
        lora(|_| {}),
        lora(|lora| lora.dora = true),
        lora(|lora| lora.init = LoraInit::Pissa),
        lora(|lora| lora.base = LoraBase::Nf4),
        lora(|lora| lora.base = LoraBase::Q8_0),
        lora(|lora| (lora.dora, lora.base) = (true, LoraBase::Nf4)),
        lora(|lora| (lora.init, lora.base) = (LoraInit::Pissa, LoraBase::Q8_0)),
    ];
    let (model, steps) = (crate::quantised::model(), &rig::golden_steps()[..3]);
    for (number, lora) in cases.into_iter().enumerate() {
        let mut config = crate::decoders::config([1, 1, 1], 0);
        (config.batch.micro, config.batch.sum, config.optimizer.lr) = (Some(1), Sum::Tree, 1e-2);
        (config.memory.chunk, config.lora) = (Chunk::Mebibytes(0.2), lora);
        config.precision.compute = [Float::F32, Float::Bf16][number % 2];
        let alone = rig::run_fresh(&model, &on(&config, 1, 0), steps);
        for (at, data) in [2, 4].into_iter().enumerate() {
            let config = on(&config, data, ((number + at) % 4) as u8);
            let what = format!("{data} replicas, stage {}, {:?}", config.parallel.zero, config.lora);
            rig::assert_same_run(&what, &alone, &rig::run_fresh(&model, &config, steps));
        }
    }
}

#[test]
fn a_run_resumes_on_another_number_of_replicas_to_the_bit() {
    let (model, mut config) = rig::golden_config();
    (config.batch.micro, config.batch.sum) = (Some(1), Sum::Tree);
    config.memory.chunk = Chunk::Mebibytes(0.3);
    let steps = &rig::golden_steps()[..4];
    let folder = tempfile::tempdir().unwrap();
    for reduce in [Reduce::Each, Reduce::Defer] {
        config.batch.reduce = reduce;
        let whole = rig::run(&model, &on(&config, 8, 3), steps);
        for (from, to) in [(8, 2), (2, 1), (1, 4), (4, 8)] {
            let dir = folder.path().join(format!("{reduce:?}-{from}"));
            let save = rig::Checkpoints { save: Some(dir.clone()), ..Default::default() };
            rig::run_between(&model, &on(&config, from, 2), &steps[..2], &save);
            let restore = rig::Checkpoints { restore: Some(dir.join("step-2")), ..Default::default() };
            let rest = rig::run_between(&model, &on(&config, to, 1), &steps[2..], &restore);
            assert_eq!(rest.losses, whole.losses[2..], "{reduce:?}: {from} -> {to}");
            rig::assert_same_state(&format!("{reduce:?}: {from} -> {to}"), &whole.state, &rest.state);
        }
    }
}

/// A change to a run of 8 micro-batches, and a part of the reason why another number of replicas then changes bits; none if it does not.
type Condition = (fn(&mut RunConfig), Option<&'static str>);

const CONDITIONS: [Condition; 20] = [
    (|_| {}, None),
    (|c| c.parallel.data = Some(2), None),
    (|c| c.parallel.data = Some(8), None),
    (|c| (c.parallel.data, c.batch.global) = (Some(3), 3), None),
    (
        |c| (c.parallel.data, c.batch.global) = (Some(3), 6),
        Some("3 replicas are no power of two: set batch.reduce = \"defer\""),
    ),
    (|c| (c.parallel.data, c.batch.global) = (Some(6), 12), Some("6 replicas")),
    (|c| (c.parallel.data, c.batch.global, c.batch.reduce) = (Some(3), 6, Reduce::Defer), None),
    (|c| c.batch.reduce = Reduce::Defer, None),
    (
        |c| (c.batch.global, c.batch.reduce) = (6, Reduce::Defer),
        Some("the 6 micro-batches of a replica are no power of two"),
    ),
    (
        |c| (c.parallel.data, c.batch.global, c.batch.reduce) = (Some(2), 12, Reduce::Defer),
        Some("the 6 micro-batches"),
    ),
    (|c| c.batch.global = 6, None),
    (|c| c.precision.compute = Float::Bf16, None),
    (|c| c.precision.compute = Float::F16, None),
    (|c| (c.precision.compute, c.precision.accumulate) = (Float::Bf16, Float::Bf16), Some("added in bf16")),
    (|c| (c.precision.compute, c.precision.accumulate) = (Float::F16, Float::F16), Some("added in f16")),
    (|c| c.precision.communicate = Some(Float::Bf16), Some("sent in bf16")),
    (|c| (c.precision.communicate, c.parallel.data) = (Some(Float::F16), Some(4)), Some("sent in f16")),
    (|c| (c.parallel.pipeline, c.parallel.tensor) = (2, 2), None),
    (|c| (c.parallel.zero, c.parallel.data) = (3, Some(4)), None),
    (|c| (c.memory.optimizer, c.memory.gradients) = (Tier::Host, Tier::Host), None),
];

#[test]
fn a_plan_says_which_condition_fails() {
    for (number, (change, reason)) in CONDITIONS.into_iter().enumerate() {
        let (model, mut config) = rig::golden_config();
        (config.batch.micro, config.batch.sum) = (Some(1), Sum::Tree);
        change(&mut config);
        let reasons = rig::spec(&model, &config).replicas_change_bits().unwrap();
        match reason {
            None => assert_eq!(reasons, [""; 0], "{number}"),
            Some(reason) => {
                assert!(reasons.iter().any(|found| found.contains(reason)), "{number}: {reasons:?}")
            }
        }
        config.batch.sum = Sum::Running;
        assert_eq!(rig::spec(&model, &config).replicas_change_bits(), None);
    }
}
