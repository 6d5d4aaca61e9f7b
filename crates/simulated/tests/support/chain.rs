//! A chain of work as a training step does it: uploads, staged weights, kernels, copies out, late numbers, the disk.
//!
//! Every wait that the chain makes, itself or through `Device`, is needed: without it some access is not ordered.

use std::sync::Arc;

use phalanx_cpu::Cpu;
use phalanx_simulated::{Options, Simulated};
use phalanx_tensor::{
    Arena, Backend, Category, DType, Device, DeviceError, DiskMemory, Epilogue, Immediate, Layout, Memory,
    Region, Tensor, Weight,
};

const ROWS: usize = 16;
const HIDDEN: usize = 32;
const ROUNDS: usize = 3;

/// The round in which plants make their mistake.
pub const PLANTED_ROUND: usize = 2;

/// Ample for the tensors of the chain.
const MEMORY_BYTES: usize = 1 << 20;

/// Options of the device for one seed.
pub fn options(seed: u64, check_races: bool) -> Options {
    Options { seed, check_races, ..Options::new(MEMORY_BYTES as u64) }
}

/// A host memory that stays mapped, whatever still uses it.
fn host() -> Arc<Arena> {
    Arena::unplanned_in(Memory::Host, Region::anonymous(MEMORY_BYTES).unwrap())
}

fn disk() -> Arc<Arena> {
    let disk = DiskMemory::create(&std::env::temp_dir(), MEMORY_BYTES as u64).unwrap();
    Arena::unplanned_on_disk(disk)
}

/// A simulated device whose calls go through `decorate`.
pub fn simulated(options: Options, decorate: impl FnOnce(Arc<Simulated>) -> Arc<dyn Backend>) -> Device {
    let (simulated, memory) = Simulated::new(Cpu::new(1), options).unwrap();
    Device::with_memories(decorate(simulated), memory.unplanned(), host()).with_disk(disk())
}

/// The numbers that the host ends with.
pub struct Numbers(Vec<f32>);

impl Numbers {
    /// Their bits.
    pub fn bits(&self) -> Vec<u32> {
        self.0.iter().map(|x| x.to_bits()).collect()
    }
}

/// The right numbers: those of the processor.
pub fn on_the_processor() -> Numbers {
    let backend = Immediate::with_disk_stream(Cpu::new(1)).unwrap();
    let host = Arena::heap_of(Memory::Host);
    let device = Device::with_memories(Arc::new(backend), Arena::heap(), host).with_disk(disk());
    run(&device, &mut downloaded()).unwrap()
}

fn values(round: usize, first: usize, count: usize) -> Vec<f32> {
    (first..first + count).map(|i| ((i * 37 + round * 101) % 64) as f32 / 32.0 - 1.0).collect()
}

fn device_tensor(device: &Device, name: &'static str, shape: &[usize]) -> Tensor {
    device.alloc(DType::F32, shape, Category::Activations, name)
}

fn host_tensor(device: &Device, name: &'static str, elements: usize) -> Tensor {
    device.alloc_host(DType::F32, [elements], Category::Workspace, name)
}

/// Tensors that live for the whole chain.
struct Resident {
    x: Tensor,
    bias: Tensor,
    gain: Tensor,
    /// Sum of everything, on the device.
    total: Tensor,
}

/// Buffer of the last download.
pub fn downloaded() -> Vec<f32> {
    vec![0f32; ROWS * HIDDEN]
}

/// Runs the chain. `last` must outlive the device: a copy that nobody waited for may still write there.
pub fn run(device: &Device, last: &mut [f32]) -> Result<Numbers, DeviceError> {
    let mut numbers = Vec::new();
    let mut resident = Resident {
        x: device_tensor(device, "x", &[ROWS, HIDDEN]),
        bias: device_tensor(device, "bias", &[HIDDEN]),
        gain: device_tensor(device, "gain", &[HIDDEN]),
        total: device_tensor(device, "total", &[ROWS, HIDDEN]),
    };
    device.fill(resident.bias.view_mut(), 0.25);
    device.fill(resident.gain.view_mut(), 1.5);
    device.fill(resident.total.view_mut(), 0.0);
    let mut w = device_tensor(device, "w", &[HIDDEN * HIDDEN]);
    let mut staged = host_tensor(device, "staged weights", HIDDEN * HIDDEN);
    let mut stored = device.alloc_disk(DType::F32, [ROWS * HIDDEN], Category::Activations, "stored");
    for number in 1..=ROUNDS {
        let weights = values(number, 7, HIDDEN * HIDDEN);
        staged.host_slice_mut::<f32>().copy_from_slice(&weights);
        [w, staged, stored] = round(device, number, &mut resident, [w, staged, stored], &mut numbers)?;
    }
    device.download(resident.total.view(), last)?;
    numbers.extend_from_slice(last);
    Ok(Numbers(numbers))
}

fn round(
    device: &Device,
    number: usize,
    resident: &mut Resident,
    [w, staged, stored]: [Tensor; 3],
    numbers: &mut Vec<f32>,
) -> Result<[Tensor; 3], DeviceError> {
    let Resident { x, bias, gain, total } = resident;
    let shape = [ROWS, HIDDEN];
    // The kernels of the round before still read x: the upload waits for them, and the next kernel for it.
    device.upload(&values(number, 0, ROWS * HIDDEN), x.view_mut());
    device.add(x.view(), total.view_mut());
    let (mut staged, w) = device.copy_to_device(staged, w).wait()?;
    // The copy has read the weights: the host may write there.
    staged.host_slice_mut::<f32>().fill(f32::NAN);

    let mut y = device_tensor(device, "y", &shape);
    let matrix = w.view().reshape([HIDDEN, HIDDEN]);
    let epilogue = Epilogue { bias: Some(bias.view()), residual: None };
    device.linear(x.view(), Weight { matrix, layout: Layout::InOut }, epilogue, y.view_mut());
    let mut z = device_tensor(device, "z", &shape);
    let mut statistics = ["mean", "rstd"].map(|name| device_tensor(device, name, &[ROWS]));
    let [mean, rstd] = &mut statistics;
    let statistics_out = (Some(mean.view_mut()), rstd.view_mut());
    device.layer_norm(y.view(), (gain.view(), Some(bias.view())), 1e-5, z.view_mut(), statistics_out);
    device.add(x.view(), z.view_mut());

    let out = host_tensor(device, "out", ROWS * HIDDEN);
    let copied = device.copy_to_host(z.reshape([ROWS * HIDDEN]), out);
    device.add(y.view(), total.view_mut());
    let total_at = total.view().range(number..number + 1);
    let late = device.fetch_later(&[total_at]);
    let (z, out) = copied.wait()?;
    // Freed: the next tensor of its size takes its place.
    drop(z);
    let mut reused = device_tensor(device, "reused", &shape);
    device.fill(reused.view_mut(), -1.0);
    numbers.extend(late.wait()?);
    numbers.extend(out.host_slice::<f32>());
    // To the disk and back into the same tensor, beside the last kernel.
    let (mut out, stored) = device.copy_to_disk(out, stored).wait()?;
    out.host_slice_mut::<f32>().fill(f32::NAN);
    let (stored, out) = device.copy_from_disk(stored, out).wait()?;
    numbers.extend(out.host_slice::<f32>());
    // Nobody waits for these kernels before the next round.
    device.add(reused.view(), total.view_mut());
    device.add(x.view(), total.view_mut());
    Ok([w, staged, stored])
}
