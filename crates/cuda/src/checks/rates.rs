//! Rates of the operations that take most of a step, compared with the card's peak rates.

use std::time::Instant;

use phalanx_tensor::arguments::{Epilogue, Gate, Heads, Layout, Weight};
use phalanx_tensor::operations::Copy;
use phalanx_tensor::{
    AdamWUpdate, Category, DType, Device, DeviceError, Rotary, RotaryScaling, RowPositions, Tensor,
};

use super::bench::{Bench, random};
use crate::limits::Limits;

/// The sizes of what is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Rows of activations.
    pub rows: usize,
    /// Positions of a sequence.
    pub seq: usize,
    /// Heads of attention, of 64 elements each.
    pub heads: usize,
    /// Elements of an update.
    pub parameters: usize,
    /// Calls of which the time is taken.
    pub calls: u32,
}

impl Sizes {
    /// Sizes of GPT-2's small model, which fit the memory of a [`Bench`].
    pub const CARD: Sizes = Sizes { rows: 2048, seq: 1024, heads: 12, parameters: 32 << 20, calls: 20 };
    /// As small as an emulator needs them: times that mean nothing.
    pub const EMULATOR: Sizes = Sizes { rows: 64, seq: 64, heads: 1, parameters: 4096, calls: 1 };
}

/// Measured time and work of an operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Rate {
    /// The operation with its type and sizes.
    pub name: String,
    /// Seconds of a call.
    pub seconds: f64,
    /// Minimum work of a call.
    pub work: Work,
}

/// Minimum work of a call: floating-point operations, or bytes of memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Work {
    /// Floating-point operations of products in a type.
    Flops(DType, f64),
    /// Bytes of memory.
    Bytes(f64),
}

impl Rate {
    /// Operations or bytes a second.
    pub fn per_s(&self) -> f64 {
        match self.work {
            Work::Flops(_, work) | Work::Bytes(work) => work / self.seconds,
        }
    }

    /// The share of what the card can do at most.
    pub fn share(&self, limits: &Limits) -> f64 {
        let limit = match self.work {
            Work::Flops(dtype, _) => limits.flops_per_s(dtype),
            Work::Bytes(_) => limits.memory_bytes_per_s,
        };
        self.per_s() / limit
    }
}

/// Measures every operation of the list.
///
/// # Errors
/// The card's failure.
pub fn measure(bench: &Bench, sizes: Sizes) -> Result<Vec<Rate>, DeviceError> {
    let device = bench.card();
    let mut rates = Vec::new();
    for dtype in [DType::BF16, DType::F32] {
        rates.push(linear(device, sizes, dtype)?);
        rates.push(weight_gradient(device, sizes, dtype)?);
        rates.extend(attention(device, sizes, dtype)?);
        rates.push(layer_norm(device, sizes, dtype)?);
        rates.push(rotary(device, sizes, dtype)?);
        rates.extend(gated(device, sizes, dtype)?);
    }
    rates.push(adamw(device, sizes)?);
    rates.push(copy(device, sizes)?);
    Ok(rates)
}

/// The time of one of several calls, after one that loads the kernel.
fn seconds(device: &Device, calls: u32, mut call: impl FnMut()) -> Result<f64, DeviceError> {
    call();
    device.synchronize()?;
    let start = Instant::now();
    (0..calls).for_each(|_| call());
    device.synchronize()?;
    Ok(start.elapsed().as_secs_f64() / f64::from(calls))
}

fn hidden(sizes: Sizes) -> usize {
    64 * sizes.heads
}

fn linear(device: &Device, sizes: Sizes, dtype: DType) -> Result<Rate, DeviceError> {
    let (rows, hidden, calls) = (sizes.rows, hidden(sizes), sizes.calls);
    let x = random(device, dtype, &[rows, hidden], 1);
    let w = random(device, dtype, &[hidden, 4 * hidden], 2);
    let bias = random(device, dtype, &[4 * hidden], 3);
    let mut y = random(device, dtype, &[rows, 4 * hidden], 4);
    let seconds = seconds(device, calls, || {
        let epilogue = Epilogue { bias: Some(bias.view()), residual: None };
        device.linear(x.view(), Weight { matrix: w.view(), layout: Layout::InOut }, epilogue, y.view_mut());
    })?;
    let work = Work::Flops(dtype, 8.0 * (rows * hidden * hidden) as f64);
    Ok(Rate { name: format!("linear {} {rows} x {hidden} x {}", dtype.name(), 4 * hidden), seconds, work })
}

fn weight_gradient(device: &Device, sizes: Sizes, dtype: DType) -> Result<Rate, DeviceError> {
    let (rows, hidden, calls) = (sizes.rows, hidden(sizes), sizes.calls);
    let x = random(device, dtype, &[rows, hidden], 1);
    let dy = random(device, dtype, &[rows, 4 * hidden], 2);
    let mut dw = random(device, DType::F32, &[hidden, 4 * hidden], 3);
    let seconds = seconds(device, calls, || {
        device.linear_weight_gradient(x.view(), dy.view(), dw.view_mut(), Layout::InOut, true);
    })?;
    let work = Work::Flops(dtype, 8.0 * (rows * hidden * hidden) as f64);
    let name = format!("weight gradient {} {hidden} x {rows} x {}", dtype.name(), 4 * hidden);
    Ok(Rate { name, seconds, work })
}

/// Causal attention forward (2 products of half of the scores), and backward (5 of them).
fn attention(device: &Device, sizes: Sizes, dtype: DType) -> Result<[Rate; 2], DeviceError> {
    let Sizes { rows, seq, heads, calls, .. } = sizes;
    let (batch, hidden) = (rows / seq, hidden(sizes));
    let numbers = |dims: [usize; 3], seed| random(device, dtype, &dims, seed);
    let qkv = numbers([batch, seq, 3 * hidden], 1);
    let [mut out, dout] = [2, 3].map(|seed| numbers([batch, seq, hidden], seed));
    let mut dqkv = numbers([batch, seq, 3 * hidden], 4);
    let mut lse: Tensor = device.alloc(DType::F32, [batch, heads, seq], Category::Workspace, "lse");
    let heads = Heads::equal(heads, hidden / heads, true);
    let forward = seconds(device, calls, || {
        device.attention(qkv.view(), heads, None, None, out.view_mut(), lse.view_mut());
    })?;
    let backward = seconds(device, calls, || {
        let saved = [out.view(), lse.view(), dout.view()];
        device.attention_backward(qkv.view(), saved, heads, None, None, dqkv.view_mut());
    })?;
    let product = (batch * seq * seq * hidden) as f64;
    let rate = |name: &str, seconds, products: f64| Rate {
        name: format!("{name} {} {batch} x {seq} x {hidden}", dtype.name()),
        seconds,
        work: Work::Flops(dtype, products * product),
    };
    Ok([rate("attention", forward, 2.0), rate("attention backward", backward, 5.0)])
}

fn layer_norm(device: &Device, sizes: Sizes, dtype: DType) -> Result<Rate, DeviceError> {
    let (rows, hidden, calls) = (sizes.rows, hidden(sizes), sizes.calls);
    let x = random(device, dtype, &[rows, hidden], 1);
    let [gamma, beta] = [2, 3].map(|seed| random(device, dtype, &[hidden], seed));
    let mut y = random(device, dtype, &[rows, hidden], 4);
    let [mut mean, mut rstd] = [5, 6].map(|seed| random(device, DType::F32, &[rows], seed));
    let seconds = seconds(device, calls, || {
        let statistics = (Some(mean.view_mut()), rstd.view_mut());
        device.layer_norm(x.view(), (gamma.view(), Some(beta.view())), 1e-5, y.view_mut(), statistics);
    })?;
    let work = Work::Bytes((2 * rows * hidden * dtype.bytes()) as f64);
    Ok(Rate { name: format!("layer norm {} {rows} x {hidden}", dtype.name()), seconds, work })
}

/// Queries and keys of all heads, beside values.
fn rotary(device: &Device, sizes: Sizes, dtype: DType) -> Result<Rate, DeviceError> {
    let Sizes { rows, seq, heads, calls, .. } = sizes;
    let mut qkv = random(device, dtype, &[rows / seq, seq, 3 * hidden(sizes)], 1);
    let rotary = Rotary::new(64, 64, 1e4, RotaryScaling::Default);
    let seconds =
        seconds(device, calls, || device.rotary(qkv.view_mut(), &rotary, 2 * heads, RowPositions::From(0)))?;
    let work = Work::Bytes((4 * rows * hidden(sizes) * dtype.bytes()) as f64);
    Ok(Rate { name: format!("rotary {} {rows} x {}", dtype.name(), 2 * hidden(sizes)), seconds, work })
}

/// SiLU, forward and backward.
fn gated(device: &Device, sizes: Sizes, dtype: DType) -> Result<[Rate; 2], DeviceError> {
    let (rows, columns, calls) = (sizes.rows, 4 * hidden(sizes), sizes.calls);
    let mut x = random(device, dtype, &[rows, 2 * columns], 1);
    let [mut y, dy] = [2, 3].map(|seed| random(device, dtype, &[rows, columns], seed));
    let forward = seconds(device, calls, || device.gated(x.view(), Gate::Silu, y.view_mut()))?;
    let backward = seconds(device, calls, || device.gated_backward(x.view_mut(), Gate::Silu, dy.view()))?;
    let rate = |name: &str, seconds, tensors: usize| Rate {
        name: format!("{name} {} {rows} x {columns}", dtype.name()),
        seconds,
        work: Work::Bytes((tensors * rows * columns * dtype.bytes()) as f64),
    };
    Ok([rate("gated", forward, 3), rate("gated backward", backward, 5)])
}

fn adamw(device: &Device, sizes: Sizes) -> Result<Rate, DeviceError> {
    let (n, calls) = (sizes.parameters, sizes.calls);
    let [mut p, g, mut m, mut v] = [1, 2, 3, 4].map(|seed| random(device, DType::F32, &[n], seed));
    let scale = super::bench::tensor(device, DType::F32, &[1], &[0.0]);
    let mut copy = random(device, DType::BF16, &[n], 5);
    device.fill(v.view_mut(), 0.0);
    let seconds = seconds(device, calls, || {
        device.run(AdamWUpdate {
            step: super::elementwise::ADAMW,
            p: p.view_mut(),
            g: g.view(),
            moments: [m.view_mut(), v.view_mut()],
            gradient_scale: scale.view(),
            rounded: Some(copy.view_mut()),
        });
    })?;
    // Reads parameter, gradient and moments; writes parameter, moments and the rounded copy.
    Ok(Rate { name: format!("adamw of {n}"), seconds, work: Work::Bytes((30 * n) as f64) })
}

fn copy(device: &Device, sizes: Sizes) -> Result<Rate, DeviceError> {
    let (n, calls) = (2 * sizes.parameters, sizes.calls);
    let x = random(device, DType::F32, &[n], 1);
    let mut y = random(device, DType::F32, &[n], 2);
    let seconds = seconds(device, calls, || device.run(Copy { from: x.view(), to: y.view_mut() }))?;
    Ok(Rate { name: format!("copy of {n} f32"), seconds, work: Work::Bytes((8 * n) as f64) })
}
