//! Two devices side by side: the processor and the card.

use std::sync::{Mutex, MutexGuard, PoisonError};

use phalanx_cpu::Cpu;
use phalanx_cuda::{Error, Options, unplanned_device};
use phalanx_random::SplitMix64;
use phalanx_tensor::{Arena, Category, DType, Device, Tensor, View};

pub const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// The process has one driver, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

/// The processor and a card.
pub struct Bench {
    devices: [Device; 2],
    _turn: MutexGuard<'static, ()>,
}

/// What a case leaves: a name and numbers.
pub type Results = Vec<(&'static str, Vec<f64>)>;

impl Bench {
    /// None, with a line that says why, where there is no driver or no compiler.
    pub fn new(test: &str) -> Option<Bench> {
        Bench::with(test, Options::default())
    }

    /// With options of the card.
    pub fn with(test: &str, options: Options) -> Option<Bench> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let cpu = Cpu::new(1);
        let nvrtc = std::env::var_os("PHALANX_NVRTC").map(Into::into);
        let options = Options { nvrtc, ..options };
        match unplanned_device(&options, 64 << 20, cpu.clone()) {
            Ok(card) => Some(Bench { devices: [Device::new(cpu, Arena::heap()), card], _turn: turn }),
            Err(error @ (Error::NoDriver | Error::NoCompiler { .. })) => {
                eprintln!("{test}: skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// The card.
    pub fn card(&self) -> &Device {
        &self.devices[1]
    }

    /// Runs a case on both devices and compares what it leaves. `tolerance` is relative to the largest number of a result; 0 for the
    /// same numbers.
    #[track_caller]
    pub fn compare(&self, name: &str, tolerance: f64, case: impl Fn(&Device) -> Results) {
        let [expected, found] = [0, 1].map(|which| case(&self.devices[which]));
        for ((what, expected), (_, found)) in expected.iter().zip(&found) {
            assert_eq!(expected.len(), found.len(), "{name}: {what}");
            let largest = expected.iter().fold(1e-30, |largest: f64, x| largest.max(x.abs()));
            for (i, (expected, found)) in expected.iter().zip(found).enumerate() {
                let near = (expected - found).abs() <= tolerance * largest;
                let same = expected == found || (expected.is_nan() && found.is_nan());
                assert!(
                    near || same,
                    "{name}: {what}[{i}] is {found}, not {expected} (of at most {largest})"
                );
            }
        }
    }
}

/// Random numbers in [-1, 1).
pub fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut random = SplitMix64::new(seed);
    (0..n).map(|_| random.next_fraction() as f32 * 2.0 - 1.0).collect()
}

/// A tensor with these numbers, rounded.
pub fn tensor(device: &Device, dtype: DType, dims: &[usize], numbers: &[f32]) -> Tensor {
    let mut tensor = device.alloc(dtype, dims, Category::Workspace, "test");
    let to = tensor.view_mut();
    match dtype {
        DType::F32 => device.upload(numbers, to),
        DType::F64 => device.upload(&numbers.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), to),
        DType::BF16 => {
            device.upload(&numbers.iter().map(|x| half::bf16::from_f32(*x)).collect::<Vec<_>>(), to)
        }
        DType::F16 => device.upload(&numbers.iter().map(|x| half::f16::from_f32(*x)).collect::<Vec<_>>(), to),
        DType::U32 => device.upload(&numbers.iter().map(|x| *x as u32).collect::<Vec<_>>(), to),
    }
    tensor
}

/// A tensor of random numbers.
pub fn random(device: &Device, dtype: DType, dims: &[usize], seed: u64) -> Tensor {
    tensor(device, dtype, dims, &numbers(seed, dims.iter().product()))
}

/// A tensor of 32-bit ids.
pub fn ids(device: &Device, ids: &[u32]) -> Tensor {
    let mut tensor = device.alloc(DType::U32, [ids.len()], Category::Workspace, "ids");
    device.upload(ids, tensor.view_mut());
    tensor
}

/// The numbers of a tensor.
pub fn read(device: &Device, from: View) -> Vec<f64> {
    let n = from.elements();
    macro_rules! read {
        ($zero:expr, $wide:expr) => {{
            let mut to = vec![$zero; n];
            device.download(from, &mut to).unwrap_or_else(|error| panic!("{error}"));
            to.into_iter().map($wide).collect()
        }};
    }
    match from.dtype() {
        DType::F32 => read!(0f32, f64::from),
        DType::F64 => read!(0f64, f64::from),
        DType::BF16 => read!(half::bf16::ZERO, half::bf16::to_f64),
        DType::F16 => read!(half::f16::ZERO, half::f16::to_f64),
        DType::U32 => read!(0u32, f64::from),
    }
}

/// The tolerance of a result of this type: long sums in another order in f32, two roundings in the others.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-7),
        DType::F16 => 2f64.powi(-10),
        _ => 1e-5,
    }
}
