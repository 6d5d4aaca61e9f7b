//! Published times of steps on A100: Narayanan et al. (arXiv 2104.04473, table 1, with the seconds that follow from its rates) and Korthikanti
//! et al. (arXiv 2205.05198, table 5). One profile predicts them, four of whose numbers were fitted to three rows of the first table.

use crate::rig::Home;

/// The profile.
const A100: &str = include_str!("golden/machines/a100-megatron.toml");

/// A run: heads, hidden, layers; tensor and pipeline ranks; devices, batch, micro-batch, and stages of each rank.
struct Run {
    model: [usize; 3],
    mesh: [usize; 2],
    devices: usize,
    batch: usize,
    micro: usize,
    chunks: usize,
    /// What backward recomputes, and whether sequence parallelism is on.
    memory: (&'static str, bool),
    published_s: f64,
}

impl Run {
    fn config(&self) -> String {
        let ([heads, hidden, layers], [tensor, pipeline]) = (self.model, self.mesh);
        let (checkpointing, sequence) = self.memory;
        let schedule = match pipeline {
            1 => String::new(),
            _ => format!("schedule = \"interleaved\"\nchunks = {}\n", self.chunks),
        };
        format!(
            "[model]\narch = \"gpt2\"\nlayers = {layers}\nhidden = {hidden}\nheads = {heads}\nvocab = 51200\nseq = 2048\n[batch]\n\
             global = {}\nmicro = {}\nreduce = \"defer\"\n[precision]\ncompute = \"f16\"\naccumulate = \"f16\"\n[memory]\n\
             checkpointing = \"{checkpointing}\"\n[parallel]\ntensor = {tensor}\npipeline = {pipeline}\ndata = {}\nzero = 0\n\
             sequence_parallel = {sequence}\n{schedule}",
            self.batch,
            self.micro,
            self.devices / tensor / pipeline,
        )
    }

    fn predicted_s(&self, home: &Home) -> f64 {
        home.write("run.toml", self.config());
        let plan = home.run(&["plan", "run.toml", "--machine", "a100.toml", "--json"]).ok().json();
        plan["step_time"]["time"]["seconds"].as_f64().expect("the profile has all rates")
    }
}

/// Within 10 %. The papers do not give the micro-batches of the first table: these are the fastest of 1, 2, 4 and 8 that divide the batch.
#[test]
fn published_steps_on_a100_are_predicted() {
    let home = Home::new();
    home.write("a100.toml", A100);
    let full = ("block", false);
    let run = |model, mesh, devices, batch, micro, chunks, memory, published_s| Run {
        model,
        mesh,
        devices,
        batch,
        micro,
        chunks,
        memory,
        published_s,
    };
    let runs = [
        run([24, 2304, 24], [1, 1], 32, 512, 8, 1, full, 3.53),
        run([32, 3072, 30], [2, 1], 64, 512, 8, 1, full, 3.70),
        run([32, 4096, 36], [4, 1], 128, 512, 4, 1, full, 3.70),
        run([48, 6144, 40], [8, 1], 256, 1024, 4, 1, full, 9.40),
        run([80, 10240, 60], [8, 4], 1024, 1792, 2, 3, full, 16.06),
        run([128, 16384, 96], [8, 16], 1920, 2160, 1, 3, full, 37.61),
        run([128, 20480, 105], [8, 35], 2520, 2520, 1, 3, full, 54.08),
        run([64, 6144, 48], [8, 1], 8, 4, 4, 1, full, 1.42),
        run([64, 6144, 48], [8, 1], 8, 4, 4, 1, ("selective", true), 1.10),
        run([128, 20480, 105], [8, 35], 280, 280, 1, 3, full, 49.05),
        run([128, 20480, 105], [8, 35], 280, 280, 1, 3, ("selective", true), 37.83),
    ];
    let mut wrong = Vec::new();
    for run in &runs {
        let predicted = run.predicted_s(&home);
        let error = 100.0 * (predicted / run.published_s - 1.0);
        let line = format!(
            "{:?} on {}: {predicted:.2} s, published {:.2} s ({error:+.1} %)",
            run.model, run.devices, run.published_s
        );
        if error.abs() > 10.0 {
            wrong.push(line);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

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
