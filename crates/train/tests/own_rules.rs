//! Optimizers of the caller's own, whose updates need elements, blocks or whole parameters: no stage, world, chunk size or placement
//! changes a bit, checkpoints have the states' shapes, and rules that cannot be are refused by name.

use crate::rig;
use crate::rig::{Checkpoints, Ran, assert_same_run, assert_same_state, same_bits};
use phalanx_checkpoint::Checkpoint;
use phalanx_layers::Kind;
use phalanx_models::{Arch, Bert, Gpt2};
use phalanx_optim::{Extent, StateSpec, UpdateRule, UpdateStep, UpdatedParameter};
use phalanx_plan::Segment;
use phalanx_testing::sweeps;
use phalanx_train::config::{Chunk, ChunkWord, Float, OptimizerKind, Tier, UpdateOn};
use phalanx_train::{RunConfig, RunPlan, Spec};

type Change = fn(&mut RunConfig);

/// From initial values.
const FRESH: Checkpoints = Checkpoints { fresh: true, restore: None, save: None };

/// Elements of a block.
const BLOCK: usize = 256;

/// Matrices as a whole, by the means of squares of rows and columns (as Adafactor); tables by the largest momentum of each block (as 8-bit
/// states are scaled); other parameters by elements.
struct Mixed;

impl UpdateRule for Mixed {
    fn extent(&self, of: &UpdatedParameter) -> Extent {
        match of.kind {
            Kind::Matrix => Extent::Whole,
            Kind::Table | Kind::Head => Extent::Blocks(BLOCK),
            _ => Extent::Elements,
        }
    }

    fn states(&self, of: &UpdatedParameter) -> Vec<StateSpec> {
        match self.extent(of) {
            Extent::Whole => vec![
                StateSpec { name: "rows", shape: vec![of.shape[0]] },
                StateSpec { name: "columns", shape: vec![of.shape[1]] },
            ],
            Extent::Blocks(block) => {
                vec![StateSpec::like("momentum", of), StateSpec::of_blocks("largest", of, block)]
            }
            Extent::Elements => vec![StateSpec::like("momentum", of)],
        }
    }

    fn update(&self, step: &UpdateStep, p: &mut [f32], g: &[f32], states: &mut [&mut [f32]]) {
        match (self.extent(step.of), states) {
            (Extent::Whole, [rows, columns]) => {
                assert_eq!((p.len(), step.of.shape.clone()), (g.len(), vec![rows.len(), columns.len()]));
                let width = columns.len();
                let mean = |old: f32, sum: f32, count: usize| 0.9 * old + 0.1 * sum / count as f32;
                for (r, row) in rows.iter_mut().enumerate() {
                    *row = mean(*row, g[r * width..][..width].iter().map(|g| g * g).sum(), width);
                }
                for (c, column) in columns.iter_mut().enumerate() {
                    *column = mean(*column, g[c..].iter().step_by(width).map(|g| g * g).sum(), rows.len());
                }
                let all = rows.iter().sum::<f32>() / rows.len() as f32 + 1e-12;
                for (i, (p, g)) in p.iter_mut().zip(g).enumerate() {
                    *p -= step.lr * g / ((rows[i / width] * columns[i % width] / all).sqrt() + 1e-6);
                }
            }
            (Extent::Blocks(block), [momentum, largest]) => {
                assert_eq!(largest.len(), p.len().div_ceil(block));
                let parts = p.chunks_mut(block).zip(g.chunks(block)).zip(momentum.chunks_mut(block));
                for (((p, g), m), largest) in parts.zip(largest.iter_mut()) {
                    m.iter_mut().zip(g).for_each(|(m, g)| *m = 0.9 * *m + g);
                    *largest = m.iter().fold(0.5 * *largest, |max, m| max.max(m.abs()));
                    p.iter_mut().zip(m).for_each(|(p, m)| *p -= step.lr * *m / (*largest + 1e-6));
                }
            }
            (Extent::Elements, [momentum]) => {
                for ((p, g), m) in p.iter_mut().zip(g).zip(momentum.iter_mut()) {
                    *m = 0.9 * *m + g;
                    *p -= step.lr * *m;
                }
            }
            (extent, states) => panic!("{} states for {extent:?}", states.len()),
        }
    }
}

/// Wider than the golden model: its matrices are of three and four blocks of 4,096 elements, so that shards and tiles could cut them.
fn model() -> Gpt2 {
    Gpt2 { layers: 2, hidden: 64, heads: 4, vocab: 67, positions: 16, ..Gpt2::default() }
}

fn base(world: usize) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    config.parallel.data = Some(world);
    config.optimizer.clip = 0.0;
    config.memory.chunk = Chunk::Mebibytes(0.3);
    config
}

fn spec(config: &RunConfig) -> Spec {
    rig::spec(&model(), config).with_optimizer(Mixed).unwrap()
}

fn run_between(config: &RunConfig, steps: std::ops::Range<usize>, host: bool, files: &Checkpoints) -> Ran {
    rig::run_spec(rig::addressed(spec(config), host), config, &rig::golden_steps()[steps], files)
}

fn run(config: &RunConfig) -> Ran {
    run_between(config, 0..3, true, &FRESH)
}

fn on_disk(config: &mut RunConfig) {
    config.memory.optimizer = Tier::Nvme;
    config.memory.nvme_path = Some(std::env::temp_dir().as_path().into());
}

/// By elements, with two states of each: what AdamW needs.
struct Plain;

impl UpdateRule for Plain {
    fn states(&self, of: &UpdatedParameter) -> Vec<StateSpec> {
        vec![StateSpec::like("exp_avg", of), StateSpec::like("exp_avg_sq", of)]
    }

    fn update(&self, _: &UpdateStep, _: &mut [f32], _: &[f32], _: &mut [&mut [f32]]) {}
}

#[test]
fn shards_cut_matrices_unless_a_rule_needs_them_whole() {
    for (spec, whole) in
        [(rig::spec(&model(), &base(4)).with_optimizer(Plain).unwrap(), false), (spec(&base(4)), true)]
    {
        let (network, layout) = (spec.model.whole(), &spec.mesh.layout);
        let shards = (0..layout.chunks()).flat_map(|chunk| (0..4).map(move |rank| (chunk, rank)));
        let segments = shards.flat_map(|(chunk, rank)| layout.segments(chunk, layout.shard(chunk, rank, 4)));
        let mut matrices = segments.filter(|s| network.parameters[s.parameter].kind == Kind::Matrix);
        let is_whole = |s: &Segment| s.in_parameter == (0..network.parameters[s.parameter].elements() as u64);
        assert_eq!(matrices.all(|segment| is_whole(&segment)), whole, "{layout:?}");
        let note = spec.chunk_note();
        let words = ["on each of 4 data-parallel ranks", ".mlp.c_"];
        let says = |note: &String| words.iter().all(|word| note.contains(word));
        assert_eq!(note.as_ref().map(says), whole.then_some(true), "{note:?}");
    }
    let mut large = base(4);
    large.memory.chunk = Chunk::Mebibytes(64.0);
    assert_eq!(spec(&large).chunk_note(), None, "chunks are as large as they were asked to be");
}

/// A whole gradient times its factor has planned memory; the measured peaks show that the update takes no other.
#[test]
fn memory_of_whole_scaled_gradients_is_planned() {
    let host_bytes = |rule: fn(&UpdatedParameter) -> (Extent, Vec<StateSpec>), delayed: bool| {
        let mut config = base(1);
        (config.memory.chunk, config.memory.optimizer) = (Chunk::Mebibytes(64.0), Tier::Host);
        (config.precision.compute, config.memory.delayed_update) = (Float::Bf16, delayed);
        config.memory.gradients = if delayed { Tier::Host } else { Tier::Device };
        let spec = rig::spec(&model(), &config).with_optimizer(Said(rule)).unwrap();
        RunPlan::new(rig::addressed(spec, false)).unwrap().of(0).host.arena_bytes
    };
    let largest =
        rig::spec(&model(), &base(1)).model.whole().members().map(|spec| spec.elements()).max().unwrap();
    for delayed in [false, true] {
        let [whole, elements] = [
            host_bytes(|of| (Extent::Whole, vec![StateSpec::like("m", of)]), delayed),
            host_bytes(|of| (Extent::Elements, vec![StateSpec::like("m", of)]), delayed),
        ];
        let more = (whole - elements) as usize;
        assert!(4 * largest <= more && more < 4 * largest + 8192, "{whole} - {elements}, delayed {delayed}");
    }
}

#[test]
fn no_stage_chunk_size_or_placement_cuts_what_a_rule_needs_whole() {
    let changes: [(&str, Change); 12] = [
        ("stage 0, one chunk", |c| c.memory.chunk = Chunk::Mebibytes(64.0)),
        ("stage 1, small chunks", |c| (c.parallel.zero, c.memory.chunk) = (1, Chunk::Mebibytes(0.02))),
        ("stage 2, chunks as they are chosen", |c| {
            (c.parallel.zero, c.memory.chunk) = (2, Chunk::Word(ChunkWord::Auto));
        }),
        ("stage 3, no overlap", |c| (c.parallel.zero, c.parallel.overlap) = (3, false)),
        ("stage 3, prefetch 4, one chunk", |c| {
            (c.parallel.zero, c.memory.prefetch, c.memory.chunk) = (3, 4, Chunk::Mebibytes(64.0));
        }),
        ("stage 1, states in host memory", |c| (c.parallel.zero, c.memory.optimizer) = (1, Tier::Host)),
        ("stage 2, states in host memory, updated by the device in tiles of one block", |c| {
            (c.parallel.zero, c.memory.optimizer) = (2, Tier::Host);
            (c.memory.update, c.memory.buffer_mb) = (UpdateOn::Device, 1.0 / 64.0);
        }),
        ("stage 0, states on disk in tiles of two blocks", |c| {
            on_disk(c);
            c.memory.buffer_mb = 2.0 / 64.0;
        }),
        ("stage 3, everything on disk in tiles of one block", |c| {
            on_disk(c);
            (c.parallel.zero, c.memory.parameters, c.memory.gradients) = (3, Tier::Nvme, Tier::Nvme);
            c.memory.buffer_mb = 1.0 / 64.0;
        }),
        ("stage 3, some states elsewhere", |c| {
            (c.parallel.zero, c.memory.offload_optim_frac) = (3, Some(0.5));
        }),
        ("stage 2, updates within backward", |c| {
            (c.parallel.zero, c.memory.update_in_backward) = (2, true);
        }),
        ("stage 3, states on disk, updates within backward", |c| {
            on_disk(c);
            (c.parallel.zero, c.memory.update_in_backward) = (3, true);
        }),
    ];
    for (at, world) in [1, 2, 4].into_iter().enumerate() {
        // Both types together try every change on each number of ranks.
        for (first, compute) in (at..).zip([Float::F32, Float::Bf16]) {
            let mut base = base(world);
            base.precision.compute = compute;
            let expected = run(&base);
            assert_eq!(expected.peaks, expected.planned, "peak == plan");
            for (number, (name, change)) in (first..).zip(sweeps::share(&changes, first, 2)) {
                let mut config = base.clone();
                change(&mut config);
                for &host in sweeps::share(&[true, false], number, 2) {
                    let what =
                        format!("{world} ranks, {compute:?}, {name}, host addresses device memory: {host}");
                    let got = run_between(&config, 0..3, host, &FRESH);
                    assert_same_run(&what, &expected, &got);
                }
            }
        }
    }
}

/// The rules that a configuration names, over all golden steps: their values are those of other programs (`optim/tests/goldens.rs`).
#[test]
fn rules_by_their_names_give_the_same_bits_on_every_stage() {
    let changes: [(&str, Change); 4] = [
        ("stage 1, small chunks", |c| (c.parallel.zero, c.memory.chunk) = (1, Chunk::Mebibytes(0.02))),
        ("stage 2, updates within backward", |c| {
            (c.parallel.zero, c.memory.update_in_backward) = (2, true);
        }),
        ("stage 3, one chunk", |c| (c.parallel.zero, c.memory.chunk) = (3, Chunk::Mebibytes(64.0))),
        ("stage 3, states on disk", |c| {
            on_disk(c);
            c.parallel.zero = 3;
        }),
    ];
    let run =
        |config: &RunConfig| rig::run_spec(rig::spec(&model(), config), config, &rig::golden_steps(), &FRESH);
    for (world, kind) in [(1, OptimizerKind::Lion), (2, OptimizerKind::Lion), (2, OptimizerKind::Adafactor)] {
        let mut base = base(world);
        (base.optimizer.kind, base.optimizer.lr) = (kind, 1e-3);
        let expected = run(&base);
        assert_eq!(expected.peaks, expected.planned, "{kind:?}: peak == plan");
        assert!(expected.losses[19] < expected.losses[0] - 0.3, "{kind:?} learns: {:?}", expected.losses);
        for (name, change) in &changes {
            let mut config = base.clone();
            change(&mut config);
            assert_same_run(&format!("{kind:?}, {world} ranks, {name}"), &expected, &run(&config));
        }
    }
}

#[test]
fn gradients_in_place_and_delayed_updates_see_the_same() {
    for (world, zero) in [(1, 0), (2, 1), (2, 3)] {
        let mut config = base(world);
        (config.parallel.zero, config.memory.buffer_mb) = (zero, 1.0 / 64.0);
        (config.precision.compute, config.precision.accumulate) = (Float::Bf16, Float::Bf16);
        let expected = run(&config);
        config.memory.gradients_in_place = true;
        assert_same_state(&format!("in place, {world} ranks"), &expected.state, &run(&config).state);
        config.memory.gradients_in_place = false;
        (config.memory.optimizer, config.memory.gradients) = (Tier::Host, Tier::Host);
        for host in [false, true] {
            let first = |config: &RunConfig| run_between(config, 0..1, host, &FRESH);
            let mut delayed = config.clone();
            delayed.memory.delayed_update = true;
            let what = format!("delayed, {world} ranks, host addresses device memory: {host}");
            assert_same_state(&what, &first(&config).state, &first(&delayed).state);
        }
    }
}

#[test]
fn checkpoints_have_states_of_their_own_shapes_and_resume_into_any_layout() {
    let folder = tempfile::tempdir().unwrap();
    let mut from = base(2);
    (from.parallel.zero, from.memory.chunk) = (3, Chunk::Mebibytes(0.02));
    let whole = run_between(&from, 0..4, true, &FRESH);
    let save = Checkpoints { save: Some(folder.path().into()), ..FRESH };
    run_between(&from, 0..2, true, &save);
    let dir = folder.path().join("step-2");
    let network = spec(&from).model.whole();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let shape = |kind, state| {
        let of = network.parameters.iter().find(|p| p.kind == kind).unwrap();
        let shape = checkpoint
            .tensors()
            .iter()
            .find(|t| t.state == state && t.name == of.name)
            .map(|t| t.shape.clone());
        (of.shape.clone(), shape)
    };
    let (matrix, rows) = shape(Kind::Matrix, "rows");
    assert_eq!(rows.as_deref(), Some(&matrix[..1]));
    assert_eq!(shape(Kind::Matrix, "momentum").1, None, "a matrix has no momentum");
    let (table, largest) = shape(Kind::Table, "largest");
    assert_eq!(largest, Some(vec![table.iter().product::<usize>().div_ceil(BLOCK)]));
    let restore = Checkpoints { restore: Some(dir), ..FRESH };
    let mut to = base(2);
    (to.parallel.zero, to.memory.chunk) = (1, Chunk::Mebibytes(64.0));
    on_disk(&mut to);
    let rest = run_between(&to, 2..4, true, &restore);
    assert_same_state("resumed", &whole.state, &rest.state);
    assert!(same_bits(&whole.losses[2..], &rest.losses), "{:?} {:?}", whole.losses, rest.losses);
}

#[test]
fn joined_parameters_have_rules_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let run = |zero, chunk, range: std::ops::Range<usize>, files: &Checkpoints| {
        let mut config = base(2);
        config.model.arch = Arch::BERT;
        (config.parallel.zero, config.memory.chunk) = (zero, Chunk::Mebibytes(chunk));
        let (layers, hidden, heads, intermediate, vocab, positions) = (1, 48, 4, 96, 67, 16);
        let model = Bert { layers, hidden, heads, intermediate, vocab, positions, ..Bert::default() };
        let spec = rig::spec(&model, &config).with_optimizer(Mixed).unwrap();
        rig::run_spec(spec, &config, &rig::golden_steps()[range], files)
    };
    let whole = run(0, 64.0, 0..3, &FRESH);
    let rows =
        whole.state.keys().filter(|name| name.starts_with("rows/") && name.contains("self.query")).count();
    assert_eq!(rows, 1, "{:?}", whole.state.keys());
    run(3, 0.02, 0..1, &Checkpoints { save: Some(folder.path().into()), ..FRESH });
    let restore = Checkpoints { restore: Some(folder.path().join("step-1")), ..FRESH };
    assert_same_state("resumed", &whole.state, &run(2, 0.3, 1..3, &restore).state);
}

#[test]
fn blocks_are_the_same_over_parts_of_tensor_parallel_ranks() {
    struct OfBlocks;
    impl UpdateRule for OfBlocks {
        fn extent(&self, _: &UpdatedParameter) -> Extent {
            Extent::Blocks(8)
        }
        fn states(&self, of: &UpdatedParameter) -> Vec<StateSpec> {
            vec![StateSpec::of_blocks("largest", of, 8)]
        }
        fn update(&self, step: &UpdateStep, p: &mut [f32], g: &[f32], states: &mut [&mut [f32]]) {
            for ((p, g), largest) in p.chunks_mut(8).zip(g.chunks(8)).zip(states[0].iter_mut()) {
                *largest = g.iter().fold(0.5 * *largest, |max, g| max.max(g.abs()));
                p.iter_mut().zip(g).for_each(|(p, g)| *p -= step.lr * g / (*largest + 1e-6));
            }
        }
    }
    let run = |zero, range: std::ops::Range<usize>, files: &Checkpoints| {
        let mut config = base(2);
        (config.parallel.tensor, config.parallel.zero) = (2, zero);
        let spec = rig::spec(&model(), &config).with_optimizer(OfBlocks).unwrap();
        rig::run_spec(spec, &config, &rig::golden_steps()[range], files)
    };
    let folder = tempfile::tempdir().unwrap();
    let whole = run(0, 0..3, &FRESH);
    run(3, 0..1, &Checkpoints { save: Some(folder.path().into()), ..FRESH });
    let restore = Checkpoints { restore: Some(folder.path().join("step-1")), ..FRESH };
    assert_same_state("resumed", &whole.state, &run(1, 1..3, &restore).state);
}

/// A rule that is never applied.
struct Said(fn(&UpdatedParameter) -> (Extent, Vec<StateSpec>));

impl UpdateRule for Said {
    fn extent(&self, of: &UpdatedParameter) -> Extent {
        (self.0)(of).0
    }

    fn states(&self, of: &UpdatedParameter) -> Vec<StateSpec> {
        (self.0)(of).1
    }

    fn update(&self, _: &UpdateStep, _: &mut [f32], _: &[f32], _: &mut [&mut [f32]]) {}
}

#[test]
fn rules_that_cannot_be_are_refused_by_name() {
    let (model, config) = rig::golden_config();
    let refused = |config: &RunConfig, said| -> String {
        rig::spec(&model, config).with_optimizer(Said(said)).map(drop).unwrap_err().to_string()
    };
    let text = refused(&config, |_| (Extent::Elements, vec![StateSpec { name: "m", shape: vec![3] }]));
    assert!(text.contains("state `m` of `transformer.wte.weight` has the shape [3]"), "{text}");
    assert!(text.contains("expected that of the parameter, ["), "{text}");
    let text = refused(&config, |_| (Extent::Blocks(256), vec![StateSpec { name: "m", shape: vec![3] }]));
    assert!(text.contains("a number for each block of 256"), "{text}");
    let text = refused(&config, |_| (Extent::Blocks(300), Vec::new()));
    assert!(text.contains("blocks of 300 elements: expected a power of two, at most 4096"), "{text}");
    let text = refused(&config, |_| (Extent::Whole, vec![StateSpec { name: "m", shape: vec![0] }]));
    assert!(text.contains("has the shape [0]: expected at least one number"), "{text}");
    let text =
        refused(&config, |of| (Extent::Elements, vec![StateSpec::like("m", of), StateSpec::like("m", of)]));
    assert!(text.contains("a state `m` of `transformer.wte.weight` twice"), "{text}");
    let text = refused(&config, |of| (Extent::Elements, vec![StateSpec::like("parameters", of)]));
    assert!(
        text.contains("`parameters` of `transformer.wte.weight` as well as the parameter itself"),
        "{text}"
    );

    let mut parts = config.clone();
    (parts.parallel.tensor, parts.parallel.data) = (2, Some(1));
    let text = refused(&parts, |of| match of.kind {
        Kind::Matrix => (Extent::Whole, Vec::new()),
        _ => (Extent::Elements, Vec::new()),
    });
    assert!(text.contains("as a whole, but 2 tensor-parallel ranks have a part of it each"), "{text}");
    assert!(text.contains("set parallel.tensor = 1"), "{text}");
    let text = refused(&parts, |_| (Extent::Blocks(4096), Vec::new()));
    assert!(
        text.contains("in blocks of 4096 elements, but the parts of 2 tensor-parallel ranks are runs of"),
        "{text}"
    );

    let mut each_tensor = config.clone();
    (each_tensor.parallel.data, each_tensor.memory.chunk) = (Some(2), Chunk::Word(ChunkWord::None));
    let text = refused(&each_tensor, |_| (Extent::Whole, Vec::new()));
    assert!(text.contains("a chunk for each tensor") && text.contains("2 data-parallel ranks"), "{text}");
}

#[test]
fn states_take_the_memory_of_their_shapes_alone() {
    let mut config = base(2);
    config.parallel.zero = 2;
    let adamw = rig::spec(&model(), &config);
    let plan = |spec: Spec| RunPlan::new(spec).unwrap();
    let peaks = |plan: &RunPlan| (0..2).map(|rank| plan.of(rank).peak()).collect::<Vec<_>>();
    let expected = plan(adamw.clone());
    let like = plan(adamw.with_optimizer(Plain).unwrap());
    assert_eq!(peaks(&like), peaks(&expected), "two states of each element, as AdamW has");
    let small = plan(spec(&config));
    assert!(small.arena_bytes_max() < expected.arena_bytes_max());
}
