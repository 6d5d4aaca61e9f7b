//! Two devices side by side: the processor and the card.

use std::cell::RefCell;
use std::sync::Arc;

use phalanx_system::random::SplitMix64;
use phalanx_tensor::blocks::quantised;
use phalanx_tensor::{Arena, Category, DType, Device, DeviceError, Immediate, Kernels, Memory, Tensor, View};

use crate::driver::{Context, Launches, Made, usable_cards};
use crate::error::Error;
use crate::factory::{Options, unplanned_counting};

pub(super) const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Bytes of the card's memory for tensors: on a card, more than its caches hold.
const CARD_BYTES: u64 = 1 << 30;
const EMULATOR_BYTES: u64 = 64 << 20;

/// The processor and a card.
pub struct Bench {
    devices: [Device; 2],
    made: Arc<Made>,
    context: Context,
    /// Bytes of the card that its tensors and scratch take.
    taken_bytes: u64,
    cases: RefCell<Vec<Case>>,
}

/// One comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Operation, types and sizes.
    pub name: String,
    /// The largest difference of a number, relative to the largest number of its result.
    pub worst: f64,
    /// The largest difference that is allowed; 0 for the same numbers.
    pub tolerance: f64,
    /// Description of the fault; None if there is none.
    pub fault: Option<String>,
}

/// The numbers of a tensor.
pub(super) type Read = Result<Vec<f64>, DeviceError>;

/// Results of a case: names and numbers.
pub(super) type Results = Vec<(&'static str, Read)>;

impl Bench {
    /// The first usable card with `options`, and the processor with `kernels`.
    ///
    /// # Errors
    /// No driver, card or compiler.
    pub fn new(options: &Options, kernels: Arc<dyn Kernels>) -> Result<Bench, Error> {
        // A card without clocks is the emulator.
        let card = usable_cards()?.swap_remove(0);
        let memory_bytes = if card.clocks.is_some() { CARD_BYTES } else { EMULATOR_BYTES };
        let made = Arc::default();
        let device = unplanned_counting(options, 0, memory_bytes, Arc::clone(&kernels), &made)?;
        let processor = Device::with_memories(
            Arc::new(Immediate::new(kernels)),
            Arena::heap(),
            Arena::heap_of(Memory::Host),
        );
        let context = Context::new(card, &Arc::default())?;
        let taken_bytes = memory_bytes + options.scratch_bytes;
        Ok(Bench { devices: [processor, device], made, context, taken_bytes, cases: RefCell::default() })
    }

    /// Bytes of the card's memory that are in use besides the tensors and scratch of this bench: those of the driver's context, of kernels
    /// and libraries, and of other programs.
    ///
    /// # Errors
    /// The driver's.
    pub fn other_bytes(&self) -> Result<u64, Error> {
        self.context.memory().map(|(free, total)| (total - free).saturating_sub(self.taken_bytes))
    }

    /// Numbers of launches on the card.
    pub fn launches(&self) -> Launches {
        self.made.launches()
    }

    /// The card.
    pub fn card(&self) -> &Device {
        &self.devices[1]
    }

    /// Takes the comparisons made since the last call.
    pub fn take_cases(&self) -> Vec<Case> {
        self.cases.take()
    }

    /// Runs a case on both devices and compares what it leaves.
    pub(super) fn compare(&self, name: &str, tolerance: f64, case: impl Fn(&Device) -> Results) {
        let [expected, found] = [0, 1].map(|which| case(&self.devices[which]));
        self.check(name, tolerance, expected, found);
    }

    /// Compares what two runs of a case have left.
    pub(super) fn check(&self, name: &str, tolerance: f64, expected: Results, found: Results) {
        let mut case = Case { name: name.to_string(), worst: 0.0, tolerance, fault: None };
        for ((what, expected), (_, found)) in expected.into_iter().zip(found) {
            match (expected, found) {
                (Ok(expected), Ok(found)) => case.add(what, &expected, &found),
                (Err(error), _) | (_, Err(error)) => {
                    case.fault.get_or_insert(error.to_string());
                }
            }
        }
        self.cases.borrow_mut().push(case);
    }
}

impl Case {
    fn add(&mut self, what: &str, expected: &[f64], found: &[f64]) {
        if expected.len() != found.len() {
            self.fault.get_or_insert(format!("{what} has {} numbers, not {}", found.len(), expected.len()));
        }
        let largest = expected.iter().fold(1e-30, |largest: f64, x| largest.max(x.abs()));
        for (i, (expected, found)) in expected.iter().zip(found).enumerate() {
            if expected == found || (expected.is_nan() && found.is_nan()) {
                continue;
            }
            let apart = (expected - found).abs() / largest;
            // A difference that is no number is the largest.
            self.worst = if apart.is_nan() { f64::INFINITY } else { self.worst.max(apart) };
            if apart.is_nan() || apart > self.tolerance {
                let text = || format!("{what}[{i}] is {found}, not {expected} (of at most {largest})");
                self.fault.get_or_insert_with(text);
            }
        }
    }
}

/// Random numbers in [-1, 1).
pub(super) fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut random = SplitMix64::new(seed);
    (0..n).map(|_| random.next_fraction() as f32 * 2.0 - 1.0).collect()
}

/// A tensor with these numbers, rounded.
pub fn tensor(device: &Device, dtype: DType, dims: &[usize], numbers: &[f32]) -> Tensor {
    let mut tensor = device.alloc(dtype, dims, Category::Workspace, "check");
    let to = tensor.view_mut();
    match dtype {
        DType::F32 => device.upload(numbers, to),
        DType::F64 => device.upload(&numbers.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), to),
        DType::BF16 => {
            device.upload(&numbers.iter().map(|x| half::bf16::from_f32(*x)).collect::<Vec<_>>(), to)
        }
        DType::F16 => device.upload(&numbers.iter().map(|x| half::f16::from_f32(*x)).collect::<Vec<_>>(), to),
        DType::U32 => device.upload(&numbers.iter().map(|x| *x as u32).collect::<Vec<_>>(), to),
        DType::Q8_0 | DType::Nf4 => device.upload(&quantised(dtype, numbers), to.typed(DType::U32)),
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
///
/// # Errors
/// The device's failure.
pub fn read(device: &Device, from: View) -> Read {
    let n = from.elements();
    macro_rules! read {
        ($zero:expr, $wide:expr) => {{
            let mut to = vec![$zero; n];
            device.download(from, &mut to)?;
            Ok(to.into_iter().map($wide).collect())
        }};
    }
    match from.dtype() {
        DType::F32 => read!(0f32, f64::from),
        DType::F64 => read!(0f64, f64::from),
        DType::BF16 => read!(half::bf16::ZERO, half::bf16::to_f64),
        DType::F16 => read!(half::f16::ZERO, half::f16::to_f64),
        DType::U32 => read!(0u32, f64::from),
        DType::Q8_0 | DType::Nf4 => read(device, from.typed(DType::U32)),
    }
}

/// The tolerance of a result of this type: long sums in another order in f32, two roundings in the others.
pub(super) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-7),
        DType::F16 => 2f64.powi(-10),
        _ => 1e-5,
    }
}
