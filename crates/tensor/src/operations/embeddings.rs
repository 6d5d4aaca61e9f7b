//! Embeddings of token ids, with their positions, and the gradients of both tables.
//!
//! A table may hold a part of a vocabulary, rows `first ..`: ids of other rows give zeros, so that the parts of
//! several ranks add up (Megatron-LM's vocabulary-parallel embedding, Shoeybi et al., arXiv 1909.08053).

use phalanx_plan::trace::{DType, Site};

use super::{gradient, same};
use crate::arguments::{Lookup, Positions};
use crate::device::Device;
use crate::operation::{Describe, Price, operation};
use crate::operations::family::family;
use crate::placement::rules::{Rule, operand, result};
use crate::record::Recorder;
use crate::view::{View, ViewMut};

family! {
    /// Embeddings and their gradients.
    Embeddings { EmbeddingForward, AddPositions, EmbeddingBackward, PositionGradient, }
}

operation! {
    /// `y[i] (+)= table[lookup of ids[i]] (+ positions[(first_row + i) % seq])`, rounded once; zeros for an id whose
    /// row is not in the table.
    EmbeddingForward {
        /// `[..]` u32
        ids: View<'a>,
        /// The row that an id selects.
        lookup: Lookup,
        /// `[rows, hidden]`
        table: View<'a>,
        /// Added, when given.
        positions: Option<Positions<'a>>,
        /// True to accumulate into `y`.
        accumulate: bool,
        /// `[.., hidden]`
        y: ViewMut<'a>,
    }
}

impl Describe for EmbeddingForward<'_> {
    const NAME: &'static str = "embedding";

    fn check(&self) {
        let EmbeddingForward { ids, lookup, table, positions, y, .. } = self;
        check_lookup(*ids, *lookup, table.dims(), y.shape().rows_cols());
        same(&[table.dtype(), y.dtype()]);
        if let Some(positions) = positions {
            check_positions(*positions, y);
        }
    }

    fn price(&self) -> Price {
        Price::bytes(self.y.bytes() * (2 + self.accumulate as usize))
    }

    /// A table of which each rank has some rows gives terms of a sum, to which positions may not be added yet.
    fn follow(&self, recorder: &Recorder, site: Site) {
        let EmbeddingForward { ids, table, positions, accumulate, y, .. } = self;
        let rule = Rule {
            op: Self::NAME,
            factors: &[operand("ids", "r", *ids), operand("table", "vh", *table)],
            addends: &[positions.map(|p| operand("positions", "ph", p.table))],
            results: &[result("y", "rh", y, *accumulate)],
            whole: &[],
        };
        recorder.follow(&rule, site);
    }
}

operation! {
    /// `y[i] += positions[(first_row + i) % seq]`, rounded once.
    AddPositions {
        /// The table, and the position of row 0.
        positions: Positions<'a>,
        /// `[.., hidden]`, any piece of the rows of a micro-batch.
        y: ViewMut<'a>,
    }
}

impl Describe for AddPositions<'_> {
    const NAME: &'static str = "add_positions";

    fn check(&self) {
        check_positions(self.positions, &self.y);
    }

    fn price(&self) -> Price {
        Price::bytes(2 * self.y.bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let rule = Rule {
            op: Self::NAME,
            factors: &[],
            addends: &[Some(operand("positions", "ph", self.positions.table))],
            results: &[result("y", "rh", &self.y, true)],
            whole: &[],
        };
        recorder.follow(&rule, site);
    }
}

operation! {
    /// `dtable[lookup of ids[i]] (+)= dy[i]`, for the ids whose row is in the table. Without accumulation every row
    /// is overwritten, those of absent ids with zero.
    EmbeddingBackward {
        /// `[..]` u32
        ids: View<'a>,
        /// The row that an id selects.
        lookup: Lookup,
        /// `[.., hidden]`
        dy: View<'a>,
        /// `[rows, hidden]`
        dtable: ViewMut<'a>,
        /// True to accumulate into `dtable`.
        accumulate: bool,
    }
}

impl Describe for EmbeddingBackward<'_> {
    const NAME: &'static str = "embedding_backward";

    fn check(&self) {
        let EmbeddingBackward { ids, lookup, dy, dtable, .. } = self;
        check_lookup(*ids, *lookup, dtable.dims(), dy.shape().rows_cols());
        gradient(dtable, dy.dtype());
    }

    fn price(&self) -> Price {
        Price::bytes(self.dy.bytes() + self.dy.elements() * self.dtable.dtype().bytes())
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let EmbeddingBackward { ids, dy, dtable, accumulate, .. } = self;
        let rule = Rule {
            op: Self::NAME,
            factors: &[operand("ids", "r", *ids), operand("dy", "rh", *dy)],
            addends: &[],
            results: &[result("dtable", "vh", dtable, *accumulate)],
            whole: &[],
        };
        recorder.follow(&rule, site);
    }
}

operation! {
    /// `dpositions[(first_row + i) % seq] (+)= dy[i]`. Without accumulation every row is overwritten, those that dy
    /// does not touch with zero.
    PositionGradient {
        /// `[.., hidden]`
        dy: View<'a>,
        /// Number of row 0 of `dy` within its micro-batch.
        first_row: usize,
        /// Rows of a sample.
        seq: usize,
        /// `[at least seq, hidden]`
        dpositions: ViewMut<'a>,
        /// True to accumulate into `dpositions`.
        accumulate: bool,
    }
}

impl Describe for PositionGradient<'_> {
    const NAME: &'static str = "position_gradient";

    fn check(&self) {
        let PositionGradient { dy, seq, dpositions, .. } = self;
        let [length, hidden] = dpositions.dims();
        assert_eq!(dy.shape().rows_cols()[1], hidden, "{dpositions:?} of {dy:?}");
        assert!(0 < *seq && *seq <= length, "{dpositions:?} of {seq} positions");
        gradient(dpositions, dy.dtype());
    }

    fn price(&self) -> Price {
        let PositionGradient { dy, seq, dpositions, accumulate, .. } = self;
        let [_, hidden] = dpositions.dims();
        let written = seq * hidden * dpositions.dtype().bytes();
        Price::bytes(dy.bytes() + written * (1 + *accumulate as usize))
    }

    fn follow(&self, recorder: &Recorder, site: Site) {
        let PositionGradient { dy, dpositions, accumulate, .. } = self;
        let rule = Rule {
            op: Self::NAME,
            factors: &[operand("dy", "rh", *dy)],
            addends: &[],
            results: &[result("dpositions", "ph", dpositions, *accumulate)],
            whole: &[],
        };
        recorder.follow(&rule, site);
    }
}

impl Device {
    /// `y (+)= table[lookup of ids] (+ positions)`, rounded once; zeros for an id whose row is not in the table.
    /// ids `[..]` u32, table `[rows, hidden]`, y `[.., hidden]`.
    #[track_caller]
    pub fn embedding(
        &self,
        ids: View,
        lookup: Lookup,
        table: View,
        positions: Option<Positions>,
        accumulate: bool,
        y: ViewMut,
    ) {
        self.run(EmbeddingForward { ids, lookup, table, positions, accumulate, y });
    }

    /// `y += positions`, rounded once; y `[.., hidden]` is any piece of the rows of a micro-batch.
    #[track_caller]
    pub fn add_positions(&self, positions: Positions, y: ViewMut) {
        self.run(AddPositions { positions, y });
    }

    /// `dtable[lookup of ids] (+)= dy`, for the ids whose row is in the table; without accumulation every row is
    /// overwritten. ids `[..]` u32, dy `[.., hidden]`, dtable `[rows, hidden]`.
    #[track_caller]
    pub fn embedding_backward(&self, ids: View, lookup: Lookup, dy: View, dtable: ViewMut, accumulate: bool) {
        self.run(EmbeddingBackward { ids, lookup, dy, dtable, accumulate });
    }

    /// `dpositions[(first_row + i) % seq] (+)= dy[i]` for all rows of dy `[.., hidden]`; without accumulation every
    /// row of dpositions `[at least seq, hidden]` is overwritten.
    #[track_caller]
    pub fn position_gradient(
        &self,
        dy: View,
        first_row: usize,
        seq: usize,
        dpositions: ViewMut,
        accumulate: bool,
    ) {
        self.run(PositionGradient { dy, first_row, seq, dpositions, accumulate });
    }
}

#[track_caller]
fn check_lookup(ids: View, lookup: Lookup, table: [usize; 2], [rows, hidden]: [usize; 2]) {
    assert_eq!((ids.elements(), ids.dtype(), table[1]), (rows, DType::U32, hidden), "{ids:?} in {table:?}");
    match lookup {
        Lookup::Token { first, vocab } => {
            assert!(first + table[0] <= vocab, "rows {first} .. {} of {vocab} tokens", first + table[0]);
        }
        Lookup::Type => assert!((1..=2).contains(&table[0]), "an upper bit names 1 or 2 rows, not {table:?}"),
    }
}

#[track_caller]
fn check_positions(positions: Positions, y: &ViewMut) {
    let [length, hidden] = positions.table.dims();
    assert_eq!(
        (y.shape().rows_cols()[1], y.dtype()),
        (hidden, positions.table.dtype()),
        "{positions:?} for {y:?}"
    );
    assert!(0 < positions.seq && positions.seq <= length, "{positions:?}");
}
