//! `phalanx doctor`: what this machine is, how fast it is, and which of its limits matter to a run.

use std::time::Duration;

use anyhow::{Context, Result};
use phalanx_bench::kernel_table::Achieved;
use phalanx_bench::kernels::{FamilyRate, family_rates};
use phalanx_cpu::peak::Bandwidth;
use phalanx_plan::trace::DType;
use phalanx_simd::tiles::TileUnit;
use phalanx_tensor::ProductMethod;
use phalanx_train::config::PrecisionConfig;
use serde_json::json;

use crate::arguments::args::DoctorArgs;
use crate::host::busy::{self, Disturbance, Ticks};
use crate::host::environment::{Environment, Processor};
use crate::host::machine;
use crate::host::output::{print, print_json};
use crate::reports::card_report::{self, Kernels};
use phalanx_drawing::report::{Table, bytes, count};

/// Bytes for measuring bandwidth: per core, and the maximum in total. Larger than any cache.
const MEMORY_BYTES: [usize; 2] = [256 << 20, 1 << 30];

/// Measurements of operations per second, of which the best counts, and the time between two.
const ROUNDS: usize = 5;
const PAUSE: Duration = Duration::from_millis(100);

/// Kernels in use that reach less than this of what others do are named.
const SLOWER: f64 = 0.9;

/// A job of N ranks needs about N descriptors; a limit below this is reported.
const FEW_FILES: u64 = 1024;

/// Measures and prints.
///
/// # Errors
/// Memory that the system does not give.
pub fn doctor(args: &DoctorArgs, environment: Environment) -> Result<()> {
    if args.kernels {
        return kernels(args, environment);
    }
    let cores = machine::cores();
    let processors = [processor(environment, 1)?, processor(environment, cores)?];
    let (isa, why) = (environment.isa().name(), environment.isa().why_not_best());
    let products = environment.choose(&PrecisionConfig::default())?.name();
    let (before, load_average) = (Ticks::now(), busy::load_average());
    let ([f32_flops, bf16_flops], spread) =
        best_rates(ROUNDS, |dtype| processors.each_ref().map(|each| each.flops_per_s(dtype)));
    let size = (MEMORY_BYTES[0] * cores).min(MEMORY_BYTES[1]);
    let measure =
        |each: &Processor| each.bandwidth(size).context("cannot allocate memory to measure its bandwidth");
    let bandwidth = [measure(&processors[0])?, measure(&processors[1])?];
    let families = family_rates(environment.options(1), cores).context("the rates of kernels")?;
    let disturbance = Disturbance::between(before, Ticks::now(), spread, load_average);
    let advice = if disturbance.is_busy() { Vec::new() } else { advice(&families) };
    let (available, limit) = (machine::available().map(|a| a.bytes), machine::memory_limit());
    let [memlock, nofile, nproc] = machine::limits();
    let [private, shared] = machine::huge_pages();
    if args.json {
        return print_json(&json!({
            "cores": cores, "processor": machine::processor(), "kernel": machine::kernel(),
            "instruction_sets": machine::instruction_sets(), "kernels_use": isa,
            "kernels_use_because": why, "f32_products": products,
            "tile_registers": environment.tiles().map(TileUnit::name),
            "kernel_families": families.iter().map(family_json).collect::<Vec<_>>(),
            "peak_flops_per_s_thread": f32_flops[0], "peak_flops_per_s": f32_flops[1],
            "peak_bf16_flops_per_s_thread": bf16_flops[0], "peak_bf16_flops_per_s": bf16_flops[1],
            "read_bytes_per_s_thread": bandwidth[0].read, "read_bytes_per_s": bandwidth[1].read,
            "copy_bytes_per_s_thread": bandwidth[0].copy, "copy_bytes_per_s": bandwidth[1].copy,
            "update_bytes_per_s_thread": bandwidth[0].update, "update_bytes_per_s": bandwidth[1].update,
            "memory_bytes": phalanx_system::host::total_bytes(), "available_bytes": available,
            "memory_limit_bytes": limit.as_ref().map(|limit| limit.limit_bytes),
            "memory_limit_file": limit.as_ref().map(|limit| &limit.file),
            "memlock_bytes": memlock.1, "nofile": nofile.1, "nproc": nproc.1,
            "huge_pages": private, "huge_pages_shared": shared, "advice": advice,
            "busy": disturbance.is_busy(), "disturbance": disturbance, "gpus": card_report::to_json(),
        }));
    }
    let table = rates_table(cores, [f32_flops, bf16_flops], &bandwidth);
    let size = |bytes_or_none: Option<u64>| bytes_or_none.map_or("no limit".to_string(), bytes);
    let number = |limit: Option<u64>| limit.map_or("no limit".to_string(), |limit| limit.to_string());
    let mut text = format!(
        "processor         {} ({cores} cores for this process)\n\
         instruction sets  {}; kernels use {}\n\
         matrix products   {}\n\
         kernel            {}\n\
         memory            {} available of {}; huge pages: private {private}, shared {shared}\n\
         control group     memory limit {}\n\
         limits            memlock {}, nofile {}, nproc {}\n{table}",
        machine::processor(),
        machine::instruction_sets().join(" "),
        why.map_or(isa.to_string(), |why| format!("{isa}: {why}")),
        matrix_products(environment, products),
        machine::kernel(),
        available.map_or("?".into(), bytes),
        phalanx_system::host::total_bytes().map_or("?".into(), bytes),
        limit.map_or("none".into(), |limit| limit.to_string()),
        size(memlock.1),
        number(nofile.1),
        number(nproc.1),
    );
    text.push_str(&families_text(environment, cores, &families));
    text.push_str(&card_report::to_text());
    text.push_str(&ending(disturbance, &advice));
    Ok(print(&text)?)
}

/// The advice, or what disturbed the measurement from which it would follow.
fn ending(disturbance: Disturbance, advice: &[String]) -> String {
    match advice {
        _ if disturbance.is_busy() => disturbance.to_text(),
        [] => "no limit stands in the way of a run\n".to_string(),
        lines => lines.iter().map(|line| format!("note: {line}\n")).collect(),
    }
}

/// Rates of one thread and of all.
fn rates_table(cores: usize, [f32, bf16]: [[f64; 2]; 2], bandwidth: &[Bandwidth; 2]) -> Table {
    let mut table = Table::default();
    let mut row = |label: &str, first: String, second: String| table.row([label.to_string(), first, second]);
    row("", "one thread".into(), format!("{cores} threads"));
    row("multiply-adds in f32 (f16), operations/s", count(f32[0]), count(f32[1]));
    row("products of bf16, operations/s", count(bf16[0]), count(bf16[1]));
    let gbs = |bytes_per_s: f64| format!("{:.1} GB/s", bytes_per_s / 1e9);
    row("memory read", gbs(bandwidth[0].read), gbs(bandwidth[1].read));
    row("memory copied (read and written)", gbs(bandwidth[0].copy), gbs(bandwidth[1].copy));
    row("memory read and written in place", gbs(bandwidth[0].update), gbs(bandwidth[1].update));
    table
}

fn family_json(family: &FamilyRate) -> serde_json::Value {
    let FamilyRate { name, kernels, rates: [one, all], other } = family;
    let unit = if matches!(one, Achieved::Flops(_)) { "flops" } else { "bytes" };
    json!({
        "family": name, "kernels": kernels, "unit": unit, "per_s_thread": one.per_s(), "per_s": all.per_s(),
        "other_kernels": other.as_ref().map(|(kernels, _)| kernels),
        "other_per_s_thread": other.as_ref().map(|(_, rate)| rate.per_s()),
    })
}

/// The families of kernels with their rates, beside the best of the other kernels that the processor has; and why these are used.
fn families_text(environment: Environment, cores: usize, families: &[FamilyRate]) -> String {
    let all = format!("{cores} threads");
    let mut table = Table::new(&["", "kernels", "one thread", &all, "otherwise, one thread"]);
    let rate = |rate: Achieved| match rate {
        Achieved::Flops(rate) => format!("{:.0} GFLOP/s", rate / 1e9),
        Achieved::Bytes(rate) => format!("{:.1} GB/s", rate / 1e9),
    };
    for family in families {
        let other = family.other.as_ref().map(|(kernels, other)| format!("{kernels} {}", rate(*other)));
        let [one, all] = family.rates.map(rate);
        table.row([family.name.into(), family.kernels.clone(), one, all, other.unwrap_or_default()]);
    }
    format!("{table}{}", why_these(environment))
}

/// Families of which other kernels are faster.
fn faster_kernels(families: &[FamilyRate]) -> impl Iterator<Item = String> {
    families.iter().filter_map(|family| {
        let (times, (other, _)) = (family.times_other()?, family.other.as_ref()?);
        let faster = || format!("{}: {other} would be {:.1} times as fast", family.name, 1.0 / times);
        (times < SLOWER).then(faster)
    })
}

/// Why these kernels are used.
fn why_these(environment: Environment) -> &'static str {
    match environment.is_chosen() {
        true => "PHALANX_ISA has chosen these kernels\n",
        false => {
            "these kernels are chosen by a table of processors, and not by the rates, so\n\
             that all ranks agree; PHALANX_ISA and device.kernels choose others\n"
        }
    }
}

/// Checks the kernels of the first GPU.
fn kernels(args: &DoctorArgs, environment: Environment) -> Result<()> {
    let checked = Kernels::check(environment)?;
    match args.json {
        true => print_json(&checked.to_json())?,
        false => print(&format!("{}\n{}", card_report::to_text(), checked.to_text()))?,
    }
    checked.verdict()
}

/// The processor with `threads` threads, whose f32 rate is that of multiply-adds.
fn processor(environment: Environment, threads: usize) -> Result<Processor> {
    environment.processor(threads, Some(ProductMethod::Fma))
}

/// Describes what computes matrix products; `f32` is the value of `precision.products` that a run of f32 would have.
fn matrix_products(environment: Environment, f32: &str) -> String {
    match (environment.tiles(), environment.unused_tiles()) {
        (Some(unit), _) => format!("{}: bf16 on tile registers, f32 by \"{f32}\"", unit.name()),
        (None, Some(unused)) => unused,
        (None, None) => "by the kernels' instruction set; no tile registers (AMX)".to_string(),
    }
}

/// The best of several measurements of operations per second in f32 and bf16, by one thread and by all, and how far the middle one
/// of them is below it at most. Another program may have the processor during one of them, so they are spread over time.
fn best_rates(rounds: usize, measure: impl Fn(DType) -> [f64; 2]) -> ([[f64; 2]; 2], f64) {
    let mut all: [[Vec<f64>; 2]; 2] = Default::default();
    for round in 0..rounds {
        if round > 0 {
            std::thread::sleep(PAUSE);
        }
        for (known, dtype) in all.iter_mut().zip([DType::F32, DType::BF16]) {
            known.iter_mut().zip(measure(dtype)).for_each(|(known, rate)| known.push(rate));
        }
    }
    let spread = all.iter().flatten().map(|rates| busy::spread(rates)).fold(0.0, f64::max);
    (all.map(|of_type| of_type.map(|rates| rates.into_iter().fold(0.0, f64::max))), spread)
}

/// Advice for this machine.
fn advice(families: &[FamilyRate]) -> Vec<String> {
    let mut advice: Vec<String> = faster_kernels(families).collect();
    let [_, (_, nofile), _] = machine::limits();
    if nofile.is_some_and(|limit| limit < FEW_FILES) {
        advice.push("few open files allowed: `ulimit -n 4096` before jobs of many ranks".to_string());
    }
    let [private, shared] = machine::huge_pages();
    if private == "never" {
        advice.push(
            "huge pages are off: memory-bound kernels run slower (transparent_hugepage/enabled)".to_string(),
        );
    }
    if matches!(shared.as_str(), "never" | "deny") {
        advice.push(
            "no huge pages for memory that ranks share: several ranks start and run a little slower; \
             `advise` in /sys/kernel/mm/transparent_hugepage/shmem_enabled allows them"
                .to_string(),
        );
    }
    let has = machine::instruction_sets();
    if cfg!(target_arch = "x86_64") && !has.iter().any(|set| set == "avx2") {
        advice.push("no AVX2: kernels run portable code, many times slower".to_string());
    }
    advice
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_of_all_rounds_counts() {
        let calls = std::cell::Cell::new(0);
        let (rates, spread) = best_rates(3, |dtype| {
            calls.set(calls.get() + 1);
            // The processor is taken away in the first round for one thread, in the second for all.
            let scale = if dtype == DType::F32 { 1.0 } else { 2.0 };
            match calls.get() {
                1 | 2 => [0.5 * scale, 9.0 * scale],
                3 | 4 => [7.0 * scale, 0.5 * scale],
                _ => [6.0 * scale, 8.0 * scale],
            }
        });
        assert_eq!((rates, calls.get()), ([[7.0, 9.0], [14.0, 18.0]], 6));
        // One thread: 0.5, 7 and 6; all: 9, 0.5 and 8.
        assert!((spread - 1.0 / 7.0).abs() < 1e-12, "{spread}");
    }

    #[test]
    fn a_busy_machine_gets_no_advice() {
        let advice = ["products, f32: avx2 would be 1.4 times as fast".to_string()];
        let at_rest = Disturbance { others_share: 0.02, spread: 0.05, load_average: Some(0.1) };
        assert_eq!(ending(at_rest, &advice), format!("note: {}\n", advice[0]));
        assert_eq!(ending(at_rest, &[]), "no limit stands in the way of a run\n");
        for busy in [Disturbance { others_share: 0.4, ..at_rest }, Disturbance { spread: 0.4, ..at_rest }] {
            let said = ending(busy, &advice);
            assert!(said.contains("this machine is busy") && !said.contains("as fast"), "{said}");
        }
    }
}
