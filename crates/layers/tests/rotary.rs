//! Blocks with rotary positions and a gate: what they keep, and the same bits with cached keys and values.

use std::sync::Arc;

use phalanx_cpu::Cpu;
use phalanx_layers::{AnyLayer, Call, Context, KeyValueCache, Parameter, Parameters};
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Arena, DType, Device, Tensor};

use crate::rig::{HIDDEN, SEQ, bits_of, decoder, filled_as, kernels, left, trace};

/// Bytes of a `[1, seq, hidden]`.
const H: u64 = (4 * SEQ * HIDDEN) as u64;

#[test]
fn queries_and_keys_turn_in_place_and_a_gate_is_computed_again() {
    let few = [
        ("attention.log_sum_exp", 2 * (4 * SEQ) as u64),
        ("linear.y", H),
        ("linear.y", H),
        ("linear.y", 3 * H),
        ("linear.y", 8 * H),
    ];
    let mut all = [&few[..], &[("attention.out", H), ("gated.y", 4 * H)]].concat();
    all.sort_unstable();
    assert_eq!(left(&trace(&decoder(false), None), PhaseName::Forward), all);
    assert_eq!(left(&trace(&decoder(true), None), PhaseName::Forward), few);
    let work = |rebuilds, phase| kernels(&trace(&decoder(rebuilds), None), phase);
    let count = |kernels: &[&str], name| kernels.iter().filter(|kernel| **kernel == name).count();
    let forward = work(false, PhaseName::Forward);
    assert_eq!(["rotary", "gated", "copy"].map(|name| count(&forward, name)), [1, 1, 0]);
    let backward = work(false, PhaseName::Backward);
    assert_eq!(["gated_backward", "rotary_backward", "copy"].map(|name| count(&backward, name)), [1, 1, 0]);
    let again = work(true, PhaseName::Backward);
    assert_eq!(["gated", "attention", "rotary", "copy"].map(|name| count(&again, name)), [1, 1, 0, 0]);
}

/// A cache has turned keys: rows in pieces, each from its own position, have the bits of all rows at once.
#[test]
fn rows_in_pieces_over_a_cache_have_the_bits_of_all_rows() {
    let device = Device::new(Cpu::new(2), Arena::heap());
    let layer = decoder(false);
    let specs = AnyLayer::parameters(&layer);
    let fill = |name: &str, shape: &[usize]| filled_as(&device, DType::F32, name, 0, shape.into());
    let values: Vec<Tensor> = specs.iter().map(|spec| fill(&spec.name, &spec.shape)).collect();
    let own = Parameter::read_all(&values);
    let x = fill("x", &[1, SEQ, HIDDEN]);
    let part = |first: usize, rows: usize| {
        let mut part = fill("x", &[1, rows, HIDDEN]);
        device.copy(x.view().range(first * HIDDEN..(first + rows) * HIDDEN), part.view_mut());
        Call { input_wanted: false, ..Call::new(Parameters::new(&own), Arc::new(part)) }
    };
    let whole = Context { keep: false, ..Context::new(&device, DType::F32, [1, SEQ]) };
    let (y, _) = AnyLayer::forward(&layer, &whole, part(0, SEQ)).unwrap();
    let y = bits_of(&device, &y);
    let last = AnyLayer::last_row(&layer, &whole, part(0, SEQ)).unwrap();
    assert_eq!(bits_of(&device, &last), y[(SEQ - 1) * HIDDEN..], "the last row");
    let cache = KeyValueCache::new(&device, SEQ);
    for (first, rows) in [(0, 3), (3, 1), (4, 1)] {
        let cx = Context { rows: whole.rows.from(first), cache: Some(&cache), ..whole };
        let (own, _) = AnyLayer::forward(&layer, &cx, part(first, rows)).unwrap();
        assert_eq!(bits_of(&device, &own), y[first * HIDDEN..(first + rows) * HIDDEN], "rows from {first}");
    }
}
