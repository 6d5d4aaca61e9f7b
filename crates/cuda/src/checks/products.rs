//! Matrix products of linear layers, in both layouts of the weight, with their epilogues.

use phalanx_tensor::arguments::{Epilogue, Gelu, Layout, Weight, logits_stride};
use phalanx_tensor::operations::{BiasGradient, InputGradient, WeightGradient};
use phalanx_tensor::{DType, Device, Tensor};

use super::bench::{Bench, FLOATS, numbers, random, read, tensor, tolerance};

/// Rows, inputs, outputs: less than a tile, rows that are not whole chunks of 16 bytes, several tiles.
const SIZES: [[usize; 3]; 4] = [[5, 8, 16], [33, 37, 21], [70, 96, 72], [130, 40, 136]];

fn weight(device: &Device, dtype: DType, layout: Layout, [inner, out]: [usize; 2]) -> Tensor {
    let dims = match layout {
        Layout::InOut => [inner, out],
        Layout::OutIn => [out, inner],
    };
    random(device, dtype, &dims, 2)
}

pub(super) fn linear_with_epilogues(bench: &Bench) {
    for dtype in FLOATS {
        for [rows, inner, out] in SIZES {
            for layout in [Layout::InOut, Layout::OutIn] {
                let name = format!("linear {dtype:?} {rows} x {inner} x {out} {layout:?}");
                bench.compare(&name, tolerance(dtype), |device| {
                    let x = random(device, dtype, &[rows, inner], 1);
                    let w = weight(device, dtype, layout, [inner, out]);
                    let w = Weight { matrix: w.view(), layout };
                    let bias = random(device, dtype, &[out], 3);
                    let residual = random(device, dtype, &[rows, out], 4);
                    let [mut y, mut plain, mut pre, mut act] =
                        [5, 6, 7, 8].map(|seed| random(device, dtype, &[rows, out], seed));
                    let epilogue = Epilogue { bias: Some(bias.view()), residual: Some(residual.view()) };
                    device.linear(x.view(), w, epilogue, y.view_mut());
                    device.linear(x.view(), w, Epilogue::default(), plain.view_mut());
                    device.linear_gelu(
                        x.view(),
                        w,
                        Some(bias.view()),
                        Gelu::Tanh,
                        pre.view_mut(),
                        act.view_mut(),
                    );
                    let all = [("y", &y), ("plain", &plain), ("pre", &pre), ("act", &act)];
                    all.map(|(name, x)| (name, read(device, x.view()))).into()
                });
            }
        }
    }
}

/// Rows of random numbers, with zeros behind them.
fn padded(device: &Device, dtype: DType, [rows, columns]: [usize; 2], seed: u64) -> Tensor {
    let stride = logits_stride(columns);
    let mut stored = vec![0.0; rows * stride];
    for (to, from) in stored.chunks_mut(stride).zip(numbers(seed, rows * columns).chunks(columns)) {
        to[..columns].copy_from_slice(from);
    }
    tensor(device, dtype, &[rows, stride], &stored)
}

pub(super) fn gradients_of_linear(bench: &Bench) {
    for dtype in FLOATS {
        for [rows, inner, out] in SIZES {
            for layout in [Layout::InOut, Layout::OutIn] {
                for (gradient, accumulate) in [(dtype, false), (DType::F32, true)] {
                    let name =
                        format!("gradients {dtype:?} {rows} x {inner} x {out} {layout:?} {gradient:?}");
                    bench.compare(&name, tolerance(dtype), |device| {
                        let x = random(device, dtype, &[rows, inner], 1);
                        let w = weight(device, dtype, layout, [inner, out]);
                        let dy = match accumulate {
                            true => padded(device, dtype, [rows, out], 3),
                            false => random(device, dtype, &[rows, out], 3),
                        };
                        let mut dx = random(device, dtype, &[rows, inner], 4);
                        let mut dw = weight(device, gradient, layout, [inner, out]);
                        let mut db = random(device, gradient, &[out], 5);
                        let w = Weight { matrix: w.view(), layout };
                        let (padded, x, dy) = (accumulate, x.view(), dy.view());
                        device.run(InputGradient { dy, padded, w, dx: dx.view_mut(), accumulate });
                        device.run(WeightGradient { x, dy, padded, dw: dw.view_mut(), layout, accumulate });
                        device.run(BiasGradient { dy, padded, db: db.view_mut(), accumulate });
                        let all = [("dx", &dx), ("dw", &dw), ("db", &db)];
                        all.map(|(name, x)| (name, read(device, x.view()))).into()
                    });
                }
            }
        }
    }
}
