//! Training on the simulated accelerator: the losses of the processor, two memories as planned, and what is refused.

use crate::rig::{Home, assert_as_planned, number};
use phalanx_testing::sweeps;

const SIMULATED: [&str; 2] = ["--set", "device.kind=simulated"];

#[test]
fn the_losses_are_those_of_the_processor_and_both_memories_are_as_planned() {
    let home = Home::new();
    for layout in [&["--nproc", "1"][..], &["--nproc", "2", "--set", "parallel.zero=2"]] {
        let run = |name: &str, more: &[&str]| {
            let args = [&["train", "small.toml", "--run", name], layout, more].concat();
            home.run(&args).ok()
        };
        let name = |device: &str| format!("{device}-{}", layout[1]);
        let (cpu, simulated) = (name("cpu"), name("simulated"));
        run(&cpu, &[]);
        let ended = run(&simulated, &SIMULATED);
        assert!(ended.stdout.contains("simulated accelerator"), "{}", ended.stdout);
        assert!(!home.losses(&cpu).is_empty());
        assert_eq!(home.losses(&cpu), home.losses(&simulated), "{layout:?}");
        let (plan, memory) =
            (home.json(&format!("{simulated}/plan.json")), home.json(&format!("{simulated}/memory.json")));
        assert_as_planned(&plan, &memory);
        let peak = |of: &serde_json::Value| number(&of["ranks"][0]["host"], "peak_bytes");
        assert!(peak(&memory) > 0.0);
        assert_eq!(peak(&plan), peak(&memory), "host memory");
    }
}

#[test]
fn an_evaluation_computes_on_the_device_of_the_run() {
    let home = Home::new();
    home.write("few.txt", "rank shard gather plan step\n".repeat(9));
    home.run(&[&["train", "small.toml", "--run", "r"], &SIMULATED[..]].concat()).ok();
    let eval = |more: &[&str]| home.run(&[&["eval", "r", "--data", "few.txt", "--json"], more].concat());
    let (simulated, cpu) = (eval(&[]).ok().json(), eval(&["--device", "cpu"]).ok().json());
    assert_eq!((&simulated["device"], &cpu["device"]), (&"simulated".into(), &"cpu".into()));
    assert_eq!(number(&simulated, "loss"), number(&cpu, "loss"));
    home.run(&["eval", "r", "--data", "few.txt", "--device", "cuda"])
        .refused(&["device.kind = \"cuda\"", "--device cpu"]);
}

#[test]
fn what_cannot_be_simulated_is_refused() {
    let home = Home::new();
    let refused = |more: &[&str], words: &[&str]| {
        let args = [&["train", "small.toml", "--run", "refused"], &SIMULATED[..], more].concat();
        home.run(&args).refused(words);
    };
    let asynchronous = ["--nproc", "2", "--set", "parallel.updates=asynchronous"];
    refused(&asynchronous, &["device.kind", "needs parallel.updates"]);
    refused(&["--set", "device.memory_mb=0.01"], &["bytes", "memory"]);
    refused(&["--set", "device.copy_gb_per_s=0"], &["device.copy_gb_per_s"]);
}

/// Ways to keep the state of a run, with the keys that each needs and no other.
const PLACEMENTS: [&[&str]; 6] = [
    &["memory.placement=device"],
    &["memory.optimizer=host", "memory.gradients=host"],
    &["device.kind=simulated", "device.seed=7", "device.memory_mb=64", "memory.placement=host"],
    &["device.kind=cpu", "memory.offload_optim_frac=0.5"],
    &["memory.placement=auto", "memory.device_budget_mb=1.5", "memory.host_budget_mb=64"],
    &["memory.placement=nvme", "memory.nvme_path=disk"],
];

/// A run that changes its placement at each step is the undisturbed run: from each one to the next and to the one after that, in whole
/// sweeps to each other.
#[test]
fn a_run_resumes_from_placements_into_others() {
    let home = Home::new();
    std::fs::create_dir(home.path("disk")).unwrap();
    let train = |run: &[&str], steps: usize, more: &[&str]| {
        let steps = format!("train.steps={steps}");
        let own = [steps.as_str(), "train.save_every=1", "train.eval_every=100", "train.keep=1"];
        let set: Vec<&str> = own.iter().chain(more).flat_map(|set| ["--set", set]).collect();
        home.run(&[&["train"], run, &set[..]].concat())
    };
    let count = PLACEMENTS.len();
    // 0 1 0 2 0 3 ... 0, then 1 2 1 3 ... 1, and so on: each follows each other.
    let each = (0..count).flat_map(|one| (one + 1..count).flat_map(move |other| [one, other]).chain([one]));
    let some = (0..=count)
        .chain((1..=count / 2).map(|step| 2 * step))
        .chain((0..=count / 2).map(|step| 2 * step + 1));
    let order: Vec<usize> =
        if sweeps::are_whole() { each.collect() } else { some.map(|one| one % count).collect() };
    train(&["small.toml", "--run", "moved"], 1, PLACEMENTS[order[0]]).ok();
    for (step, pair) in (2..).zip(order.windows(2)) {
        let ended = train(&["--run", "moved", "--resume"], step, PLACEMENTS[pair[1]]);
        let [before, now] = [PLACEMENTS[pair[0]], PLACEMENTS[pair[1]]];
        assert_eq!(ended.code, Some(0), "{before:?}, then {now:?}: {}", ended.stderr);
    }
    train(&["small.toml", "--run", "whole"], order.len(), &[]).ok();
    assert_eq!(home.losses("moved").len(), order.len());
    assert_eq!(home.losses("moved"), home.losses("whole"));
}
