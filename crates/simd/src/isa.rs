//! Instruction sets, and the macro that compiles a loop for each of them.

/// Instruction sets that loops are compiled for, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// The instructions that every processor of the architecture has.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, VL, BW, DQ.
    Avx512,
    /// AVX-512 and products of pairs of bf16 (`vdpbf16ps`).
    Avx512Bf16,
}

impl Isa {
    /// All instruction sets, weakest first.
    pub const ALL: [Isa; 4] = [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Avx512Bf16];

    /// The best instruction set that this processor has.
    pub fn detect() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma") && has!("f16c");
            if avx2 && has!("avx512f") && has!("avx512vl") && has!("avx512bw") && has!("avx512dq") {
                return if has!("avx512bf16") { Isa::Avx512Bf16 } else { Isa::Avx512 };
            }
            if avx2 {
                return Isa::Avx2;
            }
        }
        Isa::Portable
    }

    /// The instruction set whose kernels are fastest on this processor. It is a table and not a measurement, because all
    /// ranks of a run, and a resumed run, must choose the same.
    pub fn fastest() -> Isa {
        Isa::detect().fastest_of(&vendor())
    }

    /// [`Isa::fastest`] for a processor of `vendor` whose best instruction set is this one.
    fn fastest_of(self, vendor: &str) -> Isa {
        // `vdpbf16ps`, in operations per second of one core, beside multiply-adds of f32: on AMD EPYC of Zen 5 512 and
        // 256 G, on Intel Xeon of the fourth generation 123 and 247 G. There, bf16 is faster widened to f32.
        if self == Isa::Avx512Bf16 && vendor == "GenuineIntel" { Isa::Avx512 } else { self }
    }

    /// Why the kernels do not use the best instruction set of this processor, if they do not.
    pub fn why_not_best(self) -> Option<&'static str> {
        let slow_pairs = self < Isa::detect() && self == Isa::fastest();
        slow_pairs.then_some("on this processor, products of bf16 pairs are slower than multiply-adds of f32")
    }

    /// The weaker of this instruction set and `max`.
    #[must_use]
    pub fn limit(self, max: Isa) -> Isa {
        self.min(max)
    }

    /// The name that users give and see.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Avx512Bf16 => "avx512bf16",
        }
    }
}

/// The vendor that the processor names.
fn vendor() -> String {
    #[cfg(target_arch = "x86_64")]
    {
        #[allow(unused_unsafe, reason = "safe from Rust 1.94 on")]
        // SAFETY: every x86-64 processor has the instruction.
        let leaf = unsafe { std::arch::x86_64::__cpuid(0) };
        let bytes = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).concat();
        String::from_utf8_lossy(&bytes).into_owned()
    }
    #[cfg(not(target_arch = "x86_64"))]
    String::new()
}

/// Defines `fn name(isa: Isa, args)`, which runs `body::<L>(args)` compiled for that instruction set.
///
/// The body must be `#[inline(always)]` and generic over one [`Lanes`](crate::Lanes), then over the types that the
/// function itself is generic over; inside, and only there, the vectors of `L` may be used. `isa` must be one that the
/// processor has: [`Isa::detect`] or a weaker one.
#[macro_export]
macro_rules! vectorized {
    ($vis:vis fn $name:ident $(<$($g:ident : $bound:path),+>)? ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $vis fn $name $(<$($g: $bound),+>)? (isa: $crate::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]
            fn avx512 $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                $body::<$crate::Avx512 $($(, $g)+)?>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2 $(<$($g: $bound),+>)? ($($arg: $ty),*) $(-> $ret)? {
                $body::<$crate::Avx2 $($(, $g)+)?>($($arg),*)
            }
            match isa {
                // SAFETY: an `Isa` above Portable comes from `Isa::detect`, which has seen the features.
                #[cfg(target_arch = "x86_64")]
                $crate::Isa::Avx512 | $crate::Isa::Avx512Bf16 => unsafe {
                    avx512 $(::<$($g),+>)? ($($arg),*)
                },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::Isa::Avx2 => unsafe { avx2 $(::<$($g),+>)? ($($arg),*) },
                _ => $body::<$crate::Portable $($(, $g)+)?>($($arg),*),
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Lanes, lanes};

    vectorized!(fn exp_lanes(x: &mut [f32]) = exp_lanes_body);
    #[inline(always)]
    fn exp_lanes_body<L: Lanes>(x: &mut [f32]) {
        for x in x.chunks_mut(16) {
            // SAFETY: compiled for L; the chunk has 16 elements.
            unsafe {
                let y = lanes::exp::<L>(L::load_first(x.as_ptr(), x.len()));
                L::store_first(x.as_mut_ptr(), y, x.len());
            }
        }
    }

    #[test]
    fn exp_is_within_two_ulps_of_f64() {
        for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
            let isa = isa.limit(Isa::detect());
            let x: Vec<f32> = (0..2_000_000).map(|i| -87.3 + i as f32 * 8.8e-5).collect();
            let mut y = x.clone();
            exp_lanes(isa, &mut y);
            let mut worst = 0f64;
            for (x, y) in x.iter().zip(&y) {
                let exact = f64::from(*x).exp();
                let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
                worst = worst.max((f64::from(*y) - exact).abs() / ulp);
            }
            println!("{}: {worst} ulp", isa.name());
            assert!(worst < 2.0, "{}: {worst} ulp", isa.name());
        }
    }

    #[test]
    fn pairs_of_bf16_are_multiplied_where_that_is_fast() {
        for isa in Isa::ALL {
            assert_eq!(isa.fastest_of("AuthenticAMD"), isa);
            assert_eq!(isa.fastest_of("GenuineIntel"), isa.min(Isa::Avx512));
        }
        assert!(Isa::fastest() <= Isa::detect());
        assert_eq!(Isa::fastest().why_not_best().is_some(), Isa::fastest() < Isa::detect());
        assert_eq!(Isa::detect().why_not_best(), None);
    }

    #[test]
    fn exp_at_the_ends() {
        for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
            let isa = isa.limit(Isa::detect());
            let inf = f32::INFINITY;
            let mut x =
                [0.0, -0.0, 1.0, 88.7, 88.8, inf, -87.3, -87.4, -104.0, -inf, f32::NAN, f32::MAX, f32::MIN];
            exp_lanes(isa, &mut x);
            assert_eq!((x[0], x[1], x[2]), (1.0, 1.0, std::f32::consts::E));
            assert!(x[3].is_finite() && x[6] > 0.0 && x[10].is_nan());
            assert_eq!([x[4], x[5], x[7], x[8], x[9], x[11], x[12]], [inf, inf, 0.0, 0.0, 0.0, inf, 0.0]);
        }
    }
}
