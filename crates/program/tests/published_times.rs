//! Published times of steps on H100: torchtitan's, in tokens a second of a device.

use crate::rig::Home;

/// Tokens a second of a device that torchtitan publishes for H100 with HBM2e, within 15 %: Llama 3.1 8B on 8 (eager, selective checkpointing), and
/// 70B on 256 (bf16, without asynchronous tensor parallelism; full checkpointing and 16 sequences of a rank are assumed).
#[test]
fn published_steps_on_h100_are_predicted() {
    let home = Home::new();
    let h100 = include_str!("../machines/h100.toml");
    assert!(h100.contains("memory_gb_per_s = 3350.0"), "{h100}");
    home.write("h100.toml", h100.replace("memory_gb_per_s = 3350.0", "memory_gb_per_s = 2000.0"));
    let of_both = "--machine h100.toml --json --set model.seq=8192 --set parallel.zero=3 --set device.kind=cuda --set memory.chunk=512 \
                   --set memory.prefetch=2";
    for (options, devices, published) in [
        ("--size llama3-8b --nproc 8 --set batch.global=8 --set memory.checkpointing=selective", 8.0, 5762.0),
        (
            "--size llama3-70b --nproc 256 --set batch.global=512 --set memory.checkpointing=block --set parallel.tensor=8 \
             --set parallel.sequence_parallel=true",
            256.0,
            597.0,
        ),
    ] {
        let line = format!("plan {options} {of_both}");
        let plan = home.run(&line.split_whitespace().collect::<Vec<_>>()).ok().json();
        let rate = plan["step_time"]["tokens_per_s"].as_f64().expect("the profile has all rates") / devices;
        assert!(
            (rate / published - 1.0).abs() < 0.15,
            "{options}: {rate:.0} tokens a second, published {published}"
        );
    }
}
