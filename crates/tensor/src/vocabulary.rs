//! What a device computes at the two ends of a language model: embedding of ids, and cross entropy of logits.
//!
//! Both are cut so that several devices may each hold a part of the vocabulary, rows `first ..` of its table: an
//! embedding gives zeros for the ids of others, so that parts add up; a cross entropy needs four numbers a row
//! from the others (Megatron-LM's vocabulary-parallel layers, Shoeybi et al., arXiv 1909.08053). Whoever holds
//! all of it is one part. Checked and priced as in [`operations`](crate::operations).

use phalanx_trace::DType;

use crate::buffer::{View, ViewMut};
use crate::device::Device;
use crate::kernels::{CrossEntropy, Lookup, Positions, Weight, vocabulary_blocks};
use crate::operations::{floats, gradient, same};

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
        check_lookup(ids, lookup, table.dims(), y.shape().rows_cols());
        same(&[table.dtype(), y.dtype()]);
        if let Some(positions) = positions {
            check_positions(positions, &y);
        }
        let bytes = y.bytes() * (2 + accumulate as usize);
        self.follow_embedding(ids, table, positions, accumulate, &y);
        self.run("embedding", 0, bytes, |k| k.embedding(ids, lookup, table, positions, accumulate, y));
    }

    /// `y += positions`, rounded once; y `[.., hidden]` is any piece of the rows of a micro-batch.
    #[track_caller]
    pub fn add_positions(&self, positions: Positions, y: ViewMut) {
        check_positions(positions, &y);
        self.follow_add_positions(positions, &y);
        self.run("add_positions", 0, 2 * y.bytes(), |k| k.add_positions(positions, y));
    }

    /// `dtable[lookup of ids] (+)= dy`, of the ids whose row is in the table; without accumulation every row is
    /// overwritten. ids `[..]` u32, dy `[.., hidden]`, dtable `[rows, hidden]`.
    #[track_caller]
    pub fn embedding_backward(&self, ids: View, lookup: Lookup, dy: View, dtable: ViewMut, accumulate: bool) {
        check_lookup(ids, lookup, dtable.dims(), dy.shape().rows_cols());
        gradient(&dtable, dy.dtype());
        let bytes = dy.bytes() + dy.elements() * dtable.dtype().bytes();
        self.follow_embedding_backward(ids, dy, &dtable, accumulate);
        self.run("embedding_backward", 0, bytes, |k| {
            k.embedding_backward(ids, lookup, dy, dtable, accumulate)
        });
    }

    /// `dpositions[(first_row + i) % seq] (+)= dy[i]` of all rows of dy `[.., hidden]`; without accumulation every
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
        let [length, hidden] = dpositions.dims();
        assert_eq!(dy.shape().rows_cols()[1], hidden, "{dpositions:?} of {dy:?}");
        assert!(0 < seq && seq <= length, "{dpositions:?} of {seq} positions");
        gradient(&dpositions, dy.dtype());
        let bytes = dy.bytes() + seq * hidden * dpositions.dtype().bytes() * (1 + accumulate as usize);
        self.follow_position_gradient(dy, &dpositions, accumulate);
        self.run("position_gradient", 0, bytes, |k| {
            k.position_gradient(dy, first_row, seq, dpositions, accumulate)
        });
    }

    /// The logits `x · w (+ bias)` of classes `first ..`, as statistics of rows `[rows, 4]` and of blocks `[rows,
    /// 4 * vocabulary_blocks(columns)]`, all f32, and when training as exponentials `[rows, columns]` relative to
    /// the largest of their block: see [`Kernels`](crate::kernels::Kernels::vocabulary_statistics). x
    /// `[rows, hidden]`, bias `[columns]`, targets `[rows]` u32. All outputs are overwritten.
    #[track_caller]
    pub fn vocabulary_statistics(
        &self,
        x: View,
        w: Weight,
        bias: Option<View>,
        targets: View,
        first: usize,
        exponentials: Option<ViewMut>,
        blocks: ViewMut,
        statistics: ViewMut,
    ) {
        let [rows, hidden] = x.shape().rows_cols();
        let [w_in, columns] = w.in_out();
        assert_eq!((w_in, targets.elements(), targets.dtype()), (hidden, rows, DType::U32), "{x:?}, {w:?}");
        assert_eq!(blocks.elements(), rows * 4 * vocabulary_blocks(columns), "{blocks:?}, {columns} columns");
        assert_eq!((statistics.elements(), statistics.dtype()), (4 * rows, DType::F32), "{statistics:?}");
        assert!(bias.is_none_or(|b| (b.elements(), b.dtype()) == (columns, x.dtype())), "{bias:?} for {w:?}");
        same(&[x.dtype(), w.matrix.dtype()]);
        same(&[DType::F32, blocks.dtype()]);
        if let Some(e) = &exponentials {
            assert_eq!((e.dims(), e.dtype()), ([rows, columns], x.dtype()), "{e:?} of {x:?}, {w:?}");
        }
        let stored = exponentials.as_ref().map_or(0, |e| e.bytes());
        let bytes = x.bytes() + w.matrix.bytes() + stored + blocks.bytes() + statistics.bytes();
        let written = [&blocks, &statistics];
        self.follow_vocabulary_statistics(x, w, bias, targets, exponentials.as_ref(), written);
        self.run("vocabulary_statistics", 2 * rows * hidden * columns, bytes, |k| {
            k.vocabulary_statistics(x, w, bias, targets, first, exponentials, blocks, statistics)
        });
    }

    /// As [`Device::vocabulary_statistics`], of logits `[rows, columns]` of classes `first ..` that are stored: they
    /// become exponentials, where they lie.
    #[track_caller]
    pub fn logits_statistics(
        &self,
        logits: ViewMut,
        targets: View,
        first: usize,
        blocks: ViewMut,
        statistics: ViewMut,
    ) {
        let [rows, columns] = logits.dims();
        assert_eq!((targets.elements(), targets.dtype()), (rows, DType::U32), "{targets:?} of {logits:?}");
        assert_eq!(blocks.elements(), rows * 4 * vocabulary_blocks(columns), "{blocks:?}, {columns} columns");
        assert_eq!((statistics.elements(), statistics.dtype()), (4 * rows, DType::F32), "{statistics:?}");
        same(&[DType::F32, blocks.dtype()]);
        floats([logits.dtype(); 2]);
        let bytes = 2 * logits.bytes() + blocks.bytes() + statistics.bytes();
        self.follow_logits_statistics(&logits, targets, [&blocks, &statistics]);
        self.run("logits_statistics", 0, bytes, |k| {
            k.logits_statistics(logits, targets, first, blocks, statistics)
        });
    }

    /// The sum of the losses of some rows into `loss` `[1]` f64 (+)=, without `numbers.scale`, from the statistics
    /// `[parts, rows, 4]` of all parts of the vocabulary; and the derivatives of this part's logits in place of its
    /// `exponentials`, when training. `blocks` as [`Device::vocabulary_statistics`] left them. A target is below
    /// `classes`, or [`IGNORED`](crate::IGNORED).
    #[track_caller]
    pub fn vocabulary_loss(
        &self,
        statistics: View,
        blocks: View,
        targets: View,
        first: usize,
        classes: usize,
        numbers: CrossEntropy,
        exponentials: Option<ViewMut>,
        loss: ViewMut,
        accumulate: bool,
    ) {
        let [parts, rows, four] = statistics.dims();
        assert!(parts > 0 && four == 4, "{statistics:?}");
        same(&[DType::F32, statistics.dtype(), blocks.dtype()]);
        assert_eq!((targets.elements(), targets.dtype()), (rows, DType::U32), "{targets:?} of {rows} rows");
        assert_eq!((loss.elements(), loss.dtype()), (1, DType::F64), "{loss:?}");
        let stored = exponentials.as_ref().map_or(0, |e| {
            let [e_rows, columns] = e.dims();
            assert_eq!((e_rows, blocks.elements()), (rows, rows * 4 * vocabulary_blocks(columns)), "{e:?}");
            assert!(first + columns <= classes, "classes {first} .. {} of {classes}", first + columns);
            2 * e.bytes()
        });
        let bytes = statistics.bytes() + blocks.bytes() + stored;
        self.follow_vocabulary_loss(statistics, targets, exponentials.as_ref(), &loss, accumulate);
        self.run("vocabulary_loss", 0, bytes, |k| {
            k.vocabulary_loss(
                statistics,
                blocks,
                targets,
                first,
                classes,
                numbers,
                exponentials,
                loss,
                accumulate,
            )
        });
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
