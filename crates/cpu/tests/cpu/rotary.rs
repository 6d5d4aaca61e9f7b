//! Rotary positions, and their gradients against differences.

use phalanx_tensor::{Category, DType, Device, Rotary, RotaryScaling, RowPositions};

use crate::differences::{gradient, weighted};
use crate::oracle::{Expected, FLOATS, check_as, numbers, read_f32, rounded, tensor_as, wide};

/// The extents of a call.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// batch, seq, columns behind the heads that turn
    rows: [usize; 3],
    heads: usize,
    /// Elements of a head, and how many of them turn.
    head: [usize; 2],
    /// The position of the first row of a sequence.
    first: usize,
    /// Rows of a document, if a sequence has several; then positions count from 0 in each.
    document: Option<usize>,
}

const CASES: [Case; 7] = [
    Case { rows: [1, 1, 0], heads: 1, head: [2, 2], first: 0, document: None },
    Case { rows: [2, 3, 5], heads: 2, head: [6, 6], first: 0, document: None },
    Case { rows: [3, 4, 8], heads: 3, head: [40, 34], first: 7, document: None },
    Case { rows: [1, 9, 3], heads: 2, head: [9, 4], first: 1000, document: None },
    Case { rows: [2, 67, 64], heads: 3, head: [64, 64], first: 0, document: None },
    Case { rows: [1, 1, 128], heads: 5, head: [256, 256], first: 131_071, document: None },
    Case { rows: [3, 7, 2], heads: 2, head: [6, 4], first: 0, document: Some(3) },
];

impl Case {
    fn shape(&self) -> [usize; 3] {
        let [batch, seq, behind] = self.rows;
        [batch, seq, self.heads * self.head[0] + behind]
    }

    fn rotary(&self) -> Rotary {
        let turned = Rotary::new(self.head[0], self.head[1], 1e4, RotaryScaling::Default);
        Rotary::of(self.head[0], 1.25, turned.frequencies())
    }

    /// The position of a row, of all sequences. Each sequence begins one row further in its first document.
    fn position(&self, row: usize, seq: usize) -> usize {
        match self.document {
            None => self.first + row % seq,
            Some(rows) => (row % seq + row / seq) % rows,
        }
    }

    fn reference(&self, x: &[f64], inverse: bool) -> Vec<f64> {
        let ([_, seq, width], [head_dim, rotated], rotary) = (self.shape(), self.head, self.rotary());
        let mut y = x.to_vec();
        for (row, y) in y.chunks_mut(width).enumerate() {
            let position = self.position(row, seq) as f64;
            for head in y.chunks_exact_mut(head_dim).take(self.heads) {
                for (i, frequency) in rotary.frequencies().iter().enumerate() {
                    let (s, c) = (position * frequency).sin_cos();
                    let s = if inverse { -s } else { s };
                    let (a, b) = (head[i], head[i + rotated / 2]);
                    head[i] = rotary.scale() * (a * c - b * s);
                    head[i + rotated / 2] = rotary.scale() * (b * c + a * s);
                }
            }
        }
        y
    }

    fn call(&self, device: &Device, dtype: DType, x: &[f32], inverse: bool) -> Vec<Vec<f32>> {
        let mut x = tensor_as(device, dtype, self.shape(), x);
        let turn = if inverse { Device::rotary_backward } else { Device::rotary };
        let [batch, seq, _] = self.shape();
        let of_rows = (0..batch * seq).map(|row| self.position(row, seq) as u32);
        let mut each = device.alloc(DType::U32, [batch, seq], Category::Activations, "positions");
        device.upload(&of_rows.collect::<Vec<u32>>(), each.view_mut());
        let positions = match self.document {
            None => RowPositions::From(self.first),
            Some(_) => RowPositions::Each(each.view()),
        };
        turn(device, x.view_mut(), &self.rotary(), self.heads, positions);
        vec![read_f32(device, &x)]
    }
}

/// The cosine and sine are rounded once, and so are a product and the sum; |a| + |b| is at most 2, times 1.25.
fn expected(value: Vec<f64>) -> Expected {
    Expected { magnitude: vec![2.5; value.len()], value, roundings: 3.0 }
}

#[test]
fn forward_and_backward() {
    for (case, dtype) in CASES.into_iter().flat_map(|case| FLOATS.map(|dtype| (case, dtype))) {
        let x = rounded(dtype, &numbers(1, case.shape().iter().product()));
        for inverse in [false, true] {
            let kernel = |device: &Device| case.call(device, dtype, &x, inverse);
            let y = case.reference(&wide(&x), inverse);
            check_as(&format!("rotary {case:?}, inverse {inverse}"), kernel, &[expected(y)], &[dtype]);
        }
    }
}

/// Columns behind the heads, and elements of a head that are not rotated, keep their bits.
#[test]
fn the_others_stay() {
    for (case, dtype) in CASES.into_iter().flat_map(|case| FLOATS.map(|dtype| (case, dtype))) {
        let ([_, _, width], [head_dim, rotated]) = (case.shape(), case.head);
        let x = rounded(dtype, &numbers(1, case.shape().iter().product()));
        let device = crate::oracle::cpu(2, phalanx_simd::Isa::detect());
        let y = &case.call(&device, dtype, &x, false)[0];
        for (i, (x, y)) in x.iter().zip(y).enumerate() {
            let column = i % width;
            let turns = column < case.heads * head_dim && column % head_dim < rotated;
            assert!(turns || x.to_bits() == y.to_bits(), "{case:?}, element {i}: {x} became {y}");
        }
    }
}

#[test]
fn backward_against_differences() {
    for case in &CASES[..4] {
        for dtype in FLOATS {
            let [_, seq, width] = case.shape();
            let elements = case.shape().iter().product();
            let (x, dy) = (numbers(1, elements), rounded(dtype, &numbers(2, elements)));
            let kernel = |device: &Device| case.call(device, dtype, &dy, true);
            // A sequence at a time.
            let of_sequence =
                |(x, dy): (&[f32], &[f32])| gradient(&wide(x), |x| weighted(&case.reference(x, false), dy));
            let dx = x.chunks(seq * width).zip(dy.chunks(seq * width)).flat_map(of_sequence).collect();
            check_as(&format!("rotary backward {case:?}"), kernel, &[expected(dx)], &[dtype]);
        }
    }
}
