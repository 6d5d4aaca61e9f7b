//! A run records the kernels that it computes with, and a resumed run uses them again.

use crate::rig::{Ended, Home};
use phalanx_simd::Isa;

const VARIABLE: &str = "PHALANX_ISA";

/// The variable without a value: the program chooses, also where the tests themselves run with `PHALANX_ISA`.
const UNCHOSEN: Option<&str> = Some("");

/// Part of the line about a resumed run that has other bits.
const DIFFER: &str = "its bits may differ from those of an undisturbed run";

/// Two instruction sets of this processor with different bits, as only one fuses multiplications with additions. The program takes
/// another one than the first by itself.
fn two() -> Option<[&'static str; 2]> {
    (Isa::detect() > Isa::Portable).then_some(["portable", "avx2"])
}

fn train(home: &Home, isa: Option<&str>, run: &str, steps: &str, more: &[&str]) -> Ended {
    let steps = format!("train.steps={steps}");
    let args = ["train", "--run", run, "--set", &steps];
    let args = [&args[..], more].concat();
    match isa {
        Some(isa) => home.run_with((VARIABLE, isa), &args),
        None => home.run(&args),
    }
}

fn start(home: &Home, isa: Option<&str>, run: &str, steps: &str) -> Ended {
    train(home, isa, run, steps, &["small.toml"]).ok()
}

fn resume(home: &Home, isa: Option<&str>, run: &str, more: &[&str]) -> Ended {
    train(home, isa, run, "8", &[&["--resume"], more].concat())
}

/// The checksum of what a rank has saved at the end.
fn saved(home: &Home, run: &str, rank: usize) -> String {
    let file = home.read(&format!("{run}/checkpoints/step-8/rank-{rank:05}.safetensors"));
    blake3::hash(&file).to_hex().to_string()
}

/// The kernels that a new run records, tile registers included.
fn by_default(home: &Home, isa: Option<&str>) -> String {
    start(home, isa, "new", "1");
    recorded(home, "new")
}

fn recorded(home: &Home, run: &str) -> String {
    let config = String::from_utf8(home.read(&format!("{run}/config.toml"))).unwrap();
    let line = config.lines().find_map(|line| line.strip_prefix("kernels = ")).unwrap_or("nothing");
    line.trim_matches('"').to_string()
}

/// Replaces the configuration of a run by one that another processor or an earlier version would have written.
fn forge_config(home: &Home, run: &str, config: &str) {
    let path = format!("{run}/checksums.json");
    let mut checksums = home.json(&path);
    checksums["config.toml"] = blake3::hash(config.as_bytes()).to_hex().to_string().into();
    home.write(&path, checksums.to_string());
    home.write(&format!("{run}/config.toml"), config);
}

#[test]
fn a_resumed_run_keeps_the_kernels_of_its_start() {
    let Some([kept, other]) = two() else { return };
    let home = Home::new();
    start(&home, Some(kept), "whole", "8");
    start(&home, Some(other), "other", "8");
    assert_ne!(saved(&home, "whole", 0), saved(&home, "other", 0), "{kept} and {other} have the same bits");

    let started = start(&home, Some(kept), "run", "4");
    assert!(
        started.stdout.contains(&format!("kernels {kept}; products by multiply-adds")),
        "{}",
        started.stdout
    );
    assert_eq!(recorded(&home, "run"), kept);
    assert_eq!(home.json("run/plan.json")["processor_kernels"], kept);
    let resumed = resume(&home, UNCHOSEN, "run", &[]).ok();
    assert!(!resumed.stderr.contains(DIFFER), "{}", resumed.stderr);
    assert!(resumed.stdout.contains(&format!("kernels {kept};")), "{}", resumed.stdout);
    assert_eq!(saved(&home, "run", 0), saved(&home, "whole", 0));
    assert_eq!(recorded(&home, "run"), kept);
}

/// Ranks are processes, each with an environment; the run's record counts for all of them.
#[test]
fn all_ranks_keep_the_kernels_of_the_start() {
    let Some([kept, _]) = two() else { return };
    let home = Home::new();
    let ranks =
        |isa, run, steps, more: &[&str]| train(&home, isa, run, steps, &[&["--nproc", "2"], more].concat());
    ranks(Some(kept), "whole", "8", &["small.toml"]).ok();
    ranks(Some(kept), "run", "4", &["small.toml"]).ok();
    ranks(UNCHOSEN, "run", "8", &["--resume"]).ok();
    for rank in 0..2 {
        assert_eq!(saved(&home, "run", rank), saved(&home, "whole", rank), "rank {rank}");
    }
}

#[test]
fn other_kernels_are_used_where_the_variable_names_them_and_the_bits_are_said_to_differ() {
    let Some([kept, other]) = two() else { return };
    let home = Home::new();
    start(&home, Some(kept), "run", "4");
    let resumed = resume(&home, Some(other), "run", &[]).ok();
    let line = format!("has computed with the kernels {kept} and computes with {other} from here on");
    for words in [line.as_str(), "because PHALANX_ISA asks for them", DIFFER] {
        assert!(resumed.stderr.contains(words), "no {words:?} in: {}", resumed.stderr);
    }
    assert_eq!(recorded(&home, "run"), other);
    assert_eq!(home.losses("run").len(), 8);
}

/// The record names kernels that no processor of today has together with this one's.
#[test]
fn kernels_that_the_processor_has_not_are_replaced_and_the_bits_are_said_to_differ() {
    if phalanx_simd::tiles::amx().is_ok() {
        return;
    }
    let home = Home::new();
    start(&home, Some("portable"), "run", "4");
    // As another processor would have recorded it.
    let config = String::from_utf8(home.read("run/config.toml")).unwrap();
    forge_config(&home, "run", &config.replace("\"portable\"", "\"avx512+amx\""));
    let resumed = resume(&home, UNCHOSEN, "run", &[]).ok();
    let now = by_default(&home, UNCHOSEN);
    let line = format!("kernels avx512+amx and computes with {now} from here on, because");
    for words in [line.as_str(), DIFFER] {
        assert!(resumed.stderr.contains(words), "no {words:?} in: {}", resumed.stderr);
    }
    assert_eq!(recorded(&home, "run"), now);
}

/// Runs of earlier versions have no record: they resume as before, with the kernels of the processor.
#[test]
fn a_run_without_the_record_resumes_with_the_fastest_kernels() {
    let home = Home::new();
    start(&home, Some("portable"), "run", "4");
    let config = String::from_utf8(home.read("run/config.toml")).unwrap();
    forge_config(&home, "run", &config.replace("kernels = \"portable\"\n", ""));
    let resumed = resume(&home, None, "run", &[]).ok();
    assert!(!resumed.stderr.contains(DIFFER), "{}", resumed.stderr);
    assert_eq!(recorded(&home, "run"), by_default(&home, None));
}

#[test]
fn the_key_chooses_kernels_and_may_change_them_later() {
    let Some([kept, other]) = two() else { return };
    let home = Home::new();
    let key = format!("device.kernels={kept}");
    train(&home, UNCHOSEN, "run", "4", &["small.toml", "--set", &key]).ok();
    start(&home, Some(kept), "same", "4");
    assert_eq!(recorded(&home, "run"), kept);
    let both = train(&home, Some(other), "both", "4", &["small.toml", "--set", &key]);
    both.refused(&[
        &format!("PHALANX_ISA chooses the kernels {other}"),
        &format!("device.kernels = \"{kept}\""),
    ]);
    let change = format!("device.kernels={other}");
    let changed = resume(&home, UNCHOSEN, "run", &["--set", &change]).ok();
    assert!(changed.stderr.contains("because device.kernels was changed"), "{}", changed.stderr);
    assert_eq!(recorded(&home, "run"), other);
    train(&home, UNCHOSEN, "new", "4", &["small.toml", "--set", "device.kernels=sse9"]).refused(&[
        "device.kernels = \"sse9\"",
        "\"avx2\"",
        "\"avx512+amx\"",
    ]);
}
