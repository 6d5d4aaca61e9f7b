//! Attention in tiles against the whole matrix in f64.

use std::ops::Range;

use half::{bf16, f16};
use phalanx_cpu::Cpu;
use phalanx_cpu::Options;
use phalanx_simd::Isa;
use phalanx_system::random::{GOLDEN, mix};
use phalanx_tensor::{Arena, Category, DType, Device, Dropout, Heads, Shape, Tensor};
use phalanx_testing::sweeps;

use crate::differences::{gradient, weighted};
use crate::oracle::{EPS, Expected, KernelPath, check, numbers, same_bits, wide};

#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    seq: usize,
    heads: usize,
    kv_heads: usize,
    size: usize,
    causal: bool,
    window: Option<usize>,
    scale: Option<f32>,
    soft_cap: Option<f32>,
    /// Lengths of the documents of a sequence, again and again, where it has several.
    documents: Option<&'static [usize]>,
    dropout: Option<Dropout>,
    dtype: DType,
}

impl Case {
    fn hidden(self) -> usize {
        self.heads * self.size
    }

    fn heads(self) -> Heads {
        let Case { heads, kv_heads, size, causal, window, scale, soft_cap, .. } = self;
        let equal = Heads::equal(heads, size, causal);
        Heads { kv_heads, window, scale: scale.unwrap_or(equal.scale), soft_cap, ..equal }
    }

    /// Columns of qkv and of a cache.
    fn widths(self) -> [usize; 2] {
        [self.heads + 2 * self.kv_heads, 2 * self.kv_heads].map(|heads| heads * self.size)
    }

    fn with(self, dtype: DType) -> Case {
        Case { dtype, ..self }
    }

    fn dropping(self, p: f32, first: u64) -> Case {
        let sample = (self.heads * self.seq * self.seq) as u64;
        Case { dropout: Some(Dropout { p, key: 0x1234_5678_9abc_def0, first, sample }), ..self }
    }

    /// Reproducible numbers `[batch, seq, columns]` in [-amount, amount), rounded to the type.
    fn values(self, seed: u64, columns: usize, amount: f32) -> Vec<f32> {
        let x = numbers(seed, self.batch * self.seq * columns);
        x.iter().map(|x| rounded(self.dtype, amount * x)).collect()
    }

    fn qkv(self, amount: f32) -> Vec<f32> {
        self.values(1, self.widths()[0], amount)
    }

    fn dout(self) -> Vec<f32> {
        self.values(2, self.hidden(), 1.0)
    }

    /// Offset of q (0), k (1) or v (2) of a head of queries.
    fn at(self, b: usize, row: usize, which: usize, h: usize) -> usize {
        let kv = h / (self.heads / self.kv_heads);
        let head = [h, self.heads + kv, self.heads + self.kv_heads + kv][which];
        (b * self.seq + row) * self.widths()[0] + head * self.size
    }

    /// Offset of a head of out.
    fn out_at(self, b: usize, row: usize, h: usize) -> usize {
        (b * self.seq + row) * self.hidden() + h * self.size
    }

    fn keys(self, b: usize, query: usize) -> Range<usize> {
        let far = self.window.unwrap_or(self.seq);
        let end = if self.causal { query + 1 } else { self.seq.min(query + far) };
        let start = (query + 1).saturating_sub(far);
        let Some(positions) = self.positions() else { return start..end };
        let of_sample = &positions[b * self.seq..][..self.seq];
        let document_end = (query + 1..end).find(|row| of_sample[*row] == 0).unwrap_or(end);
        start.max(query - of_sample[query] as usize)..document_end
    }

    /// The positions of all rows in their documents. Each sample begins with another length.
    fn positions(self) -> Option<Vec<u32>> {
        let lengths = self.documents?;
        let of_sample =
            |sample| lengths.iter().cycle().skip(sample).flat_map(|len| 0..*len as u32).take(self.seq);
        Some((0..self.batch).flat_map(of_sample).collect())
    }

    fn scale(self) -> f64 {
        self.scale.map_or(1.0 / (self.size as f64).sqrt(), f64::from)
    }

    /// The score of a query and a key, and its derivative by q·kᵀ.
    fn score(self, query: &[f64], key: &[f64]) -> (f64, f64) {
        let score = dot(query, key) * self.scale();
        self.soft_cap.map(f64::from).map_or((score, self.scale()), |cap| {
            let tanh = (score / cap).tanh();
            (cap * tanh, self.scale() * (1.0 - tanh * tanh))
        })
    }

    /// All rows as (sample, head, query).
    fn rows(self) -> impl Iterator<Item = (usize, usize, usize)> {
        let Case { batch, seq, heads, .. } = self;
        (0..batch * heads * seq).map(move |n| (n / seq / heads, n / seq % heads, n % seq))
    }

    /// Dropout factor of the probability of (key, query), by the contract.
    fn factor(self, b: usize, h: usize, key: usize, query: usize) -> f64 {
        let Some(Dropout { p, key: seed, first, sample }) = self.dropout else { return 1.0 };
        let element = b as u64 * sample + ((h * self.seq + key) * self.seq + query) as u64;
        let element = first.wrapping_add(element);
        let z = mix(seed.wrapping_add((element / 2).wrapping_mul(GOLDEN)));
        let number = if element % 2 == 1 { z >> 32 } else { z & 0xffff_ffff };
        let p = f64::from(p);
        if number as f64 >= p * 2f64.powi(32) { 1.0 / (1.0 - p) } else { 0.0 }
    }
}

fn rounded(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::BF16 => bf16::from_f32(x).to_f32(),
        DType::F16 => f16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// Largest relative error of one rounding: half the spacing of numbers at 1.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => EPS,
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Values, and for each the sum of the magnitudes of its terms.
struct Sums {
    value: Vec<f64>,
    terms: Vec<f64>,
}

impl Sums {
    fn zero(len: usize) -> Sums {
        Sums { value: vec![0.0; len], terms: vec![0.0; len] }
    }

    /// `+= factor * x` from `at` on.
    fn add(&mut self, at: usize, factor: f64, x: &[f64]) {
        for (i, x) in x.iter().enumerate() {
            self.value[at + i] += factor * x;
            self.terms[at + i] += (factor * x).abs();
        }
    }
}

/// out and log_sum_exp.
fn reference(case: Case, qkv: &[f64]) -> (Sums, Vec<f64>) {
    let size = case.size;
    let mut out = Sums::zero(case.batch * case.seq * case.hidden());
    let mut lse = Vec::new();
    for (b, h, i) in case.rows() {
        let part = |row: usize, which: usize| &qkv[case.at(b, row, which, h)..][..size];
        let scores: Vec<f64> = case.keys(b, i).map(|j| case.score(part(i, 0), part(j, 1)).0).collect();
        let top = scores.iter().fold(f64::NEG_INFINITY, |a, x| a.max(*x));
        let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        lse.push(top + total.ln());
        for (j, score) in case.keys(b, i).zip(&scores) {
            let p = (score - top).exp() / total * case.factor(b, h, j, i);
            out.add(case.out_at(b, i, h), p, part(j, 2));
        }
    }
    (out, lse)
}

/// dqkv by the formulas, from the inputs of backward.
fn reference_backward(case: Case, qkv: &[f64], out: &[f64], lse: &[f64], dout: &[f64]) -> Sums {
    let size = case.size;
    let mut d = Sums::zero(qkv.len());
    for (row, (b, h, i)) in case.rows().enumerate() {
        let o = case.out_at(b, i, h);
        let delta = dot(&out[o..o + size], &dout[o..o + size]);
        let part = |which: usize, row: usize| &qkv[case.at(b, row, which, h)..][..size];
        for j in case.keys(b, i) {
            let (score, slope) = case.score(part(0, i), part(1, j));
            let p = (score - lse[row]).exp();
            let factor = case.factor(b, h, j, i);
            let dp = factor * dot(&dout[o..o + size], part(2, j));
            let ds = p * (dp - delta) * slope;
            d.add(case.at(b, j, 2, h), p * factor, &dout[o..o + size]);
            d.add(case.at(b, i, 0, h), ds, part(1, j));
            d.add(case.at(b, j, 1, h), ds, part(0, i));
        }
    }
    d
}

fn stored(device: &Device, dtype: DType, shape: impl Into<Shape>, values: &[f32]) -> Tensor {
    let mut t = device.alloc(dtype, shape, Category::Activations, "test");
    match dtype {
        DType::BF16 => {
            let values: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
            device.upload(&values, t.view_mut());
        }
        DType::F16 => {
            let values: Vec<f16> = values.iter().map(|x| f16::from_f32(*x)).collect();
            device.upload(&values, t.view_mut());
        }
        _ => device.upload(values, t.view_mut()),
    }
    t
}

fn positions(device: &Device, case: Case) -> Option<Tensor> {
    let positions = case.positions()?;
    let mut on_device = device.alloc(DType::U32, [case.batch, case.seq], Category::Activations, "positions");
    device.upload(&positions, on_device.view_mut());
    Some(on_device)
}

/// Memory that no kernel may read before it writes.
fn poisoned(device: &Device, dtype: DType, shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    stored(device, dtype, shape, &vec![f32::NAN; shape.elements()])
}

fn read(device: &Device, t: &Tensor) -> Vec<f32> {
    fn all<T: phalanx_tensor::Element + Default>(device: &Device, t: &Tensor) -> Vec<T> {
        let mut x = vec![T::default(); t.shape().elements()];
        device.download(t.view(), &mut x).unwrap();
        x
    }
    match t.dtype() {
        DType::BF16 => all::<bf16>(device, t).iter().map(|x| x.to_f32()).collect(),
        DType::F16 => all::<f16>(device, t).iter().map(|x| x.to_f32()).collect(),
        _ => all::<f32>(device, t),
    }
}

/// out and log_sum_exp.
fn forward(device: &Device, case: Case, qkv: &[f32]) -> Vec<Vec<f32>> {
    let Case { batch, seq, heads, dtype, .. } = case;
    let qkv = stored(device, dtype, [batch, seq, case.widths()[0]], qkv);
    let mut out = poisoned(device, dtype, [batch, seq, case.hidden()]);
    let mut lse = poisoned(device, DType::F32, [batch, heads, seq]);
    let positions = positions(device, case);
    let positions = positions.as_ref().map(|positions| positions.view());
    device.attention(qkv.view(), case.heads(), positions, case.dropout, out.view_mut(), lse.view_mut());
    vec![read(device, &out), read(device, &lse)]
}

/// dqkv.
fn backward(device: &Device, case: Case, [qkv, out, lse, dout]: [&[f32]; 4]) -> Vec<Vec<f32>> {
    let Case { batch, seq, heads, dtype, .. } = case;
    let qkv = stored(device, dtype, [batch, seq, case.widths()[0]], qkv);
    let [out, dout] = [out, dout].map(|x| stored(device, dtype, [batch, seq, case.hidden()], x));
    let lse = stored(device, DType::F32, [batch, heads, seq], lse);
    let mut dqkv = poisoned(device, dtype, [batch, seq, case.widths()[0]]);
    let saved = [out.view(), lse.view(), dout.view()];
    let positions = positions(device, case);
    let positions = positions.as_ref().map(|positions| positions.view());
    device.attention_backward(qkv.view(), saved, case.heads(), positions, case.dropout, dqkv.view_mut());
    vec![read(device, &dqkv)]
}

/// (batch, seq, heads, size), each with both masks, in f32.
fn cases(shapes: &[[usize; 4]]) -> impl Iterator<Item = Case> {
    shapes.iter().flat_map(|&[batch, seq, heads, size]| {
        [false, true].map(|causal| plain([batch, seq, heads, heads, size], causal))
    })
}

/// In f32, of these batch, seq, heads, kv_heads, size.
fn plain([batch, seq, heads, kv_heads, size]: [usize; 5], causal: bool) -> Case {
    let (window, scale, soft_cap, documents, dropout, dtype) = (None, None, None, None, None, DType::F32);
    Case { batch, seq, heads, kv_heads, size, causal, window, scale, soft_cap, documents, dropout, dtype }
}

/// Heads that share keys and values, windows, scales and caps, with both masks, some with dropout.
fn varied() -> impl Iterator<Item = Case> {
    [
        ([2, 67, 4, 2, 20], None, None, None),
        ([1, 130, 6, 1, 33], None, Some(0.3), None),
        ([1, 70, 3, 3, 16], Some(1), None, None),
        ([1, 200, 4, 2, 32], Some(50), None, Some(4.0)),
        ([1, 450, 2, 1, 16], Some(150), None, None),
        ([2, 300, 2, 2, 5], Some(1000), Some(0.5), Some(2.5)),
        // On tile registers.
        ([1, 416, 4, 1, 32], Some(130), Some(0.25), Some(3.0)),
        ([1, 160, 2, 1, 64], None, None, None),
        // A group of heads is a task.
        ([4, 289, 8, 4, 7], Some(33), None, None),
        // Several spans of keys.
        ([1, 1300, 2, 1, 4], Some(1060), None, None),
    ]
    .into_iter()
    .flat_map(|(shape, window, scale, soft_cap)| {
        [false, true].map(|causal| {
            let case = Case { window, scale, soft_cap, ..plain(shape, causal) };
            if shape[1] % 4 == 2 { case.dropping(0.25, 5) } else { case }
        })
    })
}

/// With both masks: short documents, such as cover several tiles, and such as end at the border of one; under a window and a cap, and with dropout.
fn documents() -> impl Iterator<Item = Case> {
    [
        (&[1][..], plain([2, 5, 1, 1, 3], true)),
        (&[3, 1, 2], plain([2, 67, 4, 2, 20], true)),
        (&[9, 1, 5, 4, 2], Case { window: Some(5), ..plain([3, 70, 3, 3, 16], true) }),
        (
            &[200, 1, 101, 67, 2],
            Case { window: Some(50), soft_cap: Some(4.0), ..plain([1, 450, 4, 2, 32], true) },
        ),
        (&[256, 1, 1000, 86, 2], plain([2, 1300, 2, 1, 4], true)),
        // On tile registers.
        (&[128, 96, 1, 31], Case { scale: Some(0.25), ..plain([1, 416, 4, 1, 32], true) }),
        (&[20, 7, 33], plain([2, 160, 2, 1, 64], true)),
        // A group of heads is a task.
        (&[100, 1, 51, 34, 2], plain([4, 289, 8, 4, 7], true)),
        (&[77, 1, 39], plain([1, 130, 1, 1, 200], true).dropping(0.25, 5)),
        // The whole sequence.
        (&[1000], plain([2, 305, 2, 1, 5], true)),
    ]
    .into_iter()
    .flat_map(|(documents, case)| {
        [true, false].map(|causal| Case { causal, documents: Some(documents), ..case })
    })
}

/// A score is a sum of `size` products, then an exponential of up to a few units; a row sums `seq` of them, those of dk
/// and dv of each head that reads them.
fn roundings(case: Case) -> f64 {
    4.0 * (case.size + case.seq * case.heads / case.kv_heads) as f64 + 32.0
}

/// The additional error of 16 bits compared with f32: each term's probability (or its derivative) is rounded to bf16
/// when that is the type, and the sum to the type when it is stored; f16 may be subnormal there.
fn expected(case: Case, sums: Sums, roundings: f64) -> Expected {
    let Sums { value, terms } = sums;
    let largest = value.iter().fold(0f64, |a, x| a.max(x.abs()));
    let u = unit(case.dtype);
    let by_term = if case.dtype == DType::BF16 { u } else { 0.0 };
    let half_of_smallest = if case.dtype == DType::F16 { 2f64.powi(-25) } else { 0.0 };
    let error = |(value, terms): (&f64, &f64)| {
        let computed = roundings * EPS * largest + by_term * terms;
        computed
            + if case.dtype == DType::F32 { 0.0 } else { u * (value.abs() + computed) + half_of_smallest }
    };
    let magnitude = value.iter().zip(&terms).map(|x| error(x) / EPS).collect();
    Expected { value, magnitude, roundings: 1.0 }
}

fn check_forward(case: Case, amount: f32, roundings: f64) {
    let qkv = case.qkv(amount);
    let (out, lse) = reference(case, &wide(&qkv));
    let expected = [expected(case, out, roundings), Expected::by_largest(lse, roundings)];
    check(&format!("{case:?}"), |device: &Device| forward(device, case, &qkv), &expected);
}

fn check_backward(case: Case, amount: f32) {
    let (qkv, dout) = (case.qkv(amount), case.dout());
    let (out, lse) = reference(case, &wide(&qkv));
    let out: Vec<f32> = out.value.iter().map(|x| rounded(case.dtype, *x as f32)).collect();
    let lse: Vec<f32> = lse.iter().map(|x| *x as f32).collect();
    let d = reference_backward(case, &wide(&qkv), &wide(&out), &wide(&lse), &wide(&dout));
    let expected = expected(case, d, 4.0 * roundings(case));
    let kernel = |device: &Device| backward(device, case, [&qkv, &out, &lse, &dout]);
    check(&format!("backward {case:?}"), kernel, &[expected]);
}

/// Odd sizes, whole tiles, more than one tile of keys and block of queries; with few heads and with many. Where sequence and
/// head are multiples of 32, tile registers compute the backward of bf16.
const SHAPES: [[usize; 4]; 11] = [
    [1, 1, 1, 1],
    [1, 3, 1, 17],
    [2, 17, 3, 5],
    [1, 64, 2, 64],
    [2, 67, 2, 33],
    [1, 129, 3, 16],
    [1, 257, 2, 80],
    [1, 130, 1, 200],
    [3, 305, 1, 7],
    [1, 288, 2, 64],
    [2, 160, 8, 32],
];

#[test]
fn forward_in_tiles() {
    for case in cases(&SHAPES) {
        // Three times as large: scores between about -9 and 9, so that the maximum moves.
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            check_forward(case.with(dtype), 3.0, roundings(case));
        }
    }
}

#[test]
fn backward_in_tiles() {
    for case in cases(&SHAPES) {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            check_backward(case.with(dtype), 2.0);
        }
    }
}

#[test]
fn grouped_heads_windows_scales_and_caps() {
    for (number, case) in varied().enumerate() {
        // Each case with one type, in turn.
        for dtype in sweeps::share(&[DType::F32, DType::BF16, DType::F16], number, 3) {
            let case = case.with(*dtype);
            check_forward(case, 3.0, roundings(case));
            check_backward(case, 2.0);
        }
    }
}

#[test]
fn documents_do_not_see_each_other() {
    for (number, case) in documents().enumerate() {
        // Each case with one type, in turn.
        for dtype in sweeps::share(&[DType::F32, DType::BF16, DType::F16], number, 3) {
            let case = case.with(*dtype);
            check_forward(case, 3.0, roundings(case));
            check_backward(case, 2.0);
        }
    }
}

/// Documents that begin at borders of tiles have the bits that each has alone in a sequence: their keys are summed in the same tiles.
#[test]
fn documents_have_the_bits_that_they_have_alone() {
    const LENGTHS: [usize; 4] = [384, 128, 256, 128];
    let windowed = Case { window: Some(90), ..plain([1, 896, 2, 2, 64], true) };
    for case in [plain([1, 896, 4, 2, 40], true), windowed] {
        for case in [DType::F32, DType::BF16, DType::F16].map(|dtype| case.with(dtype)) {
            let device = Device::new(Cpu::with_options(Options::new(3)).unwrap(), Arena::heap());
            let (qkv, dout) = (case.qkv(2.0), case.dout());
            let both = |case: Case, qkv: &[f32], dout: &[f32]| {
                let [out, lse] = forward(&device, case, qkv).try_into().expect("two outputs");
                let [dqkv] = backward(&device, case, [qkv, &out, &lse, dout]).try_into().expect("one output");
                [out, dqkv]
            };
            let packed = both(Case { documents: Some(&LENGTHS), ..case }, &qkv, &dout);
            let mut start = 0;
            for seq in LENGTHS {
                let piece = |x: &[f32]| {
                    let row = x.len() / case.seq;
                    x[start * row..(start + seq) * row].to_vec()
                };
                let alone = both(Case { seq, ..case }, &piece(&qkv), &piece(&dout));
                for (which, (packed, alone)) in packed.iter().zip(&alone).enumerate() {
                    assert!(
                        same_bits(&piece(packed), alone),
                        "{case:?}, rows from {start}, output {which}: other bits alone"
                    );
                }
                start += seq;
            }
        }
    }
}

#[test]
fn dropped_probabilities() {
    for case in cases(&[[1, 3, 1, 2], [2, 67, 2, 33], [1, 131, 1, 64]]) {
        // Two elements share a random number; a mask may start at either of the two.
        for (p, first) in [(0.25, 0), (0.1, 7), (0.9, (1 << 40) + 3)] {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let case = case.with(dtype).dropping(p, first);
                check_forward(case, 3.0, roundings(case));
                check_backward(case, 2.0);
            }
        }
    }
}

/// Computes only some of the heads, as on a tensor-parallel rank.
#[test]
fn some_heads_drop_what_all_heads_drop() {
    let grouped = [false, true].map(|causal| plain([2, 130, 4, 2, 33], causal));
    let all = cases(&[[3, 67, 4, 5], [2, 130, 4, 33]]).chain(grouped);
    let all = all.map(|case| case.dropping(0.3, (1 << 33) + 6));
    for case in all.flat_map(|case| [DType::F32, DType::BF16, DType::F16].map(|dtype| case.with(dtype))) {
        let device = Device::new(Cpu::with_options(Options::new(3)).unwrap(), Arena::heap());
        let (qkv, dout) = (case.qkv(2.0), case.dout());
        let both = |case: Case, qkv: &[f32], dout: &[f32]| {
            let [out, lse] = forward(&device, case, qkv).try_into().expect("two outputs");
            let [dqkv] = backward(&device, case, [qkv, &out, &lse, dout]).try_into().expect("one output");
            [out, dqkv]
        };
        let whole = both(case, &qkv, &dout);
        for half in 0..2 {
            let dropout = case.dropout.map(|d| {
                let before = half * case.heads / 2 * case.seq * case.seq;
                Dropout { first: d.first + before as u64, ..d }
            });
            let part = Case { heads: case.heads / 2, kv_heads: case.kv_heads / 2, dropout, ..case };
            // The part of each row of these heads that belongs to this half of them.
            let cut = |mut x: &[f32], heads: &[usize]| -> Vec<f32> {
                let mut own = Vec::new();
                for heads in heads.iter().cycle() {
                    let Some((here, rest)) = x.split_at_checked(heads * case.size) else { break };
                    own.extend_from_slice(&here[half * here.len() / 2..][..here.len() / 2]);
                    x = rest;
                }
                own
            };
            let (of_out, of_qkv) = ([case.heads], [case.heads, case.kv_heads, case.kv_heads]);
            let own = both(part, &cut(&qkv, &of_qkv), &cut(&dout, &of_out));
            assert_eq!(whole.len(), own.len());
            for (which, (whole, own)) in whole.iter().zip(&own).enumerate() {
                let heads = if which == 0 { &of_out[..] } else { &of_qkv };
                assert!(same_bits(&cut(whole, heads), own), "{case:?}, half {half}, output {which}");
            }
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let [_, case] = cases(&[[1, 70, 1, 16]]).collect::<Vec<_>>().try_into().unwrap_or_else(|_| panic!());
    // Scores reach 6000: their own rounding is 6000 * EPS, which the exponential makes relative.
    check_forward(case, 40.0, 6000.0 * 8.0);
    // Values reach 50,000, and their products with the root of the size exceed f16.
    check_forward(case.with(DType::F16), 150.0, 90_000.0 * 8.0);
    check_forward(case.with(DType::BF16), 150.0, 90_000.0 * 8.0);
}

#[test]
fn backward_against_differences() {
    let varied = [false, true].map(|causal| plain([1, 9, 4, 2, 3], causal));
    let varied = varied.map(|case| Case { window: Some(3), scale: Some(0.7), soft_cap: Some(1.5), ..case });
    let packed = [&[4, 1, 3][..], &[6]]
        .map(|documents| Case { documents: Some(documents), ..plain([2, 9, 4, 2, 3], true) });
    for case in cases(&[[1, 1, 1, 1], [1, 3, 1, 5], [2, 7, 2, 3], [1, 17, 1, 4], [1, 67, 1, 2]])
        .chain(varied)
        .chain(packed)
    {
        for case in [case, case.dropping(0.3, 3)] {
            let (qkv, dout) = (case.qkv(1.0), case.dout());
            let d = gradient(&wide(&qkv), |qkv| weighted(&reference(case, qkv).0.value, &dout));
            let kernel = |device: &Device| {
                let [out, lse] = forward(device, case, &qkv).try_into().expect("two outputs");
                backward(device, case, [&qkv, &out, &lse, &dout])
            };
            let expected = Expected::by_largest(d, 4.0 * roundings(case));
            check(&format!("differences {case:?}"), kernel, &[expected]);
        }
    }
}

/// A single sample is cut into blocks that run in parallel; with many samples, each head is one task, and keys are
/// processed in spans. The bits must be equal.
#[test]
fn a_sample_has_the_same_bits_in_any_batch() {
    let grouped = Case { window: Some(140), ..plain([16, 300, 4, 2, 5], true) };
    for case in cases(&[[16, 300, 1, 5], [16, 1100, 1, 4]]).chain([grouped]) {
        for case in [DType::F32, DType::BF16, DType::F16].map(|dtype| case.with(dtype)) {
            let (qkv, dout) = (case.qkv(2.0), case.dout());
            let device = Device::new(Cpu::with_options(Options::new(3)).unwrap(), Arena::heap());
            let both = |case: Case, qkv: &[f32], dout: &[f32]| {
                let [out, lse] = forward(&device, case, qkv).try_into().expect("two outputs");
                let [dqkv] = backward(&device, case, [qkv, &out, &lse, dout]).try_into().expect("one output");
                [out, lse, dqkv]
            };
            let all = both(case, &qkv, &dout);
            let piece = |x: &[f32], b: usize| x[b * x.len() / 16..(b + 1) * x.len() / 16].to_vec();
            for b in [0, 9] {
                let alone = both(Case { batch: 1, ..case }, &piece(&qkv, b), &piece(&dout, b));
                for (which, (all, alone)) in all.iter().zip(&alone).enumerate() {
                    assert!(
                        same_bits(&piece(all, b), alone),
                        "{case:?}, sample {b}, output {which}: other bits alone"
                    );
                }
            }
        }
    }
}

/// Rows computed one after another over a cache of keys and values.
#[test]
fn cached_attention_has_the_bits_of_the_whole() {
    let kept = |case: &Case| case.causal && case.dropout.is_none();
    for case in cases(&SHAPES).chain(cases(&[[1, 1060, 1, 8]])).chain(varied()).filter(kept) {
        let best = KernelPath::all().filter(|path| path.isa == Isa::detect());
        let types = [DType::F32, DType::BF16, DType::F16];
        for (path, dtype) in best.flat_map(|path| types.map(|dtype| (path, dtype))) {
            let case = case.with(dtype);
            let device = path.cpu(2);
            let qkv = case.qkv(3.0);
            let whole = forward(&device, case, &qkv).swap_remove(0);
            for prompt in [1, case.seq / 2 + 1] {
                let cached = cached(&device, case, &qkv, prompt);
                assert!(
                    same_bits(&cached, &whole),
                    "{case:?} ({}): {prompt} rows at once, then one at a time",
                    path.name()
                );
            }
            let last = last_row(&device, case, &qkv[..case.seq * case.widths()[0]]);
            let end = case.seq * case.hidden();
            assert!(
                same_bits(&last, &whole[end - case.hidden()..end]),
                "{case:?} ({}): the last row",
                path.name()
            );
        }
    }
}

/// out of the last row of one sample, of which nothing is in the cache.
fn last_row(device: &Device, case: Case, qkv: &[f32]) -> Vec<f32> {
    let Case { seq, dtype, .. } = case;
    let (hidden, [width, kept]) = (case.hidden(), case.widths());
    let qkv = stored(device, dtype, [1, seq, width], qkv);
    let mut cache = poisoned(device, dtype, [1, seq, kept]);
    let mut out = poisoned(device, dtype, [1, 1, hidden]);
    device.attention_cached(qkv.view(), case.heads(), 0, cache.view_mut(), out.view_mut());
    read(device, &out)
}

/// out of all rows: the first `prompt` at once, the others one at a time, with room for three more.
fn cached(device: &Device, case: Case, qkv: &[f32], prompt: usize) -> Vec<f32> {
    let Case { batch, seq, dtype, .. } = case;
    let (hidden, [width, kept]) = (case.hidden(), case.widths());
    let mut cache = poisoned(device, dtype, [batch, seq + 3, kept]);
    let mut all = vec![0.0; batch * seq * hidden];
    let mut past = 0;
    while past < seq {
        let new = if past == 0 { prompt } else { 1 };
        let rows = |b: usize| (b * seq + past)..(b * seq + past + new);
        let some: Vec<f32> =
            (0..batch).flat_map(|b| &qkv[rows(b).start * width..rows(b).end * width]).copied().collect();
        let some = stored(device, dtype, [batch, new, width], &some);
        let mut out = poisoned(device, dtype, [batch, new, hidden]);
        device.attention_cached(some.view(), case.heads(), past, cache.view_mut(), out.view_mut());
        for (b, out) in read(device, &out).chunks(new * hidden).enumerate() {
            all[rows(b).start * hidden..rows(b).end * hidden].copy_from_slice(out);
        }
        past += new;
    }
    all
}
