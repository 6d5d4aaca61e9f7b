//! Dropout in layers: nothing where nothing is dropped, and numbers that depend on seed, step, name and place in
//! the global batch alone.

use std::collections::HashSet;

use crate::rig::{DRAW, HEADS, HIDDEN, SEQ, linear, norm, numbers, plain, trace};
use phalanx_layers::{
    Activation, AnyLayer, Call, Context, Draw, Dropped, Fork, Layer, Linear, ParameterSpec, Result, Saved,
    Sequence,
};

#[test]
fn nothing_is_computed_or_taken_where_nothing_is_dropped() {
    let bare = |layer: Linear| Sequence::new(vec![Box::new(norm("a")), Box::new(layer)]);
    let dropped = |layer: Linear, p| {
        let layer = Dropped { layer: Box::new(layer), p, name: "drop".into() };
        Sequence::new(vec![Box::new(norm("a")), Box::new(layer)])
    };
    let make = || linear("b", HIDDEN, HIDDEN);
    let expected = trace(&Fork::residual(bare(make())), None);
    for (what, layer, draw) in
        [("p = 0", dropped(make(), 0.0), Some(DRAW)), ("outside of training", dropped(make(), 0.1), None)]
    {
        assert_eq!(trace(&Fork::residual(layer), draw).phases, expected.phases, "{what}");
    }
    assert_eq!(trace(&plain((0.1, 0.1)), None).phases, trace(&plain((0.0, 0.0)), Some(DRAW)).phases);
}

#[test]
fn draws_differ_by_seed_step_and_layer_and_count_in_the_global_batch() {
    let mut keys = HashSet::new();
    for seed in 0..4 {
        for step in 1..20 {
            for name in ["transformer.drop", "transformer.h.0.mlp.dropout", "transformer.h.1.mlp.dropout"] {
                let draw = Draw { seed, step, first_sample: 0 };
                assert!(keys.insert(draw.dropout(0.1, name, 1).key), "{seed}, {step}, {name}");
            }
        }
    }
    let probabilities = HEADS * SEQ * SEQ;
    let later = Draw { first_sample: 6, ..DRAW };
    let (first, second) = (DRAW.dropout(0.5, "a", probabilities), later.dropout(0.5, "a", probabilities));
    assert_eq!((first.p, first.key), (second.p, second.key));
    assert_eq!((first.first, second.first), (0, 6 * probabilities as u64));
}

/// `y = x`, so that the dropout is visible.
struct Through;

impl Layer for Through {
    type Own = ();

    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    fn forward(&self, _: &Context, call: Call) -> Result<(Activation, Saved<()>)> {
        assert!(call.sum.is_none());
        Ok((call.x, Saved::new(())))
    }

    fn backward(&self, _: &Context, _: Saved<()>, call: Call) -> Result<Option<Activation>> {
        Ok(Some(call.x))
    }
}

#[test]
fn backward_drops_what_forward_dropped() {
    let layer = Dropped { layer: Box::new(Through), p: 0.5, name: "drop".into() };
    let (batch, elements) = (20, 20 * SEQ * HIDDEN);
    let fallen = |bits: &[u32]| bits.iter().map(|b| f32::from_bits(*b) == 0.0).collect::<Vec<_>>();
    let first = numbers(&layer, batch, Some(DRAW));
    assert_eq!(fallen(&first.y), fallen(&first.dx));
    let second = numbers(&layer, batch, Some(Draw { step: 2, ..DRAW }));
    assert_ne!(fallen(&first.y), fallen(&second.y));
    // Binomial: standard deviation sqrt(n) / 2; five of them.
    let count = fallen(&first.y).iter().filter(|f| **f).count() as f64;
    assert!((count - elements as f64 / 2.0).abs() < 2.5 * (elements as f64).sqrt(), "{count} of {elements}");
}

#[test]
fn a_cut_batch_drops_the_same_elements() {
    let p = 0.4;
    let layers: [(&str, Box<dyn AnyLayer>); 2] = [
        ("alone", Box::new(Dropped { layer: Box::new(Through), p, name: "drop".into() })),
        ("block", Box::new(plain((p, p)))),
    ];
    for (name, layer) in layers {
        let whole = numbers(&*layer, 4, Some(DRAW));
        let (mut y, mut dx) = (Vec::new(), Vec::new());
        for (first_sample, batch) in [(0, 1), (1, 2), (3, 1)] {
            let part = numbers(&*layer, batch, Some(Draw { first_sample, ..DRAW }));
            y.extend(part.y);
            dx.extend(part.dx);
        }
        assert_eq!((y, dx), (whole.y, whole.dx), "{name}");
    }
}
