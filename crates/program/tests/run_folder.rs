//! A run folder changes completely or not at all, and by one run at a time; a run notices when its folder is removed.

use crate::rig;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};

use crate::rig::{Home, lives, ranks, signal, wait};
use phalanx_testing::reliability::SETUP_FILES;
use rustix::process::Signal;

const RESUME: [&str; 6] = ["train", "--run", "r", "--resume", "--set", "train.steps=12"];

/// A run with the tokenizer `char` on the text `text.txt`.
fn by_characters(home: &Home) {
    let tokenizer = "data.tokenizer=char";
    home.run(&["train", "small.toml", "--run", "r", "--set", tokenizer, "--quiet"]).ok();
}

fn endless<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let args = ["train", "small.toml", "--run", "r", "--set", "train.steps=1000000", "--quiet"];
    [&args[..], more].concat()
}

#[test]
fn a_refused_resume_changes_nothing() {
    let home = Home::new();
    by_characters(&home);
    home.copy("r", "whole");
    let text = String::from_utf8(home.read("text.txt")).unwrap();
    // More characters, and as many others: the run keeps its tokenizer, which has no ids for them.
    let more: String = (' '..='z').collect();
    home.write("more.txt", more.repeat(20) + &text);
    home.write("others.txt", text.to_uppercase());
    home.write("fewer.txt", text.replace('a', ""));
    let before = home.snapshot("r");
    for data in ["more.txt", "others.txt"] {
        home.run(&[&RESUME[..], &["--data", data]].concat())
            .refused(&[data, "is not in the vocabulary of 16"]);
        assert_eq!(home.snapshot("r"), before, "{data}");
    }
    // Named again, "char" makes another vocabulary of each text.
    for data in ["more.txt", "others.txt", "fewer.txt"] {
        let ended = home.run(&[&RESUME[..], &["--data", data, "--set", "data.tokenizer=char"]].concat());
        ended.refused(&["data.tokenizer", "char", "r/checkpoints/step-8", "data.new_tokenizer"]);
        assert_eq!(home.snapshot("r"), before, "{data}");
    }
    for (set, word) in [
        ("memory.limit_mb=0.1", "memory.limit_mb"),
        ("data.tokenizer=byte", "data.tokenizer"),
        ("data.tokens=nowhere.bin", "nowhere.bin"),
        ("batch.micro=3", "batch.micro"),
    ] {
        home.run(&[&RESUME[..], &["--set", set]].concat()).refused(&[word]);
        assert_eq!(home.snapshot("r"), before, "{set}");
    }
    home.run(&[&RESUME[..], &["--data", "missing.txt"]].concat()).refused(&["missing.txt"]);
    assert_eq!(home.snapshot("r"), before);
    // The run continues as if nothing had been tried.
    home.run(&RESUME).ok();
    home.run(&["train", "--run", "whole", "--resume", "--set", "train.steps=12"]).ok();
    assert_eq!(home.losses("r"), home.losses("whole"));
}

#[test]
fn other_text_is_encoded_by_the_tokenizer_of_the_run() {
    let home = Home::new();
    by_characters(&home);
    home.write("fewer.txt", String::from_utf8(home.read("text.txt")).unwrap().replace('a', ""));
    home.copy("r", "named");
    home.run(&[&RESUME[..], &["--data", "fewer.txt"]].concat()).ok();
    let named = ["--data", "fewer.txt", "--set", "data.tokenizer=named/tokenizer.json"];
    home.run(&[&["train", "--run", "named", "--resume", "--set", "train.steps=12"], &named[..]].concat())
        .ok();
    assert_eq!(home.losses("r"), home.losses("named"));
    home.run(&["sample", "r", "--prompt", "rank", "--tokens", "5"]).ok();
    // A character that the model does not know is named.
    home.write("unknown.txt", "rank ".repeat(100) + "é");
    let unknown = ["--data", "unknown.txt", "--set", "data.tokenizer=r/tokenizer.json"];
    let args = ["train", "--run", "r", "--resume", "--set", "train.steps=16"];
    home.run(&[&args[..], &unknown].concat()).refused(&["'é'", "unknown.txt"]);
}

#[test]
fn a_tokenizer_that_is_not_the_run_s_is_refused_by_readers() {
    let home = Home::new();
    by_characters(&home);
    let json = String::from_utf8(home.read("r/tokenizer.json")).unwrap();
    home.write("r/tokenizer.json", "{\"kind\":\"byte\"}");
    for args in [&["sample", "r", "--prompt", "rank"][..], &["export", "r", "--out", "hf"]] {
        home.run(args).refused(&["tokenizer.json", "byte", "other ids"]);
    }
    assert!(!home.path("hf").exists());
    home.run(&RESUME).refused(&["tokenizer.json", "tokens.bin", "remove it"]);
    fs::remove_file(home.path("r/tokenizer.json")).unwrap();
    home.run(&["sample", "r", "--prompt", "rank"]).refused(&["tokenizer.json", "missing"]);
    home.run(&RESUME).ok();
    assert_eq!(home.read("r/tokenizer.json"), json.as_bytes());
    home.run(&["sample", "r", "--prompt", "rank", "--tokens", "5"]).ok();
}

#[test]
fn a_change_that_was_interrupted_is_finished_or_forgotten() {
    let home = Home::new();
    by_characters(&home);
    home.copy("r", "before");
    home.write("other.txt", String::from_utf8(home.read("text.txt")).unwrap().replace("chunk", "rank"));
    home.run(&[&RESUME[..], &["--data", "other.txt", "--set", "data.tokenizer=r/tokenizer.json"]].concat())
        .ok();
    home.copy("r", "after");
    for moved in 0..=SETUP_FILES.len() {
        // What a crash leaves when so many files have arrived.
        home.copy("before", "r");
        fs::create_dir(home.path("r/.ready")).unwrap();
        home.write("r/.ready/phalanx-start", "");
        for (place, name) in SETUP_FILES.iter().enumerate() {
            let folder = if place < moved { "r" } else { "r/.ready" };
            if *name != "given.toml" {
                home.write(&format!("{folder}/{name}"), home.read(&format!("after/{name}")));
            }
        }
        home.run(&["train", "--run", "r", "--resume", "--set", "train.steps=8"]).ok();
        for name in SETUP_FILES {
            let [now, then] = ["r", "after"].map(|run| home.read(&format!("{run}/{name}")));
            assert_eq!(now, then, "{name} after {moved}");
        }
        assert!(!home.path("r/.ready").exists());
    }
    // Before the rename that commits it, a change is discarded.
    home.copy("before", "r");
    fs::create_dir(home.path("r/.next")).unwrap();
    home.write("r/.next/phalanx-start", "");
    home.write("r/.next/config.toml", home.read("after/config.toml"));
    let ended = home.run(&["train", "--run", "r", "--resume", "--set", "train.steps=8"]).ok();
    assert!(ended.stderr.contains("r: removes what a start that was interrupted"), "{}", ended.stderr);
    assert_eq!(
        home.snapshot("r").values().collect::<Vec<_>>(),
        home.snapshot("before").values().collect::<Vec<_>>()
    );
}

#[test]
fn a_start_removes_what_a_start_before_it_prepared() {
    let home = Home::new();
    by_characters(&home);
    fs::remove_dir_all(home.path("r/checkpoints")).unwrap();
    fs::remove_file(home.path("r/metrics.jsonl")).unwrap();
    // Bare ids, without a tokenizer: the tokenizer of the earlier start must not be used.
    let ids: Vec<u8> = (0..4000u16).flat_map(|id| (id % 50).to_le_bytes()).collect();
    home.write("ids.bin", ids);
    let text = String::from_utf8(home.read("small.toml")).unwrap();
    home.write("ids.toml", text.replace("text = [\"text.txt\"]", "tokens = \"ids.bin\""));
    home.run(&["train", "ids.toml", "--run", "r", "--set", "model.vocab=64", "--quiet"]).ok();
    assert!(!home.path("r/tokens.bin").exists() && !home.path("r/tokenizer.json").exists());
    home.run(&["sample", "r", "--prompt", "rank"]).refused(&["no tokenizer"]);
}

#[test]
fn one_run_at_a_time() {
    let home = Home::new();
    for nproc in ["1", "2"] {
        let _ = fs::remove_dir_all(home.path("r"));
        let first = home.start(&endless(&["--nproc", nproc]));
        home.wait_for_step("r", 10);
        let holder = format!("in use by process {}", first.id());
        let words = [holder.as_str(), "--run", "nothing was changed"];
        home.run(&RESUME).refused(&words);
        home.run(&["train", "small.toml", "--run", "r"]).refused(&words);
        let at = home.metrics("r").last().unwrap()["step"].as_u64().unwrap();
        home.wait_for_step("r", at + 5);
        // Every rank holds the lock, so that it outlives a launcher that is killed.
        for (rank, pid) in ranks(first.id()) {
            let held = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
            let lock = home.path("r/.lock").canonicalize().unwrap();
            let holds = held.filter_map(|fd| fs::read_link(fd.unwrap().path()).ok()).any(|to| to == lock);
            assert!(holds, "rank {rank}");
        }
        signal(first.id() as i32, Signal::INT);
        let ended = rig::finish(first);
        assert_eq!(ended.code, Some(130), "{}", ended.stderr);
        let steps = format!("train.steps={}", home.newest("r") + 2);
        home.run(&["train", "--run", "r", "--resume", "--set", &steps, "--quiet"]).ok();
    }
}

/// A run that is killed while it removes its last old checkpoint leaves part of one behind. The next command that locks the
/// folder removes it, even when no step is left to do.
#[test]
fn what_a_killed_save_or_purge_left_is_removed() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--quiet"]).ok();
    let newest = format!("step-{}", home.newest("r"));
    for name in ["step-4.tmp", "step-99.tmp"] {
        fs::create_dir(home.path("r/checkpoints").join(name)).unwrap();
        home.write(&format!("r/checkpoints/{name}/rank-00000.safetensors"), "half");
    }
    home.copy(&format!("r/checkpoints/{newest}"), &format!("r/checkpoints/{newest}.replaced"));
    home.run(&["train", "--run", "r", "--resume", "--quiet"]).ok();
    let names = fs::read_dir(home.path("r/checkpoints")).unwrap();
    let names: Vec<String> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.contains(&newest), "{names:?}");
    assert!(names.iter().all(|name| name.trim_start_matches("step-").parse::<u64>().is_ok()), "{names:?}");
}

/// The lock file and the metrics are opened by name: an error names anything that is not a regular file, and nothing
/// blocks on it.
#[test]
fn special_files_in_a_run_folder_are_named() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--quiet"]).ok();
    for (name, link) in [(".lock", true), (".lock", false), ("metrics.jsonl", true), ("metrics.jsonl", false)]
    {
        home.copy("r", "s");
        let path = home.path("s").join(name);
        // A copy of a run folder has no lock.
        let _ = fs::remove_file(&path);
        match link {
            true => symlink(&path, &path).unwrap(),
            false => phalanx_testing::hostile::make_fifo(&path),
        }
        home.run(&["train", "--run", "s", "--resume", "--set", "train.steps=12"]).refused(&[name]);
        fs::remove_dir_all(home.path("s")).unwrap();
    }
}

#[test]
fn two_starts_at_once_are_one_run() {
    let home = Home::new();
    for _ in 0..8 {
        let _ = fs::remove_dir_all(home.path("r"));
        let args = ["train", "small.toml", "--run", "r", "--nproc", "2", "--quiet"];
        let started = [home.start(&args), home.start(&args)];
        let ended = started.map(rig::finish);
        let mut codes = ended.each_ref().map(|ended| ended.code);
        codes.sort();
        assert_eq!(codes, [Some(0), Some(1)], "{} {}", ended[0].stderr, ended[1].stderr);
        let refused = ended.iter().find(|ended| ended.code == Some(1)).unwrap();
        let words = ["in use by process", "already holds a run"];
        assert!(words.iter().any(|word| refused.stderr.contains(word)), "{}", refused.stderr);
        home.run(&["inspect", "r", "--verify"]).ok();
        assert_eq!(home.newest("r"), 8);
    }
}

#[test]
fn planted_links_are_not_followed_and_leftovers_are_removed() {
    let home = Home::new();
    home.write("victim", "precious");
    fs::create_dir(home.path("r")).unwrap();
    for name in [".config.toml.tmp", ".given.toml.tmp", ".plan.json.tmp", "memory.tmp", "metrics.jsonl.tmp"] {
        symlink(home.path("victim"), home.path(&format!("r/{name}"))).unwrap();
    }
    home.run(&["train", "small.toml", "--run", "r", "--nproc", "2", "--quiet"]).ok();
    assert_eq!(home.read("victim"), b"precious");
    let token = ".hosts-01234567";
    let leftovers = [".phalanx-0123456789abcdef.tmp", "memory.rank-0.json", "memory.rank-17.json", token];
    for name in leftovers {
        home.write(&format!("r/{name}"), "0123456789abcdef".repeat(2));
    }
    // Other files of such names are somebody's own.
    home.write("r/.hosts-89abcdef", "10.0.0.1 node1\n");
    home.run(&["train", "--run", "r", "--resume", "--quiet"]).ok();
    assert_eq!(home.read("r/.hosts-89abcdef"), b"10.0.0.1 node1\n");
    for name in leftovers {
        assert!(!home.path(&format!("r/{name}")).exists(), "{name}");
    }
}

#[test]
fn a_run_folder_that_has_gone_ends_the_run() {
    let home = Home::new();
    type Remove = fn(&Home);
    let removals: [(Remove, &str); 3] = [
        (|home| fs::remove_dir_all(home.path("r")).unwrap(), "the folder was removed"),
        (|home| fs::rename(home.path("r"), home.path("moved")).unwrap(), "the folder was removed"),
        (|home| fs::remove_file(home.path("r/config.toml")).unwrap(), "config.toml was removed"),
    ];
    for (nproc, (remove, words)) in ["1", "2", "2"].into_iter().zip(removals) {
        let _ = fs::remove_dir_all(home.path("r"));
        // The signal requests a save after the folder was removed.
        let child = home.start(&endless(&["--nproc", nproc, "--set", "train.save_every=0"]));
        home.wait_for_step("r", 5);
        let started = ranks(child.id());
        remove(&home);
        signal(child.id() as i32, Signal::INT);
        let ended = rig::finish(child);
        ended.refused(&["the run folder r was removed or changed", words]);
        assert!(started.iter().all(|(_, pid)| !lives(*pid)));
        assert!(!home.path("r/checkpoints").exists());
    }
}

#[test]
fn tokens_that_change_during_a_run_are_an_error_and_no_signal() {
    let home = Home::new();
    // In place: in the file that the run has open.
    type Change = fn(&File);
    let changes: [(Change, &str); 2] = [
        (|file| file.write_all_at(&[0xff; 17_000], 64).unwrap(), "id 65535"),
        (|file| file.set_len(100).unwrap(), "was shortened while it was in use"),
    ];
    for nproc in ["1", "2"] {
        for (change, words) in changes {
            let _ = fs::remove_dir_all(home.path("r"));
            let child = home.start(&endless(&["--nproc", nproc, "--set", "train.save_every=0"]));
            home.wait_for_step("r", 5);
            change(&File::options().write(true).open(home.path("r/tokens.bin")).unwrap());
            let ended = rig::finish(child);
            ended.refused(&["r/tokens.bin", words]);
        }
    }
}

#[test]
fn tokens_that_became_others_of_the_vocabulary_are_found_before_the_next_save() {
    let home = Home::new();
    let child = home.start(&endless(&["--nproc", "2", "--set", "train.save_every=0"]));
    home.wait_for_step("r", 5);
    let file = File::options().write(true).open(home.path("r/tokens.bin")).unwrap();
    file.write_all_at(b"a\0b\0c\0", 1000).unwrap();
    signal(child.id() as i32, Signal::INT);
    let ended = rig::finish(child);
    ended.refused(&["r/tokens.bin does not hold the tokens", "blake3"]);
    assert!(home.checkpoints("r").is_empty());
}

#[test]
fn other_commands_do_not_replace_what_they_should_not() {
    let home = Home::new();
    by_characters(&home);
    let before = home.snapshot("r");
    home.run(&["tokenize", "--out", "r/tokens.bin", "text.txt"]).refused(&["exists already", "--force"]);
    home.run(&["export", "r", "--out", "r"]).refused(&["--out r", "the folder of a run"]);
    home.run(&["import", "nowhere", "--run", "r"]).refused(&["nowhere"]);
    assert_eq!(home.snapshot("r"), before);
    home.run(&["tokenize", "--out", "t.bin", "text.txt"]).ok();
    let made = home.read("t.bin");
    // A new file that is not completed leaves the old one.
    home.write("bad.txt", [b'a', 0xff]);
    home.run(&["tokenize", "--out", "t.bin", "--force", "bad.txt"]).refused(&["bad.txt"]);
    assert_eq!(home.read("t.bin"), made);
    home.run(&["tokenize", "--out", "t.bin", "--force", "--tokenizer", "char", "text.txt"]).ok();
    assert_ne!(home.read("t.bin"), made);
}

#[test]
fn readers_beside_a_run_that_purges_see_whole_checkpoints() {
    let home = Home::new();
    let sets = ["--nproc", "2", "--set", "train.save_every=1", "--set", "train.keep=1"];
    let child = home.start(&endless(&sets));
    home.wait_for_step("r", 3);
    wait("a checkpoint", || home.newest("r") > 0);
    for _ in 0..10 {
        home.run(&["inspect", "r", "--verify"]).ok();
        home.run(&["sample", "r", "--prompt", "rank", "--tokens", "1"]).ok();
        home.run(&["export", "r", "--out", "hf", "--force"]).ok();
    }
    signal(child.id() as i32, Signal::INT);
    assert_eq!(rig::finish(child).code, Some(130));
}

/// A key that is unset has its default; one that says where a step is computed gives way to what contradicts it; the rest is refused.
#[test]
fn a_resume_leaves_out_what_is_unset_and_what_gives_way() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--run", "r", "--quiet", "--set", "memory.optimizer=host"]).ok();
    let resume = |more: &[&str]| {
        home.copy("r", "copy");
        let base = ["train", "--run", "copy", "--resume", "--quiet", "--set", "train.steps=9"];
        home.run(&[&base[..], more].concat())
    };
    let ended = resume(&["--unset", "memory.optimizer"]).ok();
    let said = "from here on, memory.optimizer is \"device\" and was \"host\"";
    assert!(ended.stderr.contains(said), "{}", ended.stderr);
    assert_eq!(home.losses("copy").len(), 9);
    resume(&["--unset", "memory.optimiser"])
        .refused(&["--unset: unknown key memory.optimiser", "did you mean optimizer in table [memory]"]);
    resume(&["--unset", "train.seed", "--set", "train.seed=2"]).refused(&["leave one of them out"]);
    home.copy("r", "copy");
    let args = ["--set", "memory.placement=device", "--set", "train.steps=9"];
    let ended = home.run(&[&["train", "--run", "copy", "--resume"][..], &args].concat()).ok();
    let left = "memory.optimizer of before left out: memory.placement = \"device\": needs memory.optimizer = \"device\" (it is \"host\")";
    assert!(ended.stderr.contains(left), "{}", ended.stderr);
    resume(&["--set", "model.arch=bert"]).refused(&[
        "model.arch = \"bert\"",
        "the run has \"gpt2\"",
        "model.init",
    ]);
    let both = ["--set", "parallel.updates=asynchronous", "--set", "memory.optimizer=host"];
    resume(&both).refused(&["memory.optimizer = \"host\": needs parallel.updates = \"synchronous\""]);
    resume(&["--nproc", "3"]).refused(&[
        "batch.global = 8",
        "the run has this batch.global",
        "--set batch.global=VALUE",
    ]);
}

/// Each change of what is trained or measured is one line, also under --quiet; a validation part that was trained on is
/// refused.
#[test]
fn a_resume_says_what_it_trains_or_measures_otherwise() {
    let home = Home::new();
    home.write("other.txt", "other words of a gather and a reduce step\n".repeat(400));
    home.run(&["train", "small.toml", "--run", "r", "--quiet"]).ok();
    let resume = |more: &[&str]| {
        home.copy("r", "copy");
        let base = ["train", "--run", "copy", "--resume", "--quiet", "--set", "train.steps=9"];
        home.run(&[&base[..], more].concat())
    };
    for (key, words) in [
        (
            "data.validation=0.05",
            "data.validation is 0.05 and was 0.1: the validation loss is that of other windows",
        ),
        ("data.validation=0", "data.validation is 0.0 and was 0.1: nothing is held out or evaluated"),
        ("train.seed=2", "train.seed is 2 and was 1: the samples that are left of this epoch are others"),
        (
            "data.order=sequential",
            "data.order is \"sequential\" and was \"shuffled\": the samples that are left",
        ),
        ("model.seq=8", "model.seq is 8 and was 16: the text is cut into other windows"),
        (
            "train.eval_samples=4",
            "train.eval_samples is 4 and was 8: the validation loss is that of other windows",
        ),
        ("batch.global=4", "batch.global is 4 and was 8: a step has 64 tokens and had 128"),
        ("loss.z_loss=0.001", "loss.z_loss is 0.001 and was 0.0: training losses have another term"),
        ("data.text=other.txt", "other data than before"),
        ("optimizer.beta1=0.8", "from here on, optimizer.beta1 is 0.8 and was 0.9"),
    ] {
        let ended = resume(&["--set", key]).ok();
        let lines = ended.stderr.lines().filter(|line| line.contains(words)).count();
        assert_eq!(lines, 1, "{key}: {}", ended.stderr);
    }
    let same = resume(&[]).ok();
    assert_eq!(same.stderr, "", "what did not change has no line");
    let before = home.snapshot("r");
    resume(&["--set", "data.validation=0.2"]).refused(&[
        "data.validation = 0.2",
        "0.1 or less",
        "nothing was changed",
    ]);
    assert_eq!(home.snapshot("copy").len(), before.len());
    // The share that was trained on counts, not the one of the last start.
    home.copy("r", "less");
    home.run(&[
        "train",
        "--run",
        "less",
        "--resume",
        "--quiet",
        "--set",
        "train.steps=9",
        "--set",
        "data.validation=0.05",
    ])
    .ok();
    home.run(&[
        "train",
        "--run",
        "less",
        "--resume",
        "--quiet",
        "--set",
        "train.steps=10",
        "--set",
        "data.validation=0.1",
    ])
    .refused(&["data.validation = 0.1", "0.05 or less"]);
    // Tokens are those that were seen, whatever the length of a sequence was.
    resume(&["--set", "model.seq=8"]).ok();
    let tokens = home.metrics("copy").into_iter().filter_map(|line| line["tokens"].as_u64());
    assert_eq!(tokens.skip(7).collect::<Vec<_>>(), [8 * 8 * 16, 8 * 8 * 16 + 8 * 8]);
}

/// The files in another order: what was trained on would be held out.
#[test]
fn other_data_whose_validation_part_was_trained_on_is_refused() {
    let home = Home::new();
    let texts =
        |seed: usize| (0..900).map(|i| format!("{} ", (i * i * 7 + seed * i) % 9973)).collect::<String>();
    for (name, seed) in [("a.txt", 1), ("b.txt", 2), ("c.txt", 3)] {
        home.write(name, texts(seed));
    }
    let first = ["train", "small.toml", "--run", "r", "--quiet", "--set", "data.validation=0.3"];
    home.run(&[&first[..], &["--data", "a.txt", "--data", "b.txt"]].concat()).ok();
    let resume = |data: &[&str]| {
        home.copy("r", "copy");
        let base = ["train", "--run", "copy", "--resume", "--quiet", "--set", "train.steps=9"];
        let data = data.iter().flat_map(|file| ["--data", file]);
        home.run(&base.into_iter().chain(data).collect::<Vec<_>>())
    };
    resume(&["b.txt", "a.txt"]).refused(&[
        "100 % of the validation windows",
        "was trained on",
        "data.validation=0",
    ]);
    for (data, words) in [
        (
            &["a.txt", "b.txt", "c.txt"][..],
            "0 % of the validation windows of the other data are among the tokens",
        ),
        (&["c.txt"], "0 % of the validation windows of the other data are among the tokens"),
    ] {
        let ended = resume(data).ok();
        assert!(ended.stderr.contains(words), "{data:?}: {}", ended.stderr);
    }
    // Tokens that are gone cannot be compared.
    home.run(&["tokenize", "a.txt", "--tokenizer", "byte", "--out", "a.bin"]).ok();
    let tokens = [
        "train",
        "small.toml",
        "--run",
        "t",
        "--quiet",
        "--set",
        "data.tokens=a.bin",
        "--set",
        "data.text=[]",
    ];
    home.run(&tokens).ok();
    home.run(&["tokenize", "b.txt", "--tokenizer", "byte", "--out", "a.bin", "--force"]).ok();
    let resume = [
        "train",
        "--run",
        "t",
        "--resume",
        "--quiet",
        "--set",
        "train.steps=9",
        "--set",
        "data.tokens=a.bin",
    ];
    let ended = home.run(&resume).ok();
    assert!(ended.stderr.contains("cannot be checked"), "{}", ended.stderr);
}
