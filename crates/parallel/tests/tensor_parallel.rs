//! Layers of which each rank has a part are the whole layers: outputs, derivatives of inputs and all gradients, with
//! rows on all ranks or shared (sequence parallelism), backward in one and in two parts.

use crate::rig;
use crate::rig::{
    AXES, Build, DRAW, HEADS, HIDDEN, Numbers, PLAIN, ROWS, SEQ, Setting, TestRank, allowed, block, distance,
    joined, linear, on_ranks, parts, paths, run, same_within, whole,
};
use std::sync::Arc;

use phalanx_layers::{
    AdapterInit, AnyLayer, Attention, Fork, Gated, Init, Linear, Lora, Output, Pieces, RotaryPositions,
    Sequence,
};
use phalanx_parallel::TensorParallel;
use phalanx_tensor::{DType, Gate, Gelu, Heads, Layout, Rotary, RotaryScaling};
use phalanx_testing::planted::{FaultKind, PlantedFault, sites};

const LAYOUTS: [Layout; 2] = [Layout::InOut, Layout::OutIn];

/// Sums on the way to a gradient, the longest way there is, of both linear layers of a path: forward, backward,
/// gradients over the rows of both micro-batches, and over at most 4 ranks each.
const LINEAR: [usize; 6] = [HIDDEN, 4 * HIDDEN, HIDDEN, 4 * HIDDEN, 2 * ROWS, 4];

/// Those of a norm, forward and backward, and of attention: scores over a head, a softmax and a sum over positions,
/// and the three of its backward.
const NORM: [usize; 2] = [HIDDEN, 2 * HIDDEN];
const ATTENTION: [usize; 6] = [HIDDEN, SEQ, SEQ, HIDDEN, SEQ, SEQ];

/// Those of an adapter of each of the two linear layers, there and back.
const ADAPTER: [usize; 6] = [HIDDEN, 3, 4 * HIDDEN, 3, 2 * ROWS, 4];

/// The same with parameters by name: the bias that is added to a sum lies behind the adapters, and before them on one rank.
fn by_name(numbers: Numbers) -> Numbers {
    let Numbers { y, dx, gradients, specs } = numbers;
    let mut both: Vec<_> = specs.into_iter().zip(gradients).collect();
    both.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    let (specs, gradients) = both.into_iter().unzip();
    Numbers { y, dx, gradients, specs }
}

/// The parts of `build` on all axes against the whole, with residuals and without, and both ways of backward, which
/// agree to the bit on each rank.
fn check(name: &str, build: &Build, sums: &[usize]) {
    for residual in [false, true] {
        let setting = Setting { residual, ..PLAIN };
        let expected = by_name(whole(build, setting));
        for axis in AXES {
            let what = format!("{name}, (ranks, sequence) {axis:?}, residual {residual}");
            let got = parts(build, axis, setting);
            same_within(&by_name(joined(&got, axis.1)), &expected, allowed(sums), &what);
            assert!(parts(build, axis, Setting { split: true, ..setting }) == got, "{what}, in two parts");
        }
    }
}

#[test]
fn columns_then_rows() {
    for layout in LAYOUTS {
        for bias in [false, true] {
            let build = move |tensor: &TensorParallel| -> Box<dyn AnyLayer> {
                let up = Linear { bias, ..linear("up", HIDDEN, 4 * HIDDEN, layout) };
                let down = Linear { bias, ..linear("down", 4 * HIDDEN, HIDDEN, layout) };
                Box::new(Sequence::new(vec![tensor.column(up).unwrap(), tensor.row(down).unwrap()]))
            };
            check(&format!("column, row, {layout:?}, bias {bias}"), &build, &LINEAR);
        }
    }
}

#[test]
fn a_path_of_norm_columns_with_gelu_and_rows() {
    for layout in LAYOUTS {
        let build = move |tensor: &TensorParallel| -> Box<dyn AnyLayer> {
            let [_, mlp] = paths(tensor, layout, (0.0, 0.0));
            Box::new(Sequence::new(mlp))
        };
        check(&format!("mlp, {layout:?}"), &build, &[&LINEAR[..], &NORM].concat());
    }
}

/// Each rank has the same columns of gate and up.
#[test]
fn gate_and_up_then_rows() {
    for gate in [Gate::Silu, Gate::Gelu(Gelu::Tanh)] {
        let build = move |tensor: &TensorParallel| -> Box<dyn AnyLayer> {
            let outputs = ["gate", "up"].map(|name| Output::new(name, 2 * HIDDEN));
            let up = Linear { bias: false, ..Linear::new(outputs, HIDDEN, Init::Normal(1.0)) };
            let down = linear("down", 2 * HIDDEN, HIDDEN, Layout::OutIn);
            let layers =
                vec![tensor.column(up).unwrap(), Box::new(Gated { gate }) as _, tensor.row(down).unwrap()];
            Box::new(Sequence::new(layers))
        };
        check(&format!("gate and up, row, {gate:?}"), &build, &LINEAR);
    }
}

#[test]
fn a_path_of_attention() {
    for layout in LAYOUTS {
        let build = move |tensor: &TensorParallel| -> Box<dyn AnyLayer> {
            let [attention, _] = paths(tensor, layout, (0.0, 0.0));
            Box::new(Fork::residual(Sequence::new(attention)))
        };
        check(&format!("attention, {layout:?}"), &build, &[&LINEAR[..], &NORM, &ATTENTION].concat());
    }
}

#[test]
fn blocks() {
    let build = move |tensor: &TensorParallel| -> Box<dyn AnyLayer> {
        Box::new(Sequence::new(vec![
            Box::new(block(tensor, (0.0, 0.0))),
            Box::new(block(tensor, (0.0, 0.0))),
            tensor.rows(rig::norm("ln_f")),
        ]))
    };
    // Parameters of both blocks have the same names and values: it is the same block twice. A block has two paths.
    let path = [&LINEAR[..], &NORM, &ATTENTION].concat();
    check("two blocks", &build, &path.repeat(4));
}

/// Adapters of all linear layers: of some outputs, of some inputs, with GELU behind them. One of their two matrices is cut, and of the other
/// each rank has a term of the gradient.
#[test]
fn layers_with_adapters() {
    for (layout, magnitudes) in LAYOUTS.into_iter().flat_map(|layout| [(layout, false), (layout, true)]) {
        let adapters = move || adapters(magnitudes);
        let pair = move |tensor: &TensorParallel| -> Box<dyn AnyLayer> {
            let tensor = tensor.adapting(adapters());
            let (up, down) =
                (linear("up", HIDDEN, 4 * HIDDEN, layout), linear("down", 4 * HIDDEN, HIDDEN, layout));
            Box::new(Sequence::new(vec![tensor.column(up).unwrap(), tensor.row(down).unwrap()]))
        };
        check(
            &format!("column, row with adapters, {layout:?}, {magnitudes}"),
            &pair,
            &[&LINEAR[..], &ADAPTER].concat(),
        );
        let block = move |tensor: &TensorParallel| -> Box<dyn AnyLayer> {
            let [attention, mlp] = paths(&tensor.adapting(adapters()), layout, (0.0, 0.0));
            let paths = [attention, mlp].map(|path| Box::new(Fork::residual(Sequence::new(path))) as _);
            Box::new(Sequence::new(paths.into()))
        };
        let path = [&LINEAR[..], &ADAPTER, &NORM, &ATTENTION].concat();
        check(&format!("block with adapters, {layout:?}, {magnitudes}"), &block, &path.repeat(2));
    }
}

fn adapters(magnitudes: bool) -> Arc<Lora> {
    let targets = Arc::new(|_: &str| true);
    Arc::new(Lora {
        width: 3,
        scale: 0.5,
        dropout: 0.0,
        init: AdapterInit::Uniform,
        magnitudes,
        added: 0,
        targets,
    })
}

/// Each rank drops, of its columns of a layer's input, what one rank drops of them.
#[test]
fn adapters_drop_the_elements_of_the_whole_input() {
    let build = move |tensor: &TensorParallel| -> Box<dyn AnyLayer> {
        let lora = Lora { dropout: 0.3, ..Lora::clone(&adapters(true)) };
        let tensor = tensor.adapting(Arc::new(lora));
        let [up, down] = [("up", HIDDEN, 4 * HIDDEN), ("down", 4 * HIDDEN, HIDDEN)]
            .map(|(n, i, o)| linear(n, i, o, Layout::OutIn));
        Box::new(Sequence::new(vec![tensor.column(up).unwrap(), tensor.row(down).unwrap()]))
    };
    let setting = Setting { draw: Some(DRAW), ..PLAIN };
    let expected = by_name(whole(&build, setting));
    for axis in AXES {
        let got = by_name(joined(&parts(&build, axis, setting), axis.1));
        same_within(&got, &expected, allowed(&[&LINEAR[..], &ADAPTER].concat()), &format!("{axis:?}"));
    }
}

/// The tolerances find every collective that is left out, done twice, or done elsewhere.
#[test]
fn a_planted_fault_is_far_outside_of_what_is_allowed() {
    let build = |tensor: &TensorParallel| -> Box<dyn AnyLayer> { Box::new(block(tensor, (0.0, 0.0))) };
    let run_with = |axis: (usize, bool), fault| {
        on_ranks(axis.0, |group| {
            TestRank::with_fault(group, axis.1, fault, |place| run(place, &*build(place.tensor), PLAIN))
        })
    };
    let path = [&LINEAR[..], &NORM, &ATTENTION].concat();
    for axis in AXES {
        let right = parts(&build, axis, PLAIN);
        let gathers = [sites::COLUMN_X, sites::COLUMN_X_AGAIN, sites::ROW_DY];
        let sums = [sites::ROW_Y, sites::COLUMN_DX];
        for site in sums.into_iter().chain(gathers.into_iter().filter(|_| axis.1)) {
            let kinds = [FaultKind::Dropped, FaultKind::Doubled, FaultKind::OtherGroup];
            let summed = |kind: &FaultKind| *kind != FaultKind::OtherGroup || sums.contains(&site);
            for kind in kinds.into_iter().filter(summed) {
                let got = run_with(axis, PlantedFault { site, kind });
                let worst =
                    got.iter().zip(&right).map(|(got, right)| distance(got, right)).fold(0.0, f32::max);
                let allowed = allowed(&path.repeat(2));
                assert!(
                    worst > 20.0 * allowed,
                    "{site:?} {kind:?} on {axis:?}: off by {worst:e} of {allowed:e}"
                );
            }
        }
    }
}

/// The two parts of backward give the same bits in 16-bit types too.
#[test]
fn backward_in_two_parts_below_f32() {
    let build = move |tensor: &TensorParallel| -> Box<dyn AnyLayer> { Box::new(block(tensor, (0.2, 0.3))) };
    for compute in [DType::BF16, DType::F16] {
        for axis in AXES {
            let setting = Setting { compute, draw: Some(DRAW), ..PLAIN };
            let got = parts(&build, axis, setting);
            let split = parts(&build, axis, Setting { split: true, ..setting });
            assert!(split == got, "{compute:?}, {axis:?}");
        }
    }
}

/// Queries, keys and values as results of one layer, turned by their positions, with fewer heads of keys and values than of queries, down to one that all ranks
/// have: each then has a term of its gradient.
#[test]
fn grouped_attention_with_copies_of_keys_and_values() {
    for (kv_heads, has_adapters) in [(HEADS, false), (2, false), (1, false), (2, true), (1, true)] {
        let build = move |tensor: &TensorParallel| -> Box<dyn AnyLayer> {
            let adapted =
                if has_adapters { tensor.adapting(adapters(kv_heads == 2)) } else { tensor.clone() };
            let tensor = &adapted;
            let size = HIDDEN / HEADS;
            let result = |name, heads| {
                let pieces = Pieces { repeat: heads < HEADS, ..Pieces::of(heads) };
                Output { name: String::from(name), width: heads * size, pieces }
            };
            let outputs = [result("q", HEADS), result("k", kv_heads), result("v", kv_heads)];
            let qkv = Linear { bias: true, ..Linear::new(outputs, HIDDEN, Init::Normal(1.0)) };
            let heads = Heads { kv_heads, ..Heads::equal(HEADS, size, true) };
            let name = "attn".to_string();
            let attention = Attention { heads, dropout: 0.0, name, first_head: 0, all_heads: HEADS };
            let attention = tensor.attention(attention).unwrap();
            let rotary = Rotary::new(size, size, 1e4, RotaryScaling::Default);
            let out = linear("out", HIDDEN, HIDDEN, Layout::OutIn);
            let layers = vec![
                tensor.column(qkv).unwrap(),
                Box::new(RotaryPositions { rotary, beyond: None, heads: attention.heads }),
                Box::new(attention),
                tensor.row(out).unwrap(),
            ];
            Box::new(Sequence::new(layers))
        };
        let expected = by_name(whole(&build, PLAIN));
        for axis in AXES
            .into_iter()
            .filter(|(ranks, _)| kv_heads.is_multiple_of(*ranks) || ranks.is_multiple_of(kv_heads))
        {
            let what =
                format!("{kv_heads} heads of keys and values, {has_adapters}, (ranks, sequence) {axis:?}");
            let got = parts(&build, axis, PLAIN);
            same_within(
                &by_name(joined(&got, axis.1)),
                &expected,
                allowed(&[&LINEAR[..], &ATTENTION, &ADAPTER[..if has_adapters { 6 } else { 0 }]].concat()),
                &what,
            );
            assert!(parts(&build, axis, Setting { split: true, ..PLAIN }) == got, "{what}, in two parts");
        }
    }
}

/// A rank has the heads of keys and values that its heads of queries read; where there are fewer of them than ranks, ranks have copies.
#[test]
fn heads_of_keys_and_values_are_divided_like_those_of_queries() {
    let part = |group, kv_heads| {
        let heads = Heads { kv_heads, ..Heads::equal(8, 4, true) };
        let name = "attn".to_string();
        let whole = Attention { heads, dropout: 0.0, name, first_head: 0, all_heads: 8 };
        let part = TensorParallel::new(group, false).attention(whole).map_err(|error| error.to_string());
        part.map(|part| (part.heads, part.first_head, part.all_heads))
    };
    let heads = Heads { kv_heads: 1, ..Heads::equal(4, 4, true) };
    for kv_heads in [1, 2] {
        assert_eq!(on_ranks(2, |group| part(group, kv_heads)), [Ok((heads, 0, 8)), Ok((heads, 4, 8))]);
    }
    let words = "heads of keys and values: 4 ranks cannot share 3 pieces evenly; expected a number of ranks that divides 3";
    assert_eq!(on_ranks(4, |group| part(group, 3)), [(); 4].map(|()| Err(words.to_string())));
    let words =
        "heads of attention: 3 ranks cannot share 8 pieces evenly; expected a number of ranks that divides 8";
    assert_eq!(on_ranks(3, |group| part(group, 8)), [(); 3].map(|()| Err(words.to_string())));
}
