//! Random configurations: what each rank holds is what its plan says, in every phase and category; and what cannot be is refused by the
//! name of a key and its value.

use std::sync::Arc;

use crate::rig;
use phalanx_data::{Masking, NOT_PREDICTED};
use phalanx_models::{Arch, Keys, Model};
use phalanx_plan::Peak;
use phalanx_plan::trace::{Memory, PhaseName};
use phalanx_system::random::SplitMix64;
use phalanx_train::config::{
    Checkpointing, CheckpointingWord, Chunk, ChunkWord, Float, ParameterGroup, Paths, PlacementPolicy,
    Reduce, Sum, Tier, UpdateOn,
};
use phalanx_train::metrics::{DeviceBytes, RankBytes};
use phalanx_train::planning::{BudgetError, PlanError};
use phalanx_train::rank::{Batch, Rank};
use phalanx_train::spec::SpecError;
use phalanx_train::{RunConfig, RunPlan, Spec};

const SCHEDULES: [&str; 7] = ["model", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"];

/// The number of random configurations, and of random budgets, that are tried; 12 when left out.
const COUNT: &str = "PHALANX_RANDOM_PLANS";

fn count() -> usize {
    std::env::var(COUNT).map_or(12, |count| count.parse().expect("a number of configurations"))
}

/// Patterns of the parameters that are trained, and of those that are frozen; mostly none.
const TRAINED: [(&[&str], &[&str]); 7] = [
    (&[], &[]),
    (&[], &[]),
    (&[], &[]),
    (&["*.bias"], &[]),
    (&["*.1.*"], &["*.1.*.weight"]),
    (&[], &["*.0.*", "*.w?e.*"]),
    (&[], &["*embeddings*"]),
];

/// Patterns, learning rate and weight decay of a group.
type Group = (&'static str, Option<f64>, Option<f64>);

/// Groups; mostly none.
const GROUPS: [&[Group]; 5] = [
    &[],
    &[],
    &[("*.bias", Some(1e-3), None)],
    &[("*.1.*", Some(0.0), Some(0.0)), ("*", None, Some(0.01))],
    &[("*.value.*", None, Some(0.5)), ("*.key.*", Some(1e-2), None)],
];

/// A random model of any architecture with `layers` blocks, for sequences of `seq`.
fn random_model(
    (layers, heads, seq): (usize, usize, usize),
    mut pick: impl FnMut(usize) -> usize,
) -> (Arch, Arc<dyn Model>) {
    let all: Vec<Arch> = Arch::all().collect();
    let arch = all[pick(all.len())];
    let (hidden, vocab) = (heads * [4, 8, 12][pick(3)], 30 + pick(50));
    let mut keys = Keys::default();
    let sizes =
        [("layers", layers), ("hidden", hidden), ("heads", heads), ("intermediate", hidden * (1 + pick(4)))];
    let kv_heads = ("kv_heads", [heads, heads / 2][pick(2)]);
    let has_kv_heads = arch.keys.iter().any(|key| key.name == kv_heads.0);
    sizes.into_iter().chain(has_kv_heads.then_some(kv_heads)).for_each(|(key, count)| keys.set(key, count));
    (arch, arch.model(&keys, vocab, seq).unwrap())
}

/// A random model and configuration of at most 8 ranks; None where it is refused, as it must be.
fn random(random: &mut SplitMix64) -> Option<(Arc<dyn Model>, RunConfig)> {
    let mut pick = |count: usize| (random.next_u64() % count as u64) as usize;
    let (layers, heads, seq) = (2 + pick(4), [2, 4][pick(2)], [4, 8, 12][pick(3)]);
    let (arch, model) = random_model((layers, heads, seq), &mut pick);
    let (pipeline, data, tensor) = loop {
        let mesh @ (pipeline, data, tensor) = ([1, 1, 2, 3, 4][pick(5)], [1, 2, 3][pick(3)], [1, 2][pick(2)]);
        if pipeline * data * tensor <= 8 {
            break mesh;
        }
    };
    let mut config = RunConfig::default();
    config.model.arch = arch;
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor) = (pipeline, Some(data), tensor);
    (parallel.zero, parallel.schedule) = (pick(4) as u8, SCHEDULES[pick(SCHEDULES.len())].into());
    (parallel.sequence_parallel, parallel.overlap) = (tensor > 1 && pick(2) == 0, pick(3) > 0);
    config.memory.prefetch = pick(3);
    config.memory.chunk =
        [Chunk::Word(ChunkWord::Auto), Chunk::Word(ChunkWord::None), Chunk::Mebibytes(0.05)][pick(3)];
    config.memory.checkpointing = match pick(4) {
        0 => Checkpointing::Word(CheckpointingWord::Selective),
        1 => Checkpointing::Word(CheckpointingWord::Block),
        2 => Checkpointing::Every(2),
        _ => Checkpointing::Word(CheckpointingWord::None),
    };
    let floats = [Float::F32, Float::Bf16, Float::F16];
    config.precision.compute = floats[pick(3)];
    // Gradients do not overflow: a step that is skipped holds less.
    config.precision.initial_scale_power = 8;
    config.precision.accumulate = [Float::F32, config.precision.compute][pick(2)];
    config.precision.communicate = [None, Some(Float::Bf16)][pick(2)];
    config.batch.reduce = [Reduce::Each, Reduce::Defer][pick(2)];
    config.batch.sum = [Sum::Running, Sum::Tree][pick(2)];
    let micro_batches = pipeline * (1 + pick(3));
    let micro = 1 + pick(2);
    (config.batch.micro, config.batch.global) = (Some(micro), micro * data * micro_batches);
    config.model.seq = seq;
    config.model.dropout = [0.0, 0.1][pick(2)];
    config.train.threads = Some(1 + pick(2));
    let texts = |patterns: &[&str]| patterns.iter().map(|pattern| pattern.to_string()).collect::<Vec<_>>();
    let (trainable, frozen) = TRAINED[pick(TRAINED.len())];
    (config.model.trainable, config.model.frozen) = (texts(trainable), texts(frozen));
    let group = |(pattern, lr, weight_decay): &Group| ParameterGroup {
        parameters: texts(&[pattern]),
        lr: *lr,
        weight_decay: *weight_decay,
    };
    config.optimizer.group = GROUPS[pick(GROUPS.len())].iter().map(group).collect();
    is_accepted(&model, &config).then_some((model, config))
}

/// Returns whether the configuration is accepted; checks the refusal otherwise.
fn is_accepted(model: &Arc<dyn Model>, config: &RunConfig) -> bool {
    let refusal = Spec::new(config, Arc::clone(model), config.batch.global, 1).err();
    refusal.as_ref().inspect(|refusal| assert_named(refusal, config)).is_none()
}

/// A refusal names a key of the configuration, and the value that it has there.
fn assert_named(error: &SpecError, config: &RunConfig) {
    let SpecError::Config(error) = error else { panic!("{error}, which names no key: {config:?}") };
    let known = serde_json::to_value(config).unwrap();
    // The mesh is refused as a whole.
    if error.key != "parallel" {
        let mut key = error.key.split('.');
        let value = known.pointer(&format!("/{}/{}", key.next().unwrap(), key.next().unwrap()));
        let value = value.unwrap_or_else(|| panic!("no key {}: {error}", error.key)).to_string();
        let [given, value] = [&error.given, &value].map(|text| text.replace(['"', ' '], ""));
        assert!(value.contains(&given), "{} is {value}, and refused is {given}: {config:?}", error.key);
    }
    assert!(error.expected.len() > 10, "{error}");
}

/// Sets a key that most configurations do not allow.
fn spoil(config: &mut RunConfig, numbers: &mut SplitMix64) {
    let memory = &mut config.memory;
    match numbers.next_u64() % 8 {
        0 => memory.update_in_backward = true,
        1 => memory.gradients_in_place = true,
        2 => memory.delayed_update = true,
        3 => memory.parameters = Tier::Host,
        4 => (memory.optimizer, memory.nvme_path) = (Tier::Nvme, None),
        5 => config.parallel.schedule = "zb-v".into(),
        6 => config.parallel.sequence_parallel = true,
        _ => config.parallel.tensor = 3,
    }
}

/// Chooses the memories of the parts of a rank's state, and the device that updates them.
fn place(config: &mut RunConfig, numbers: &mut SplitMix64) {
    let mut pick = |count: usize| (numbers.next_u64() % count as u64) as usize;
    let mut tier = || [Tier::Device, Tier::Device, Tier::Host, Tier::Nvme][pick(4)];
    let [parameters, mut gradients, optimizer] = [tier(), tier(), tier()];
    let micro_batches = config.micro_batches();
    let can_update_early =
        micro_batches == 1 && config.precision.compute != Float::F16 && !config.parallel.sequence_parallel;
    let updates_early = can_update_early && pick(2) == 0;
    if updates_early {
        (gradients, config.optimizer.clip) = (Tier::Device, 0.0);
    }
    let memory = &mut config.memory;
    (memory.gradients, memory.optimizer) = (gradients, optimizer);
    if config.parallel.zero == 3 {
        memory.parameters = parameters;
    }
    if [memory.parameters, gradients, optimizer].contains(&Tier::Nvme) {
        memory.nvme_path = Some(std::env::temp_dir().as_path().into());
    }
    memory.buffer_mb = [1.0 / 64.0, 1.0 / 32.0, 16.0][pick(3)];
    memory.update = [UpdateOn::Auto, UpdateOn::Device][pick(2)];
    let is_here = [memory.parameters, gradients, optimizer] == [Tier::Device; 3];
    let has_one_type =
        config.precision.compute != Float::F32 && config.precision.accumulate == config.precision.compute;
    let wanted = pick(2) == 0;
    memory.update_in_backward = updates_early;
    memory.gradients_in_place = wanted && is_here && has_one_type && micro_batches == 1 && !updates_early;
    memory.delayed_update = [gradients, optimizer] == [Tier::Host; 2]
        && memory.parameters == Tier::Device
        && memory.update == UpdateOn::Auto
        && config.precision.compute != Float::F32;
}

/// As [`random`], with the parts of a rank's state in their places.
fn random_placed(numbers: &mut SplitMix64) -> Option<(Arc<dyn Model>, RunConfig)> {
    let (model, mut config) = random(numbers)?;
    place(&mut config, numbers);
    if numbers.next_u64().is_multiple_of(3) {
        spoil(&mut config, numbers);
    }
    is_accepted(&model, &config).then_some((model, config))
}

/// The peaks of the phases that a rank ran, in order, and what it reports to `memory.json` before the diagnosis.
struct Measured {
    phases: Vec<(PhaseName, Peak)>,
    reported: RankBytes,
}

fn run(engine: &mut Rank, rank: usize, config: &RunConfig) -> Measured {
    let (rows, seq) = (config.batch.global / config.data(), config.model.seq);
    let mut phases = Vec::new();
    let mut note = |engine: &Rank, name| {
        phases.push((name, engine.device().arena().phase_peak().expect("an arena with a plan measures")));
    };
    note(engine, PhaseName::Init);
    engine.initialise(1).unwrap();
    note(engine, PhaseName::Load);
    let mut batch = Batch::with_rows(rows, seq);
    batch.tokens.fill(3);
    batch.targets.fill(5);
    if config.model.arch == Arch::BERT {
        batch
            .targets
            .chunks_mut(seq)
            .for_each(|row| row[..seq - Masking::predicted(seq)].fill(NOT_PREDICTED));
    }
    for step in 1..=2 {
        engine.step(step, &batch, false).unwrap();
        note(engine, PhaseName::Step);
    }
    engine.evaluate(&batch).unwrap();
    note(engine, PhaseName::Evaluate);
    engine.save(|_, _| Ok(())).unwrap();
    note(engine, PhaseName::Save);
    engine.report(|_| Ok(())).unwrap();
    note(engine, PhaseName::Report);
    let reported = RankBytes::measured(rank, engine.device(), 0);
    engine.diagnose(2, &batch, batch.counted_targets(), 1.0).unwrap();
    note(engine, PhaseName::Diagnose);
    Measured { phases, reported }
}

/// Compares `wanted` random configurations with their plans; returns the numbers of compared ranks and phases, and how many others were
/// refused.
fn compare(seed: u64, wanted: usize) -> (usize, usize, usize) {
    let mut numbers = SplitMix64::new(seed);
    let (mut done, mut ranks, mut compared, mut refused) = (0, 0, 0, 0);
    while done < wanted {
        let Some((model, config)) = random_placed(&mut numbers) else {
            refused += 1;
            continue;
        };
        let whole = |spec: &Spec, groups: &phalanx_train::Groups| spec.network(&groups.tensor);
        let body = |engine: &mut Rank, rank: usize| run(engine, rank, &config);
        let spec = rig::spec(&model, &config);
        // Every other one runs on simulated devices.
        let plan = RunPlan::new(rig::addressed(spec, done % 2 == 0)).unwrap();
        let measured: Vec<Measured> = rig::on_planned_ranks(&plan, &whole, &body);
        for (rank, measured) in measured.iter().enumerate() {
            let own = plan.of(rank);
            for (name, peak) in &measured.phases {
                let planned = own.memory.phase(*name).expect("a planned phase").peak;
                assert_eq!(*peak, planned, "phase {name} of rank {rank}: {config:?}");
            }
            let RankBytes { device, host, disk, .. } = &measured.reported;
            let planned = [Memory::Device, Memory::Host, Memory::Disk].map(|memory| own.peak_of(memory));
            let planned = planned.map(DeviceBytes::from);
            assert_eq!([device, host, disk], planned.each_ref(), "rank {rank}: {config:?}");
            compared += measured.phases.len();
        }
        ranks += measured.len();
        done += 1;
    }
    (ranks, compared, refused)
}

#[test]
fn random_configurations_hold_what_was_planned() {
    let wanted = count();
    let (ranks, phases, refused) = compare(7, wanted);
    assert!(ranks >= 2 * wanted && phases == 8 * ranks, "{ranks} ranks, {phases} phases");
    assert!(refused >= wanted / 2, "{refused} refused");
}

/// Changes a configuration so that it updates each chunk within backward: one micro-batch, no clipping, no loss scale. False where it
/// is not a run then.
fn update_early(config: &mut RunConfig, model: &Arc<dyn Model>) -> bool {
    let precision = &mut config.precision;
    if precision.compute == Float::F16 {
        precision.compute = Float::Bf16;
        precision.accumulate = [Float::F32, Float::Bf16][usize::from(precision.accumulate == Float::F16)];
    }
    (config.parallel.sequence_parallel, config.parallel.schedule) = (false, "model".into());
    (config.optimizer.clip, config.memory.update_in_backward) = (0.0, true);
    config.batch.global = config.batch.micro.unwrap() * config.data();
    is_accepted(model, config)
}

/// A random budget for `need` bytes of device memory, with the memories below it.
fn with_budget(
    config: &RunConfig,
    need: u64,
    folder: &std::path::Path,
    numbers: &mut SplitMix64,
) -> RunConfig {
    const MIB: f64 = 1_048_576.0;
    let mut pick = |count: usize| (numbers.next_u64() % count as u64) as usize;
    let mut config = config.clone();
    let memory = &mut config.memory;
    memory.placement = Some(PlacementPolicy::Auto);
    memory.device_budget_mb = Some(need as f64 * (15 + pick(90)) as f64 / 100.0 / MIB);
    memory.headroom = [0.0, 0.02, 0.1][pick(3)];
    let tiers = pick(3);
    memory.nvme_path = (tiers > 0).then(|| Paths::One(folder.display().to_string()));
    memory.host_budget_mb = (tiers != 1).then(|| [64.0, 0.02, 0.5][pick(3)]);
    config
}

/// Runs a plan whose budget suffices, and checks that no memory exceeds it.
fn run_within(plan: &RunPlan, config: &RunConfig) {
    let whole = |spec: &Spec, groups: &phalanx_train::Groups| spec.network(&groups.tensor);
    let body = |engine: &mut Rank, rank: usize| run(engine, rank, config);
    let usable =
        (config.memory.device_budget_mb.unwrap() * 1_048_576.0 * (1.0 - config.memory.headroom)) as u64;
    for (rank, measured) in rig::on_planned_ranks(plan, &whole, &body).iter().enumerate() {
        let own = plan.of(rank);
        for (name, peak) in &measured.phases {
            assert_eq!(*peak, own.memory.phase(*name).unwrap().peak, "{name} of rank {rank}: {config:?}");
            assert!(peak.bytes <= usable, "{name} of rank {rank}: {} of {usable}: {config:?}", peak.bytes);
        }
        let RankBytes { device, host, disk, .. } = &measured.reported;
        let planned = Memory::ALL.map(|memory| DeviceBytes::from(own.peak_of(memory)));
        assert_eq!([device, host, disk], planned.each_ref(), "rank {rank}: {config:?}");
        let host_budget = config.memory.host_budget_mb.map_or(u64::MAX, |mib| (mib * 1_048_576.0) as u64);
        assert!(own.host.arena_bytes <= host_budget, "rank {rank}: {config:?}");
    }
}

/// Every budget either runs, in the memory that was planned, or is refused at plan time with one that would do.
#[test]
fn random_budgets_run_as_planned_or_are_refused() {
    let wanted = count();
    let folder = tempfile::tempdir().unwrap();
    let mut numbers = SplitMix64::new(31);
    let (mut ran, mut refused, mut away, mut early) = (0, 0, 0, 0);
    // What is rare may come later.
    while ran + refused < wanted || (early < wanted / 6 && ran + refused < 2 * wanted) {
        let Some((model, mut config)) = random(&mut numbers) else { continue };
        let [updates_early, host_addressable] = [3, 2].map(|of| numbers.next_u64().is_multiple_of(of));
        if updates_early && !update_early(&mut config, &model) {
            continue;
        }
        // Half of them run on simulated devices, whose memory the host cannot address.
        let spec = |config: &RunConfig| {
            let spec = rig::spec(&model, config);
            rig::addressed(spec, host_addressable)
        };
        let need = RunPlan::without_offsets(spec(&config)).unwrap().arena_bytes_max();
        let mut config = with_budget(&config, need, folder.path(), &mut numbers);
        if config.check_with(&*model).is_err() {
            continue;
        }
        let mut is_refused = false;
        let plan = match RunPlan::new(spec(&config)) {
            Ok(plan) => plan,
            Err(PlanError::Budget(error)) => {
                is_refused = true;
                let error = RunPlan::with_budgets_that_do(&spec(&config), error);
                let mib = |bytes: u64| bytes as f64 / 1_048_576.0;
                let (device, host) = match error {
                    BudgetError::Device { smallest_bytes, other_bytes, .. } => {
                        (Some(smallest_bytes), other_bytes)
                    }
                    BudgetError::Host { smallest_bytes, other_bytes, .. } => {
                        (other_bytes, Some(smallest_bytes))
                    }
                    BudgetError::Memory(error) => panic!("{error}: {config:?}"),
                };
                let memory = &mut config.memory;
                memory.device_budget_mb = device.map(mib).or(memory.device_budget_mb);
                memory.host_budget_mb = host.map(mib).or(memory.host_budget_mb);
                RunPlan::new(spec(&config))
                    .unwrap_or_else(|refused| panic!("{error}, then {refused}: {config:?}"))
            }
            Err(other) => panic!("{other}: {config:?}"),
        };
        run_within(&plan, &config);
        (ran, refused) = if is_refused { (ran, refused + 1) } else { (ran + 1, refused) };
        early += usize::from(updates_early);
        away +=
            usize::from(plan.ranks.iter().any(|rank| rank.disk.arena_bytes + rank.host.arena_bytes > 4096));
    }
    assert!(
        ran >= wanted / 4 && refused > 0 && away > wanted / 3 && early >= wanted / 6,
        "{ran} ran, {refused} refused, {away} away, {early} updated within backward"
    );
}
