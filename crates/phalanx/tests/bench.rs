//! `phalanx bench` and `phalanx doctor`: figures with the names that scripts rely on.

mod rig;

use rig::Home;
use serde_json::Value;

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
        ] {
            assert!(figures[key].as_f64().unwrap() > 0.0, "{key}");
        }
        assert_eq!(figures["losses"].as_array().unwrap().len(), 3);
        home.run(&["bench", "step", "small.toml", "--nproc", nproc, "--steps", "1"]).ok();
    }
    assert!(!home.path("runs").exists());
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
        assert!(
            line["bytes"].is_u64()
                && line["us"].as_f64() > Some(0.0)
                && line["algbw_gbs"].as_f64() > Some(0.0)
        );
    }
}

#[test]
fn the_doctor_measures() {
    let home = Home::new();
    let figures = home.run(&["doctor", "--json"]).ok().json();
    for key in
        ["cores", "peak_flops_per_s", "peak_flops_per_s_thread", "read_bytes_per_s", "copy_bytes_per_s"]
    {
        assert!(figures[key].as_f64().unwrap() > 0.0, "{key}");
    }
    assert!(figures.get("memlock_bytes").is_some() && figures["instruction_sets"].is_array());
}
