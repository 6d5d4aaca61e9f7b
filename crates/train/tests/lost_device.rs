//! A device that fails on one of several ranks, in the middle of a step: all ranks stop together, within a bounded time,
//! and each says which rank, which operation and where it was asked for.

mod rig;

use std::time::{Duration, Instant};

use phalanx_collectives::CollectiveError;
use phalanx_simulated::Failure;
use phalanx_tensor::DeviceError;
use phalanx_train::rank::{Batch, Rank};
use phalanx_train::{RunConfig, RunError, RunPlan, on_threads};
use rig::devices;

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
        let batch = Batch::with_rows(spec.micro_batch_size * spec.micro_batches, spec.seq);
        (1..=STEPS).find_map(|number| engine.step(number, &batch, false).err()).expect("the device fails")
    };
    on_threads(&factory, plan, until_an_error).unwrap()
}

/// The failure that an error is, if it is that of the rank's own device.
fn failure_of(error: &RunError) -> Option<&DeviceError> {
    match error {
        RunError::Device(failure) | RunError::Collective(CollectiveError::Device(failure)) => Some(failure),
        _ => None,
    }
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
            let errors = errors(&plan, call, failure);
            assert!(start.elapsed() < BOUND, "{what}: {:?}", start.elapsed());

            let own = failure_of(&errors[FAULTY]).unwrap_or_else(|| panic!("{what}: {}", errors[FAULTY]));
            let reason = if failure == Failure::Lost { "the device was lost" } else { "out of memory" };
            assert!(own.device == "simulated" && own.reason.starts_with(reason), "{what}: {own}");
            assert!(own.site.file.ends_with(".rs") && own.site.line > 0, "{what}: {own}");
            for (rank, error) in errors.iter().enumerate().filter(|(rank, _)| *rank != FAULTY) {
                let expected = format!("the job ended because of rank {FAULTY}: {own}");
                assert_eq!(error.to_string(), expected, "{what}: rank {rank}");
            }
        }
    }
}
