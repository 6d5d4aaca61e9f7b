//! Updates that the host computes during the next step: parameters lack exactly one update, on every device and ZeRO stage,
//! and a save applies what is left.

use crate::rig;
use crate::rig::{Checkpoints, Ran, Steps, assert_same_state, same_bits};
use phalanx_train::RunConfig;
use phalanx_train::config::{Chunk, Float, Reduce, Tier};

fn config(world: usize, zero: u8) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    (config.parallel.data, config.parallel.zero) = (Some(world), zero);
    config.precision.compute = Float::Bf16;
    (config.memory.optimizer, config.memory.gradients) = (Tier::Host, Tier::Host);
    config.memory.chunk = Chunk::Mebibytes(0.3);
    config.memory.buffer_mb = 3.0 / 64.0;
    config
}

fn run(config: &RunConfig, steps: &Steps, host_addressable: bool) -> Ran {
    let (model, _) = rig::golden_config();
    let spec = rig::spec(&model, config);
    let ran = rig::run_spec(rig::addressed(spec, host_addressable), config, steps, &Checkpoints::default());
    assert_eq!(ran.peaks, ran.planned, "peak == plan");
    ran
}

/// Steps of the golden run by their numbers.
fn steps(numbers: &[usize]) -> Steps {
    let all = rig::golden_steps();
    numbers.iter().map(|number| all[*number].clone()).collect()
}

#[test]
fn each_step_computes_without_the_update_of_the_step_before() {
    for (world, zero) in [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)] {
        for host_addressable in [true, false] {
            let at_once = config(world, zero);
            let mut delayed = at_once.clone();
            delayed.memory.delayed_update = true;
            let what =
                format!("{world} ranks, stage {zero}, host addresses device memory: {host_addressable}");

            // The first update lacks nothing, and the save waits for it.
            let [one, expected] =
                [&delayed, &at_once].map(|config| run(config, &steps(&[0]), host_addressable));
            assert_same_state(&what, &expected.state, &one.state);

            // The second step has the initial parameters, the third those after the first update.
            let losses = run(&delayed, &steps(&[0, 1, 2]), host_addressable).losses;
            let second = run(&at_once, &steps(&[1]), host_addressable).losses[0];
            let third = run(&at_once, &steps(&[0, 2]), host_addressable).losses[1];
            assert!(
                same_bits(&losses[..3], &[expected.losses[0], second, third]),
                "{what}: {losses:?} {second} {third}"
            );
        }
    }
}

#[test]
fn devices_stages_and_accumulation_give_the_same_bits() {
    let all = steps(&[0, 1, 2, 3, 4]);
    for reduce in [Reduce::Each, Reduce::Defer] {
        let of = |zero, host_addressable| {
            let mut config = config(2, zero);
            (config.batch.micro, config.batch.reduce) = (Some(2), reduce);
            config.memory.delayed_update = true;
            run(&config, &all, host_addressable)
        };
        let expected = of(0, true);
        for (zero, host_addressable) in [(1, true), (3, true), (0, false), (2, false), (3, false)] {
            let ran = of(zero, host_addressable);
            assert_same_state(&format!("stage {zero}, {host_addressable}"), &expected.state, &ran.state);
            assert!(same_bits(&expected.losses, &ran.losses));
        }
    }
}

/// The losses of the golden run fall as fast, one step later.
#[test]
fn a_delay_of_one_step_costs_little() {
    let all = rig::golden_steps();
    let mut delayed = config(1, 0);
    let at_once = run(&delayed, &all, true).losses;
    delayed.memory.delayed_update = true;
    let losses = run(&delayed, &all, true).losses;
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
    // The mean of the last ten steps, where the losses of single steps differ by their samples.
    let (late, expected) = (mean(&losses[10..20]), mean(&at_once[10..20]));
    let fall = at_once[0] - expected;
    println!("mean loss of steps 11 to 20: {expected} at once, {late} delayed, {} at first", at_once[0]);
    assert!(late < at_once[0] - 0.5 * fall, "{late} {expected}");
    assert_ne!(losses[1], at_once[1]);
}

#[test]
fn steps_that_overflow_are_skipped() {
    let mut config = config(2, 1);
    config.precision.compute = Float::F16;
    config.precision.initial_scale_power = 24;
    (config.precision.hysteresis, config.precision.loss_scale_window) = (1, 2);
    config.memory.delayed_update = true;
    let all = steps(&[0, 1, 2, 3, 4, 5]);
    let [here, there] = [true, false].map(|host_addressable| run(&config, &all, host_addressable));
    assert!(here.skipped.contains(&true) && here.skipped.contains(&false), "{:?}", here.skipped);
    assert_same_state("f16", &here.state, &there.state);
}

#[test]
fn what_a_delayed_update_needs_is_said() {
    let refusal = |change: fn(&mut RunConfig)| {
        let mut config = config(1, 3);
        config.memory.delayed_update = true;
        change(&mut config);
        config.check().unwrap_err().to_string()
    };
    assert!(refusal(|c| c.memory.gradients = Tier::Device).contains("needs memory.gradients = \"host\""));
    assert!(refusal(|c| c.memory.parameters = Tier::Host).contains("needs parameters in device memory"));
    assert!(refusal(|c| c.precision.compute = Float::F32).contains("needs precision.compute"));
}
