//! Which tile registers a process may use.

use std::fmt;
use std::sync::OnceLock;

/// Tile registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileUnit {
    /// Those of the processor (AMX with bf16).
    Amx,
    /// Their [`Model`](super::Model), which any processor computes, slowly. For tests.
    Model,
}

impl TileUnit {
    /// Both.
    pub const ALL: [TileUnit; 2] = [TileUnit::Amx, TileUnit::Model];

    /// The name that users give and see.
    pub fn name(self) -> &'static str {
        match self {
            TileUnit::Amx => "amx",
            TileUnit::Model => "amx-model",
        }
    }

    /// Those of the processor, where this process may use them: the fastest way to multiply bf16. Cores of Intel Xeon of the
    /// fifth generation multiply 2.6 T operations a second of bf16 on tile registers, and 0.18 T of f32 by multiply-adds.
    pub fn fastest() -> Option<TileUnit> {
        TileUnit::Amx.is_available().then_some(TileUnit::Amx)
    }

    /// Returns whether this process may use them.
    pub fn is_available(self) -> bool {
        self == TileUnit::Model || amx().is_ok()
    }
}

/// Why the processor's tile registers cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoAmx {
    /// The processor has none that multiply bf16.
    Processor,
    /// The operating system does not save them when it switches threads.
    System,
    /// The system refused them to this process, with this error number.
    Refused(i32),
}

impl fmt::Display for NoAmx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoAmx::Processor => write!(f, "this processor has no AMX with bf16"),
            NoAmx::System => write!(f, "the operating system does not switch AMX on"),
            NoAmx::Refused(error) => {
                write!(f, "the system refused AMX to this process (arch_prctl: error {error})")
            }
        }
    }
}

/// Checks that this process may use the processor's tile registers. The first call asks the system for permission, which then
/// holds for all threads.
///
/// # Errors
/// Why it may not.
pub fn amx() -> Result<(), NoAmx> {
    static AMX: OnceLock<Result<(), NoAmx>> = OnceLock::new();
    *AMX.get_or_init(request)
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn request() -> Result<(), NoAmx> {
    use std::arch::asm;

    /// `arch_prctl`, `ARCH_REQ_XCOMP_PERM`, and the state component of the registers' contents.
    const SYSTEM_CALL: i64 = 158;
    const REQUEST: i64 = 0x1023;
    const TILE_DATA: i64 = 18;

    #[allow(unused_unsafe, reason = "safe from Rust 1.94 on")]
    // SAFETY: every x86-64 processor has the instruction; leaf 7 is read only where there is one.
    let (leaf_1, leaf_7) = unsafe {
        use std::arch::x86_64::{__cpuid, __cpuid_count};
        if __cpuid(0).eax < 7 {
            return Err(NoAmx::Processor);
        }
        (__cpuid(1), __cpuid_count(7, 0))
    };
    let [bf16, tile] = [22, 24].map(|bit| leaf_7.edx >> bit & 1 == 1);
    if !(bf16 && tile) {
        return Err(NoAmx::Processor);
    }
    if leaf_1.ecx >> 27 & 1 == 0 {
        return Err(NoAmx::System);
    }
    let (low, _high): (u32, u32);
    // SAFETY: the system has switched the instruction on (bit 27, OSXSAVE).
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _high,
            options(nostack, nomem, preserves_flags));
    }
    // State components 17 and 18: the configuration and the contents of the registers.
    if low >> 17 & 3 != 3 {
        return Err(NoAmx::System);
    }
    let result: i64;
    // SAFETY: the call changes only which registers this process may use.
    unsafe {
        asm!("syscall", inlateout("rax") SYSTEM_CALL => result, in("rdi") REQUEST, in("rsi") TILE_DATA,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    if result == 0 { Ok(()) } else { Err(NoAmx::Refused(-result as i32)) }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn request() -> Result<(), NoAmx> {
    Err(NoAmx::Processor)
}
