//! Optional arguments of a call change nothing else: no bias equals a bias of zeros, and a requested result has the same bits
//! whichever others are requested.

use phalanx_tensor::{DType, Device, Gelu, LayerNormBackward, Layout, Tensor, Weight};

use super::oracle::{FLOATS, KernelPath, numbers, poisoned_as, read_f32, tensor, tensor_as};

const ROWS: usize = 37;
const WIDTH: usize = 45;

fn rows(device: &Device, dtype: DType, seed: u64) -> Tensor {
    tensor_as(device, dtype, [ROWS, WIDTH], &numbers(seed, ROWS * WIDTH))
}

#[test]
fn biases() {
    for (path, dtype) in KernelPath::all().flat_map(|path| FLOATS.map(|dtype| (path, dtype))) {
        let device = path.cpu(2);
        let (x, gamma) = (rows(&device, dtype, 1), tensor_as(&device, dtype, [WIDTH], &numbers(2, WIDTH)));
        let zeros = tensor_as(&device, dtype, [WIDTH], &[0.0; WIDTH]);
        let w = tensor_as(&device, dtype, [WIDTH, WIDTH], &numbers(3, WIDTH * WIDTH));
        let of = |bias: Option<&Tensor>| {
            let bias = bias.map(Tensor::view);
            let [mut y, mut pre, mut act] = [0; 3].map(|_| poisoned_as(&device, dtype, [ROWS, WIDTH]));
            let [mut mean, mut rstd] = [0; 2].map(|_| poisoned_as(&device, DType::F32, [ROWS]));
            let statistics = (Some(mean.view_mut()), rstd.view_mut());
            device.layer_norm(x.view(), (gamma.view(), bias), 1e-5, y.view_mut(), statistics);
            let w = Weight { matrix: w.view(), layout: Layout::InOut };
            device.linear_gelu(x.view(), w, bias, Gelu::Erf, pre.view_mut(), act.view_mut());
            [y, mean, rstd, pre, act].map(|tensor| read_f32(&device, &tensor))
        };
        assert_eq!(of(None), of(Some(&zeros)), "{} {}", path.name(), dtype.name());
    }
}

#[test]
fn gradients() {
    for (path, dtype) in KernelPath::all().flat_map(|path| FLOATS.map(|dtype| (path, dtype))) {
        let device = path.cpu(2);
        let (x, dy) = (rows(&device, dtype, 1), rows(&device, dtype, 2));
        let gamma = tensor_as(&device, dtype, [WIDTH], &numbers(3, WIDTH));
        let [mean, rstd] = [0.1, 1.7].map(|value| tensor(&device, [ROWS], &[value; ROWS]));
        let of_norm = |wanted: [bool; 2]| {
            let mut dx = poisoned_as(&device, dtype, [ROWS, WIDTH]);
            let mut gradients =
                wanted.map(|wanted| wanted.then(|| poisoned_as(&device, DType::F32, [WIDTH])));
            device.run(LayerNormBackward {
                x: x.view(),
                gamma: gamma.view(),
                norm: 1e-5.into(),
                products: None,
                mean: Some(mean.view()),
                rstd: rstd.view(),
                dy: dy.view(),
                dx: dx.view_mut(),
                accumulate_input: false,
                gradients: gradients.each_mut().map(|wanted| wanted.as_mut().map(Tensor::view_mut)),
                accumulate_parameters: false,
            });
            (read_f32(&device, &dx), gradients.map(|wanted| wanted.map(|wanted| read_f32(&device, &wanted))))
        };
        let (dx, all) = of_norm([true, true]);
        for wanted in [[false, false], [true, false], [false, true]] {
            let (own_dx, own) = of_norm(wanted);
            assert_eq!(own_dx, dx, "{} {}: {wanted:?}", path.name(), dtype.name());
            for ((own, of_all), wanted) in own.iter().zip(&all).zip(wanted) {
                assert_eq!(own, &of_all.clone().filter(|_| wanted), "{} {}", path.name(), dtype.name());
            }
        }
        let of_gelu = |wanted: bool| {
            let mut dx = rows(&device, dtype, 2);
            let mut db = wanted.then(|| poisoned_as(&device, DType::F32, [WIDTH]));
            let sums = db.as_mut().map(Tensor::view_mut);
            device.gelu_backward(x.view(), Gelu::Tanh, dx.view_mut(), sums, false);
            read_f32(&device, &dx)
        };
        assert_eq!(of_gelu(false), of_gelu(true), "{} {}", path.name(), dtype.name());
    }
}
