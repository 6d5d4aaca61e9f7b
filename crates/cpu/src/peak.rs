//! Measures the peak arithmetic rate and memory bandwidth of this machine, with which kernels are compared.

use std::time::{Duration, Instant};

use phalanx_plan::trace::DType;
#[cfg(target_arch = "x86_64")]
use phalanx_simd::tiles::Amx;
use phalanx_simd::tiles::{Model, ROWS, Shapes, TileUnit, Tiles};
#[cfg(target_arch = "x86_64")]
use phalanx_simd::{Avx2, Avx512};
use phalanx_simd::{Isa, Lanes};
use phalanx_tensor::region::Region;

use crate::Cpu;
use crate::format::Format;

/// Duration of the measurement of an arithmetic rate. The best of many runs under a millisecond counts: in some of them,
/// every thread has a core to itself.
const FLOPS_TIME: Duration = Duration::from_millis(40);

/// Rounds of one run.
const ROUNDS: usize = 100_000;

/// Repetitions of a bandwidth measurement; the best counts.
const TIMES: usize = 5;

/// Operations per second of all threads on numbers of `dtype`, multiply-adds from registers counted as two: with the
/// instructions that matrix products of this type use. Numbers in parts need several products for one.
pub fn flops_per_s(cpu: &Cpu, dtype: DType) -> f64 {
    match (Format::of(cpu, dtype), dtype, cpu.isa) {
        (Format::Tiles { unit, cut }, ..) => {
            let products = cut.products() as f64;
            let rounds = if unit == TileUnit::Model { ROUNDS / MODEL_SLOWER } else { ROUNDS };
            rate(cpu, rounds, TILE_SUMS * TILE_OPERATIONS, |rounds| multiply_tiles(unit, rounds)) / products
        }
        #[cfg(target_arch = "x86_64")]
        (_, DType::BF16, Isa::Avx512Bf16) => {
            rate(cpu, ROUNDS, CHAINS_512 * 64, |rounds| products_of_pairs(cpu.isa, rounds))
        }
        (_, _, isa) => rate(cpu, ROUNDS, operations_per_round(isa), |rounds| multiply_adds(isa, rounds)),
    }
}

/// Operations per second of all threads: the best of many runs of `rounds` rounds of `operations`.
fn rate(cpu: &Cpu, rounds: usize, operations: usize, run: impl Fn(usize) -> f32 + Sync) -> f64 {
    let threads = cpu.pool.threads();
    let begin = Instant::now();
    let mut best = 0f64;
    while best == 0.0 || begin.elapsed() < FLOPS_TIME {
        let start = Instant::now();
        cpu.pool.run(threads, &|_| {
            std::hint::black_box(run(std::hint::black_box(rounds)));
        });
        best = best.max((rounds * operations * threads) as f64 / start.elapsed().as_secs_f64());
    }
    best
}

/// Independent chains of multiply-adds: enough to hide the latency of two units, few enough for registers. A
/// chain is 16 numbers: one register of AVX-512, two of AVX2, four of SSE.
const CHAINS_512: usize = 16;
const CHAINS_256: usize = 6;
const CHAINS_128: usize = 3;

/// Operations of one thread in one round of multiply-adds: chains x elements per chain x 2 (multiply and add).
fn operations_per_round(isa: Isa) -> usize {
    match isa {
        Isa::Avx512 | Isa::Avx512Bf16 => CHAINS_512 * 32,
        Isa::Avx2 => CHAINS_256 * 32,
        Isa::Portable => CHAINS_128 * 32,
    }
}

/// Registers of sums, each a chain.
const TILE_SUMS: usize = 4;

/// Operations of one multiplication of tiles: 16 x 16 sums of 32 products.
const TILE_OPERATIONS: usize = 16 * 16 * 32 * 2;

/// The model is measured in fewer rounds, because it is slow.
const MODEL_SLOWER: usize = 2000;

fn multiply_tiles(unit: TileUnit, rounds: usize) -> f32 {
    // SAFETY: `Cpu::with_options` has made sure of the unit.
    unsafe {
        match unit {
            TileUnit::Model => multiply_tiles_of::<Model>(rounds),
            #[cfg(target_arch = "x86_64")]
            TileUnit::Amx => multiply_tiles_of::<Amx>(rounds),
            #[cfg(not(target_arch = "x86_64"))]
            TileUnit::Amx => unreachable!("only x86-64 has AMX"),
        }
    }
}

/// Multiplies registers that hold zeros, which takes as long as other numbers.
unsafe fn multiply_tiles_of<T: Tiles>(rounds: usize) -> f32 {
    let mut out = [[0f32; 16]; ROWS];
    // SAFETY: the caller's promise; the array has the rows of a register.
    unsafe {
        let mut tiles = T::new(&Shapes::new([ROWS; 8]));
        for _ in 0..rounds {
            tiles.multiply_bf16::<0, 4, 6>();
            tiles.multiply_bf16::<1, 4, 7>();
            tiles.multiply_bf16::<2, 5, 6>();
            tiles.multiply_bf16::<3, 5, 7>();
        }
        tiles.store::<0>(out.as_mut_ptr().cast(), 64);
    }
    out[0][0]
}

fn multiply_adds(isa: Isa, rounds: usize) -> f32 {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
    fn avx512(rounds: usize) -> f32 {
        // SAFETY: inside a function that has the features.
        unsafe { chains::<Avx512, CHAINS_512>(rounds) }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn avx2(rounds: usize) -> f32 {
        // SAFETY: as above.
        unsafe { chains::<Avx2, CHAINS_256>(rounds) }
    }
    match isa {
        // SAFETY: an `Isa` above Portable comes from `Isa::detect`, which has seen the features.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Avx512Bf16 => unsafe { avx512(rounds) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { avx2(rounds) },
        // SAFETY: every processor of the architecture has these.
        _ => unsafe { portable(rounds) },
    }
}

/// The peak of `Portable`, written with 128-bit intrinsics where possible, because the compiler does not keep its
/// arrays in registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse")]
fn portable(rounds: usize) -> f32 {
    use std::arch::x86_64::{_mm_add_ps, _mm_cvtss_f32, _mm_mul_ps, _mm_set_ps1};
    let (factor, term) = (_mm_set_ps1(std::hint::black_box(0.999)), _mm_set_ps1(std::hint::black_box(1e-3)));
    let mut sums = [_mm_set_ps1(0.0); 4 * CHAINS_128];
    for sum in &mut sums {
        *sum = _mm_set_ps1(std::hint::black_box(0.5));
    }
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm_add_ps(_mm_mul_ps(*sum, factor), term);
        }
    }
    let mut all = sums[0];
    for sum in &sums[1..] {
        all = _mm_add_ps(all, *sum);
    }
    _mm_cvtss_f32(all)
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn portable(rounds: usize) -> f32 {
    // SAFETY: the caller has the features.
    unsafe { chains::<phalanx_simd::Portable, CHAINS_128>(rounds) }
}

#[inline(always)]
unsafe fn chains<L: Lanes, const N: usize>(rounds: usize) -> f32 {
    // Values that the compiler cannot know, or it would compute the sums itself. They all differ, or it would compute
    // only one.
    let start: [f32; 16] = std::array::from_fn(|i| i as f32 / 32.0);
    // SAFETY: the caller has the features; the arrays are as long as a vector.
    unsafe {
        let (factor, term) = (L::splat(std::hint::black_box(0.999)), L::splat(std::hint::black_box(1e-3)));
        let mut sums = [L::splat(0.0); N];
        for sum in &mut sums {
            *sum = L::load(std::hint::black_box(start).as_ptr());
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
        out.iter().sum()
    }
}

/// Independent chains of `vdpbf16ps`, each of which adds 16 sums of two products: 64 operations.
#[cfg(target_arch = "x86_64")]
fn products_of_pairs(isa: Isa, rounds: usize) -> f32 {
    use std::arch::x86_64::{__m512bh, _mm512_dpbf16_ps, _mm512_reduce_add_ps, _mm512_set1_ps};

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn chains(rounds: usize) -> f32 {
        // 1/1024, which is exact in bf16; hidden from the compiler, or it would compute the sums itself.
        let x = std::hint::black_box([0x3a80u16; 32]);
        // SAFETY: the same size, and every bit pattern is a number.
        let x = unsafe { std::mem::transmute::<[u16; 32], __m512bh>(x) };
        let mut sums = [_mm512_set1_ps(0.0); CHAINS_512];
        for sum in &mut sums {
            *sum = _mm512_set1_ps(std::hint::black_box(0.5));
        }
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, x, x);
            }
        }
        let mut all = 0.0;
        for sum in sums {
            all += _mm512_reduce_add_ps(sum);
        }
        all
    }
    assert_eq!(isa, Isa::Avx512Bf16);
    // SAFETY: this `Isa` comes from `Isa::detect`, which has seen the features.
    unsafe { chains(rounds) }
}

/// Bytes per second of all threads together, each on a contiguous share of memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bandwidth {
    /// Read alone.
    pub read: f64,
    /// Copied: each byte counted once where it is read and once where it is written.
    pub copy: f64,
    /// Read and written in place, counted as in a copy. No cache line is fetched only to be overwritten.
    pub update: f64,
}

impl Bandwidth {
    /// The highest rate: no kernel moves bytes from and to memory faster.
    pub fn max(&self) -> f64 {
        self.read.max(self.copy).max(self.update)
    }

    /// Bytes copied per second, each counted once.
    pub fn copied(&self) -> f64 {
        self.copy / 2.0
    }
}

/// Measures with `bytes` of memory, in huge pages where available. Use more than the caches hold, or their bandwidth is
/// measured.
///
/// # Errors
/// When the system does not have that much memory.
pub fn bandwidth(cpu: &Cpu, bytes: usize) -> std::io::Result<Bandwidth> {
    let mut halves = [Region::anonymous(bytes / 2)?, Region::anonymous(bytes / 2)?];
    for half in &halves {
        cpu.populate(half)?;
    }
    // SAFETY: mapped, zeroed memory of this length, borrowed uniquely with its region.
    let [from, to] = halves
        .each_mut()
        .map(|half| unsafe { std::slice::from_raw_parts_mut(half.base().cast::<f32>(), half.bytes() / 4) });
    let share = from.len().div_ceil(cpu.pool.threads());
    let read = best_of(TIMES, from.len() * 4, || {
        cpu.over(from.len(), share, |range| {
            std::hint::black_box(sum(std::hint::black_box(&from[range])));
        });
    });
    let copy = best_of(TIMES, from.len() * 8, || {
        cpu.over_mut(to, share, |range, to| to.copy_from_slice(std::hint::black_box(&from[range])));
    });
    let update = best_of(TIMES, to.len() * 8, || {
        cpu.over_mut(to, share, |_, to| to.iter_mut().for_each(|x| *x += 1.0));
    });
    Ok(Bandwidth { read, copy, update })
}

/// Sums in many lanes, so that only loads limit the speed.
fn sum(x: &[f32]) -> f32 {
    let mut sums = [0f32; 64];
    for part in x.as_chunks::<64>().0 {
        for (sum, x) in sums.iter_mut().zip(part) {
            *sum += x;
        }
    }
    sums.iter().sum()
}

/// Highest rate of `amount` per second.
fn best_of(times: usize, amount: usize, mut work: impl FnMut()) -> f64 {
    let mut best = 0f64;
    for _ in 0..times {
        let start = Instant::now();
        work();
        best = best.max(amount as f64 / start.elapsed().as_secs_f64());
    }
    best
}
