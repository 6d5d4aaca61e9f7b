//! Attention: tiles, their shared memory, and where queries, keys and values lie; rotary positions.

use phalanx_tensor::arguments::{Dropout, Heads};
use phalanx_tensor::operations::{
    AttentionBackward, AttentionCached, AttentionForward, Attentions, RotaryPositions,
};
use phalanx_tensor::rotary::ROTARY_FREQUENCIES_MAX;
use phalanx_tensor::{DType, RowPositions, View, ViewMut};

use crate::error::Error;
use crate::launch::elementwise::kept;
use crate::launch::products::PADDING;
use crate::launch::{Issue, THREADS, address, numbers};
use crate::modules::Launch;
use crate::programs::{AttentionForm, HEADS, Program, Source};

/// Threads of a block in the forward pass.
const FORWARD_THREADS: u32 = 128;

/// Bytes of shared memory that a block must have for attention with heads of `size` elements; None where heads are too large for every card.
pub fn attention_shared_bytes(size: usize, element: DType) -> Option<u32> {
    let head = Program::of(Source::Attention, element).with_head(size)?.head?;
    Some(HeadTiles::new(head, element).max_bytes())
}

/// The tiles of an attention, as in `attention.cuh` and `attention_backward.cu`.
#[derive(Clone, Copy, Debug)]
struct HeadTiles {
    /// Bytes of a row in shared memory.
    row_bytes: usize,
    /// Rows of the tiles that pass through shared memory, forward and backward.
    passing: [usize; 2],
    /// Rows of the tiles that stay in it, in the backward pass.
    staying: usize,
    /// Buffers of the tiles that pass.
    buffers: usize,
    /// Queries of a block in the forward pass, without and with dropout.
    queries: [usize; 2],
}

impl HeadTiles {
    fn new(head: u32, element: DType) -> HeadTiles {
        let bytes = head as usize * element.bytes();
        let passing = [128, 64].map(|max| if bytes <= max { 64 } else { 32 });
        let staying = if bytes <= 256 { 64 } else { 32 };
        let buffers = if bytes <= 256 { 2 } else { 1 };
        let queries = if element.bytes() == 2 && head <= 64 { [128, 64] } else { [64, 64] };
        HeadTiles { row_bytes: bytes + PADDING, passing, staying, buffers, queries }
    }

    fn forward_bytes(self, queries: usize) -> u32 {
        ((queries + 2 * self.buffers * self.passing[0]) * self.row_bytes) as u32
    }

    fn backward_bytes(self) -> u32 {
        (2 * (self.staying + self.buffers * self.passing[1]) * self.row_bytes) as u32
    }

    /// Bytes of shared memory of a block that needs most. Those of the backward pass have two numbers of each passing query besides.
    fn max_bytes(self) -> u32 {
        let numbers = (2 * self.buffers * self.passing[1] * size_of::<f32>()) as u32;
        self.forward_bytes(self.queries[0]).max(self.backward_bytes() + numbers)
    }

    /// Threads of a block of the backward pass: a warp for 16 rows.
    fn backward_threads(self) -> u32 {
        (self.staying / 16 * 32) as u32
    }
}

/// The sizes of an attention.
#[derive(Clone, Copy)]
struct Extents<'a> {
    batch: usize,
    rows: usize,
    heads: Heads,
    size: usize,
    /// The positions of rows in their documents, if sequences have several.
    positions: Option<View<'a>>,
}

impl<'a> Extents<'a> {
    fn new(qkv: View, heads: Heads, positions: Option<View<'a>>) -> Extents<'a> {
        let [batch, rows, _] = qkv.dims();
        Extents { batch, rows, heads, size: heads.head_dim, positions }
    }

    fn pairs(&self) -> usize {
        self.batch * self.heads.heads
    }

    /// The last fields but one of `Extents` in `attention.cuh`, of an attention over so many keys.
    fn scores(&self, keys: usize) -> [u64; 5] {
        let Heads { kv_heads, causal, window, .. } = self.heads;
        let [factor, tanh_factor] =
            [self.heads.exponent_factor(), self.heads.tanh_factor().unwrap_or_default()].map(f32::to_bits);
        let window = window.unwrap_or(keys).min(keys);
        [causal.into(), factor.into(), kv_heads as u64, window as u64, tanh_factor.into()]
    }

    fn form(&self) -> AttentionForm {
        let Heads { heads, kv_heads, causal, window, soft_cap, .. } = self.heads;
        AttentionForm {
            grouped: kv_heads < heads,
            windowed: window.is_some(),
            capped: soft_cap.is_some(),
            documents: self.positions.is_some(),
            ahead: self.positions.is_some() && !causal,
        }
    }
}

/// Keys and values of a forward pass.
struct Keys {
    /// Addresses of the first key and the first value.
    at: [u64; 2],
    /// Elements between rows, and between samples.
    strides: [usize; 2],
    /// Keys of a sample, and positions before the first query.
    count: usize,
    past: usize,
}

/// The dropout numbers of a kernel: key, smallest kept number, factor, first counter, counters of a sample.
fn dropout_numbers(dropout: Option<Dropout>) -> [u64; 5] {
    dropout.map_or([0; 5], |dropout| {
        let (kept_min, factor) = kept(dropout);
        [dropout.key, kept_min, u64::from(factor.to_bits()), dropout.first, dropout.sample]
    })
}

impl Issue<'_> {
    pub(super) fn attention(&mut self, operation: Attentions) -> Result<(), Error> {
        match operation {
            Attentions::AttentionForward(o) => self.attention_forward(o),
            Attentions::AttentionCached(o) => self.attention_cached(o),
            Attentions::AttentionBackward(o) => self.attention_backward(o),
            Attentions::RotaryPositions(o) => self.rotary(o),
        }
    }

    /// A block turns the heads of a row. The frequencies are an argument of the kernel.
    fn rotary(&mut self, o: RotaryPositions) -> Result<(), Error> {
        let ([batch, seq, width], rotary, count) = (o.x.dims(), &o.rotary, o.rotary.frequencies().len());
        let mut frequencies: Vec<u64> = rotary.frequencies().iter().map(|f| f.to_bits()).collect();
        frequencies.resize(ROTARY_FREQUENCIES_MAX, 0);
        let sin_scale = if o.inverse { -rotary.scale() } else { rotary.scale() };
        let launch = Launch {
            program: Program::of(Source::Rotary, o.x.dtype()),
            kernel: "rotary",
            grid: [(batch * seq) as u64, 1],
            threads: THREADS,
            shared_bytes: 0,
        };
        let (first, positions) = match o.positions {
            RowPositions::From(first) => (first, None),
            RowPositions::Each(positions) => (0, Some(positions)),
        };
        let arguments = numbers![
            rotary.scale(),
            sin_scale,
            count,
            &o.x,
            seq,
            width,
            rotary.head_dim(),
            o.heads,
            first,
            positions
        ];
        self.launch_table(launch, &frequencies, arguments)
    }

    /// The program of a file for heads of this size.
    fn attention_program(&self, source: Source, element: DType, e: &Extents) -> Result<Program, Error> {
        let tf32 = self.tf32 && element == DType::F32;
        let program = Program { tf32, form: e.form(), ..Program::of(source, element) };
        program.with_head(e.size).ok_or_else(|| {
            let max = HEADS[HEADS.len() - 1];
            Error::Unsupported(format!(
                "a head has {} elements; a card computes heads of at most {max}",
                e.size
            ))
        })
    }

    fn attention_forward(&mut self, o: AttentionForward) -> Result<(), Error> {
        let e = Extents::new(o.qkv, o.heads, o.positions);
        let (heads, width) = (o.heads, o.heads.qkv_width());
        let start = address(o.qkv);
        let columns = [heads.out_width(), heads.out_width() + heads.cache_width() / 2];
        let keys = Keys {
            at: columns.map(|column| start + (column * o.qkv.dtype().bytes()) as u64),
            strides: [width, e.rows * width],
            count: e.rows,
            past: 0,
        };
        let dropout = o.dropout.filter(|dropout| dropout.p > 0.0);
        self.forward(&e, o.qkv, &keys, dropout, (&o.out, Some(&o.log_sum_exp)))
    }

    fn attention_cached(&mut self, o: AttentionCached) -> Result<(), Error> {
        let e = Extents::new(o.qkv, o.heads, None);
        let (queries, before) = o.queries();
        let [_, capacity, _] = o.cache.dims();
        let program = self.attention_program(Source::Attention, o.qkv.dtype(), &e)?;
        let (width, kept) = (o.heads.qkv_width(), o.heads.cache_width());
        let arguments = numbers![o.qkv, &o.cache, e.batch, e.rows, width, kept, o.past, capacity];
        self.over_fours(program, "store_keys_values", e.batch * e.rows * kept, arguments)?;
        let start = address(o.cache.as_view());
        let keys = Keys {
            at: [start, start + (kept / 2 * o.qkv.dtype().bytes()) as u64],
            strides: [kept, capacity * kept],
            count: o.past + e.rows,
            past: before,
        };
        self.forward(&Extents::new(queries, o.heads, None), queries, &keys, None, (&o.out, None))
    }

    fn forward(
        &mut self,
        e: &Extents,
        qkv: View,
        keys: &Keys,
        dropout: Option<Dropout>,
        (out, log_sum_exp): (&ViewMut, Option<&ViewMut>),
    ) -> Result<(), Error> {
        let element = qkv.dtype();
        let program = self.attention_program(Source::Attention, element, e)?;
        let tiles = HeadTiles::new(program.head.unwrap_or_default(), element);
        let queries = tiles.queries[usize::from(dropout.is_some())];
        let launch = Launch {
            program,
            kernel: if dropout.is_some() { "attention_with_dropout" } else { "attention" },
            grid: [(e.pairs() * e.rows.div_ceil(queries)) as u64, 1],
            threads: FORWARD_THREADS,
            shared_bytes: tiles.forward_bytes(queries),
        };
        let ([row, sample], width) = (keys.strides, e.heads.qkv_width());
        let [causal, factor, kv_heads, window, tanh_factor] = e.scores(keys.count);
        let arguments = numbers![
            qkv,
            keys.at[0],
            keys.at[1],
            width,
            e.rows * width,
            row,
            sample,
            out,
            log_sum_exp,
            e.pairs(),
            e.heads.heads,
            e.size,
            e.rows,
            keys.count,
            keys.past,
            causal,
            factor,
            kv_heads,
            window,
            tanh_factor,
            e.positions
        ];
        let mut arguments = arguments.to_vec();
        if dropout.is_some() {
            arguments.extend(dropout_numbers(dropout));
        }
        self.launch(launch, &arguments)
    }

    fn attention_backward(&mut self, o: AttentionBackward) -> Result<(), Error> {
        let e = Extents::new(o.qkv, o.heads, o.positions);
        let element = o.qkv.dtype();
        let [out, log_sum_exp, dout] = o.saved;
        let program = self.attention_program(Source::AttentionBackward, element, &e)?;
        let head = program.head.unwrap_or_default();
        let tiles = HeadTiles::new(head, element);
        let rows = e.pairs() * e.rows;
        let delta = self.scratch(rows * size_of::<f32>())?;
        let arguments = numbers![out, dout, delta, rows, e.rows, e.heads.heads, e.size];
        self.over_rows(program, "attention_delta", rows, arguments)?;
        let dropout = o.dropout.filter(|dropout| dropout.p > 0.0);
        let [causal, exponent, kv_heads, window, tanh_factor] = e.scores(e.rows);
        for kernel in backward_kernels(head, dropout.is_some()) {
            // A block computes dq of a head of queries, or dk and dv of one of keys and values.
            let of_queries = kernel.starts_with("attention_queries");
            let units = if of_queries { e.pairs() } else { e.batch * e.heads.kv_heads };
            let launch = Launch {
                program,
                kernel,
                grid: [(units * e.rows.div_ceil(tiles.staying)) as u64, 1],
                threads: tiles.backward_threads(),
                shared_bytes: tiles.backward_bytes(),
            };
            let [key, kept_min, factor, first, sample] = dropout_numbers(dropout);
            let arguments = numbers![
                o.qkv,
                dout,
                log_sum_exp,
                delta,
                &o.dqkv,
                units,
                e.heads.heads,
                e.size,
                e.rows,
                causal,
                exponent,
                kv_heads,
                window,
                tanh_factor,
                e.positions,
                e.heads.scale,
                key,
                kept_min,
                factor,
                first,
                sample
            ];
            self.launch(launch, arguments)?;
        }
        Ok(())
    }
}

/// The kernels of the backward pass: keys and values in one, or in two where their sums do not fit into registers.
fn backward_kernels(head: u32, drops: bool) -> &'static [&'static str] {
    match (head <= 128, drops) {
        (true, false) => &["attention_queries", "attention_keys_values"],
        (true, true) => &["attention_queries_with_dropout", "attention_keys_values_with_dropout"],
        (false, false) => &["attention_queries", "attention_keys", "attention_values"],
        (false, true) => &[
            "attention_queries_with_dropout",
            "attention_keys_with_dropout",
            "attention_values_with_dropout",
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cards of desktops give a block 99 KiB, an A100 163 KiB.
    #[test]
    fn only_large_heads_of_f32_need_more_than_a_desktop_card_has() {
        for (size, element, fits) in [
            (64, DType::F32, true),
            (128, DType::F32, true),
            (129, DType::F32, false),
            (256, DType::F32, false),
            (64, DType::BF16, true),
            (128, DType::BF16, true),
            (256, DType::F16, true),
        ] {
            let bytes = attention_shared_bytes(size, element).unwrap();
            assert_eq!(bytes <= 99 << 10, fits, "{size} of {element:?}: {bytes}");
            assert!(bytes <= 163 << 10);
        }
        assert_eq!(attention_shared_bytes(257, DType::BF16), None);
    }
}
