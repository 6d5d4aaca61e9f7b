//! A device that fails on one of several ranks, in the middle of a step: all ranks stop together, within a bounded time,
//! and each says which rank, which operation and where it was asked for.

use crate::rig;
use std::time::{Duration, Instant};

use crate::rig::devices;
use phalanx_simulated::Failure;
use phalanx_train::rank::{Batch, Rank};
use phalanx_train::{RunConfig, RunError, RunPlan, on_threads};

/// Far more than the steps take, far less than the 300 s after which ranks give up on each other.
const BOUND: Duration = Duration::from_secs(100);
/// Steps that would be run without a failure.
const STEPS: u64 = 8;
/// The rank whose device fails.
const FAULTY: usize = 1;

fn config([pipeline, data, tensor]: [usize; 3], zero: u8) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    let parallel = &mut config.parallel;
    (parallel.pipeline, parallel.data, parallel.tensor, parallel.zero) = (pipeline, Some(data), tensor, zero);
    config.batch.micro = Some(1);
    config
}

fn plan(config: &RunConfig) -> RunPlan {
    let (model, _) = rig::golden_config();
    RunPlan::new(devices::on(&devices::simulated(1), rig::spec(&model, config))).unwrap()
}

/// Calls that a rank issues to its device in one step.
fn calls_of_a_step(plan: &RunPlan) -> u64 {
    let step = &plan.of(FAULTY).step;
    let copies: u64 = step.copies.iter().map(|copy| copy.calls).sum();
    step.kernels.iter().map(|kernel| kernel.calls).sum::<u64>() + copies
}

/// Trains until an error; each rank's.
fn errors(plan: &RunPlan, call: u64, failure: Failure) -> Vec<RunError> {
    let factory = devices::simulated(call).with_failure(FAULTY, call, failure);
    let until_an_error = |engine: &mut Rank| {
        engine.initialise(1).unwrap();
        let spec = &plan.spec;
        let batch = Batch::with_rows(spec.batch.micro_batch_size * spec.batch.micro_batches, spec.batch.seq);
        (1..=STEPS).find_map(|number| engine.step(number, &batch, false).err()).expect("the device fails")
    };
    on_threads(&factory, plan, until_an_error).unwrap()
}

/// Returns whether a text is "`linear` at crates/.../mlp.rs:12 failed on the simulated device: the device was lost".
fn names_operation_and_call_site(text: &str, reason: &str) -> bool {
    let rest = text.strip_prefix('`').and_then(|rest| rest.split_once("` at crates/"));
    let Some((operation, rest)) = rest else { return false };
    let Some((site, rest)) = rest.split_once(" failed on the simulated device: ") else { return false };
    let line = site.split_once(".rs:").and_then(|(_, line)| line.parse::<u32>().ok());
    !operation.is_empty() && line.is_some() && rest.starts_with(reason)
}

#[test]
fn all_ranks_stop_together_and_name_rank_operation_and_call_site() {
    let meshes = [([1, 2, 1], 0), ([1, 2, 1], 3), ([2, 1, 1], 0), ([1, 1, 2], 0)];
    for (mesh, zero) in meshes {
        let plan = plan(&config(mesh, zero));
        let calls = calls_of_a_step(&plan);
        for (nth, failure) in
            [Failure::Lost, Failure::OutOfMemory, Failure::Lost, Failure::Lost].into_iter().enumerate()
        {
            // Spread over a step; the first ones are those of the initial values.
            let call = 4 * calls + calls * (1 + 2 * nth as u64) / 8;
            let what = format!("mesh {mesh:?}, ZeRO-{zero}, call {call} of {calls} in a step, {failure:?}");
            let start = Instant::now();
            let reason = if failure == Failure::Lost { "the device was lost" } else { "out of memory" };
            let errors = errors(&plan, call, failure);
            assert!(start.elapsed() < BOUND, "{what}: {:?}", start.elapsed());

            // What the others are told; the rank itself may learn it first from another call that it waits for.
            let told = errors[0].to_string();
            let failure = told.strip_prefix(&format!("the job ended because of rank {FAULTY}: "));
            let failure = failure.unwrap_or_else(|| panic!("{what}: {told}"));
            assert!(names_operation_and_call_site(failure, reason), "{what}: {failure}");
            let own = errors[FAULTY].to_string();
            assert!(own == failure || own == told, "{what}: {own}");
        }
    }
}
