//! What this machine can do, measured: the floors that kernels are compared with.

use std::time::Instant;

#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::lanes::{Lanes, Portable};
use super::shards::Shards;
use super::simd::Isa;
use super::{Cpu, GRAIN};

/// f32 operations per second of all threads, multiply-adds from registers counted as two; the best of a
/// few hundredths of a second.
pub fn flops_per_s(cpu: &Cpu) -> f64 {
    const ROUNDS: usize = 100_000;
    let chains = if cpu.isa >= Isa::Avx512 { 16 } else { 6 };
    let flops = (ROUNDS * chains * 16 * 2 * cpu.pool.threads()) as f64;
    best_of(20, || {
        cpu.pool.run(cpu.pool.threads(), &|_| {
            std::hint::black_box(multiply_add(cpu.isa, std::hint::black_box(ROUNDS)));
        });
        flops
    })
}

fn multiply_add(isa: Isa, rounds: usize) -> f32 {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
    fn avx512(rounds: usize) -> f32 {
        // SAFETY: inside a function that has the features.
        unsafe { chains::<Avx512, 16>(rounds) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn avx2(rounds: usize) -> f32 {
        // SAFETY: as above.
        unsafe { chains::<Avx2, 6>(rounds) }
    }
    match isa {
        // SAFETY: an `Isa` above Portable comes from `Isa::detect`, which has seen the features.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 => unsafe { avx512(rounds) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2(rounds) },
        // SAFETY: every processor has these.
        _ => unsafe { chains::<Portable, 6>(rounds) },
    }
}

/// Independent chains of multiply-adds: enough to hide the latency of two units, few enough for registers.
#[inline(always)]
unsafe fn chains<L: Lanes, const CHAINS: usize>(rounds: usize) -> f32 {
    // SAFETY: the caller has the features; the array is as long as a vector.
    unsafe {
        // Numbers that the compiler cannot know, or it would compute the sums itself.
        let (factor, term) = (L::splat(std::hint::black_box(0.999)), L::splat(std::hint::black_box(1e-3)));
        let mut sums = [L::splat(0.0); CHAINS];
        for sum in &mut sums {
            *sum = L::splat(std::hint::black_box(0.5));
        }
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = L::mul_add(*sum, factor, term);
            }
        }
        let mut all = sums[0];
        for sum in &sums[1..] {
            all = L::add(all, *sum);
        }
        let mut out = [0f32; 16];
        L::store(out.as_mut_ptr(), all);
        out[0]
    }
}

/// Bytes per second that all threads read from memory and write back together: `x = x + 1` over `bytes` of
/// memory, each byte counted once read and once written.
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
