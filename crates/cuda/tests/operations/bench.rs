//! The devices of a test: the processor and the card.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use phalanx_cpu::Cpu;
use phalanx_cuda::checks;
use phalanx_cuda::{Error, Options};
use phalanx_tensor::Kernels;

/// The process has one driver, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

/// The processor and a card, for one test at a time.
pub struct Bench {
    bench: checks::Bench,
    _turn: MutexGuard<'static, ()>,
}

impl Deref for Bench {
    type Target = checks::Bench;

    fn deref(&self) -> &checks::Bench {
        &self.bench
    }
}

impl Bench {
    /// None, with a line that says why, where there is no driver or no compiler.
    pub fn new(test: &str) -> Option<Bench> {
        Bench::with(test, true)
    }

    /// `new`, with products by cuBLASLt where it is found, or never.
    pub fn with(test: &str, library_products: bool) -> Option<Bench> {
        Bench::of(test, Options { library_products, ..Options::default() })
    }

    /// `new`, with options; where the compiler and its programs are is added to them.
    pub fn of(test: &str, options: Options) -> Option<Bench> {
        Bench::made(test, options, Cpu::new(1))
    }

    /// `new`, with kernels for operations of the host.
    pub fn computing(test: &str, kernels: Arc<dyn Kernels>) -> Option<Bench> {
        Bench::made(test, Options::default(), kernels)
    }

    fn made(test: &str, options: Options, kernels: Arc<dyn Kernels>) -> Option<Bench> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        match checks::Bench::new(&self::options(options), kernels) {
            Ok(bench) => Some(Bench { bench, _turn: turn }),
            Err(error @ (Error::NoDriver | Error::NoCompiler { .. })) => {
                eprintln!("{test}: skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// The same options with where the compiler and its programs are.
pub fn options(options: Options) -> Options {
    Options {
        nvrtc: std::env::var_os("PHALANX_NVRTC").map(Into::into),
        cache: Some(concat!(env!("CARGO_TARGET_TMPDIR"), "/phalanx/cuda").into()),
        ..options
    }
}
