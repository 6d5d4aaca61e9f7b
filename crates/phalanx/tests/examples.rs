//! The examples on 2 and 4 ranks, as threads and as processes: the same losses, bit for bit.
//!
//! A test that launches processes is started once more for each rank, by its own name.
#![allow(dead_code, reason = "the examples' own main functions")]

#[path = "../examples/all_reduce.rs"]
mod all_reduce;
#[path = "../examples/ddp.rs"]
mod ddp;
#[path = "../examples/own_data.rs"]
mod own_data;
#[path = "../examples/own_inputs.rs"]
mod own_inputs;
#[path = "../examples/own_layer.rs"]
mod own_layer;
#[path = "../examples/own_model.rs"]
mod own_model;
#[path = "../examples/own_optimizer.rs"]
mod own_optimizer;
#[path = "../examples/processes.rs"]
mod processes;

use std::error::Error;

use phalanx::{Arena, Category, Cpu, CpuFactory, DType, Device, LaunchError, Launcher, Training};

/// Ranks that run only the test `name` of this file.
fn launcher(ranks: usize, name: &str) -> Launcher {
    Launcher::new(ranks).with_arguments([
        "--exact",
        &format!("examples::{name}"),
        "--nocapture",
        "--test-threads=1",
    ])
}

fn threads_and_processes(training: &Training, ranks: usize, name: &str) {
    let processes = launcher(ranks, name).run(|rank| training.on_rank(&CpuFactory::new(), rank)).unwrap();
    let threads = training.on_threads(&CpuFactory::new()).unwrap();
    assert_eq!((threads.len(), processes.len()), (ranks, ranks));
    for (thread, process) in threads.into_iter().zip(processes) {
        let losses = thread.unwrap();
        assert!(losses.len() == 5 && losses[4] < losses[0], "{losses:?}");
        let bits = |losses: &[f32]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&losses), bits(&process), "{losses:?} and {process:?}");
    }
}

macro_rules! on_ranks {
    ($($test:ident: $example:ident, $ranks:literal;)*) => {
        $(#[test]
        fn $test() {
            threads_and_processes(&$example::training($ranks).unwrap(), $ranks, stringify!($test));
        })*
    };
}
on_ranks! {
    own_layer_on_2_ranks: own_layer, 2;
    own_layer_on_4_ranks: own_layer, 4;
    own_optimizer_on_2_ranks: own_optimizer, 2;
    own_optimizer_on_4_ranks: own_optimizer, 4;
    own_data_on_2_ranks: own_data, 2;
    own_data_on_4_ranks: own_data, 4;
    own_inputs_on_2_ranks: own_inputs, 2;
    own_inputs_on_4_ranks: own_inputs, 4;
    processes_on_2_ranks: processes, 2;
    processes_on_4_ranks: processes, 4;
}

/// Another number of ranks changes the order of sums, and nothing else.
#[test]
fn losses_are_those_of_one_rank() {
    for make in [own_layer::training, own_optimizer::training, own_data::training, own_inputs::training] {
        let losses = |ranks| {
            let trained = make(ranks).unwrap().on_threads(&CpuFactory::new()).unwrap();
            trained.into_iter().next().unwrap().unwrap()
        };
        let alone = losses(1);
        for ranks in [2, 4] {
            for (a, b) in alone.iter().zip(losses(ranks)) {
                // A loss of about 4 has a rounding of 2^-22; five steps of updates amplify it.
                assert!((a - b).abs() < 1e-3, "{alone:?} on one rank, {b} on {ranks}");
            }
        }
    }
}

/// Inputs of floats and a loss of the caller's own: the micro-batch that a block reads does not depend on who computes it.
#[test]
fn own_inputs_give_the_bits_of_one_rank() {
    let losses = |samples: usize, parallel: &str| -> Vec<u32> {
        let trained = own_inputs::on_mesh(samples, parallel).unwrap().on_threads(&CpuFactory::new()).unwrap();
        let losses: Vec<Vec<f32>> = trained.into_iter().map(Result::unwrap).collect();
        assert!(losses.iter().all(|rank| *rank == losses[0] && rank[4] < rank[0]), "{parallel}: {losses:?}");
        losses[0].iter().map(|loss| loss.to_bits()).collect()
    };
    let (alone, two) = (losses(8, ""), losses(8, "data = 2"));
    for stages in ["schedule = \"1f1b\"", "schedule = \"gpipe\"", "schedule = \"zb-h1\""] {
        assert_eq!(losses(8, &format!("pipeline = 2\n{stages}")), alone, "{stages}");
        for zero in 0..=3 {
            assert_eq!(
                losses(8, &format!("pipeline = 2\ndata = 2\nzero = {zero}\n{stages}")),
                two,
                "{stages}, {zero}"
            );
        }
    }
    for zero in 1..=3 {
        assert_eq!(losses(8, &format!("data = 2\nzero = {zero}")), two, "ZeRO-{zero}");
        assert_eq!(losses(8, &format!("zero = {zero}")), alone, "ZeRO-{zero} on one rank");
    }
    // The sum of two micro-batches is the same on one rank and on two.
    assert_eq!(losses(4, "data = 2\nzero = 3"), losses(4, ""), "ZeRO-3 on two ranks and one rank");
}

#[test]
fn examples_that_only_print_run_to_their_end() {
    all_reduce::main().unwrap();
    ddp::main().unwrap();
    own_model::main().unwrap();
}

#[test]
fn a_collective_without_a_plan() {
    let sums = launcher(3, "a_collective_without_a_plan").run(processes::sum).unwrap();
    assert_eq!(sums, [3.0; 3]);
}

#[test]
fn a_tensor_that_others_cannot_read_is_an_error_that_says_what_to_do() {
    let name = "a_tensor_that_others_cannot_read_is_an_error_that_says_what_to_do";
    let outside = |rank: &phalanx::Endpoint| -> Result<f32, Box<dyn Error>> {
        let device = Device::new(Cpu::new(1), Arena::heap());
        let x = device.alloc(DType::F32, [4], Category::Workspace, "x");
        let x = rank.group("all").all_reduce(x).wait()?;
        Ok(device.fetch([x.view().range(0..1)])?[0])
    };
    let error = launcher(2, name).run(outside).unwrap_err().to_string();
    for part in ["a tensor of 16 bytes", "not in memory that the ranks share", "endpoint.arena"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_rank_that_fails_is_named_and_ends_the_others() {
    let fails = |rank: &phalanx::Endpoint| match rank.rank() {
        1 => Err("no luck".to_string()),
        // Waits for rank 1 until the job ends.
        _ => processes::sum(rank).map_err(|error| error.to_string()),
    };
    let error = launcher(3, "a_rank_that_fails_is_named_and_ends_the_others").run(fails).unwrap_err();
    assert!(matches!(&error, LaunchError::Rank { rank: 1, reason, .. } if reason == "no luck"), "{error}");
}

#[test]
fn a_rank_that_dies_is_named() {
    let dies = |rank: &phalanx::Endpoint| {
        if rank.rank() == 1 {
            std::process::exit(7);
        }
        processes::sum(rank).map_err(|error| error.to_string())
    };
    let error = launcher(2, "a_rank_that_dies_is_named").run(dies).unwrap_err().to_string();
    assert!(error.contains("rank 1 failed") && error.contains("exit code 7"), "{error}");
}
