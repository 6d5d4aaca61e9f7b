//! A link of one rank, which any card can have, and the bits of sums of parts.

use phalanx_cpu::Cpu;
use phalanx_cuda::Options;
use phalanx_cuda::checks::link_of_one_rank;

use crate::bench::Bench;

#[test]
fn a_link_of_one_rank_moves_bytes_and_sums_as_the_processor() {
    let Some(_bench) = Bench::new("a link of one rank") else { return };
    let variable = |name: &str| std::env::var_os(name).map(Into::into);
    let options = Options {
        nvrtc: variable("PHALANX_NVRTC"),
        nccl: variable("PHALANX_NCCL"),
        cache: Some(concat!(env!("CARGO_TARGET_TMPDIR"), "/phalanx/cuda").into()),
        ..Options::default()
    };
    match link_of_one_rank(&options, Cpu::new(1)).unwrap() {
        Some((version, _)) => assert!(version >= 21800, "{version}"),
        None => eprintln!("a link of one rank: skipped: there is no NCCL"),
    }
}
