//! Placements of tensors on the mesh, followed through the dry run.
//!
//! On `Meta` the device knows how every piece of memory is placed along the axes of the mesh. Callers place tensors that come
//! from outside ([`Device::place`]: parameters, batches); each operation checks what it reads and marks what it writes
//! (`operations`, by the rules of `rules`), and so does each collective of a recording group. A placement that does not fit is a
//! [`phalanx_plan::trace::Fault`] of the trace. An axis along which nothing was ever placed is not checked, so runs without placements
//! are neither checked nor slowed.

pub(crate) mod marks;
pub(crate) mod rules;
pub(crate) mod table;

use phalanx_plan::trace::{Axis, Placement, Placements, Site};

pub use marks::Scope;
pub use table::Mark;

use crate::device::Device;
use crate::record::Recorder;
use crate::view::View;

impl Device {
    /// Says how `view` is placed; dimensions are those of its shape. Nothing happens off `Meta`. What the host
    /// writes keeps the placement, except a partial sum, which is to be placed after it is written.
    #[track_caller]
    pub fn place(&self, view: View, placements: Placements) {
        self.place_as(view, placements, None);
    }

    /// As [`Device::place`], and gives the piece the name that faults call it by: `h.3.mlp.c_fc.weight`. `name` is
    /// called only where placements are followed.
    #[track_caller]
    pub fn place_named(&self, view: View, placements: Placements, name: impl FnOnce() -> String) {
        if self.follows_placements() {
            self.place_as(view, placements, Some(name()));
        }
    }

    /// Returns whether this device follows how tensors are placed, as a dry run does. Elsewhere the methods that place tensors
    /// and check placements do nothing, and callers may skip the loops that only feed them.
    pub fn follows_placements(&self) -> bool {
        self.recorder().is_some()
    }

    #[track_caller]
    fn place_as(&self, view: View, placements: Placements, name: Option<String>) {
        let Some(recorder) = self.recorder() else { return };
        let dimensions = view.shape().as_slice().len();
        for axis in Axis::ALL {
            if let Placement::Shard(dimension) = placements.get(axis) {
                assert!((dimension as usize) < dimensions, "{placements} of {view:?}");
            }
        }
        recorder.place(view, placements, name);
    }

    /// Records a fault that no operation sees.
    #[track_caller]
    pub fn fault(&self, name: &str, axis: Axis, what: String) {
        if let Some(recorder) = self.recorder() {
            recorder.fault_of(name, axis, what, Site::caller());
        }
    }

    /// Places `view` as `other` is placed, piece by piece; both have equally many elements. Does nothing outside a dry run.
    pub fn place_like(&self, view: View, other: View) {
        if let Some(recorder) = self.placing() {
            recorder.combine_marks(other, view, |mark, _| mark);
        }
    }

    /// Says that products may read `view` where it is a partial sum: being linear in it, they give partial sums, which are summed in
    /// its place. Nothing happens off `Meta`.
    pub fn sum_later(&self, view: View) {
        if let Some(recorder) = self.placing() {
            recorder.combine_marks(view, view, |mark, _| mark.map(Mark::summed_later));
        }
    }

    /// Forgets how `view` is placed: what it held is not read again.
    pub fn forget_placements(&self, view: View) {
        if let Some(recorder) = self.placing() {
            recorder.mark(view, None);
        }
    }

    /// Placement of `view`, in the dimensions of its shape: replicated if no placement was given or computed, and off `Meta`.
    pub fn placements(&self, view: View) -> Placements {
        let mark = self.recorder().and_then(|recorder| recorder.mark_of(view));
        mark.map_or(Placements::REPLICATED, |mark| mark.seen_in(view.shape().as_slice().len()))
    }

    /// Records a fault for every axis along which `view`, by this name, is not placed so. A zero is placed in
    /// every way.
    #[track_caller]
    pub fn expect_placement(&self, view: View, name: impl Fn() -> String, expected: Placements) {
        let Some(recorder) = self.recorder() else { return };
        let mark = recorder.mark_of(view).unwrap_or(Mark::REPLICATED);
        let found = mark.seen_in(view.shape().as_slice().len());
        for axis in Axis::ALL {
            let (found, expected) = (found.get(axis), expected.get(axis));
            if mark.get(axis).is_some() && found != expected {
                let (is, should) = (in_words(found), in_words(expected));
                let what = format!("is {is}; expected {should}: {}", remedy(found, expected, axis));
                recorder.fault_of(&name(), axis, what, Site::caller());
            }
        }
    }

    /// Gives faults the scope `name`, such as `h.3`, until the returned value is dropped. None off `Meta`.
    pub fn scope(&self, name: &str) -> Option<Scope<'_>> {
        self.recorder().map(|recorder| recorder.scope(name))
    }

    /// Recorder of placements, if any tensor was placed.
    pub(crate) fn placing(&self) -> Option<&Recorder> {
        self.recorder().map(|recorder| &**recorder).filter(|recorder| recorder.is_placing())
    }
}

/// Describes a placement: `sharded in dimension 1`.
fn in_words(placement: Placement) -> String {
    match placement {
        Placement::Partial => "a partial sum".to_string(),
        other => other.to_string(),
    }
}

/// Collective that would turn the found placement into the expected one, or that was one too many.
fn remedy(found: Placement, expected: Placement, axis: Axis) -> String {
    use Placement::*;
    let axis = axis.name();
    match (found, expected) {
        (Partial, Replicated) => format!("an all_reduce over `{axis}` is missing"),
        (Partial, Shard(_)) => format!("a reduce_scatter over `{axis}` is missing"),
        (Shard(_), Replicated) => format!("an all_gather over `{axis}` is missing"),
        (Replicated, Shard(_)) => format!("it was never cut over `{axis}`, or gathered once too often"),
        (Replicated, Partial) => format!("a reduction over `{axis}` is too much"),
        (Shard(_), Partial) => {
            format!("a reduce_scatter over `{axis}` is too much, or another operand is cut")
        }
        (Shard(_), Shard(_)) | (Partial, Partial) => format!("another dimension is cut over `{axis}`"),
        (Replicated, Replicated) => "nothing is wrong".to_string(),
    }
}
