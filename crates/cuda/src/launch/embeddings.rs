//! Embeddings and their gradients.

use phalanx_tensor::ViewMut;
use phalanx_tensor::arguments::{Lookup, Positions};
use phalanx_tensor::operations::{EmbeddingBackward, EmbeddingForward, Embeddings};
use phalanx_tensor::shape::Shape;

use crate::error::Error;
use crate::faults::Checked;
use crate::launch::sums::RowBlocks;
use crate::launch::{Issue, numbers};
use crate::modules::Launch;
use crate::programs::{Program, Source};

/// Threads of a block that sums the rows of a token.
const TOKEN_THREADS: u32 = 128;

/// A lookup as kernels take it: kind, token of the table's first row, and tokens in all; and what is checked.
fn lookup_numbers(lookup: Lookup, rows: usize) -> ([u32; 3], Checked) {
    match lookup {
        Lookup::Token { first, vocab } => ([0, first as u32, vocab as u32], Checked::Token { vocab }),
        Lookup::Type => ([1, 0, 0], Checked::TokenType { rows }),
    }
}

impl Issue<'_> {
    pub(super) fn embedding(&mut self, operation: Embeddings) -> Result<(), Error> {
        match operation {
            Embeddings::EmbeddingForward(o) => self.embedding_forward(o),
            Embeddings::AddPositions(o) => {
                let [rows, hidden] = o.y.shape().rows_cols();
                let Positions { table, first_row, seq } = o.positions;
                let program = Program::of(Source::Embedding, o.y.dtype());
                self.by_block(program, "add_positions", rows, numbers![table, first_row, seq, hidden, &o.y])
            }
            Embeddings::EmbeddingBackward(o) => match o.lookup {
                Lookup::Token { .. } => self.token_gradient(o),
                Lookup::Type => self.type_gradient(o),
            },
            Embeddings::PositionGradient(o) => {
                let [rows, hidden] = o.dy.shape().rows_cols();
                let [length, _] = o.dpositions.dims();
                let program = Program::of(Source::Embedding, o.dy.dtype()).with_other(o.dpositions.dtype());
                let arguments = numbers![o.dy, rows, hidden, o.first_row, o.seq, &o.dpositions, o.accumulate];
                self.by_block(program, "position_gradient", length, arguments)
            }
        }
    }

    fn embedding_forward(&mut self, o: EmbeddingForward) -> Result<(), Error> {
        let [rows, hidden] = o.table.dims();
        let ([kind, first, vocab], checked) = lookup_numbers(o.lookup, rows);
        let (table, first_row, seq) =
            o.positions.map_or((None, 0, 1), |p| (Some(p.table), p.first_row, p.seq));
        let (fault, call) = self.checked(checked);
        let arguments = numbers![
            o.ids,
            kind,
            first,
            vocab,
            rows as u32,
            o.table,
            table,
            first_row,
            seq,
            hidden,
            o.accumulate,
            &o.y,
            fault,
            call
        ];
        self.by_block(Program::of(Source::Embedding, o.y.dtype()), "embedding", o.ids.elements(), arguments)
    }

    fn token_gradient(&mut self, o: EmbeddingBackward) -> Result<(), Error> {
        let [rows, hidden] = o.dtable.dims();
        let (element, gradient) = (o.dy.dtype(), o.dtable.dtype());
        if !o.accumulate {
            let n = o.dtable.elements();
            self.over_fours(
                Program::of(Source::Elementwise, gradient),
                "fill",
                n,
                numbers![&o.dtable, n, 0f32],
            )?;
        }
        let ([_, first, vocab], checked) = lookup_numbers(o.lookup, rows);
        let (fault, call) = self.checked(checked);
        let n = o.ids.elements();
        // Blocks in y take strips of columns each; two find the rows of a token less often than more would.
        let strips = (hidden as u64).div_ceil(u64::from(TOKEN_THREADS)).min(2);
        let launch = Launch {
            program: Program::of(Source::Embedding, element).with_other(gradient),
            kernel: "embedding_backward",
            grid: [n as u64, strips],
            threads: TOKEN_THREADS,
            shared_bytes: 0,
        };
        let arguments = numbers![
            o.ids,
            n as u32,
            first,
            vocab,
            rows as u32,
            o.dy,
            hidden,
            &o.dtable,
            o.accumulate,
            fault,
            call
        ];
        self.launch(launch, arguments)
    }

    /// The gradient of a table of one or two rows, as a sum over rows.
    fn type_gradient(&mut self, o: EmbeddingBackward) -> Result<(), Error> {
        let [types, hidden] = o.dtable.dims();
        let (rows, element, accumulate) = (o.ids.elements(), o.dy.dtype(), o.accumulate);
        let blocks = RowBlocks::new(rows, hidden, types);
        let partial = self.scratch(blocks.bytes())?;
        let (fault, call) = self.checked(Checked::TokenType { rows: types });
        let arguments = numbers![o.ids, o.dy, partial, rows, hidden, blocks.grain, types as u32, fault, call];
        self.over_blocks(Program::of(Source::Embedding, element), "type_sums", &blocks, arguments)?;
        let line = |row: usize| (row * hidden..(row + 1) * hidden, Shape::from([hidden]));
        let lines: Vec<ViewMut> = o.dtable.into_pieces((0..types).map(line));
        match &lines[..] {
            [only] => self.add_blocks(&blocks, [Some(only)], accumulate, partial, element),
            [first, second] => {
                self.add_blocks(&blocks, [Some(first), Some(second)], accumulate, partial, element)
            }
            _ => Err(Error::Unsupported(format!("a table of {types} token types; one or two are expected"))),
        }
    }
}
