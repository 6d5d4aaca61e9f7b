//! How fast the emulator is. Run with `--nocapture` to see the rates; the assertion only catches a machine that no test
//! could use.

mod support;

use std::time::Instant;

use phalanx_cuda_emulator::checks::Checks;
use phalanx_cuda_emulator::numbers::{Bfloat16, Narrow};
use support::Parameter::{Address, Integer};
use support::{Device, numbers};

const PTX: &str = include_str!("kernels/numerics.ptx");

fn rate(name: &str, checks: Checks) -> f64 {
    let mut device = Device::new(PTX);
    device.checks = checks;
    let start = Instant::now();
    let statistics = match name {
        "rate" => {
            let out = device.empty::<f32>(256);
            device.launch(name, [1, 1, 1], [256, 1, 1], &[Address(out), Integer(4000)])
        }
        "gelu" => {
            let n = 1 << 17;
            let (x, y) = (device.put(&numbers(n, 1)), device.empty::<f32>(n));
            device.launch(
                name,
                [n as u32 / 256, 1, 1],
                [256, 1, 1],
                &[Address(x), Address(y), Integer(n as i32)],
            )
        }
        "layer_norm" => {
            let (rows, n) = (64, 768);
            let x: Vec<u16> = numbers(rows * n, 1).iter().map(|&value| Bfloat16::nearest(value).0).collect();
            let inputs = [device.put(&x), device.put(&numbers(n, 2)), device.put(&numbers(n, 3))];
            let outputs = [device.empty::<u16>(rows * n), device.empty::<f32>(rows)];
            let mut parameters: Vec<_> = inputs.into_iter().chain(outputs).map(Address).collect();
            parameters.push(Integer(n as i32));
            device.launch(name, [rows as u32, 1, 1], [256, 1, 1], &parameters)
        }
        _ => {
            let size = 128;
            let values: Vec<u16> =
                numbers(size * size, 1).iter().map(|&value| Bfloat16::nearest(value).0).collect();
            let (a, b, c) = (device.put(&values), device.put(&values), device.empty::<f32>(size * size));
            let sizes = [Integer(size as i32); 3];
            let parameters = [Address(a), Address(b), Address(c), sizes[0], sizes[1], sizes[2]];
            device.launch(name, [2, 2, 1], [128, 1, 1], &parameters)
        }
    };
    device.assert_clean();
    statistics.lane_instructions as f64 / start.elapsed().as_secs_f64()
}

#[test]
fn rates() {
    for name in ["rate", "gelu", "layer_norm", "product_bf16"] {
        let all = rate(name, Checks::default());
        let none = rate(name, Checks { unwritten: false, races: false });
        println!(
            "{name}: {:.0} M lane instructions a second with all checks, {:.0} without",
            all / 1e6,
            none / 1e6
        );
        assert!(all > 1e6, "{name}: {all} lane instructions a second");
    }
}
