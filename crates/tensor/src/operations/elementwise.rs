//! Elementwise operations: fill, copy (of all, or of some columns), convert, dequantise, add, scale.

use phalanx_plan::trace::{Axis, DType, Placement, Site};

use super::floats;
use crate::device::Device;
use crate::operation::{Describe, Price, operation};
use crate::operations::family::family;
use crate::placement::rules::{Rule, adds, operand, result};
use crate::placement::table::Mark;
use crate::record::Recorder;
use crate::view::{View, ViewMut};

family! {
    /// Operations on each element by itself.
    Elementwise { Fill, Copy, CopyColumns, Convert, Dequantise, Add, Multiply, Scaled, }
}

operation! {
    /// Every element of `x` becomes `value`.
    Fill {
        /// Overwritten.
        x: ViewMut<'a>,
        /// Rounded to the element type.
        value: f32,
    }
}

impl Describe for Fill<'_> {
    const NAME: &'static str = "fill";

    fn check(&self) {}

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes())
    }

    fn marks_zero(&self) -> bool {
        self.value == 0.0
    }

    fn follow(&self, recorder: &Recorder, _: Site) {
        recorder.follow_write(&self.x, self.value == 0.0);
    }
}

operation! {
    /// `to = from`; same element type and number of elements.
    Copy {
        /// Read.
        from: View<'a>,
        /// Overwritten.
        to: ViewMut<'a>,
    }
}

impl Describe for Copy<'_> {
    const NAME: &'static str = "copy";

    fn check(&self) {
        let Copy { from, to } = self;
        assert_eq!((from.dtype(), from.elements()), (to.dtype(), to.elements()), "copy {from:?} to {to:?}");
    }

    fn price(&self) -> Price {
        Price::bytes(2 * self.to.bytes())
    }

    fn follow(&self, recorder: &Recorder, _: Site) {
        recorder.follow_copy(self.from, &self.to);
    }
}

operation! {
    /// Copies columns between matrices: `to[.., to_first + i] = from[.., from_first + i]` for `i` below `columns`. The others of
    /// `to` stay.
    CopyColumns {
        /// `[.., n]`
        from: View<'a>,
        /// The first column that is read.
        from_first: usize,
        /// `[.., m]`
        to: ViewMut<'a>,
        /// The first column that is written.
        to_first: usize,
        /// Number of columns.
        columns: usize,
    }
}

impl CopyColumns<'_> {
    /// Rows, and the columns that are copied.
    pub fn extents(&self) -> [usize; 2] {
        let [rows, _] = self.from.shape().rows_cols();
        [rows, self.columns]
    }
}

impl Describe for CopyColumns<'_> {
    const NAME: &'static str = "copy_columns";

    fn check(&self) {
        let CopyColumns { from, from_first, to, to_first, columns } = self;
        let ([rows, read], [to_rows, written]) = (from.shape().rows_cols(), to.shape().rows_cols());
        assert_eq!((rows, from.dtype()), (to_rows, to.dtype()), "copy columns of {from:?} to {to:?}");
        assert!(
            from_first + columns <= read && to_first + columns <= written,
            "columns from {from_first} of {from:?} to {to_first} of {to:?}"
        );
    }

    fn price(&self) -> Price {
        let [rows, columns] = self.extents();
        Price::bytes(2 * rows * columns * self.to.dtype().bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let rule = Rule {
            op: Self::NAME,
            factors: &[operand("from", "ro", self.from)],
            addends: &[],
            results: &[result("to", "ro", &self.to, false)],
            whole: &[],
        };
        recorder.follow(&rule, site);
    }
}

operation! {
    /// `to = from`, rounded to nearest even; any two of f32, bf16 and f16.
    Convert {
        /// Read.
        from: View<'a>,
        /// Overwritten.
        to: ViewMut<'a>,
    }
}

impl Describe for Convert<'_> {
    const NAME: &'static str = "convert";

    fn check(&self) {
        let Convert { from, to } = self;
        assert_eq!(from.elements(), to.elements(), "convert {from:?} to {to:?}");
        floats([from.dtype(), to.dtype()]);
    }

    fn price(&self) -> Price {
        Price::bytes(self.from.bytes() + self.to.bytes())
    }

    fn follow(&self, recorder: &Recorder, _: Site) {
        recorder.follow_copy(self.from, &self.to);
    }
}

operation! {
    /// `to` = the numbers of the blocks `from` ([`blocks`](crate::blocks)), computed in f32 and rounded to nearest even.
    Dequantise {
        /// Q8_0 or NF4.
        from: View<'a>,
        /// f32, bf16 or f16, overwritten.
        to: ViewMut<'a>,
    }
}

impl Describe for Dequantise<'_> {
    const NAME: &'static str = "dequantise";

    fn check(&self) {
        let Dequantise { from, to } = self;
        assert_eq!(from.elements(), to.elements(), "dequantise {from:?} to {to:?}");
        assert!(from.dtype().is_blocks(), "dequantise {from:?}");
        floats([to.dtype(); 2]);
    }

    fn price(&self) -> Price {
        Price::bytes(self.from.bytes() + self.to.bytes())
    }

    fn follow(&self, recorder: &Recorder, _: Site) {
        recorder.follow_copy(self.from, &self.to);
    }
}

operation! {
    /// `into += from`; any two of f32, bf16 and f16, or both f64.
    Add {
        /// Read.
        from: View<'a>,
        /// Accumulated into.
        into: ViewMut<'a>,
    }
}

impl Describe for Add<'_> {
    const NAME: &'static str = "add";

    fn check(&self) {
        let Add { from, into } = self;
        assert_eq!(from.elements(), into.elements(), "add {from:?} into {into:?}");
        if into.dtype() == DType::F64 {
            assert_eq!(from.dtype(), DType::F64);
        } else {
            floats([from.dtype(), into.dtype()]);
        }
    }

    fn price(&self) -> Price {
        Price::bytes(self.from.bytes() + 2 * self.into.bytes())
    }

    /// Both sides of a sum are placed alike, or one is zero.
    fn follow(&self, recorder: &Recorder, site: Site) {
        let mut fault = None;
        let checked = Axis::ALL.map(|axis| recorder.is_checked(axis));
        recorder.combine_marks(self.from, self.into.as_view(), |from, into| {
            // Of padding nothing is known before or afterwards.
            from.or(into)?;
            let known = |mark: Option<Mark>| mark.unwrap_or(Mark::REPLICATED);
            let (from, into) = (known(from), known(into));
            for axis in Axis::ALL.into_iter().filter(|axis| checked[*axis as usize]) {
                let pair = from.get(axis).zip(into.get(axis)).filter(|_| !from.agrees(into, axis));
                fault = fault.or(pair.map(|(found, expected)| (axis, found, expected)));
            }
            Some(into.or(from))
        });
        if let Some((axis, found, expected)) = fault {
            recorder.fault(self.from, axis, adds("add", "from", found, expected, axis), site);
        }
    }
}

operation! {
    /// `x *= factor`, rounded once; the factor is rounded to the type of x before.
    Multiply {
        /// Any shape.
        x: ViewMut<'a>,
        /// The factor.
        factor: f32,
    }
}

impl Describe for Multiply<'_> {
    const NAME: &'static str = "multiply";

    fn check(&self) {
        assert!(self.factor.is_finite(), "a factor of {}", self.factor);
    }

    fn price(&self) -> Price {
        Price::bytes(2 * self.x.bytes())
    }

    /// A multiple is placed as what it is of.
    fn follow(&self, _: &Recorder, _: Site) {}
}

operation! {
    /// `out[0] = x[0] * scale`, rounded once; x f64, out f32.
    Scaled {
        /// `[1]` f64.
        x: View<'a>,
        /// The factor.
        scale: f32,
        /// `[1]` f32, overwritten.
        out: ViewMut<'a>,
    }
}

impl Describe for Scaled<'_> {
    const NAME: &'static str = "scaled";

    fn check(&self) {
        let Scaled { x, out, .. } = self;
        assert_eq!([x.dtype(), out.dtype()], [DType::F64, DType::F32]);
        assert_eq!([x.elements(), out.elements()], [1, 1]);
    }

    fn price(&self) -> Price {
        Price::bytes(self.x.bytes() + self.out.bytes())
    }

    /// A multiple of a partial sum is a partial sum.
    fn follow(&self, recorder: &Recorder, _: Site) {
        recorder.mark(self.out.as_view(), recorder.mark_of(self.x));
    }
}

impl Recorder {
    /// Marks a tensor that is written from outside: it keeps the placement that the caller gave it, but is no longer a partial
    /// sum; a zero fits every placement.
    pub(crate) fn follow_write(&self, x: &ViewMut, zero: bool) {
        if zero {
            return self.mark(x.as_view(), Some(Mark::ZERO));
        }
        self.combine_marks(x.as_view(), x.as_view(), |mark, _| {
            mark.filter(|mark| {
                Axis::ALL.iter().all(|a| !matches!(mark.get(*a), None | Some(Placement::Partial)))
            })
        });
    }

    /// A copy is placed as what it was copied from.
    pub(crate) fn follow_copy(&self, from: View, to: &ViewMut) {
        self.combine_marks(from, to.as_view(), |from, _| from);
    }
}

impl Device {
    /// `x *= factor`, rounded once; the factor is rounded to the type of x before.
    #[track_caller]
    pub fn multiply(&self, x: ViewMut, factor: f32) {
        self.run(Multiply { x, factor });
    }

    /// Every element of `x` becomes `value`.
    #[track_caller]
    pub fn fill(&self, x: ViewMut, value: f32) {
        self.run(Fill { x, value });
    }

    /// `to = from`; same element type and number of elements.
    #[track_caller]
    pub fn copy(&self, from: View, to: ViewMut) {
        self.run(Copy { from, to });
    }

    /// `to[.., to_first + i] = from[.., from_first + i]` for `i` below `columns`; the other columns of `to` stay.
    #[track_caller]
    pub fn copy_columns(
        &self,
        (from, from_first): (View, usize),
        (to, to_first): (ViewMut, usize),
        columns: usize,
    ) {
        self.run(CopyColumns { from, from_first, to, to_first, columns });
    }

    /// `to = from`, rounded to nearest even; any two of f32, bf16 and f16.
    #[track_caller]
    pub fn convert(&self, from: View, to: ViewMut) {
        self.run(Convert { from, to });
    }

    /// `to` = the numbers of the blocks `from` (Q8_0 or NF4), rounded to nearest even; to f32, bf16 or f16.
    #[track_caller]
    pub fn dequantise(&self, from: View, to: ViewMut) {
        self.run(Dequantise { from, to });
    }

    /// `into += from`; any two of f32, bf16 and f16, or both f64.
    #[track_caller]
    pub fn add(&self, from: View, into: ViewMut) {
        self.run(Add { from, into });
    }

    /// `out[0] = x[0] * scale`, rounded once; x f64, out f32.
    #[track_caller]
    pub fn scaled(&self, x: View, scale: f32, out: ViewMut) {
        self.run(Scaled { x, scale, out });
    }
}
