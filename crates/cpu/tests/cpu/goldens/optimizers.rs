//! AdamW, SGD, the norm, and the search for what is not finite.

use half::{bf16, f16};
use phalanx_tensor::{AdamW, AdamWUpdate, Clip, DType, Device, Sgd, SgdUpdate, Tensor};

use super::case::{Case, each_case, poisoned, read};

/// An optimizer's pass over a step's gradient: p, g, states, gradient scale, rounded copy.
type Pass = fn(&Device, u64, [&mut Tensor; 3], phalanx_tensor::View, &Tensor, Option<&mut Tensor>);

/// p and the states after the steps of the case. The rounded copy must be the new p, rounded to nearest even.
fn run(case: &Case, device: &Device, pass: Pass, rounded: Option<DType>) -> [Tensor; 3] {
    let [steps, count] = case.dims("gradients");
    let mut p = case.input_as(device, "start", DType::F32);
    let [mut m, mut v] = [0; 2].map(|_| {
        let mut state = poisoned(device, DType::F32, [count]);
        device.fill(state.view_mut(), 0.0);
        state
    });
    let gradients = case.input(device, "gradients");
    let scale = case.input_as(device, "gradient_scale", DType::F32);
    for step in 0..steps {
        let gradient = gradients.view().range(step * count..(step + 1) * count);
        let mut copy = rounded.map(|dtype| poisoned(device, dtype, [count]));
        pass(device, step as u64 + 1, [&mut p, &mut m, &mut v], gradient, &scale, copy.as_mut());
        let Some(copy) = copy else { continue };
        let nearest = |x: f64| match copy.dtype() {
            DType::BF16 => bf16::from_f32(x as f32).to_f64(),
            DType::F16 => f16::from_f32(x as f32).to_f64(),
            _ => x,
        };
        let nearest: Vec<f64> = read(device, &p).into_iter().map(nearest).collect();
        assert_eq!(read(device, &copy), nearest, "{} in {}", case.name(), copy.dtype().name());
    }
    [p, m, v]
}

fn each_rounding(kind: &str, dtype: DType, outputs: &[&str], pass: Pass) {
    each_case("optimizers", dtype, |case| {
        if case.name() != kind {
            return;
        }
        let wanted: Vec<_> = outputs.iter().map(|name| case.wanted(name)).collect();
        for rounded in [None, Some(DType::BF16), Some(DType::F16)] {
            let kernel =
                |device: &Device| run(case, device, pass, rounded).into_iter().take(outputs.len()).collect();
            case.check(&format!("rounded {rounded:?}"), kernel, &wanted);
        }
    });
}

pub fn adamw(dtype: DType) {
    each_rounding(
        "adamw",
        dtype,
        &["p", "exp_avg", "exp_avg_sq"],
        |device, step, [p, m, v], g, scale, rounded| {
            let numbers = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step };
            let rounded = rounded.map(|r| r.view_mut());
            device.run(AdamWUpdate {
                step: numbers,
                p: p.view_mut(),
                g,
                moments: [m.view_mut(), v.view_mut()],
                gradient_scale: scale.view(),
                rounded,
            });
        },
    );
}

pub fn sgd(dtype: DType) {
    each_rounding(
        "sgd",
        dtype,
        &["p", "momentum_buffer"],
        |device, step, [p, velocity, _], g, scale, rounded| {
            let numbers = Sgd { lr: 1e-2, momentum: 0.9, weight_decay: 0.1, first: step == 1 };
            let rounded = rounded.map(|r| r.view_mut());
            device.run(SgdUpdate {
                step: numbers,
                p: p.view_mut(),
                g,
                velocity: velocity.view_mut(),
                gradient_scale: scale.view(),
                rounded,
            });
        },
    );
}

/// Sums of squares, and norm and clipping factor for several limits and loss scales.
pub fn norm(dtype: DType) {
    each_case("norm", dtype, |case| {
        let clips = case.numbers("clip");
        let squares_of = |device: &Device| {
            let x = case.input(device, "x");
            let mut squares = poisoned(device, DType::F64, case.dims::<1>("squares"));
            device.block_squares(x.view(), squares.view_mut());
            squares
        };
        case.check("squares", |device| vec![squares_of(device)], &[case.wanted("squares")]);
        let kernel = |device: &Device| {
            let squares = squares_of(device);
            let outputs = [0; 2].map(|_| poisoned(device, DType::F32, [clips.len() / 2]));
            let [mut norms, mut factors] = outputs;
            for (i, clip) in clips.chunks(2).enumerate() {
                let clip = Clip { max_norm: clip[0] as f32, loss_scale: clip[1] as f32 };
                let (norm, factor) = (norms.view_mut().range(i..i + 1), factors.view_mut().range(i..i + 1));
                device.norm(squares.view(), clip, norm, factor);
            }
            vec![norms, factors]
        };
        case.check("norm", kernel, &[case.wanted("norms"), case.wanted("factors")]);
    });
}

pub fn count_non_finite(dtype: DType) {
    each_case("norm", dtype, |case| {
        let device = crate::oracle::cpu(3, phalanx_simd::Isa::detect());
        let count = |name: &str| {
            let x = case.input(&device, name);
            let mut count = poisoned(&device, DType::F32, [1]);
            device.count_non_finite(x.view(), count.view_mut());
            f64::from(device.fetch([count.view()]).unwrap()[0])
        };
        assert_eq!((count("damaged"), count("x")), (case.numbers("count")[0], 0.0));
    });
}
