//! Queries of the processor beside kernels: its peak rates, and memory that is resident before it is used.

use std::os::fd::AsFd;

use phalanx_cpu::peak::{bandwidth, flops_per_s};
use phalanx_cpu::{Cpu, Options, ProductMethod::Split};
use phalanx_simd::Isa;
use phalanx_simd::tiles::TileUnit;
use phalanx_tensor::DType;
use phalanx_tensor::region::{HUGE, Region};

#[test]
fn every_instruction_set_has_a_rate_for_every_type() {
    for isa in Isa::ALL {
        let cpu = Cpu::with_options(Options { isa, tiles: None, ..Options::new(1) }).unwrap();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            assert!(flops_per_s(&cpu, dtype) > 1e8, "{isa:?} {dtype:?}");
        }
    }
    let tiles = Some(TileUnit::Model);
    let cpu = Cpu::with_options(Options { tiles, products: Split, ..Options::new(1) }).unwrap();
    let [whole, parts] = [DType::BF16, DType::F32].map(|dtype| flops_per_s(&cpu, dtype));
    assert!(parts > 1e6 && parts < whole, "{parts} {whole}");
    let bandwidth = bandwidth(&Cpu::new(2), 1 << 20).unwrap();
    let min = bandwidth.read.min(bandwidth.copy).min(bandwidth.update);
    assert!(min > 1e8 && bandwidth.max() >= min, "{bandwidth:?}");
}

#[test]
fn every_page_is_there() {
    // Counts shared memory: no other test of this process uses any.
    let resident_bytes = || {
        let text = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
        1024 * line.trim().trim_end_matches(" kB").parse::<usize>().unwrap()
    };
    // The last share is short, and ends on a small page.
    let bytes = 9 * HUGE + 3 * 4096;
    let file = rustix::fs::memfd_create("resident", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, bytes as u64).unwrap();
    let region = Region::shared(file.as_fd(), bytes).unwrap();
    assert!(resident_bytes() < HUGE);
    Cpu::new(3).populate(&region).unwrap();
    assert!(resident_bytes() > bytes - HUGE, "{} of {bytes}", resident_bytes());
}
