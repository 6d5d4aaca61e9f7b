//! Elementwise operations, activations, dropout, optimizer steps and sums: most have the processor's very bits.

use phalanx_tensor::arguments::{AdamW, Clip, Dropout, Gate, Gelu, Sgd};
use phalanx_tensor::blocks::BLOCK;
use phalanx_tensor::operations::{Copy, DropoutForward, Scaled};
use phalanx_tensor::shape::Shape;
use phalanx_tensor::{AdamWUpdate, Category, DType, SgdUpdate, ViewMut};

use super::bench::{Bench, FLOATS, numbers, random, read, tensor, tolerance};

/// Lengths around the groups of four, and unaligned starts.
const LENGTHS: [usize; 4] = [1, 7, 64, 4099];

pub(super) fn conversions_and_sums(bench: &Bench) {
    for from in FLOATS {
        for to in FLOATS {
            for n in LENGTHS {
                bench.compare(&format!("convert {from:?} to {to:?}, {n}"), 0.0, |device| {
                    let x = random(device, from, &[n + 1], 1);
                    let mut y = random(device, to, &[n], 2);
                    let mut z = random(device, to, &[n], 3);
                    // The first element is left out, so that the start is not aligned.
                    device.convert(x.view().range(1..n + 1), y.view_mut());
                    device.add(x.view().range(0..n), z.view_mut());
                    vec![("converted", read(device, y.view())), ("sum", read(device, z.view()))]
                });
            }
        }
    }
}

pub(super) fn blocks(bench: &Bench) {
    for from in [DType::Q8_0, DType::Nf4] {
        for to in FLOATS {
            bench.compare(&format!("dequantise {from:?} to {to:?}"), 0.0, |device| {
                let x = random(device, from, &[5 * BLOCK], 1);
                let mut y = random(device, to, &[4 * BLOCK + 1], 2);
                // Blocks from the second on, to a start that is not aligned.
                let blocks = x.view().range(BLOCK..5 * BLOCK);
                device.dequantise(blocks, y.view_mut().range(1..4 * BLOCK + 1));
                vec![("numbers", read(device, y.view()))]
            });
        }
    }
}

pub(super) fn fill_copy_and_f64(bench: &Bench) {
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        bench.compare(&format!("fill {dtype:?}"), 0.0, |device| {
            let mut x = random(device, dtype, &[1001], 1);
            device.fill(x.view_mut().range(1..1000), -1.375);
            let mut y = random(device, dtype, &[1001], 2);
            device.run(Copy { from: x.view(), to: y.view_mut() });
            vec![("filled", read(device, x.view())), ("copied", read(device, y.view()))]
        });
    }
    for dtype in FLOATS {
        bench.compare(&format!("multiply {dtype:?}"), 0.0, |device| {
            let mut x = random(device, dtype, &[1003], 1);
            device.multiply(x.view_mut(), 55.4256);
            vec![("x", read(device, x.view()))]
        });
        bench.compare(&format!("columns {dtype:?}"), 0.0, |device| {
            let (wide, mut narrow) =
                (random(device, dtype, &[37, 13], 1), random(device, dtype, &[37, 5], 2));
            let mut wider = random(device, dtype, &[37, 21], 3);
            device.copy_columns((wide.view(), 7), (narrow.view_mut(), 0), 5);
            device.copy_columns((narrow.view(), 0), (wider.view_mut(), 16), 5);
            vec![("narrow", read(device, narrow.view())), ("wide", read(device, wider.view()))]
        });
    }
    bench.compare("f64", 0.0, |device| {
        let x = random(device, DType::F64, &[1], 1);
        let mut y = random(device, DType::F64, &[1], 2);
        device.add(x.view(), y.view_mut());
        let mut out = device.alloc(DType::F32, [1], Category::Workspace, "out");
        device.run(Scaled { x: y.view(), scale: 0.3, out: out.view_mut() });
        vec![("sum", read(device, y.view())), ("scaled", read(device, out.view()))]
    });
}

pub(super) fn gelu_forward_and_backward(bench: &Bench) {
    // Odd columns; and pairs of columns in several blocks of rows, with large arguments.
    for (dtype, [rows, columns, scale]) in
        FLOATS.into_iter().flat_map(|d| [(d, [37, 21, 8]), (d, [301, 130, 40])])
    {
        let values: Vec<f32> = numbers(1, rows * columns).iter().map(|x| x * scale as f32).collect();
        for gelu in [Gelu::Tanh, Gelu::Erf] {
            let tolerance = if dtype == DType::F32 { 1e-6 } else { tolerance(dtype) };
            bench.compare(&format!("{gelu:?} {dtype:?} {rows} x {columns}"), tolerance, |device| {
                let x = tensor(device, dtype, &[rows, columns], &values);
                let mut y = random(device, dtype, &[rows, columns], 2);
                device.gelu(x.view(), gelu, y.view_mut());
                let mut dy = random(device, dtype, &[rows, columns], 3);
                let mut db = random(device, DType::F32, &[columns], 4);
                device.gelu_backward(x.view(), gelu, dy.view_mut(), Some(db.view_mut()), true);
                vec![
                    ("y", read(device, y.view())),
                    ("dx", read(device, dy.view())),
                    ("db", read(device, db.view())),
                ]
            });
        }
    }
}

pub(super) fn tanh_forward_and_backward(bench: &Bench) {
    for (dtype, elements) in FLOATS.into_iter().flat_map(|dtype| [(dtype, 777), (dtype, 4096)]) {
        let values: Vec<f32> = numbers(1, elements).iter().map(|x| x * 8.0).collect();
        let tolerance = if dtype == DType::F32 { 1e-6 } else { tolerance(dtype) };
        bench.compare(&format!("{dtype:?} {elements}"), tolerance, |device| {
            let x = tensor(device, dtype, &[elements], &values);
            let mut y = random(device, dtype, &[elements], 2);
            device.tanh(x.view(), y.view_mut());
            let mut dy = random(device, dtype, &[elements], 3);
            device.tanh_backward(y.view(), dy.view_mut());
            vec![("y", read(device, y.view())), ("dx", read(device, dy.view()))]
        });
    }
}

pub(super) fn gates_forward_and_backward(bench: &Bench) {
    // Odd columns; whole chunks of 16 bytes; and several blocks of columns, with large arguments.
    for (dtype, [rows, columns, scale]) in
        FLOATS.into_iter().flat_map(|d| [(d, [37, 21, 8]), (d, [13, 64, 8]), (d, [3, 2568, 100])])
    {
        let values: Vec<f32> = numbers(1, 2 * rows * columns).iter().map(|x| x * scale as f32).collect();
        for gate in [Gate::Silu, Gate::Gelu(Gelu::Tanh), Gate::Gelu(Gelu::Erf)] {
            let tolerance = if dtype == DType::F32 { 1e-6 } else { tolerance(dtype) };
            bench.compare(&format!("{gate:?} {dtype:?} {rows} x {columns}"), tolerance, |device| {
                let mut x = tensor(device, dtype, &[rows, 2 * columns], &values);
                let mut y = random(device, dtype, &[rows, columns], 2);
                device.gated(x.view(), gate, y.view_mut());
                let dy = random(device, dtype, &[rows, columns], 3);
                device.gated_backward(x.view_mut(), gate, dy.view());
                vec![("y", read(device, y.view())), ("dx", read(device, x.view()))]
            });
        }
    }
}

pub(super) fn dropout_drops_the_processors_elements(bench: &Bench) {
    for dtype in FLOATS {
        for first in [0, 1, (1 << 33) + 3] {
            bench.compare(&format!("dropout {dtype:?} from {first}"), 0.0, |device| {
                let from = random(device, dtype, &[1003], 1);
                let residual = random(device, dtype, &[1003], 2);
                let mut to = random(device, dtype, &[1003], 3);
                let dropout = Dropout { p: 0.3, key: 77, first, sample: 0 };
                let residual = Some(residual.view());
                device.run(DropoutForward {
                    from: from.view(),
                    dropout,
                    row: 0,
                    residual,
                    to: to.view_mut(),
                });
                let mut plain = random(device, dtype, &[1003], 3);
                device.dropout(from.view(), dropout, None, plain.view_mut());
                // Columns of longer rows.
                let (from, mut part) =
                    (from.view().range(0..1001).reshape([143, 7]), random(device, dtype, &[143, 7], 4));
                device.run(DropoutForward { from, dropout, row: 15, residual: None, to: part.view_mut() });
                [("to", &to), ("plain", &plain), ("part", &part)]
                    .map(|(name, x)| (name, read(device, x.view())))
                    .into()
            });
        }
    }
}

/// A step of AdamW.
pub(super) const ADAMW: AdamW =
    AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3 };

pub(super) fn optimizer_steps(bench: &Bench) {
    let step = ADAMW;
    let sgd = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01, first: false };
    for gradient in FLOATS {
        for rounded in [None, Some(DType::BF16), Some(DType::F16)] {
            bench.compare(&format!("{gradient:?}, copy {rounded:?}"), 1e-7, |device| {
                let n = 1001;
                let moment: Vec<f32> = numbers(4, n).iter().map(|x| x.abs()).collect();
                let [mut p, mut q] = [1, 1].map(|seed| random(device, DType::F32, &[n], seed));
                let g = random(device, gradient, &[n], 2);
                let [mut m, mut velocity] = [3, 3].map(|seed| random(device, DType::F32, &[n], seed));
                let mut v = tensor(device, DType::F32, &[n], &moment);
                let scale = tensor(device, DType::F32, &[1], &[0.5]);
                let [mut a, mut b] = [0, 0].map(|_| rounded.map(|dtype| random(device, dtype, &[n], 9)));
                device.run(AdamWUpdate {
                    step,
                    p: p.view_mut(),
                    g: g.view(),
                    moments: [m.view_mut(), v.view_mut()],
                    gradient_scale: scale.view(),
                    rounded: a.as_mut().map(|a| a.view_mut()),
                });
                for first in [true, false] {
                    device.run(SgdUpdate {
                        step: Sgd { first, ..sgd },
                        p: q.view_mut(),
                        g: g.view(),
                        velocity: velocity.view_mut(),
                        gradient_scale: scale.view(),
                        rounded: b.as_mut().map(|b| b.view_mut()),
                    });
                }
                let tensors = [("p", &p), ("m", &m), ("v", &v), ("q", &q), ("velocity", &velocity)];
                let copies = [("adamw copy", &a), ("sgd copy", &b)];
                let copies = copies.iter().filter_map(|(name, copy)| copy.as_ref().map(|copy| (*name, copy)));
                tensors.into_iter().chain(copies).map(|(name, x)| (name, read(device, x.view()))).collect()
            });
        }
    }
}

/// Ranges of a flat tensor, more than a launch holds: the steps and sums of a network's parameters.
fn ranges() -> Vec<std::ops::Range<usize>> {
    let mut end = 0;
    (0..130usize)
        .map(|i| {
            let start = end + i % 3;
            end = start + [7, 0, 64, 500, 4096, 9001][(i * 5 + i / 7) % 6] / if i < 12 { 1 } else { 8 };
            start..end
        })
        .collect()
}

pub(super) fn calls_in_a_row(bench: &Bench) {
    let ranges = ranges();
    let n = ranges.last().map_or(0, |last| last.end);
    // Each range by itself; then, one after the other, a sum of the sums, and more steps of the last ranges.
    bench.compare("sums in a row", 0.0, |device| {
        let x = random(device, DType::F32, &[n], 1);
        let mut squares = random(device, DType::F64, &[4 * ranges.len()], 2);
        let mut sums = random(device, DType::F64, &[ranges.len()], 3);
        let mut all = random(device, DType::F64, &[1], 4);
        for (i, range) in ranges.iter().enumerate() {
            let blocks = range.len().div_ceil(4096);
            device.block_squares(
                x.view().range(range.clone()),
                squares.view_mut().range(4 * i..4 * i + blocks),
            );
        }
        for i in 0..ranges.len() {
            device.tree_sum(squares.view().range(4 * i..4 * i + i % 5), sums.view_mut().range(i..i + 1));
        }
        device.tree_sum(sums.view(), all.view_mut());
        [("squares", &squares), ("sums", &sums), ("all", &all)]
            .map(|(name, x)| (name, read(device, x.view())))
            .into()
    });
    bench.compare("steps in a row", 1e-7, |device| {
        // The parameters of each range, and behind them its moments.
        let all: Vec<f32> = numbers(4, 3 * n).iter().map(|x| x.abs()).collect();
        let mut all = tensor(device, DType::F32, &[3 * n], &all);
        let g = random(device, DType::BF16, &[n], 3);
        let scale = tensor(device, DType::F32, &[1], &[0.5]);
        let again = ranges.iter().rev().take(3);
        for (i, range) in ranges.iter().chain(again).enumerate() {
            let (start, shape) = (3 * range.start, Shape::from([range.len()]));
            let piece = |k: usize| (start + k * range.len()..start + (k + 1) * range.len(), shape);
            let pieces: [ViewMut; 3] =
                all.view_mut().into_pieces([0, 1, 2].map(piece)).try_into().expect("three pieces");
            let [p, m, v] = pieces;
            let weight_decay = [0.0, 0.1][i % 2];
            device.run(AdamWUpdate {
                step: AdamW { weight_decay, ..ADAMW },
                p,
                g: g.view().range(range.clone()),
                moments: [m, v],
                gradient_scale: scale.view(),
                rounded: None,
            });
        }
        vec![("parameters and moments", read(device, all.view()))]
    });
}

pub(super) fn norms_have_the_processors_bits(bench: &Bench) {
    for dtype in FLOATS {
        for n in [1usize, 4096, 4097, 5 * 4096 + 17] {
            bench.compare(&format!("norm of {n} {dtype:?}"), 0.0, |device| {
                let x = random(device, dtype, &[n], 1);
                let mut squares =
                    device.alloc(DType::F64, [n.div_ceil(4096)], Category::Workspace, "squares");
                device.block_squares(x.view(), squares.view_mut());
                let [mut norm, mut factor, mut count] =
                    [0, 1, 2].map(|_| device.alloc(DType::F32, [1], Category::Workspace, "number"));
                let clip = Clip { max_norm: 0.5, loss_scale: 8.0 };
                device.norm(squares.view(), clip, norm.view_mut(), factor.view_mut());
                device.count_non_finite(x.view(), count.view_mut());
                let all = [("squares", &squares), ("norm", &norm), ("factor", &factor), ("count", &count)];
                all.map(|(name, x)| (name, read(device, x.view()))).into()
            });
        }
    }
    for n in [1usize, 2, 3, 2047, 2048, 2049, 6000] {
        bench.compare(&format!("tree of {n}"), 0.0, |device| {
            let x = random(device, DType::F64, &[n], 1);
            let mut out = device.alloc(DType::F64, [1], Category::Workspace, "sum");
            device.tree_sum(x.view(), out.view_mut());
            vec![("sum", read(device, out.view()))]
        });
    }
    bench.compare("not finite", 0.0, |device| {
        let mut values = numbers(1, 3000);
        (values[0], values[1500], values[2999]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
        let x = tensor(device, DType::F32, &[3000], &values);
        let mut count = device.alloc(DType::F32, [1], Category::Workspace, "count");
        device.count_non_finite(x.view(), count.view_mut());
        vec![("count", read(device, count.view()))]
    });
}
