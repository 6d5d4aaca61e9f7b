//! `[precision]` from end to end: what is planned, what a run leaves, what it says about its loss scale.

use crate::rig::Home;
use serde_json::{Value, json};

/// A loss scale at which the first steps overflow.
const F16: [&str; 6] = [
    "--set",
    "precision.compute=f16",
    "--set",
    "precision.initial_scale_power=24",
    "--set",
    "precision.loss_scale_window=4",
];

fn steps(home: &Home, run: &str) -> Vec<Value> {
    home.metrics(run).into_iter().filter(|line| line.get("step_s").is_some()).collect()
}

#[test]
fn a_plan_shows_the_policy_and_the_textbook_for_it() {
    let home = Home::new();
    let base = ["plan", "small.toml", "--nproc", "2", "--set", "parallel.zero=2"];
    let plan = |more: &[&str]| home.run(&[&base[..], &["--json"], more].concat()).ok().json();
    let bf16 = ["--set", "precision.compute=bf16"];
    let sent = ["--set", "precision.compute=bf16", "--set", "precision.communicate=bf16"];
    let (in_f32, in_bf16, in_sent) = (plan(&[]), plan(&bf16), plan(&sent));
    let p = in_f32["parameters"].as_u64().unwrap();
    assert_eq!(in_bf16["precision"], json!({ "compute": "bf16", "accumulate": "f32", "communicate": "f32" }));
    let state = &in_bf16["textbook"]["state"];
    assert_eq!([&state["parameters"], &state["gradients"], &state["optimizer"]], [2 * p, 2 * p, 6 * p]);
    let planned =
        |plan: &Value, category: &str| plan["ranks"][0]["device"]["categories"][category].as_u64().unwrap();
    assert_eq!(2 * planned(&in_bf16, "parameters"), planned(&in_f32, "parameters"));
    assert_eq!(2 * planned(&in_bf16, "optimizer"), 3 * planned(&in_f32, "optimizer"));
    let sent_bytes = |plan: &Value| plan["collective_bytes_per_step"].as_u64().unwrap();
    assert!(sent_bytes(&in_sent) < sent_bytes(&in_bf16) && sent_bytes(&in_bf16) < sent_bytes(&in_f32));
    let text = home.run(&[&base[..], &sent].concat()).ok().stdout;
    assert!(text.contains("bf16 with f32 master weights"), "{text}");
    assert!(text.contains("summed in f32, across ranks in bf16"), "{text}");
}

#[test]
fn a_run_in_f16_says_what_its_loss_scale_does_and_goes_on_with_it() {
    let home = Home::new();
    let train = |run: &str, more: &[&str]| {
        home.run(&[&["train", "small.toml", "--nproc", "2", "--run", run], &F16[..], more].concat()).ok()
    };
    let ended = train("whole", &["--set", "train.steps=16"]);
    for words in ["gradients overflowed, step skipped: loss scale", "dynamic loss scale from 16777216"] {
        let said = [ended.stdout.as_str(), &ended.stderr].concat();
        assert!(said.contains(words), "no {words:?} in: {said}");
    }
    let whole = steps(&home, "whole");
    assert_eq!(whole[0]["skipped"], json!(true));
    assert_eq!((&whole[0]["loss_scale"], &whole[0]["grad_norm"]), (&json!(16777216.0), &Value::Null));
    let applied = whole.iter().filter(|step| step.get("skipped").is_none());
    assert!(applied.clone().count() >= 8 && applied.clone().all(|step| step["grad_norm"].is_number()));
    assert!(ended.stdout.contains("overflowed and changed nothing"), "{}", ended.stdout);
    // Resumed where the scale has just moved, with other ranks as processes or threads.
    train("parts", &["--set", "train.steps=5", "--set", "train.save_every=0", "--quiet"]);
    let args = ["train", "--run", "parts", "--resume", "--set", "train.steps=16", "--threads-as-ranks"];
    home.run(&args).ok();
    assert_eq!(home.losses("parts"), home.losses("whole"));
    let scales = |run: &str| steps(&home, run).iter().map(|s| s["loss_scale"].clone()).collect::<Vec<_>>();
    assert_eq!(scales("parts"), scales("whole"));
}

#[test]
fn a_run_may_go_on_in_another_precision() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--quiet"]).ok();
    for (compute, steps) in [("bf16", "12"), ("f16", "16"), ("f32", "20")] {
        let (compute, steps) = (format!("precision.compute={compute}"), format!("train.steps={steps}"));
        let args = ["train", "small.toml", "--resume", "--set", &compute, "--set", &steps];
        let ended = home.run(&args).ok();
        assert!(ended.stderr.contains("precision.compute is"), "{}", ended.stderr);
    }
    let losses = home.losses("runs/small");
    let (first, last): (f64, f64) = (losses[0].1.parse().unwrap(), losses[19].1.parse().unwrap());
    assert!(losses.len() == 20 && last < first, "{losses:?}");
}

#[test]
fn a_loss_scale_that_cannot_fall_ends_the_run_and_names_the_tensor() {
    let home = Home::new();
    let smallest = ["--set", "precision.initial_scale_power=33", "--set", "precision.min_loss_scale=4e9"];
    for nproc in ["1", "2"] {
        let args = ["train", "small.toml", "--nproc", nproc, "--run", nproc];
        let ended = home.run(&[&args[..], &F16, &smallest].concat());
        let ended = ended.refused(&["is not finite", "on rank 0", "precision.min_loss_scale", "loss scale"]);
        assert_eq!(ended.stderr.matches("is not finite").count(), 1, "{}", ended.stderr);
        assert!(home.checkpoints(nproc).is_empty());
    }
}
