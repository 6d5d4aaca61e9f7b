//! Versions of a function for the instruction sets of processors: loops over 32 lanes become a few vector instructions.

use std::sync::OnceLock;

/// The vector instructions that a processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// Those that every processor of its kind has.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512, too.
    Avx512,
}

/// The instructions of this processor.
#[inline]
pub(crate) fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(detect)
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Level {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("lzcnt")
        && is_x86_feature_detected!("popcnt");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (false, _) => Level::Portable,
        (true, false) => Level::Avx2,
        (true, true) => Level::Avx512,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Level {
    Level::Portable
}

/// Defines a function that is compiled for each `Level` and calls the version for this processor. `const SIZE` parameters
/// are the only generic ones.
macro_rules! vectorised {
    ($(#[$meta:meta])* $visibility:vis fn $name:ident $([$size:ident])? ($($argument:ident: $kind:ty),* $(,)?)
        $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        #[inline]
        $visibility fn $name $(<const $size: usize>)? ($($argument: $kind),*) $(-> $result)? {
            #[inline(always)]
            fn body $(<const $size: usize>)? ($($argument: $kind),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
                fn avx2 $(<const $size: usize>)? ($($argument: $kind),*) $(-> $result)? {
                    body $(::<$size>)? ($($argument),*)
                }
                #[target_feature(
                    enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl"
                )]
                fn avx512 $(<const $size: usize>)? ($($argument: $kind),*) $(-> $result)? {
                    body $(::<$size>)? ($($argument),*)
                }
                match $crate::vectors::level() {
                    // SAFETY: the processor has the instructions of its level.
                    $crate::vectors::Level::Avx512 => return unsafe { avx512 $(::<$size>)? ($($argument),*) },
                    // SAFETY: as above.
                    $crate::vectors::Level::Avx2 => return unsafe { avx2 $(::<$size>)? ($($argument),*) },
                    $crate::vectors::Level::Portable => {}
                }
            }
            body $(::<$size>)? ($($argument),*)
        }
    };
}

pub(crate) use vectorised;
