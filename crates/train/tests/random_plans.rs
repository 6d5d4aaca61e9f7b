//! Random configurations: what each rank holds is what its plan says, in every phase and category.

mod rig;

use phalanx_models::{Dropouts, Gpt2};
use phalanx_plan::Peak;
use phalanx_random::SplitMix64;
use phalanx_trace::{Memory, PhaseName};
use phalanx_train::config::{
    Checkpointing, CheckpointingWord, Chunk, ChunkWord, Float, Reduce, Tier, UpdateOn,
};
use phalanx_train::metrics::{DeviceBytes, RankBytes};
use phalanx_train::rank::{Batch, Rank};
use phalanx_train::{RunConfig, RunPlan, Spec};

const SCHEDULES: [&str; 7] = ["model", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"];

/// A random model and configuration of at most 8 ranks; `None` where the numbers do not fit together.
fn random(random: &mut SplitMix64) -> Option<(Gpt2, RunConfig)> {
    let mut pick = |count: usize| (random.next_u64() % count as u64) as usize;
    let (layers, heads, seq) = (2 + pick(4), [2, 4][pick(2)], [4, 8, 12][pick(3)]);
    let (hidden, vocab) = (heads * [4, 8, 12][pick(3)], 30 + pick(50));
    let (pipeline, data, tensor) = ([1, 1, 2, 3, 4][pick(5)], [1, 2, 3][pick(3)], [1, 2][pick(2)]);
    if pipeline * data * tensor > 8 {
        return None;
    }
    let mut config = RunConfig::default();
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
    let micro_batches = pipeline * (1 + pick(3));
    config.batch.micro = Some(1 + pick(2));
    config.batch.global = config.batch.micro? * data * micro_batches;
    (config.model.layers, config.model.hidden, config.model.heads, config.model.seq) =
        (layers, hidden, heads, seq);
    config.model.dropout = [0.0, 0.1][pick(2)];
    config.train.threads = Some(1 + pick(2));
    place(&mut config, &mut pick);
    config.check().ok()?;
    let dropout = Dropouts::default();
    let model = Gpt2 { layers, hidden, heads, vocab, positions: seq, eps: 1e-5, dropout };
    Spec::new(&config, model.clone(), config.batch.global, 1).ok()?;
    Some((model, config))
}

/// Where the parts of a rank's state lie, and what updates them.
fn place(config: &mut RunConfig, pick: &mut impl FnMut(usize) -> usize) {
    let mut tier = || [Tier::Device, Tier::Device, Tier::Host, Tier::Nvme][pick(4)];
    let [parameters, gradients, optimizer] = [tier(), tier(), tier()];
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
    memory.delayed_update = [gradients, optimizer] == [Tier::Host; 2]
        && memory.parameters == Tier::Device
        && memory.update == UpdateOn::Auto
        && config.precision.compute != Float::F32;
}

/// The peaks of the phases that a rank ran, in order, and what it reports to `memory.json` before the diagnosis.
struct Measured {
    phases: Vec<(PhaseName, Peak)>,
    reported: RankBytes,
}

fn run(engine: &mut Rank, rank: usize, rows: usize, seq: usize) -> Measured {
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
    engine.diagnose(2, &batch, 1.0).unwrap();
    note(engine, PhaseName::Diagnose);
    Measured { phases, reported }
}

/// Compares `wanted` random configurations with their plans; returns the numbers of compared ranks and phases.
fn compare(seed: u64, wanted: usize) -> (usize, usize) {
    let mut numbers = SplitMix64::new(seed);
    let (mut done, mut ranks, mut compared) = (0, 0, 0);
    while done < wanted {
        let Some((model, config)) = random(&mut numbers) else { continue };
        let rows = config.batch.global / config.data();
        let whole = |spec: &Spec, groups: &phalanx_train::Groups| spec.network(&groups.tensor);
        let body = |engine: &mut Rank, rank: usize| run(engine, rank, rows, config.model.seq);
        let spec = rig::spec(&model, &config);
        // Every other one runs on simulated devices.
        let host_addressable = spec.host_addressable && done % 2 == 0;
        let plan = RunPlan::new(Spec { host_addressable, ..spec }).unwrap();
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
    (ranks, compared)
}

#[test]
fn random_configurations_hold_what_was_planned() {
    let (ranks, phases) = compare(7, 12);
    assert!(ranks >= 24 && phases == 8 * ranks, "{ranks} ranks, {phases} phases");
}
