//! `phalanx bench` and `phalanx doctor`: figures with the names that scripts rely on.

use crate::rig::{Home, list, number, value};
use serde_json::{Value, json};

#[test]
fn steps_are_timed_on_any_number_of_ranks() {
    let home = Home::new();
    for nproc in ["1", "2"] {
        let figures = home
            .run(&["bench", "step", "small.toml", "--nproc", nproc, "--steps", "3", "--json"])
            .ok()
            .json();
        for key in [
            "step_s_median",
            "step_s_min",
            "tokens_per_s",
            "flops_per_s",
            "peak_flops_per_s",
            "resident_bytes_peak",
            "mfu",
            "page_faults_first_step",
        ] {
            assert!(number(&figures, key) > 0.0, "{key}");
        }
        assert_eq!((figures["losses"].as_array().unwrap().len(), &figures["device"]), (3, &json!("cpu")));
        assert!(number(&figures, "page_faults_per_step") < number(&figures, "page_faults_first_step"));
        let text = home.run(&["bench", "step", "small.toml", "--nproc", nproc, "--steps", "1"]).ok().stdout;
        for words in ["linear_weight_gradient", "of floor", "outside of kernels", "step: mfu"] {
            assert!(text.contains(words), "{words}: {text}");
        }
    }
    assert!(!home.path("runs").exists());
}

#[test]
fn the_kernels_of_a_step_are_those_of_its_plan() {
    let home = Home::new();
    let args = ["small.toml", "--nproc", "2", "--set", "parallel.zero=3", "--json"];
    let plan = home.run(&[&["plan"], &args[..]].concat()).ok().json();
    let figures = home.run(&[&["bench", "step", "--steps", "2"], &args[..]].concat()).ok().json();
    let profile = &figures["profile_of_rank_0"];
    let rows = profile["kernels"].as_array().unwrap();
    for planned in list(&plan, "kernels") {
        let rows = rows.iter().filter(|row| row["name"] == planned["name"]);
        let sum = |key: &str| -> u64 {
            rows.clone().map(|row| row["calls"].as_u64().unwrap() * row[key].as_u64().unwrap()).sum()
        };
        assert_eq!(
            [sum("flops"), sum("bytes")],
            [&planned["flops"], &planned["bytes"]].map(|n| n.as_u64().unwrap())
        );
    }
    let kernels_s: f64 = rows.iter().map(|row| row["s"].as_f64().unwrap()).sum();
    let waited_s = profile["collectives"]["waited_s"].as_f64().unwrap();
    let (step_s, outside_s) = (profile["step_s"].as_f64().unwrap(), profile["outside_s"].as_f64().unwrap());
    assert!((kernels_s + waited_s + outside_s - step_s).abs() < 1e-9 * step_s && outside_s > 0.0);
    assert!(!rows.is_empty());
    assert!(rows.iter().all(|row| number(row, "floor_s") > 0.0 && number(row, "share") < 1.0));
}

#[test]
fn what_is_computed_again_is_no_work_of_the_model() {
    let home = Home::new();
    let figures = |checkpointing: &str| {
        let set = format!("memory.checkpointing={checkpointing}");
        home.run(&["bench", "step", "small.toml", "--steps", "1", "--json", "--set", &set]).ok().json()
    };
    let (plain, block) = (figures("none"), figures("block"));
    assert_eq!(value(&plain, "model_flops_per_step"), value(&plain, "flops_per_step"));
    assert_eq!(value(&block, "model_flops_per_step"), value(&plain, "flops_per_step"));
    assert!(number(&block, "flops_per_step") > number(&plain, "flops_per_step"));
    assert!(number(&block, "hfu") > number(&block, "mfu"));
}

#[test]
fn every_kernel_runs_alone_in_every_type() {
    let home = Home::new();
    for dtype in ["f32", "bf16", "f16"] {
        let args = ["bench", "kernels", "--setting", "tiny", "--threads", "2", "--ms", "1", "--dtype", dtype];
        let figures = home.run(&[&args[..], &["--json"]].concat()).ok().json();
        assert_eq!((&figures["dtype"], &figures["setting"]), (&dtype.into(), &"tiny".into()));
        let threads: Vec<_> = figures["threads"].as_array().unwrap().iter().map(|t| &t["threads"]).collect();
        assert_eq!(threads, [1, 2]);
        let kernels = figures["kernels"].as_array().unwrap();
        for name in ["linear", "linear_gelu", "attention_backward", "vocabulary_loss", "adamw", "convert"] {
            assert!(kernels.iter().any(|kernel| kernel["name"] == name), "{name}");
        }
        for kernel in kernels {
            let runs = kernel["runs"].as_array().unwrap();
            assert_eq!(runs.len(), 2);
            for run in runs {
                assert!(number(run, "s_min") > 0.0 && number(run, "s_min") <= number(run, "s_median"));
                assert!(number(run, "floor_share") > 0.0, "{kernel}");
            }
        }
    }
    let args = ["bench", "kernels", "--setting", "tiny", "--threads", "1", "--ms", "1", "--only", "gelu"];
    let text = home.run(&args).ok().stdout;
    assert!(text.contains("gelu_backward 32x128") && !text.contains("adamw"), "{text}");
}

#[test]
fn collectives_are_a_line_each() {
    let home = Home::new();
    let args = ["bench", "collectives", "--nproc", "2", "--op", "all_reduce", "--op", "all_gather"];
    let more = ["--dtype", "bf16", "--bytes", "4096,65536", "--json"];
    let ended = home.run(&[&args[..], &more].concat()).ok();
    let lines: Vec<Value> = ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 4);
    for line in lines {
        assert!(line["op"] == "all_reduce" || line["op"] == "all_gather");
        assert_eq!(line["ranks"], 2);
        assert_eq!(line["dtype"], "bf16");
        assert!(line["bytes"].is_u64() && number(&line, "us") > 0.0 && number(&line, "algbw_gbs") > 0.0);
    }
}

/// Ranks on pretended hosts: other transports, other algorithms.
#[test]
fn collectives_between_hosts_name_transport_and_algorithm() {
    let home = Home::new();
    let args =
        ["bench", "collectives", "--nproc", "3", "--op", "all_reduce", "--bytes", "6144,1048576", "--json"];
    for (transport, more) in [("tcp", &["--plaintext"][..]), ("hierarchical", &["--streams", "1"])] {
        let ended = home.run(&[&args[..], &["--transport", transport], more].concat()).ok();
        let lines: Vec<Value> =
            ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.iter().map(|line| &line["algorithm"]).collect::<Vec<_>>(), ["one step", "direct"]);
        for line in lines {
            assert_eq!(line["transport"], transport);
            assert!(number(&line, "us") > 0.0 && number(&line, "busbw_gbs") > 0.0);
            assert!(number(&line, "limit_share") > 0.0, "{line}");
        }
    }
}

#[test]
fn the_doctor_measures() {
    let home = Home::new();
    let figures = home.run(&["doctor", "--json"]).ok().json();
    for key in
        ["cores", "peak_flops_per_s", "peak_bf16_flops_per_s_thread", "read_bytes_per_s", "copy_bytes_per_s"]
    {
        assert!(number(&figures, key) > 0.0, "{key}");
    }
    assert!(figures.get("memlock_bytes").is_some() && figures["instruction_sets"].is_array());
    for family in list(&figures, "kernel_families") {
        assert!(number(family, "per_s_thread") > 0.0 && number(family, "per_s") > 0.0, "{family}");
        assert_eq!(family["other_kernels"].is_null(), family["other_per_s_thread"].is_null(), "{family}");
    }
    let text = home.run(&["doctor"]).ok().stdout;
    let from = text.lines().position(|line| line.contains("otherwise, one thread")).unwrap();
    // As far as the line that says how to choose kernels, or that they were chosen.
    let end = text.lines().skip(from).position(|line| line.contains("PHALANX_ISA")).unwrap();
    let table: Vec<&str> = text.lines().skip(from).take(end + 1).collect();
    for family in list(&figures, "kernel_families") {
        let (name, kernels) = (family["family"].as_str().unwrap(), family["kernels"].as_str().unwrap());
        assert!(table.iter().any(|line| line.contains(name) && line.contains(kernels)), "{name}: {text}");
    }
    assert!(table.iter().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn memory_compares_placements_and_budgets() {
    let home = Home::new();
    let given =
        ["bench", "memory", "small.toml", "--set", "parallel.zero=3", "--budgets", "80,5", "--steps", "1"];
    let simulated = ["--set", "device.kind=simulated", "--out", "sweep", "--json"];
    let figures = home.run(&[&given[..], &simulated].concat()).ok().json();
    let runs = figures["runs"].as_array().unwrap();
    let names: Vec<&str> = runs.iter().map(|run| run["placement"].as_str().unwrap()).collect();
    assert_eq!(names, ["device", "host", "auto", "auto"]);
    assert_eq!(figures["device"], "simulated");
    let device = |run: &Value| run["peaks"]["device"]["measured_bytes"].as_u64().unwrap();
    for run in &runs[..3] {
        assert_eq!(run["as_planned"], json!(true), "{run}");
        assert_eq!(run["losses"], runs[0]["losses"], "no placement changes a bit");
        assert!(run["step_s_median"].as_f64().unwrap() > 0.0);
    }
    assert!(device(&runs[2]) * 10 <= device(&runs[0]) * 8 && device(&runs[1]) < device(&runs[0]));
    assert!(runs[2]["moved_bytes"].as_u64().unwrap() > runs[0]["moved_bytes"].as_u64().unwrap());
    // 5% are too little, and the row says what would do.
    assert!(runs[3]["reason"].as_str().unwrap().contains("the smallest that would do"), "{}", runs[3]);
    for file in ["table.md", "memory.json", "budgets.svg", "timeline-device.svg", "timeline-auto-80.svg"] {
        assert!(!home.read(&format!("sweep/{file}")).is_empty(), "{file}");
    }
    let svg = String::from_utf8(home.read("sweep/timeline-auto-80.svg")).unwrap();
    assert!(svg.contains("host memory over a step") && svg.contains(">budget<"), "{svg}");
    let folder = format!("memory.nvme_path={}", home.path("").display());
    let ranks = ["--nproc", "2", "--set", &folder, "--out", "two", "--budgets", "60"];
    let text = home.run(&[&given[..5], &["--steps", "1"], &ranks].concat()).ok().stdout;
    for words in ["nvme", "auto, 60%", "as planned"] {
        assert!(text.contains(words), "no {words:?} in: {text}");
    }
    assert!(!text.contains("DIFFERS"), "{text}");
}
