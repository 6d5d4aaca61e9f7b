//! `PHALANX_ISA`: the kernels of every instruction set train the same model, on one rank and on two.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "for who runs the test")]

mod rig;

use phalanx_simd::Isa;
use rig::{Home, pairs};

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
            for isa in Isa::ALL.into_iter().filter(|isa| (Isa::Avx2..=Isa::detect()).contains(isa)) {
                let losses = run(isa.name());
                let apart = |(a, b): (&f64, &f64)| ((a - b) / a).abs();
                let worst = pairs(&portable, &losses).map(apart).fold(0.0, f64::max);
                println!("{compute}, {nproc} ranks, {}: {worst:.1e}", isa.name());
                assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
                assert!(worst <= tolerance, "{compute}, {nproc} ranks, {}: {worst}", isa.name());
            }
        }
    }
}

#[test]
fn what_the_processor_has_not_is_refused_and_what_it_has_is_used() {
    let home = Home::new();
    for isa in Isa::ALL {
        let ended = home.run_with(("PHALANX_ISA", isa.name()), &["doctor", "--json"]);
        if isa > Isa::detect() {
            ended.refused(&["PHALANX_ISA", isa.name(), "at most", Isa::detect().name()]);
        } else {
            assert_eq!(ended.ok().json()["kernels_use"], isa.name());
        }
    }
}
