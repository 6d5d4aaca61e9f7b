//! Methods of the recorder to read the marks of a dry run and to mark memory.

use phalanx_plan::trace::{Axis, Placements, Site};

use crate::placement::table::Mark;
use crate::record::{Recorder, Tape};
use crate::view::View;

/// The name of what runs, until it is dropped.
#[must_use = "a scope ends when it is dropped"]
pub struct Scope<'a>(&'a Recorder);

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        self.0.locked(|tape| tape.placed.scopes.pop());
    }
}

impl Recorder {
    /// Names in faults lie within `name` from here on, until what is returned is dropped: `h.3`. Names that were
    /// given to [`crate::Device::place_named`] stay as they are.
    pub fn scope(&self, name: &str) -> Scope<'_> {
        self.locked(|tape| tape.placed.scopes.push(name.to_string()));
        Scope(self)
    }

    /// Returns whether placements along the axis are checked: a tensor was placed along it.
    pub fn is_checked(&self, axis: Axis) -> bool {
        self.is_placing() && self.locked(|tape| tape.placed.is_checked(axis))
    }

    /// Mark at the start of a view; None if it was neither placed nor computed.
    pub fn mark_of(&self, view: View) -> Option<Mark> {
        self.locked(|tape| tape.placed.mark_of(view))
    }

    /// Marks of a view, piece by piece.
    pub fn marks_in(&self, view: View) -> Vec<Option<Mark>> {
        let segments = self.locked(|tape| tape.placed.segments(view));
        segments.into_iter().map(|segment| segment.mark).collect()
    }

    /// Marks a view.
    pub fn mark(&self, view: View, mark: Option<Mark>) {
        self.locked(|tape| tape.placed.set(view, mark));
    }

    /// Marks `to` piece by piece by what `f` makes of the marks of `from` and of `to`, which have equally many
    /// elements and may be the same. `f` must not use this recorder.
    pub fn combine_marks(
        &self,
        from: View,
        to: View,
        f: impl FnMut(Option<Mark>, Option<Mark>) -> Option<Mark>,
    ) {
        self.locked(|tape| tape.placed.combine(from, to, f));
    }

    /// Records that `view` is placed wrongly along `axis`; `what` follows its name in a sentence.
    pub fn fault(&self, view: View, axis: Axis, what: String, site: Site) {
        self.locked(|tape| tape.fault(view, axis, what, site));
    }

    pub(crate) fn fault_of(&self, name: &str, axis: Axis, what: String, site: Site) {
        self.locked(|tape| {
            let phase = tape.phase();
            tape.placed.fault_of(phase, name.to_string(), axis, what, site);
        });
    }

    pub(crate) fn place(&self, view: View, placements: Placements, name: Option<String>) {
        self.start_placing(placements);
        self.locked(|tape| tape.placed.place(view, placements, name));
    }
}

impl Tape {
    pub(crate) fn fault(&mut self, view: View, axis: Axis, what: String, site: Site) {
        let phase = self.phase();
        self.placed.fault(phase, view, axis, what, site);
    }
}
