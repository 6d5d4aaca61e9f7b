//! Contents of faults: names, phases, the piece covered, and the number kept.

use phalanx_plan::trace::Placement::{Partial, Replicated, Shard};
use phalanx_plan::trace::{Axis, PhaseName, Placements};
use phalanx_tensor::{Device, Gelu};

use super::{AXIS, along, device, faults, found, of, placed, tensor};

#[test]
fn what_is_expected_is_named() {
    let device = device();
    let x = placed(&device, "x", &[4, 6], Partial);
    device.expect_placement(x.view(), || "h.0.out".to_string(), along(Partial));
    found(&device, &[], "as expected");
    for (found_as, expected, words) in [
        (Partial, Replicated, "`h.0.out` is a partial sum; expected replicated: an all_reduce over `tensor`"),
        (Partial, Shard(0), "a reduce_scatter over `tensor` is missing"),
        (Shard(0), Replicated, "an all_gather over `tensor` is missing"),
        (Shard(0), Shard(1), "is sharded in dimension 0; expected sharded in dimension 1"),
        (Replicated, Partial, "a reduction over `tensor` is too much"),
        (Replicated, Shard(0), "never cut"),
    ] {
        device.place(x.view(), along(found_as));
        device.expect_placement(x.view(), || "h.0.out".to_string(), along(expected));
        found(&device, &[words], "expected");
    }
}

/// Pieces have the names that they were given, others those of their allocations within the scopes, and the
/// phase is known; memory that is taken again starts unnamed.
#[test]
fn faults_name_the_tensor_where_it_is() {
    let device = device();
    let chunk = tensor(&device, "chunk", &[20]);
    device.place_named(chunk.view().range(10..20), along(Partial), || "h.3.mlp.bias".to_string());
    let mut y = tensor(&device, "y", &[10]);
    device.phase(PhaseName::Step, || {
        device.gelu(chunk.view().range(10..20), Gelu::Tanh, y.view_mut());
        let x = placed(&device, "x", &[10], Partial);
        let _block = device.scope("h.3");
        let inner = device.scope("mlp");
        device.gelu(x.view(), Gelu::Tanh, y.view_mut());
        drop(inner);
        device.gelu(x.view(), Gelu::Tanh, y.view_mut());
    });
    drop(chunk);
    let again = tensor(&device, "again", &[20]);
    assert_eq!(of(&device, &again), Replicated);
    let faults = faults(&device);
    let names: Vec<_> = faults.iter().map(|f| (f.phase.unwrap().name(), f.tensor.as_str())).collect();
    assert_eq!(names, [("step", "h.3.mlp.bias"), ("step", "h.3.mlp.x"), ("step", "h.3.x")]);
}

#[test]
fn a_mark_covers_its_piece_and_no_more() {
    let device = device();
    let x = tensor(&device, "x", &[100]);
    let read = |device: &Device| {
        let at = |element: usize| device.placements(x.view().range(element..100)).get(AXIS);
        [0, 19, 20, 39, 40, 59, 60, 99].map(at)
    };
    device.place(x.view().range(20..60), along(Partial));
    let (r, p, s) = (Replicated, Partial, Shard(0));
    assert_eq!(read(&device), [r, r, p, p, p, p, r, r]);
    device.place(x.view().range(40..100), along(s));
    assert_eq!(read(&device), [r, r, p, p, s, s, s, s]);
    device.place(x.view().range(40..60), along(p));
    assert_eq!(read(&device), [r, r, p, p, p, p, s, s]);
    device.place(x.view().range(10..70), along(r));
    assert_eq!(read(&device), [r, r, r, r, r, r, r, s]);
    device.place(x.view(), along(p));
    assert_eq!(read(&device), [p; 8]);
}

#[test]
fn only_the_first_faults_are_kept() {
    let device = device();
    let x = placed(&device, "x", &[10], Partial);
    let mut y = tensor(&device, "y", &[10]);
    (0..50).for_each(|_| device.gelu(x.view(), Gelu::Tanh, y.view_mut()));
    assert_eq!(faults(&device).len(), 20);
}

/// Without placements there are no faults, nor along an axis without any.
#[test]
fn what_nobody_placed_is_not_checked() {
    let device = Device::meta(1);
    let x = tensor(&device, "x", &[10]);
    device.place(x.view(), Placements::REPLICATED);
    assert!(!device.recorder().unwrap().is_placing());
    device.place(x.view(), along(Partial));
    let recorder = device.recorder().unwrap();
    assert_eq!(Axis::ALL.map(|axis| recorder.is_checked(axis)), [false, false, true]);
}
