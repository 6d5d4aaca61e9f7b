//! Placements of the results of each operation, given those of its operands, and the faults that it reports.
//!
//! Each rule is a table. A row says how the operands are placed along one axis, and then either how the results are
//! placed, which follows from the algebra of sums over parts, or the words of the fault.

mod embedding;
mod faults;
mod layers;
mod linear;
mod own;
mod reductions;
mod vocabulary;

use phalanx_plan::trace::Placement::{self, Shard};
use phalanx_plan::trace::{Axis, Fault, Placements};
use phalanx_tensor::{Category, DType, Device, Tensor};

const AXIS: Axis = Axis::Tensor;

/// A device on which the axis is checked.
fn device() -> Device {
    let device = Device::meta(1);
    let x = tensor(&device, "marked", &[2]);
    device.place(x.view(), along(Shard(0)));
    device
}

fn along(placement: Placement) -> Placements {
    Placements::REPLICATED.with(AXIS, placement)
}

fn tensor(device: &Device, name: &'static str, shape: &[usize]) -> Tensor {
    device.alloc(DType::F32, shape, Category::Activations, name)
}

/// A tensor that is placed along the axis.
fn placed(device: &Device, name: &'static str, shape: &[usize], placement: Placement) -> Tensor {
    let x = tensor(device, name, shape);
    device.place(x.view(), along(placement));
    x
}

/// Tokens or targets that are placed along the axis.
fn ids(device: &Device, name: &'static str, shape: &[usize], placement: Placement) -> Tensor {
    let ids = device.alloc(DType::U32, shape, Category::Activations, name);
    device.place(ids.view(), along(placement));
    ids
}

/// A sum of numbers that is zero.
fn zero_sum(device: &Device) -> Tensor {
    let mut sum = device.alloc(DType::F64, [1], Category::Workspace, "sum");
    device.fill(sum.view_mut(), 0.0);
    sum
}

fn of(device: &Device, x: &Tensor) -> Placement {
    device.placements(x.view()).get(AXIS)
}

fn faults(device: &Device) -> Vec<Fault> {
    device.take_trace(0).faults
}

/// No fault where `words` are empty, else one that has them.
#[track_caller]
fn found(device: &Device, words: &[&str], row: &str) {
    let faults = faults(device);
    assert_eq!(faults.len(), usize::from(!words.is_empty()), "{row}: {faults:?}");
    for word in words {
        let text = faults[0].to_string();
        assert!(text.contains(word), "{row}: {text} lacks {word}");
        assert!(text.contains("tests/placement/") && faults[0].axis == AXIS, "{row}: {text}");
    }
}
