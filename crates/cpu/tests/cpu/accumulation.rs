//! Gradients that are sums over rows: the sum of a call is made first, and added once to what is there. So a
//! gradient that was computed into fresh f32 memory and is added later (as between devices) has the same bits.

use phalanx_simd::Isa;
use phalanx_tensor::{DType, Device, Gelu, LayerNormBackward, Lookup, Tensor};

use crate::oracle::{
    FLOATS, cpu, gradient_types, indices, numbers, poisoned_as, read_f32, rounded, tensor, tensor_as, tokens,
};

const ROWS: usize = 300;
const WIDTH: usize = 67;

/// One gradient `[lines, WIDTH]` of a kernel, and what computes it.
struct Sum {
    name: &'static str,
    lines: usize,
    compute: fn(&Device, DType, &mut Tensor, bool),
}

fn rows(device: &Device, dtype: DType, seed: u64) -> Tensor {
    tensor_as(device, dtype, [ROWS, WIDTH], &numbers(seed, ROWS * WIDTH))
}

fn layer_norm(device: &Device, dtype: DType, into: &mut Tensor, accumulate: bool) {
    let [x, dy] = [1, 2].map(|seed| rows(device, dtype, seed));
    let gamma = tensor_as(device, dtype, [WIDTH], &numbers(3, WIDTH));
    let [mean, rstd] = [0.1, 1.7].map(|value| tensor(device, [ROWS], &[value; ROWS]));
    let mut dx = poisoned_as(device, dtype, [ROWS, WIDTH]);
    let pieces = (0..2).map(|line| (line * WIDTH..(line + 1) * WIDTH, [WIDTH].into()));
    let lines: [_; 2] = into.view_mut().into_pieces(pieces).try_into().unwrap();
    let (mean, rstd) = (Some(mean.view()), rstd.view());
    let dx = dx.view_mut();
    device.run(LayerNormBackward {
        x: x.view(),
        gamma: gamma.view(),
        norm: 1e-5.into(),
        products: None,
        mean,
        rstd,
        dy: dy.view(),
        dx,
        accumulate_input: false,
        gradients: lines.map(Some),
        accumulate_parameters: accumulate,
    });
}

fn types(device: &Device, dtype: DType, into: &mut Tensor, accumulate: bool) {
    let ids: Vec<u32> = indices(4, ROWS, 2).iter().map(|t| t << 31 | 5).collect();
    let (ids, dy) = (tokens(device, [ROWS], &ids), rows(device, dtype, 1));
    device.embedding_backward(ids.view(), Lookup::Type, dy.view(), into.view_mut(), accumulate);
}

fn table(device: &Device, dtype: DType, into: &mut Tensor, accumulate: bool) {
    let (ids, dy) = (tokens(device, [ROWS], &indices(4, ROWS, 9)), rows(device, dtype, 1));
    let lookup = Lookup::Token { first: 3, vocab: 9 };
    device.embedding_backward(ids.view(), lookup, dy.view(), into.view_mut(), accumulate);
}

const SUMS: [Sum; 6] = [
    Sum {
        name: "bias_gradient",
        lines: 1,
        compute: |device, dtype, into, accumulate| {
            let into = into.view_mut().reshape([WIDTH]);
            device.bias_gradient(rows(device, dtype, 1).view(), into, accumulate);
        },
    },
    Sum {
        name: "gelu_backward",
        lines: 1,
        compute: |device, dtype, into, accumulate| {
            let (x, mut dy) = (rows(device, dtype, 1), rows(device, dtype, 2));
            let into = into.view_mut().reshape([WIDTH]);
            device.gelu_backward(x.view(), Gelu::Erf, dy.view_mut(), Some(into), accumulate);
        },
    },
    Sum { name: "layer_norm_backward", lines: 2, compute: layer_norm },
    Sum { name: "embedding_backward of types", lines: 2, compute: types },
    Sum { name: "embedding_backward of tokens", lines: 4, compute: table },
    Sum {
        name: "position_gradient",
        lines: 7,
        compute: |device, dtype, into, accumulate| {
            device.position_gradient(rows(device, dtype, 1).view(), 3, 7, into.view_mut(), accumulate);
        },
    },
];

#[test]
fn accumulated_is_old_plus_fresh() {
    for isa in Isa::ALL.into_iter().filter(|isa| *isa <= Isa::detect()) {
        for threads in [1, 3] {
            let device = cpu(threads, isa);
            for (dtype, stored) in
                FLOATS.into_iter().flat_map(|d| gradient_types(d).into_iter().map(move |g| (d, g)))
            {
                for Sum { name, lines, compute } in SUMS {
                    let before = rounded(stored, &numbers(7, lines * WIDTH));
                    let mut accumulated = tensor_as(&device, stored, [lines, WIDTH], &before);
                    compute(&device, dtype, &mut accumulated, true);
                    let mut fresh = poisoned_as(&device, DType::F32, [lines, WIDTH]);
                    compute(&device, dtype, &mut fresh, false);
                    let mut sum = tensor_as(&device, stored, [lines, WIDTH], &before);
                    device.add(fresh.view(), sum.view_mut());
                    let bits = |t: &Tensor| -> Vec<u32> {
                        read_f32(&device, t).iter().map(|x| x.to_bits()).collect()
                    };
                    let what = format!("{name} in {}, into {}", dtype.name(), stored.name());
                    assert_eq!(bits(&accumulated), bits(&sum), "{what}, {}", isa.name());
                    assert_ne!(bits(&accumulated), bits(&tensor(&device, [lines, WIDTH], &before)), "{what}");
                }
            }
        }
    }
}
