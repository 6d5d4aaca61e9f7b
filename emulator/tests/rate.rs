//! How fast the emulator is. Run with `--nocapture` to see the rates; the assertion only catches a machine that no test
//! could use.

use crate::support;
use crate::support::Parameter::{Address, Float, Integer};
use crate::support::{Device, numbers};
use phalanx_cuda_emulator::checks::Checks;
use phalanx_cuda_emulator::numbers::{Bfloat16, Narrow};
use rustix::time::{ClockId, clock_gettime};

const PTX: &str = include_str!("kernels/numerics.ptx");

/// The processor time of this thread in seconds, in which other work of the machine does not count.
fn processor_time() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// The kernel's launch: grid, threads, parameters.
fn launch(device: &mut Device, name: &str) -> ([u32; 3], u32, Vec<support::Parameter>) {
    let bf16 =
        |count| numbers(count, 1).iter().map(|&value| Bfloat16::nearest(value).0).collect::<Vec<u16>>();
    match name {
        "rate" => ([1; 3], 256, vec![Address(device.empty::<f32>(256)), Integer(4000)]),
        "gelu" => {
            let n = 1 << 16;
            let (x, y) = (device.put(&numbers(n, 1)), device.empty::<f32>(n));
            ([n as u32 / 256, 1, 1], 256, vec![Address(x), Address(y), Integer(n as i32)])
        }
        "layer_norm" => {
            let (rows, n) = (64, 768);
            let inputs =
                [device.put(&bf16(rows * n)), device.put(&numbers(n, 2)), device.put(&numbers(n, 3))];
            let outputs = [device.empty::<u16>(rows * n), device.empty::<f32>(rows)];
            let addresses = inputs.into_iter().chain(outputs).map(Address);
            ([rows as u32, 1, 1], 256, addresses.chain([Integer(n as i32)]).collect())
        }
        "attention" => {
            let (heads, t, d) = (2, 128, 64);
            let inputs = [1, 2, 3].map(|_| Address(device.put(&bf16(heads * t * d))));
            let outputs = [device.empty::<u16>(heads * t * d), device.empty::<f32>(heads * t)];
            let addresses = inputs.into_iter().chain(outputs.map(Address));
            let parameters = addresses.chain([Integer(t as i32), Float(0.125)]).collect();
            ([t as u32 / 64, heads as u32, 1], 128, parameters)
        }
        _ => {
            let (m, n, k) = (64, 64, 768);
            let (a, b) = (device.put(&bf16(m * k)), device.put(&bf16(k * n)));
            let addresses = [a, b, device.empty::<f32>(m * n)].map(Address);
            let sizes = [m, n, k].map(|size| Integer(size as i32));
            ([1; 3], 128, addresses.into_iter().chain(sizes).collect())
        }
    }
}

/// What a second of processor time computes.
struct Rate {
    /// Instructions of lanes, of which `mma.sync` counts as 32.
    lane_instructions: f64,
    /// Products that `mma.sync` instructions added.
    multiply_adds: f64,
}

fn rate(name: &str, checks: Checks, seconds: f64) -> Rate {
    let mut device = Device::new(PTX);
    device.checks = checks;
    let (grid, threads, parameters) = launch(&mut device, name);
    // The first launch meets memory that the system has not given yet.
    device.launch(name, grid, [threads, 1, 1], &parameters);
    let start = processor_time();
    let (mut lane_instructions, mut multiply_adds) = (0, 0);
    loop {
        let statistics = device.launch(name, grid, [threads, 1, 1], &parameters);
        lane_instructions += statistics.lane_instructions;
        multiply_adds += statistics.multiply_adds;
        let elapsed = processor_time() - start;
        if elapsed >= seconds {
            device.assert_clean();
            let each = |count: u64| count as f64 / elapsed;
            return Rate { lane_instructions: each(lane_instructions), multiply_adds: each(multiply_adds) };
        }
    }
}

/// Prints the rates of each kernel with and without checks, by turns. `PHALANX_RATE_SECONDS` measures longer.
#[test]
fn rates() {
    let given = std::env::var("PHALANX_RATE_SECONDS").ok();
    let seconds = given.map_or(0.01, |text| text.parse().expect("a number of seconds"));
    let none = Checks { unwritten: false, races: false };
    println!(
        "processor time of one thread; G a second: lane instructions, with those of mma.sync by multiply-adds"
    );
    for name in ["rate", "gelu", "layer_norm", "product_bf16", "attention"] {
        for (what, checks) in [("all checks", Checks::default()), ("bounds only", none)] {
            let Rate { lane_instructions, multiply_adds } = rate(name, checks, seconds);
            let together = lane_instructions + multiply_adds;
            println!("{name:>14}, {what}: {:.2}, {:.2}", lane_instructions / 1e9, together / 1e9);
            assert!(lane_instructions > 1e6, "{name}: {lane_instructions} lane instructions a second");
        }
    }
}
