//! Files that a resume reads again are those that the run wrote, or the resume says what differs.

use crate::rig;
use std::fs;

use crate::rig::Home;
use phalanx_testing::reliability::SETUP_FILES;

const RESUME: [&str; 6] = ["train", "--run", "r", "--resume", "--set", "train.steps=12"];

/// A run of 8 steps with checkpoints 4 and 8, in `whole`, and a copy in `r`. Keys that differ from their defaults are
/// spread over the tables.
fn home_with_run() -> Home {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "whole", "--set", "optimizer.weight_decay=0.05", "--quiet"])
        .ok();
    home.copy("whole", "r");
    home
}

fn flip(home: &Home, name: &str, at: usize) {
    let mut bytes = home.read(name);
    bytes[at] ^= 1;
    home.write(name, bytes);
}

/// The losses of the run after 12 steps without damage.
fn expected(home: &Home) -> Vec<(u64, String, String)> {
    home.copy("whole", "expected");
    home.run(&["train", "--run", "expected", "--resume", "--set", "train.steps=12", "--quiet"]).ok();
    home.losses("expected")
}

#[test]
fn a_run_of_which_no_checkpoint_loads_is_not_started_anew() {
    let home = home_with_run();
    fs::remove_dir_all(home.path("r/checkpoints/step-4")).unwrap();
    flip(&home, "r/checkpoints/step-8/manifest.json", 500);
    let before = home.snapshot("r");
    let words = ["step-8", "manifest.json", "inspect", "--run", "nothing was changed"];
    home.run(&[&RESUME[..], &["--quiet"]].concat()).refused(&words);
    home.run(&["train", "small.toml", "--run", "r", "--resume", "--quiet"]).refused(&words);
    assert_eq!(home.snapshot("r"), before);
    // Also without its configuration.
    fs::remove_file(home.path("r/config.toml")).unwrap();
    let before = home.snapshot("r");
    home.run(&["train", "small.toml", "--run", "r", "--resume", "--quiet"]).refused(&words);
    assert_eq!(home.snapshot("r"), before);
}

#[test]
fn an_older_checkpoint_is_taken_with_a_warning() {
    let home = home_with_run();
    let expected = expected(&home);
    flip(&home, "r/checkpoints/step-8/manifest.json", 500);
    let ended = home.run(&[&RESUME[..], &["--quiet"]].concat()).ok();
    assert!(ended.stderr.contains("skipping r/checkpoints/step-8"), "{}", ended.stderr);
    assert_eq!(home.losses("r"), expected);
    assert_eq!(home.newest("r"), 12);
}

#[test]
fn a_lost_configuration_is_that_of_the_checkpoint() {
    let home = home_with_run();
    let expected = expected(&home);
    for config in [None, Some("small.toml")] {
        home.copy("whole", "r");
        fs::remove_file(home.path("r/config.toml")).unwrap();
        let args = [&RESUME[..1], config.as_slice(), &RESUME[1..], &["--quiet"]].concat();
        let ended = home.run(&args).ok();
        assert!(ended.stderr.contains("config.toml is missing"), "{}", ended.stderr);
        assert_eq!(home.newest("r"), 12);
        if config.is_none() {
            assert_eq!(home.losses("r"), expected);
        }
    }
}

#[test]
fn a_configuration_that_was_cut_or_edited_is_named_key_by_key() {
    let home = home_with_run();
    let text = String::from_utf8(home.read("r/config.toml")).unwrap();
    let expected = expected(&home);
    // Cut at every line end: lost keys would take their defaults.
    let ends = text.match_indices('\n').map(|(at, _)| at + 1).filter(|end| *end < text.len());
    let ends: Vec<usize> = ends.collect();
    let (mut refused, mut went_on) = (0, 0);
    for end in ends.iter().step_by(5) {
        home.copy("whole", "r");
        home.write("r/config.toml", &text[..*end]);
        let before = home.snapshot("r");
        let ended = home.run(&RESUME);
        if ended.code == Some(0) {
            assert_eq!(home.losses("r"), expected, "cut at {end}");
            went_on += 1;
        } else {
            ended.refused(&[
                "r/config.toml is damaged or was edited",
                "step-8",
                "--set",
                "nothing was changed",
            ]);
            assert_eq!(home.snapshot("r"), before);
            refused += 1;
        }
    }
    assert!(refused > went_on, "{refused} {went_on}");
    for (from, to, words) in [
        ("lr = 0.01", "lr = 0.02", "optimizer.lr is 0.02 and was 0.01"),
        ("weight_decay = 0.05\n", "", "optimizer.weight_decay is 0.1 and was 0.05"),
        ("seed = 1", "seed = 3", "train.seed is 3 and was 1"),
        ("[model]", "[modal]", "modal"),
    ] {
        home.copy("whole", "r");
        assert!(text.contains(from), "{from} in {text}");
        home.write("r/config.toml", text.replace(from, to));
        home.run(&RESUME).refused(&["r/config.toml", words, "remove r/config.toml"]);
        // Runs of earlier programs have no checksums.
        fs::remove_file(home.path("r/checksums.json")).unwrap();
        home.run(&RESUME).refused(&["r/config.toml", words]);
    }
    // As the messages advise.
    home.write("r/config.toml", format!("# My comment.\n{text}"));
    home.run(&RESUME).refused(&["r/config.toml, r/given.toml, r/plan.json", "no checksums.json"]);
    for name in ["config.toml", "given.toml", "plan.json"] {
        fs::remove_file(home.path("r").join(name)).unwrap();
    }
    home.run(&RESUME).ok();
    assert_eq!(home.losses("r"), expected);
}

#[test]
fn a_resume_that_was_killed_before_it_saved_is_no_damage() {
    let home = home_with_run();
    // The configuration is newer than every checkpoint.
    let child = home.start(&[&RESUME[..5], &["train.steps=1000000", "--set", "train.save_every=0"]].concat());
    home.wait_for_step("r", 10);
    rig::signal(child.id() as i32, rustix::process::Signal::KILL);
    rig::finish(child);
    let ended = home.run(&RESUME).ok();
    assert!(ended.stderr.contains("resuming from step 8"), "{}", ended.stderr);
    assert_eq!(home.losses("r"), expected(&home));
}

#[test]
fn tokens_that_are_not_those_of_the_run_are_refused() {
    let home = home_with_run();
    let whole = home.read("r/tokens.bin");
    let (expected, text) = (expected(&home), home.read("text.txt"));
    home.write("other.txt", [&text[100..], &text[..100]].concat());
    home.run(&["tokenize", "--out", "other.bin", "other.txt"]).ok();
    let mut damaged = vec![home.read("other.bin"), whole[..whole.len() - 1].to_vec(), Vec::new()];
    damaged.push([&whole[..64], &vec![0; whole.len() - 64]].concat());
    for at in [0, 9, 13, 17, 25, 33, 41, 50, 64, 1000, whole.len() / 2, whole.len() - 5] {
        damaged.push(whole.clone());
        damaged.last_mut().unwrap()[at] ^= 1;
    }
    for (number, bytes) in damaged.iter().enumerate() {
        home.write("r/tokens.bin", bytes);
        let before = home.snapshot("r");
        home.run(&RESUME).refused(&["r/tokens.bin"]);
        assert_eq!(home.snapshot("r"), before, "{number}");
    }
    // Without the tokens, they are made again from the text if it has not changed.
    fs::remove_file(home.path("r/tokens.bin")).unwrap();
    home.write("text.txt", home.read("other.txt"));
    let words = ["tokens.bin is missing", "was changed since", "--data", "nothing was changed"];
    home.run(&RESUME).refused(&words);
    home.write("text.txt", text);
    home.run(&RESUME).ok();
    assert_eq!(home.losses("r"), expected);
    assert_eq!(home.read("r/tokens.bin"), whole);
}

#[test]
fn a_token_file_elsewhere_is_checked_too() {
    let home = Home::new();
    home.run(&["tokenize", "--out", "t.bin", "text.txt"]).ok();
    let text = String::from_utf8(home.read("small.toml")).unwrap();
    home.write("tokens.toml", text.replace("text = [\"text.txt\"]", "tokens = \"t.bin\""));
    home.run(&["train", "tokens.toml", "--run", "r", "--quiet"]).ok();
    flip(&home, "t.bin", 2000);
    let words = ["t.bin", "was changed since", "--set data.tokens=", "nothing was changed"];
    home.run(&RESUME).refused(&words);
    // Without the checksums of the run folder, those in the checkpoint are used.
    for name in ["checksums.json", "config.toml", "given.toml", "plan.json"] {
        fs::remove_file(home.path("r").join(name)).unwrap();
    }
    home.run(&RESUME).refused(&words);
    let as_it_is = ["--set", "data.tokens=t.bin"];
    home.run(&[&RESUME[..], &as_it_is].concat()).ok();
}

#[test]
fn damaged_checksums_and_first_configurations_are_named() {
    let home = home_with_run();
    let whole = home.read("r/checksums.json");
    for cut in [0, 1, 60, whole.len() / 2, whole.len() - 3] {
        home.write("r/checksums.json", &whole[..cut]);
        home.run(&RESUME).refused(&["r/checksums.json is damaged", "remove it"]);
    }
    for at in (0..whole.len() - 1).step_by(7) {
        home.write("r/checksums.json", &whole);
        flip(&home, "r/checksums.json", at);
        let before = home.snapshot("r");
        let ended = home.run(&["train", "small.toml", "--run", "r", "--resume", "--set", "train.steps=8"]);
        // A wrong checksum of config.toml does no harm if the checkpoint has the same configuration.
        if ended.code != Some(0) {
            ended.refused(&["r/"]);
        }
        assert_eq!(home.snapshot("r"), before, "byte {at}");
    }
    home.copy("whole", "r");
    let given = home.read("r/given.toml");
    home.write("r/given.toml", &given[..given.len() / 2]);
    let args = ["train", "small.toml", "--run", "r", "--resume", "--set", "train.steps=12"];
    home.run(&args).refused(&["r/given.toml is damaged or was edited", "nothing was changed"]);
}

#[test]
fn lines_of_metrics_that_are_no_records_are_left_out() {
    let home = home_with_run();
    let expected = expected(&home);
    let mut bytes = home.read("r/metrics.jsonl");
    let at = bytes.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    bytes.splice(at..at, [0xff, 0xfe, b'\n', b'{', b'}', b'\n']);
    home.write("r/metrics.jsonl", bytes);
    home.run(&["inspect", "r"]).ok();
    let ended = home.run(&[&RESUME[..], &["--quiet"]].concat()).ok();
    assert!(ended.stderr.contains("r/metrics.jsonl: line 2 and 1 more are not records"), "{}", ended.stderr);
    assert_eq!(home.losses("r"), expected);
}

/// Metrics of the steps up to the checkpoint are gone or are not those that the run wrote.
#[test]
fn metrics_that_were_removed_or_changed_are_said() {
    let home = home_with_run();
    let text = String::from_utf8(home.read("r/metrics.jsonl")).unwrap();
    let first = text.lines().next().unwrap();
    let lost = "r/metrics.jsonl is missing: its lines of steps 1 to 8 are lost";
    let changed = "r/metrics.jsonl is damaged or was changed: its lines of steps 1 to 8 are not those that \
                   r/checkpoints/step-8 was saved with";
    for (now, words) in [
        (None, lost),
        (Some(String::new()), changed),
        (Some(text.replacen("\"loss\":", "\"loss\":1", 1)), changed),
        (Some(text.replacen(first, &format!("{first}\n{first}"), 1)), changed),
        (Some(text[first.len() + 1..].to_string()), changed),
    ] {
        home.copy("whole", "r");
        match now {
            Some(now) => home.write("r/metrics.jsonl", now),
            None => fs::remove_file(home.path("r/metrics.jsonl")).unwrap(),
        }
        home.run(&["inspect", "r", "--verify"]).refused(&[words]);
        let ended = home.run(&[&RESUME[..], &["--quiet"]].concat()).ok();
        assert!(ended.stderr.contains(words), "{}", ended.stderr);
        // From here on, it is the run's again.
        home.run(&["inspect", "r", "--verify"]).ok();
    }
    // Lines behind the checkpoint are those of a run that was killed.
    home.copy("whole", "r");
    home.write("r/metrics.jsonl", format!("{text}{}\n{{\"ste", first.replace("\"step\":1,", "\"step\":9,")));
    home.run(&["inspect", "r", "--verify"]).ok();
    assert_eq!(home.run(&[&RESUME[..], &["--quiet"]].concat()).ok().stderr, "");
}

#[test]
fn inspect_verifies_every_file_that_a_resume_needs() {
    let home = home_with_run();
    let verify = ["inspect", "r", "--verify", "--json"];
    assert_eq!(home.run(&verify).ok().json()["damaged"].as_array().unwrap().len(), 0);
    for name in SETUP_FILES.into_iter().chain(["metrics.jsonl"]) {
        let path = format!("r/{name}");
        let whole = home.read(&path);
        for at in [0, whole.len() / 3, whole.len() - 2] {
            flip(&home, &path, at);
            let ended = home.run(&verify).refused(&[&path]);
            assert!(ended.json()["damaged"].as_array().unwrap()[0].as_str().unwrap().contains(&path));
            home.write(&path, &whole);
        }
        home.write(&path, &whole[..whole.len() / 2]);
        home.run(&verify).refused(&[&path]);
        fs::remove_file(home.path(&path)).unwrap();
        home.run(&verify).refused(&[&path]);
        fs::create_dir(home.path(&path)).unwrap();
        home.run(&verify).refused(&[&path]);
        fs::remove_dir(home.path(&path)).unwrap();
        home.write(&path, &whole);
    }
    home.run(&verify).ok();
    // A token file elsewhere is one of them.
    home.run(&["tokenize", "--out", "t.bin", "text.txt"]).ok();
    let tokens = ["--set", "data.text=[]", "--set", "data.tokens=t.bin"];
    home.run(&[&["train", "small.toml", "--run", "t", "--quiet"][..], &tokens].concat()).ok();
    home.run(&["inspect", "t", "--verify"]).ok();
    flip(&home, "t.bin", 2000);
    home.run(&["inspect", "t", "--verify"]).refused(&["t.bin does not hold the tokens that this run"]);
}

/// The launcher stands still until the ranks have ended, so that it meets the damage at the end.
#[test]
fn a_last_checkpoint_that_cannot_be_read_is_an_error() {
    let home = Home::new();
    let train = ["train", "small.toml", "--run", "r", "--quiet", "--nproc", "2", "--set", "train.steps=60"];
    let child = home.start(&[&train[..], &["--set", "train.save_every=30"]].concat());
    home.wait_for_step("r", 2);
    let started = rig::ranks(child.id());
    rig::signal(child.id() as i32, rustix::process::Signal::STOP);
    rig::wait("the ranks to end", || started.iter().all(|(_, pid)| !rig::lives(*pid)));
    flip(&home, "r/checkpoints/step-60/manifest.json", 500);
    rig::signal(child.id() as i32, rustix::process::Signal::CONT);
    let ended = rig::finish(child);
    ended.refused(&[
        "step 60 was done and saved",
        "r/checkpoints/step-60",
        "is of step 30",
        "--run r --resume",
    ]);
    for (command, instead) in [
        (&["sample", "r", "--prompt", "rank", "--tokens", "2"][..], "--step 30"),
        (&["export", "r", "--out", "hf"], "--step 30"),
    ] {
        home.run(command).refused(&["r/checkpoints/step-60", instead]);
        home.run(&[command, &["--step", "30"]].concat()).ok();
    }
}

#[test]
fn headers_of_rank_files_count() {
    let home = home_with_run();
    flip(&home, "r/checkpoints/step-8/rank-00000.safetensors", 30);
    home.run(&["inspect", "r/checkpoints/step-8"]).refused(&["rank-00000.safetensors", "header"]);
    let ended = home.run(&[&RESUME[..], &["--quiet"]].concat()).ok();
    assert!(ended.stderr.contains("skipping r/checkpoints/step-8"), "{}", ended.stderr);
}
