//! Operations that callers bring: their results are placed by the letters of their operands.

use phalanx_plan::trace::Placement::{Partial, Replicated, Shard};
use phalanx_tensor::OwnOperation;

use super::{device, found, of, placed, tensor};

#[test]
fn results_inherit_placements_by_the_letters_of_the_operands() {
    for (x_is, w_is, y_is, dw_is, words) in [
        (Replicated, Replicated, Replicated, Replicated, &[][..]),
        // Rows are cut: what sums over them is a partial sum.
        (Shard(0), Replicated, Shard(0), Partial, &[]),
        (Shard(1), Shard(0), Shard(1), Shard(0), &[]),
        (Partial, Replicated, Replicated, Replicated, &["`x`", "scale"]),
    ] {
        let device = device();
        let x = placed(&device, "x", &[4, 8], x_is);
        let w = placed(&device, "w", &[8], w_is);
        let (mut y, mut dw) = (tensor(&device, "y", &[4, 8]), tensor(&device, "dw", &[8]));
        let call = OwnOperation::new("scale").read("x", "rh", x.view()).read("w", "h", w.view());
        let call = call.write("y", "rh", y.view_mut()).gradient("dw", "h", (dw.view_mut(), false));
        call.run(&device, |[_, _], [_, _]| panic!("a dry run runs no kernel"));
        let row = format!("x {x_is:?}, w {w_is:?}");
        assert_eq!((of(&device, &y), of(&device, &dw)), (y_is, dw_is), "{row}");
        found(&device, words, &row);
    }
}

#[test]
fn a_dimension_that_the_kernel_needs_whole_may_not_be_sharded() {
    let device = device();
    let x = placed(&device, "x", &[4, 8], Shard(1));
    let mut y = tensor(&device, "y", &[4, 8]);
    let call = OwnOperation::new("softmax").read("x", "rh", x.view()).write("y", "rh", y.view_mut());
    call.whole('h', "it sums over rows").run(&device, |[_], [_]| {});
    found(&device, &["needs it whole", "it sums over rows", "all_gather"], "softmax");
}

#[test]
fn updates_keep_the_placement_of_the_parameters() {
    let device = device();
    let mut p = placed(&device, "p", &[8], Shard(0));
    let g = placed(&device, "g", &[8], Shard(0));
    OwnOperation::update("own", p.view_mut(), g.view()).run(&device, |[_], [_]| {});
    assert_eq!(of(&device, &p), Shard(0));
    found(&device, &[], "update");
    let g = placed(&device, "g", &[8], Partial);
    OwnOperation::update("own", p.view_mut(), g.view()).run(&device, |[_], [_]| {});
    found(&device, &["`gradient`", "all_reduce or reduce_scatter"], "update with a partial sum");
}
