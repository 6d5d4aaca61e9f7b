//! Frozen parameters: they keep their values; the others take the steps that they take when all are trained; no stage, placement
//! or mesh changes a bit; memory has none of their gradients and states.

use crate::rig::{self, Policy, Ran, State, assert_same_state, same_bits};
use phalanx_plan::trace::Category;
use phalanx_testing::sweeps;
use phalanx_train::config::{Checkpointing, CheckpointingWord, Chunk, Float, Reduce, Tier, Updates};
use phalanx_train::{RunConfig, RunPlan, Spec};

type Change = fn(&mut RunConfig);

/// Which parameters are trained.
const TRAINED: [(&str, Change); 4] = [
    ("the last block and the last norm", |c| {
        c.model.trainable = ["*.h.1.*", "*.ln_f.*"].map(String::from).into()
    }),
    ("biases", |c| c.model.trainable = vec!["*.bias".into()]),
    ("all but tables", |c| c.model.frozen = ["*.wte.*", "*.wpe.*"].map(String::from).into()),
    ("the table", |c| c.model.trainable = vec!["*.wte.weight".into()]),
];

fn config(world: usize, zero: u8) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    (config.parallel.data, config.parallel.zero) = (Some(world), zero);
    config.memory.chunk = Chunk::Mebibytes(0.05);
    config
}

fn run(config: &RunConfig, steps: usize) -> Ran {
    let (model, _) = rig::golden_config();
    rig::run(&model, config, &rig::golden_steps()[..steps])
}

/// The parameters of a run, and those that have optimizer states.
fn parameters(state: &State) -> Vec<(&str, &Vec<f32>, bool)> {
    let of = |(key, values)| {
        let name = str::strip_prefix(key, "parameters/")?;
        Some((name, values, state.contains_key(&format!("exp_avg/{name}"))))
    };
    state.iter().filter_map(|(key, values)| of((key.as_str(), values))).collect()
}

#[test]
fn they_keep_their_values_and_the_others_take_their_step() {
    let mut config = config(2, 2);
    config.optimizer.clip = 0.0;
    let (before, all) = (run(&config, 0), run(&config, 1));
    for (what, change) in TRAINED {
        let mut config = config.clone();
        change(&mut config);
        let ran = run(&config, 1);
        let mut kinds = [0; 2];
        for ((name, values, is_trained), of_all) in
            parameters(&ran.state).into_iter().zip(parameters(&all.state))
        {
            let expected = if is_trained { of_all.1 } else { &before.state[&format!("parameters/{name}")] };
            assert!(same_bits(values, expected), "{what}: {name}, trained {is_trained}");
            kinds[usize::from(is_trained)] += 1;
        }
        assert!(kinds.iter().all(|count| *count > 0), "{what}: {kinds:?}");
        assert_eq!(ran.losses[0].to_bits(), all.losses[0].to_bits(), "{what}");
        assert!(ran.grad_norms[0] < all.grad_norms[0], "{what}: {:?} {:?}", ran.grad_norms, all.grad_norms);
    }
}

#[test]
fn no_stage_or_policy_changes_a_bit() {
    let policies: [Policy; 3] = [("f32", |_| {}), rig::POLICIES[0], rig::POLICIES[1]];
    for (at, (trained, change)) in TRAINED.into_iter().enumerate() {
        for (number, (name, policy)) in (at..).zip(policies) {
            let ran = |world, zero| {
                let mut config = config(world, zero);
                change(&mut config);
                policy(&mut config.precision);
                run(&config, 5)
            };
            for world in [1, 2] {
                let expected = ran(world, 0);
                for zero in sweeps::share(&[1, 2, 3], number + world, 3) {
                    let what = format!("{trained}, {name}, {world} ranks, stage {zero}");
                    rig::assert_same_run(&what, &expected, &ran(world, *zero));
                }
            }
        }
    }
}

fn on_disk(config: &mut RunConfig) {
    (config.memory.optimizer, config.memory.nvme_path) =
        (Tier::Nvme, Some(std::env::temp_dir().as_path().into()));
}

#[test]
fn nothing_else_changes_a_bit() {
    let changes: [(&str, Change); 9] = [
        ("states in host memory", |c| c.memory.optimizer = Tier::Host),
        ("states and gradients in host memory", |c| {
            (c.memory.optimizer, c.memory.gradients) = (Tier::Host, Tier::Host);
        }),
        ("everything on disk", |c| {
            on_disk(c);
            (c.memory.parameters, c.memory.buffer_mb) = (Tier::Nvme, 1.0 / 64.0);
        }),
        ("blocks computed again", |c| c.memory.checkpointing = Checkpointing::Every(1)),
        ("selective", |c| c.memory.checkpointing = Checkpointing::Word(CheckpointingWord::Selective)),
        ("one chunk", |c| c.memory.chunk = Chunk::Mebibytes(64.0)),
        ("no overlap", |c| c.parallel.overlap = false),
        ("inputs of blocks in host memory", |c| {
            (c.memory.activations, c.memory.checkpointing) = (Tier::Host, Checkpointing::Every(1));
        }),
        ("updates within backward", |c| c.memory.update_in_backward = true),
    ];
    let (model, _) = rig::golden_config();
    for (at, (trained, select)) in TRAINED.into_iter().enumerate() {
        // Both types together try every change with what is trained.
        for (first, compute) in (at..).zip([Float::F32, Float::Bf16]) {
            let mut config = config(2, 3);
            select(&mut config);
            (config.precision.compute, config.optimizer.clip) = (compute, 0.0);
            let expected = run(&config, 4);
            for (number, (name, change)) in (at / 2..).zip(sweeps::share(&changes, first, 2)) {
                let mut config = config.clone();
                change(&mut config);
                for &host_addressable in sweeps::share(&[true, false], number, 2) {
                    let spec = rig::spec(&model, &config);
                    let spec = rig::addressed(spec, host_addressable);
                    let steps = &rig::golden_steps()[..4];
                    let ran = rig::run_spec(spec, &config, steps, &rig::Checkpoints::default());
                    let what = format!("{trained}, {compute:?}, {name}, host addresses {host_addressable}");
                    rig::assert_same_run(&what, &expected, &ran);
                }
            }
        }
    }
}

#[test]
fn meshes_agree() {
    let accumulating: Change = |c| (c.batch.micro, c.batch.reduce) = (Some(2), Reduce::Defer);
    let meshes: [(&str, Change); 4] = [
        ("a pipeline", |c| c.parallel.pipeline = 2),
        ("a pipeline whose backward has two parts", |c| {
            (c.parallel.pipeline, c.parallel.schedule) = (2, "zb-h1".into());
        }),
        ("a tensor axis", |c| c.parallel.tensor = 2),
        ("a tensor axis with sequence parallelism", |c| {
            (c.parallel.tensor, c.parallel.sequence_parallel) = (2, true);
        }),
    ];
    for (trained, select) in TRAINED {
        let mut config = config(1, 0);
        select(&mut config);
        accumulating(&mut config);
        let expected = run(&config, 4);
        for (name, change) in meshes {
            let mut config = config.clone();
            change(&mut config);
            let ran = run(&config, 4);
            let what = format!("{trained}, {name}");
            assert_eq!(ran.peaks, ran.planned, "{what}: peak == plan");
            for (own, expected) in ran.losses.iter().zip(&expected.losses) {
                // Sums over ranks have another order: some units in the last place of a loss of about 4.
                assert!((own - expected).abs() < 2e-5, "{what}: {:?} != {:?}", ran.losses, expected);
            }
            for ((name, values, is_trained), expected) in
                parameters(&ran.state).into_iter().zip(parameters(&expected.state))
            {
                assert_eq!((name, is_trained), (expected.0, expected.2), "{what}");
                if !is_trained {
                    assert!(same_bits(values, expected.1), "{what}: {name} is frozen");
                }
            }
        }
    }
}

#[test]
fn a_checkpoint_resumes_into_another_layout() {
    let folder = tempfile::tempdir().unwrap();
    let (model, _) = rig::golden_config();
    let steps = &rig::golden_steps()[..6];
    for (number, (trained, select)) in TRAINED.into_iter().enumerate() {
        let at = |world, zero| {
            let mut config = config(world, zero);
            select(&mut config);
            config.precision.compute = Float::Bf16;
            config
        };
        let dir = folder.path().join(number.to_string());
        let save = rig::Checkpoints { save: Some(dir.clone()), ..Default::default() };
        let whole = rig::run(&model, &at(2, 1), steps);
        rig::run_between(&model, &at(2, 3), &steps[..3], &save);
        let restore = rig::Checkpoints { restore: Some(dir.join("step-3")), ..Default::default() };
        for zero in [0, 1, 3] {
            let rest = rig::run_between(&model, &at(2, zero), &steps[3..], &restore);
            assert_same_state(&format!("{trained}, stage {zero}"), &whole.state, &rest.state);
        }
    }
}

#[test]
fn memory_has_neither_gradients_nor_states_of_them() {
    let plan = |change: Change| {
        let (model, _) = rig::golden_config();
        let mut config = config(1, 0);
        (config.precision.compute, config.memory.chunk) = (Float::Bf16, Chunk::Mebibytes(0.02));
        change(&mut config);
        RunPlan::new(rig::spec(&model, &config)).unwrap()
    };
    let all = plan(|_| {});
    for (what, change) in TRAINED {
        let plan = plan(change);
        let bytes = |category| plan.ranks[0].peak().categories.get(category);
        let (parameters, trained) = (plan.parameters(), plan.trained_parameters());
        assert!(0 < trained && trained < parameters && parameters == all.parameters(), "{what}");
        // Chunks are padded to whole blocks of 4,096 elements for each parameter.
        let whole = plan.spec.model.whole();
        let trained = whole.parameters.iter().filter(|spec| spec.trained);
        let padded: u64 = trained.map(|spec| spec.elements().next_multiple_of(4096) as u64).sum();
        assert!(
            bytes(Category::Gradients) <= 4 * padded && bytes(Category::Optimizer) <= 12 * padded,
            "{what}"
        );
        assert!(plan.arena_bytes_max() < all.arena_bytes_max(), "{what}");
    }
    // Nothing below the last block is saved.
    let last = plan(TRAINED[0].1);
    let activations = |plan: &RunPlan| plan.ranks[0].peak().categories.get(Category::Activations);
    assert!(3 * activations(&last) < 2 * activations(&all), "{} {}", activations(&last), activations(&all));
}

#[test]
fn what_cannot_be_is_refused() {
    let (model, _) = rig::golden_config();
    let refused = |change: Change| {
        let mut config = config(1, 0);
        change(&mut config);
        let error = config.check().err().map(|error| error.to_string());
        error.unwrap_or_else(|| Spec::new(&config, model.clone(), 8, 1).map(drop).unwrap_err().to_string())
    };
    let unknown = refused(|c| c.model.trainable = vec!["*.h.1.*".into(), "*.atn.*".into()]);
    assert!(unknown.contains("model.trainable") && unknown.contains("*.atn.*"), "{unknown}");
    assert!(unknown.contains("transformer.h.*.attn.c_attn.weight"), "{unknown}");
    let nothing = refused(|c| c.model.frozen = vec!["*".into()]);
    assert!(nothing.contains("model.frozen") && nothing.contains("no parameter to train"), "{nothing}");
    let asynchronous = refused(|c| {
        c.model.frozen = vec!["*.wte.*".into()];
        (c.parallel.updates, c.parallel.data, c.parallel.zero) = (Updates::Asynchronous, Some(2), 0);
    });
    assert!(
        asynchronous.contains("parallel.updates") && asynchronous.contains("model.frozen"),
        "{asynchronous}"
    );
}
