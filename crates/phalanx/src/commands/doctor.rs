//! `phalanx doctor`: what this machine is, how fast it is, and which of its limits matter to a run.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;
use phalanx_tensor::Cpu;
use phalanx_tensor::cpu::peak;
use serde_json::json;

use crate::args::DoctorArgs;
use crate::machine;
use crate::report::{Table, bytes, count, print, print_json};

/// Bytes that the threads read or copy together: beyond any cache. Each has its part, from and to.
const ALL_BYTES: usize = 1 << 30;

/// Most and least bytes of one thread's part.
const SPAN_BYTES: [usize; 2] = [16 << 20, 128 << 20];

/// Repetitions, of which the best counts.
const TIMES: usize = 4;

/// Descriptors that a job of N ranks needs are about N; fewer than this are worth a word.
const FEW_FILES: u64 = 1024;

/// Bandwidths in bytes a second: of one thread and of all.
struct Bandwidth {
    read: [f64; 2],
    copy: [f64; 2],
}

/// Measures and prints.
///
/// # Errors
/// None of its own.
pub fn doctor(args: &DoctorArgs) -> Result<()> {
    let cores = machine::cores();
    let one = Cpu::new(1);
    let flops = [peak::flops_per_s(&one), peak::flops_per_s(&Cpu::new(cores))];
    let bandwidth = Bandwidth {
        read: [1, cores].map(|threads| rate(threads, 1, read)),
        copy: [1, cores].map(|threads| rate(threads, 2, copy)),
    };
    let advice = advice();
    let [memlock, nofile, nproc] = machine::limits();
    if args.json {
        return print_json(&json!({
            "cores": cores, "processor": machine::processor(), "kernel": machine::kernel(),
            "instruction_sets": machine::instruction_sets(), "kernels_use": one.isa().name(),
            "peak_flops_per_s_thread": flops[0], "peak_flops_per_s": flops[1],
            "read_bytes_per_s_thread": bandwidth.read[0], "read_bytes_per_s": bandwidth.read[1],
            "copy_bytes_per_s_thread": bandwidth.copy[0], "copy_bytes_per_s": bandwidth.copy[1],
            "memory_bytes": machine::total_bytes(), "available_bytes": machine::available_bytes(),
            "memlock_bytes": memlock.1, "nofile": nofile.1, "nproc": nproc.1,
            "huge_pages": machine::huge_pages(), "advice": advice,
        }));
    }
    let mut table = Table::default();
    let mut row = |label: &str, first: String, second: String| table.row([label.to_string(), first, second]);
    row("", "one thread".into(), format!("{cores} threads"));
    row("f32 multiply-adds, operations/s", count(flops[0]), count(flops[1]));
    let gbs = |bytes_per_s: f64| format!("{:.1} GB/s", bytes_per_s / 1e9);
    row("memory read", gbs(bandwidth.read[0]), gbs(bandwidth.read[1]));
    row("memory copied (read and written)", gbs(bandwidth.copy[0]), gbs(bandwidth.copy[1]));
    let size = |bytes_or_none: Option<u64>| bytes_or_none.map_or("no limit".to_string(), bytes);
    let number = |limit: Option<u64>| limit.map_or("no limit".to_string(), |limit| limit.to_string());
    let mut text = format!(
        "processor         {} ({cores} cores for this process)\n\
         instruction sets  {}; kernels use {}\n\
         kernel            {}\n\
         memory            {} available of {}; huge pages: {}\n\
         limits            memlock {}, nofile {}, nproc {}\n{table}",
        machine::processor(),
        machine::instruction_sets().join(" "),
        one.isa().name(),
        machine::kernel(),
        machine::available_bytes().map_or("?".into(), bytes),
        machine::total_bytes().map_or("?".into(), bytes),
        machine::huge_pages(),
        size(memlock.1),
        number(nofile.1),
        number(nproc.1),
    );
    match advice.is_empty() {
        true => text.push_str("nothing stands in the way of a run\n"),
        false => advice.iter().for_each(|line| text.push_str(&format!("note: {line}\n"))),
    }
    print(&text);
    Ok(())
}

/// What could be better here.
fn advice() -> Vec<String> {
    let mut advice = Vec::new();
    let [_, (_, nofile), _] = machine::limits();
    if nofile.is_some_and(|limit| limit < FEW_FILES) {
        advice.push("few open files allowed: `ulimit -n 4096` before jobs of many ranks".to_string());
    }
    if machine::huge_pages() == "never" {
        advice.push(
            "huge pages are off: memory-bound kernels run slower (transparent_hugepage/enabled)".to_string(),
        );
    }
    let has = machine::instruction_sets();
    if cfg!(target_arch = "x86_64") && !has.iter().any(|set| set == "avx2") {
        advice.push("no AVX2: kernels run portable code, many times slower".to_string());
    }
    advice
}

/// Best bytes a second of `threads` threads that each do `work`, which moves each byte `moves` times.
fn rate(threads: usize, moves: usize, work: impl Fn(&[f32], &mut [f32]) + Sync) -> f64 {
    let span = (ALL_BYTES / threads).clamp(SPAN_BYTES[0], SPAN_BYTES[1]);
    let buffers = || (vec![1f32; span / 4], vec![1f32; span / 4]);
    let mut all: Vec<_> = (0..threads).map(|_| buffers()).collect();
    let mut best = 0f64;
    for _ in 0..TIMES {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for (from, to) in &mut all {
                scope.spawn(|| work(from, to));
            }
        });
        best = best.max((threads * moves * span) as f64 / start.elapsed().as_secs_f64());
    }
    best
}

/// Sums in many lanes, so that loads are the only limit.
fn read(from: &[f32], _: &mut [f32]) {
    let mut sums = [0f32; 64];
    for part in from.as_chunks::<64>().0 {
        for (sum, x) in sums.iter_mut().zip(part) {
            *sum += x;
        }
    }
    black_box(sums);
}

fn copy(from: &[f32], to: &mut [f32]) {
    to.copy_from_slice(black_box(from));
    black_box(to);
}
