//! What this machine can do, measured: the floors that kernels are compared with.

use std::time::Instant;

use super::pool::Shards;
use super::simd::{LANES, Math, vectorized};
use super::{Cpu, GRAIN};

/// Sums in flight: enough to hide the latency of two units, few enough for the registers of AVX2.
const CHAINS: usize = 12;

vectorized!(fn multiply_add(rounds: usize, factor: f32) -> f32 = multiply_add_body);
#[inline(always)]
fn multiply_add_body<M: Math>(rounds: usize, factor: f32) -> f32 {
    let mut sums = [[1f32; LANES]; CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            for s in sum {
                *s = M::mul_add(*s, factor, 1e-3);
            }
        }
    }
    sums.iter().flatten().sum()
}

/// f32 operations per second of all threads, multiply-adds from registers counted as two; the best of a
/// few tenths of a second.
pub fn flops_per_s(cpu: &Cpu) -> f64 {
    const ROUNDS: usize = 200_000;
    let flops = (ROUNDS * CHAINS * LANES * 2 * cpu.pool.threads()) as f64;
    let factor = std::hint::black_box(0.999f32);
    best_of(20, || {
        cpu.pool.run(cpu.pool.threads(), &|_| {
            std::hint::black_box(multiply_add(cpu.isa, ROUNDS, factor));
        });
        flops
    })
}

/// Bytes per second that all threads read from memory and write back together: `x = x + 1` over `bytes` of memory,
/// each byte counted once read and once written.
pub fn bytes_per_s(cpu: &Cpu, bytes: usize) -> f64 {
    let mut x = vec![1f32; bytes / 4];
    let x = Shards::new(&mut x);
    best_of(8, || {
        cpu.over(x.len(), 4 * GRAIN, |range| {
            // SAFETY: ranges are disjoint.
            unsafe { x.piece(range) }.iter_mut().for_each(|x| *x += 1.0);
        });
        2.0 * x.len() as f64 * 4.0
    })
}

/// Highest rate of `amount` per second.
fn best_of(times: usize, amount: impl Fn() -> f64) -> f64 {
    let rate = |_| {
        let start = Instant::now();
        let amount = amount();
        amount / start.elapsed().as_secs_f64()
    };
    (0..times).map(rate).fold(0.0, f64::max)
}
