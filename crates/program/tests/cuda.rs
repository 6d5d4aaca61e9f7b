//! Runs on cards: losses near those of the processor, memories as planned, ranks that share a card; and what is said where there is
//! no card, driver or compiler.
//!
//! Cards are those of the emulator of the driver (`cargo xtask cuda-emulator`); without it, the tests that need it say so and check
//! nothing.
#![allow(clippy::print_stderr, reason = "a test that checks nothing says so")]

use crate::rig;
use std::process::Command;

use crate::rig::{Ended, Home, assert_as_planned};

const CARD: [&str; 2] = ["--set", "device.kind=cuda"];
const TINY: [&str; 10] = [
    "--set",
    "model.layers=1",
    "--set",
    "model.hidden=16",
    "--set",
    "train.steps=3",
    "--set",
    "batch.global=4",
    "--set",
    "train.eval_samples=4",
];

/// Returns whether the driver that the dynamic loader finds is the emulator, with a compiler.
fn has_emulator(test: &str) -> bool {
    let cards = phalanx_cuda::usable_cards();
    let emulated = cards.is_ok_and(|cards| cards[0].name == "Phalanx CUDA emulator");
    let usable = emulated && std::env::var_os("PHALANX_NVRTC").is_some();
    if !usable {
        eprintln!(
            "{test}: skipped, because there is no emulator of the driver (`cargo xtask cuda-emulator` runs it with one)"
        );
    }
    usable
}

/// The program on the emulator; compiled kernels are kept in the target folder.
fn on_emulator(home: &Home, args: &[&str]) -> Command {
    let mut command = home.command(args);
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

fn run(home: &Home, args: &[&str], variable: (&str, &str)) -> Ended {
    let mut command = on_emulator(home, args);
    command.env(variable.0, variable.1);
    rig::ended(command)
}

#[test]
fn losses_are_near_the_processors_and_every_memory_is_as_planned() {
    if !has_emulator("training") {
        return;
    }
    let home = Home::new();
    let seed = ("PHALANX_EMULATOR_SEED", "3");
    for (layout, tolerance) in [
        (&["--nproc", "1"][..], 2e-6),
        (&["--nproc", "2", "--set", "parallel.zero=2", "--set", "precision.compute=bf16"], 16.0 / 512.0),
    ] {
        let name = |device: &str| format!("{device}-{}", layout[1]);
        let (cpu, card) = (name("cpu"), name("cuda"));
        let train = |name: &str, device: &[&str]| {
            let args = [&["train", "small.toml", "--run", name], &TINY[..], layout, device].concat();
            run(&home, &args, seed).ok()
        };
        train(&cpu, &["--set", "device.kind=cpu"]);
        let ended = train(&card, &["--set", "device.kind=auto"]);
        assert!(ended.stderr.contains("computing on Phalanx CUDA emulator"), "{}", ended.stderr);
        let shared = ended.stderr.contains("up to 2 ranks on a card");
        assert_eq!(shared, layout[1] == "2", "{}", ended.stderr);
        let config = String::from_utf8(home.read(&format!("{card}/config.toml"))).unwrap();
        assert!(config.contains("kind = \"cuda\""), "a resumed run computes on the same device: {config}");
        let (expected, found) = (home.losses(&cpu), home.losses(&card));
        assert_eq!(expected.len(), found.len());
        let losses = |of: &[(u64, String, String)]| -> Vec<f64> {
            of.iter().map(|(_, loss, _)| loss.parse().unwrap()).collect()
        };
        for (expected, found) in losses(&expected).into_iter().zip(losses(&found)) {
            assert!((expected - found).abs() < tolerance, "{layout:?}: {found} for {expected}");
        }
        let (plan, memory) =
            (home.json(&format!("{card}/plan.json")), home.json(&format!("{card}/memory.json")));
        assert_as_planned(&plan, &memory);
        assert_eq!(plan["ranks"][0]["host"], memory["ranks"][0]["host"], "host memory");
        assert_eq!(plan["beside_plan"]["scratch_bytes"], 64 << 20);
    }
}

/// The emulator says no clocks, so there are no limits; the strategies that are compared with are the processor's.
#[test]
fn benchmarks_say_their_device_and_claim_no_limits_that_are_unknown() {
    if !has_emulator("benchmarks") {
        return;
    }
    let (home, seed) = (Home::new(), ("PHALANX_EMULATOR_SEED", "5"));
    let settings = ["--set", "model.layers=1", "--set", "model.hidden=16", "--set", "batch.global=4"];
    let step = [&["bench", "step", "small.toml", "--steps", "1", "--warmup", "1"], &settings[..]].concat();
    let ended = run(&home, &[&step[..], &["--json"]].concat(), seed).ok();
    assert!(ended.stderr.contains("computing on Phalanx CUDA emulator"), "{}", ended.stderr);
    let figures = ended.json();
    let [device, mfu, peak] = ["device", "mfu", "peak_flops_per_s"].map(|key| &figures[key]);
    assert_eq!((device.as_str(), mfu.is_null(), peak.is_null()), (Some("cuda"), true, true), "{figures}");
    let kernels = figures["profile_of_rank_0"]["kernels"].as_array().unwrap();
    assert!(
        kernels.iter().any(|kernel| kernel["name"] == "adamw"),
        "the update is part of a step: {figures}"
    );
    let text = run(&home, &step, seed).ok().stdout;
    assert!(text.contains("unknown") && !text.contains("mfu") && !text.contains("utilisation"), "{text}");
    check_launches(&home, &settings);
    let tf32 = [&step[..], &["--set", "precision.products=tf32", "--json"]].concat();
    assert_eq!(run(&home, &tf32, seed).ok().json()["device"], "cuda");
    let strategies = ["bench", "strategies", "small.toml", "--nproc", "2", "--steps", "1", "--json"];
    let few = ["--only", "one-device", "--bert-steps", "0"];
    let figures = run(&home, &[&strategies[..], &few, &settings].concat(), seed).ok().json();
    assert_eq!(figures["device"], "cpu");
}

/// Steps are graphs where they may be, with the same losses.
fn check_launches(home: &Home, settings: &[&str]) {
    let step = ["bench", "step", "small.toml", "--steps", "1", "--warmup", "3", "--json"];
    let run = |variable| run(home, &[&step[..], settings].concat(), variable).ok().json();
    let [graphs, off, refused] =
        [("PHALANX_EMULATOR_SEED", "5"), ("PHALANX_CUDA_GRAPHS", "off"), ("PHALANX_EMULATOR_CAPTURE", "off")]
            .map(run);
    let launches = |figures: &serde_json::Value| {
        ["single", "graphs", "in_graphs"]
            .map(|key| figures["launches_per_step_of_rank_0"][key].as_f64().unwrap())
    };
    let ([single, count, in_graphs], [plain, ..]) = (launches(&graphs), launches(&off));
    assert!(count > 0.0 && single < in_graphs && single + in_graphs == plain, "{graphs} and {off}");
    for figures in [off, refused] {
        assert_eq!(launches(&figures), [plain, 0.0, 0.0]);
        assert_eq!(figures["losses"], graphs["losses"]);
    }
}

#[test]
#[allow(clippy::too_many_lines, reason = "a list of cases")]
fn what_is_missing_is_named_with_what_helps() {
    if !has_emulator("what is missing") {
        return;
    }
    let home = Home::new();
    let train = [&["train", "small.toml", "--run", "refused", "--nproc", "1"], &TINY[..]].concat();
    let cases: [(&str, &str, &[&str]); 9] = [
        (
            "PHALANX_EMULATOR_DRIVER",
            "11080",
            &["driver is of CUDA 11.8", "12.0 or newer", "update NVIDIA's driver"],
        ),
        ("PHALANX_EMULATOR_CARDS", "0", &["the driver finds no card", "CUDA_VISIBLE_DEVICES"]),
        ("PHALANX_EMULATOR_CAPABILITY", "75", &["compute capability 7.5", "8.0 or newer"]),
        (
            "PHALANX_NVRTC",
            "/nonexistent",
            &[
                "no NVRTC",
                "pip install nvidia-cuda-nvrtc-cu12",
                "nvidia/cuda_nvrtc/lib within",
                "/nonexistent/libnvrtc.so",
            ],
        ),
        (
            "PHALANX_CUBLAS",
            "/nonexistent",
            &["there is no cuBLASLt", "/nonexistent", "nvidia/cublas/lib", "\"off\""],
        ),
        (
            "PHALANX_EMULATOR_PTX",
            "80",
            &["the driver, of CUDA 12.8, is older than NVRTC", "update NVIDIA's driver", "PHALANX_NVRTC"],
        ),
        ("PHALANX_EMULATOR_CAPABILITY", "99", &["does not compile for sm_99", "install a newer one"]),
        ("PHALANX_EMULATOR_MEMORY_MB", "128", &["needs", "its share of the card", "128.0 MiB"]),
        (
            "PHALANX_EMULATOR_LOST_AT",
            "150",
            &["failed on the cuda device", "CUDA_ERROR_ECC_UNCORRECTABLE", "nvidia-smi"],
        ),
    ];
    for (name, value, words) in cases {
        run(&home, &[&train[..], &CARD].concat(), (name, value)).refused(words);
        let found = !matches!(name, "PHALANX_EMULATOR_MEMORY_MB" | "PHALANX_EMULATOR_LOST_AT");
        if found {
            // Without a card to use, the run is one of the processor, and says why.
            let dir = format!("auto-{name}-{}", value.replace('/', ""));
            let auto = [&["train", "small.toml", "--run", &dir, "--nproc", "1"], &TINY[..]].concat();
            let ended = run(&home, &auto, (name, value)).ok();
            let line = ended.stderr.lines().find(|line| line.contains("computing on the processor"));
            assert!(
                line.is_some_and(|line| words.iter().all(|word| line.contains(word))),
                "{}",
                ended.stderr
            );
        }
    }
    // What a card does not compute is for the processor, and `cuda` is refused for it.
    let large_heads = ["--set", "model.hidden=1024", "--set", "model.heads=2", "--set", "train.steps=1"];
    let auto = [&["train", "small.toml", "--run", "heads", "--nproc", "1"], &TINY[..], &large_heads].concat();
    let seed = ("PHALANX_EMULATOR_SEED", "0");
    let said = run(&home, &auto, seed).ok().stderr;
    assert!(
        said.contains("computing on the processor") && said.contains("a head has 512 elements"),
        "{said}"
    );
    run(&home, &[&train[..], &large_heads, &CARD].concat(), seed)
        .refused(&["model.heads = 2", "at most 256"]);
    // A block of a desktop's card has too little shared memory for large heads of f32.
    let desktop = ("PHALANX_EMULATOR_SHARED_KB", "99");
    let heads = ["--set", "model.hidden=512", "--set", "model.heads=2", "--set", "train.steps=1"];
    let words = ["heads of 256 elements in f32", "133376 bytes", "may have 101376", "precision.compute"];
    run(&home, &[&train[..], &heads, &CARD].concat(), desktop).refused(&words);
    let auto = [&["train", "small.toml", "--run", "shared", "--nproc", "1"], &TINY[..], &heads].concat();
    let said = run(&home, &auto, desktop).ok().stderr;
    assert!(said.contains("computing on the processor") && said.contains(words[0]), "{said}");
    let plan = [&["plan", "small.toml"], &heads[..], &CARD].concat();
    let planned = run(&home, &plan, desktop).ok().stderr;
    assert!(planned.contains("which would refuse the run") && planned.contains(words[0]), "{planned}");
    let limited = [&train[..], &CARD, &["--set", "device.memory_mb=500"]].concat();
    run(&home, &limited, ("PHALANX_EMULATOR_SEED", "0")).refused(&["device.memory_mb", "524288000"]);
}

/// Some systems let no driver register a process's memory (WSL2, confidential machines): copies are slower then, and nothing else.
#[test]
fn host_memory_that_the_driver_does_not_register_is_said_and_changes_no_number() {
    if !has_emulator("memory that is not registered") {
        return;
    }
    let home = Home::new();
    let train = |name: &str, variable, more: &[&str]| {
        let host = ["--set", "memory.optimizer=host", "--set", "memory.update=host", "--nproc", "1"];
        let args = [&["train", "small.toml", "--run", name], &TINY[..], &host, &CARD, more].concat();
        run(&home, &args, variable)
    };
    let refused = ("PHALANX_EMULATOR_REGISTER", "off");
    train("registered", ("PHALANX_EMULATOR_SEED", "1"), &[]).ok();
    let said = train("unregistered", refused, &[]).ok().stderr;
    assert!(said.contains("rank 0: host memory is not registered with the driver"), "{said}");
    assert_eq!(home.losses("registered"), home.losses("unregistered"));
    train("pinned", refused, &["--set", "memory.pin_memory=true"]).refused(&["cuMemHostRegister_v2"]);
}

#[test]
fn only_numbers_of_algorithms_are_taken() {
    let home = Home::new();
    for value in ["0", "9", "first"] {
        let mut command = home.command(&["plan", "small.toml"]);
        command.env("PHALANX_CUBLAS_ALGORITHM", value);
        rig::ended(command).refused(&["PHALANX_CUBLAS_ALGORITHM", value, "expected 1", "to 8"]);
    }
}

#[test]
fn without_a_driver_cuda_is_refused_and_auto_is_the_processor() {
    if phalanx_cuda::driver::load().is_ok() {
        return eprintln!("without a driver: skipped, because there is one");
    }
    let home = Home::new();
    let train = [&["train", "small.toml", "--run", "auto", "--nproc", "1"], &TINY[..]].concat();
    home.run(&[&train[..], &CARD].concat()).refused(&["no CUDA driver", "libcuda.so", "device.kind=cpu"]);
    // Most machines have no GPU: nothing is said.
    let ended = home.run(&train).ok();
    assert!(
        !ended.stderr.contains("computing on") && !ended.stdout.contains("computing on"),
        "{}",
        ended.stderr
    );
    assert!(home.json("auto/plan.json").get("beside_plan").is_none());
    let limited = [&["train", "small.toml", "--run", "limited", "--nproc", "1"], &TINY[..]].concat();
    home.run(&[&limited[..], &["--set", "device.memory_mb=100"]].concat())
        .refused(&["device.memory_mb = 100", "driver"]);
    // A plan needs no card.
    let plan = ["plan", "small.toml", "--device-memory", "80GiB", "--set", "device.kind=cuda"];
    let planned = home.run(&plan).ok();
    for words in ["an NVIDIA GPU", "scratch of kernels", "driver, about", "fits"] {
        assert!(planned.stdout.contains(words), "no {words:?} in: {}", planned.stdout);
    }
    // Both parts of the text hold a sequence.
    home.write("long.txt", "word ".repeat(300_000));
    let data = ["--set", "data.text=[\"long.txt\"]"];
    let sizes = ["--set", "model.seq=131072", "--set", "model.heads=32", "--set", "batch.micro=8"];
    let figures = home.run(&[&plan[..], &data, &sizes, &["--json"]].concat()).ok().json();
    assert_eq!(
        figures["beside_plan"]["scratch_bytes"],
        4 * 8 * 131_072 * 32,
        "a number for each query of a head"
    );
    // Slices of logits and pieces of sums grow with the card, and the plan with them.
    let arena = |more: &[&str]| {
        let figures = home.run(&[&plan[..], &data, &sizes, more, &["--json"]].concat()).ok().json();
        figures["arena_bytes"][0].as_u64().unwrap()
    };
    let [given, small] = ["512", "64"].map(|mib| arena(&["--set", &format!("device.slice_mb={mib}")]));
    assert_eq!(arena(&[]), given, "80 GiB");
    assert!(given - small > 400 << 20, "{given} and {small}");
    let unknown = home.run(&["plan", "small.toml", "--set", "device.kind=cuda"]).ok().stderr;
    assert!(unknown.contains("no card was found here (no CUDA driver"), "{unknown}");
    let hint = "for GPUs add --set device.kind=cuda";
    assert!(!planned.stderr.contains(hint), "{}", planned.stderr);
    for (args, hinted) in [
        (&["--device-memory", "80GiB"][..], true),
        (&["--machine", "h100"], false),
        (&["--device-memory", "80GiB", "--set", "device.kind=cpu"], false),
        (&[], false),
    ] {
        let said = home.run(&[&["plan", "small.toml"], args].concat()).ok().stderr;
        assert_eq!(said.contains(hint), hinted, "{args:?}: {said}");
    }
}

#[test]
fn the_doctor_checks_every_kernel() {
    let home = Home::new();
    if !has_emulator("doctor") {
        // A machine with a driver shows its cards to no test.
        let said = home.run(&["doctor", "--kernels"]).refused(&[]).stderr;
        assert!(said.contains("no CUDA driver") || said.contains("the driver finds no card"), "{said}");
        return;
    }
    let said = rig::ended(on_emulator(&home, &["doctor", "--kernels"])).ok().stdout;
    let nvrtc = std::env::var("PHALANX_NVRTC").unwrap();
    for words in [
        "CUDA driver       12.8",
        "GPU 0",
        "NVRTC",
        &format!("in {nvrtc}"),
        "\"auto\" is \"cuda\"",
        "attention and its gradient",
        "same numbers",
        "rates mean nothing",
        "NCCL 2.27.5: a communicator of this card alone",
    ] {
        assert!(said.contains(words), "no {words:?} in: {said}");
    }
    assert!(!said.contains("FAILED"), "{said}");
}
