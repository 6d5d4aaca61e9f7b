//! Training on the simulated accelerator: the losses of the processor, two memories as planned, and what is refused.

mod rig;

use rig::{Home, assert_as_planned, number};

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
fn what_cannot_be_simulated_is_refused() {
    let home = Home::new();
    let refused = |more: &[&str], words: &[&str]| {
        let args = [&["train", "small.toml", "--run", "refused"], &SIMULATED[..], more].concat();
        home.run(&args).refused(words);
    };
    let asynchronous = ["--nproc", "2", "--set", "parallel.updates=asynchronous"];
    refused(&asynchronous, &["device.kind", "synchronous updates only"]);
    refused(&["--set", "device.memory_mb=0.01"], &["bytes", "memory"]);
    refused(&["--set", "device.copy_gb_per_s=0"], &["device.copy_gb_per_s"]);
}
