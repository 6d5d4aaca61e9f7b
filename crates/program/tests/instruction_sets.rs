//! `PHALANX_ISA`: the kernels of every instruction set train the same model, on one rank and on two.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "for who runs the test")]

use crate::rig::{Home, pairs};
use phalanx_simd::Isa;
use phalanx_simd::tiles::TileUnit;

/// Largest relative difference of a loss between two instruction sets after some steps. Each fuses and orders sums in
/// its own way: f32 differs in last places, which steps amplify; bf16 rounds values that already differ in f32.
const TOLERANCES: [(&str, f64); 2] = [("f32", 1e-5), ("bf16", 5e-3)];

#[test]
fn every_instruction_set_trains_alike() {
    let home = Home::new();
    for (compute, tolerance) in TOLERANCES {
        for nproc in ["1", "2"] {
            let run = |isa: &str| {
                let run = format!("{compute}-{nproc}-{isa}");
                let set = format!("precision.compute={compute}");
                let args = ["train", "small.toml", "--nproc", nproc, "--run", &run, "--set", &set, "--quiet"];
                home.run_with(("PHALANX_ISA", isa), &args).ok();
                let losses = home.losses(&run).into_iter().map(|(_, loss, _)| loss.parse::<f64>().unwrap());
                losses.collect::<Vec<_>>()
            };
            let portable = run("portable");
            assert_eq!(portable.len(), 8);
            let sets = Isa::ALL.into_iter().filter(|isa| (Isa::Avx2..=Isa::detect()).contains(isa));
            // On the model of tile registers, products of f32 are split into parts.
            let units = TileUnit::ALL.into_iter().filter(|unit| unit.is_available());
            for name in sets.map(Isa::name).chain(units.map(TileUnit::name)) {
                let losses = run(name);
                let apart = |(a, b): (&f64, &f64)| ((a - b) / a).abs();
                let worst = pairs(&portable, &losses).map(apart).fold(0.0, f64::max);
                println!("{compute}, {nproc} ranks, {name}: {worst:.1e}");
                assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
                assert!(worst <= tolerance, "{compute}, {nproc} ranks, {name}: {worst}");
            }
        }
    }
}

#[test]
fn what_the_processor_has_not_is_refused_and_what_it_has_is_used() {
    let home = Home::new();
    for isa in Isa::ALL {
        let run = format!("run-{}", isa.name());
        let args = ["train", "small.toml", "--run", &run, "--quiet", "--set", "train.steps=1"];
        let ended = home.run_with(("PHALANX_ISA", isa.name()), &args);
        if isa > Isa::detect() {
            ended.refused(&["PHALANX_ISA", isa.name(), "at most", Isa::detect().name()]);
        } else {
            ended.ok();
            assert_eq!(home.json(&format!("{run}/plan.json"))["processor_kernels"], isa.name());
        }
    }
    let told = home.run_with(("PHALANX_ISA", "portable"), &["doctor", "--json"]).ok().json();
    assert_eq!(told["kernels_use"], "portable");
}

#[test]
fn tile_registers_are_refused_where_there_are_none_and_the_model_is_used_everywhere() {
    let home = Home::new();
    for unit in TileUnit::ALL {
        let ended = home.run_with(("PHALANX_ISA", unit.name()), &["doctor", "--json"]);
        if unit.is_available() {
            let told = ended.ok().json();
            let products = if unit == TileUnit::Model { "split" } else { "fma" };
            assert_eq!([&told["tile_registers"], &told["f32_products"]], [unit.name(), products]);
        } else {
            ended.refused(&["PHALANX_ISA=amx", "AMX", "amx-model", Isa::detect().name()]);
        }
    }
}

/// A run records how its products are computed, and a resumed run computes them the same way or says why it cannot.
#[test]
fn a_run_keeps_its_way_to_compute_products() {
    let home = Home::new();
    let (model, portable) = (("PHALANX_ISA", "amx-model"), ("PHALANX_ISA", "portable"));
    let wants = ["train", "small.toml", "--run", "run", "--quiet", "--set", "precision.products=split"];
    home.run_with(portable, &wants).refused(&["precision.products = \"split\"", "\"fma\""]);
    assert!(!home.path("run").exists());
    let short = ["--set", "train.steps=2"];
    home.run_with(model, &[&["train", "small.toml", "--run", "run", "--quiet"], &short[..]].concat()).ok();
    let recorded = || String::from_utf8(home.read("run/config.toml")).unwrap();
    assert!(recorded().contains("products = \"split\""), "{}", recorded());
    let plan = String::from_utf8(home.read("run/plan.json")).unwrap();
    assert!(plan.contains("\"products\": \"split\""), "{plan}");

    let resume = ["train", "--resume", "--run", "run", "--set", "train.steps=4"];
    home.run_with(portable, &resume).refused(&["precision.products = \"split\"", "\"fma\""]);
    home.run_with(model, &resume).ok();
    let change = ["train", "--resume", "--run", "run", "--set", "train.steps=6"];
    let changed = home.run_with(portable, &[&change[..], &["--set", "precision.products=fma"]].concat()).ok();
    assert!(changed.stderr.contains("precision.products is \"fma\" and was \"split\""), "{}", changed.stderr);
    assert!(recorded().contains("products = \"fma\""), "{}", recorded());
    assert_eq!(home.losses("run").len(), 6);
}
