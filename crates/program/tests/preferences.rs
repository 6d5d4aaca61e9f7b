//! Pairs of answers: learned in each format, resumed with the reference of the first start, evaluated, and refused by file and line.

use serde_json::{Value, json};

use crate::rig::{Home, number, pairs};

const CONFIG: &str = r#"
[model]
arch = "llama"
layers = 1
hidden = 32
heads = 2
seq = 64

[data]
pairs = "pairs.jsonl"
tokenizer = "byte"

[batch]
global = 8
micro = 4

[optimizer]
lr = 3e-3

[schedule]
kind = "constant"

[train]
steps = 6
eval_every = 3
save_every = 3
threads = 1
"#;

fn lines(records: impl Iterator<Item = Value>) -> String {
    records.map(|record| record.to_string()).collect::<Vec<_>>().join("\n")
}

fn home() -> Home {
    let home = Home::new();
    home.write("pairs.toml", CONFIG);
    let pair = |number: usize| {
        let (chosen, rejected) = (format!("yes {}", number % 3), "no ".repeat(1 + number % 4));
        json!({"prompt": format!("{number}? "), "chosen": chosen, "rejected": rejected, "score": 1})
    };
    home.write("pairs.jsonl", lines((0..40).map(pair)));
    let labelled = |number: usize| {
        let is_good = !number.is_multiple_of(3);
        json!({"prompt": format!("{number}? "), "completion": if is_good { "yes" } else { "no" }, "label": is_good})
    };
    home.write("labelled.jsonl", lines((0..40).map(labelled)));
    home
}

#[test]
fn pairs_are_learned_and_a_resumed_run_has_its_reference() {
    let home = home();
    let ended = home.run(&["train", "pairs.toml", "--run", "one"]).ok();
    let said = ended.stdout + &ended.stderr;
    for part in [
        "data.pairs: 80 answers with their prompts (40 of chosen and rejected)",
        "0 pairs have an answer without a token",
        "of the records is not read: \"score\"",
        "log-probabilities of 80 of 80 answers by the reference",
        "pairs), margin ",
        "margin 0.",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let metrics = home.metrics("one");
    let steps: Vec<&Value> = metrics.iter().filter(|line| line.get("loss").is_some()).collect();
    // Nothing is gained before the first step: log 2.
    assert!((number(steps[0], "loss") - std::f64::consts::LN_2).abs() < 1e-6, "{}", steps[0]);
    assert_eq!(number(steps[0], "targets"), 4.0);
    assert!(number(steps[5], "reward_margin") > 0.0 && number(steps[5], "loss") < 0.69, "{}", steps[5]);
    let margin = number(steps[5], "reward_chosen") - number(steps[5], "reward_rejected");
    assert!((margin - number(steps[5], "reward_margin")).abs() < 1e-6);
    let evaluated = metrics.iter().rev().find(|line| line.get("val_loss").is_some()).unwrap();
    assert_eq!((number(evaluated, "windows"), number(evaluated, "targets")), (8.0, 4.0));
    assert!(number(evaluated, "reward_accuracy") > 0.5, "{evaluated}");

    home.run(&["train", "pairs.toml", "--run", "half", "--set=train.steps=3", "--quiet"]).ok();
    assert_eq!(home.read("half/references.bin"), home.read("one/references.bin"));
    home.run(&["train", "--run", "half", "--resume", "--set=train.steps=6", "--quiet"]).ok();
    assert_eq!(home.losses("half"), home.losses("one"));
    let damaged = [&home.read("half/references.bin")[..80], &[0; 4]].concat();
    home.write("half/references.bin", damaged);
    home.run(&["train", "--run", "half", "--resume", "--set=train.steps=7", "--quiet"])
        .refused(&["references.bin", "no longer has"]);
    // Two ranks whose states are sharded: the same to rounding, and as planned.
    home.run(&["train", "pairs.toml", "--run", "two", "--nproc=2", "--set=parallel.zero=3", "--quiet"]).ok();
    let losses = |run: &str| -> Vec<f64> {
        home.metrics(run).iter().filter_map(|line| line["loss"].as_f64()).collect()
    };
    for (two, one) in pairs(&losses("two"), &losses("one")) {
        assert!((two - one).abs() < 1e-4, "{two} and {one}");
    }
    crate::rig::assert_as_planned(&home.json("two/plan.json"), &home.json("two/memory.json"));
}

#[test]
fn every_loss_and_every_format_is_learned() {
    let home = home();
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let turns = |content: String| json!([turn("assistant", &content)]);
    let conversations = |number: usize| {
        let prompt = json!([turn("user", "?")]);
        json!({"prompt": prompt, "chosen": turns("yes".repeat(1 + number % 2)), "rejected": turns("no".into())})
    };
    home.write("turns.jsonl", lines((0..20).map(conversations)));
    let shared = |number: usize| {
        let with = |answer: &str| json!([turn("user", &format!("{number}?")), turn("assistant", answer)]);
        json!({"prompt": "?", "chosen": with("yes"), "rejected": with("no")})
    };
    home.write("shared.jsonl", lines((0..20).map(shared)));
    let openai = |number: usize| {
        let input = json!({"messages": [turn("user", &format!("{number}?"))]});
        json!({"input": input, "preferred_output": turns("yes".into()), "non_preferred_output": turns("no".into())})
    };
    home.write("openai.jsonl", lines((0..20).map(openai)));
    let factory = |number: usize| match number % 2 {
        0 => json!({"instruction": format!("{number}"), "input": "?", "chosen": "yes", "rejected": "no"}),
        _ => {
            let [chosen, rejected] = ["yes", "no"].map(|text| json!({"from": "gpt", "value": text}));
            json!({"conversations": [{"from": "human", "value": "?"}], "chosen": chosen, "rejected": rejected})
        }
    };
    home.write("factory.jsonl", lines((0..20).map(factory)));
    let texts =
        |number: usize| json!({"chosen": format!("{number}? yes"), "rejected": format!("{number}? no")});
    home.write("texts.jsonl", lines((0..20).map(texts)));
    let chatml = "--set=data.template=chatml";
    for (at, (files, kind, set)) in [
        ("turns.jsonl", "dpo-norm", chatml),
        ("shared.jsonl", "ipo", chatml),
        ("openai.jsonl", "orpo", chatml),
        ("factory.jsonl", "dpo", chatml),
        ("texts.jsonl", "simpo", "--set=preference.gamma=1"),
        ("texts.jsonl", "robust", "--set=preference.label_smoothing=0.2"),
        ("labelled.jsonl", "kto", "--set=preference.kl_answers=2"),
    ]
    .into_iter()
    .enumerate()
    {
        let run = format!("run{at}");
        let keys = [format!("--set=data.pairs={files}"), format!("--set=preference.kind={kind}")];
        let given = ["train", "pairs.toml", "--run", &run, &keys[0], &keys[1], set, "--set=model.seq=128"];
        home.run(&[&given[..], &["--set=train.steps=12"]].concat()).ok();
        let metrics = home.metrics(&run);
        let losses: Vec<f64> = metrics.iter().filter_map(|line| line["loss"].as_f64()).collect();
        assert!(losses[11] < losses[0], "{kind}: {losses:?}");
        let last = metrics.iter().rev().find(|line| line.get("loss").is_some()).unwrap();
        assert!(number(last, "reward_margin") > 0.0, "{kind}: {last}");
        let has_reference = !["orpo", "simpo"].contains(&kind);
        assert_eq!(home.path(&run).join("references.bin").exists(), has_reference, "{kind}");
    }
}

#[test]
fn wrong_pairs_and_keys_are_refused_and_nothing_is_written() {
    let home = home();
    home.write("same.jsonl", "{\"chosen\": \"a b\", \"rejected\": \"a b\"}");
    home.write("none.jsonl", "{\"prompt\": \"a\", \"chosen\": \"b\"}");
    home.write("label.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\", \"label\": \"good\"}");
    for (set, parts) in [
        ("data.pairs=same.jsonl", &["same.jsonl, line 1", "are the same"][..]),
        ("data.pairs=none.jsonl", &["none.jsonl, line 1", "there is no \"rejected\""]),
        ("data.pairs=labelled.jsonl", &["labelled.jsonl, line 1", "there is no \"chosen\""]),
        ("data.chat=pairs.jsonl", &["data.pairs", "data.chat"]),
        ("batch.micro=1", &["neighbours", "even"]),
        ("model.dropout=0.1", &["model.dropout", "data.pairs"]),
        ("loss.z_loss=0.1", &["loss.z_loss", "data.pairs"]),
        ("preference.gamma=1", &["preference.gamma", "simpo"]),
        ("preference.label_smoothing=0.1", &["preference.label_smoothing", "robust"]),
        ("preference.beta=0", &["preference.beta"]),
        ("data.train_on=all", &["data.train_on", "data.chat"]),
        ("model.arch=bert", &["data.pairs", "predict the next token"]),
        ("parallel.updates=asynchronous", &["data.pairs", "parallel.updates"]),
        ("data.date=tomorrow", &["data.date", "2026-11-28"]),
    ] {
        home.run(&["train", "pairs.toml", "--run", "bad", &format!("--set={set}")]).refused(parts);
        assert!(!home.path("bad").exists(), "{set}");
    }
    let kto = ["train", "pairs.toml", "--run", "bad", "--set=preference.kind=kto"];
    home.run(&[&kto[..], &["--set=data.pairs=label.jsonl"]].concat())
        .refused(&["label.jsonl, line 1", "expected true or false"]);
    let uneven = ["--set=data.pairs=labelled.jsonl", "--set=preference.kl_answers=3"];
    home.run(&[&kto[..], &uneven].concat()).refused(&["preference.kl_answers", "2 answers of a micro-batch"]);
    home.run(&["train", "small.toml", "--run", "bad", "--set=preference.beta=1"])
        .refused(&["preference.beta", "data.pairs"]);
    home.run(&["train", "small.toml", "--run", "bad", "--unset=data.text", "--set=data.chat=pairs.jsonl"])
        .refused(&["pairs.jsonl, line 1", "name its file in data.pairs"]);
}
