//! Embedding of tokens, token types and positions, whole and in parts.

use phalanx_simd::Isa;
use phalanx_tensor::{DType, Device, Lookup, Positions, Tensor};

use crate::oracle::{
    Expected, FLOATS, check_as, cpu, gradient_types, indices, numbers, output_as, poisoned, poisoned_as,
    read_f32, rounded, tensor, tensor_as, tokens, wide,
};

/// (batch, seq, hidden, vocab, positions).
const SHAPES: [[usize; 5]; 8] = [
    [1, 1, 1, 1, 1],
    [2, 3, 17, 5, 3],
    [3, 17, 67, 11, 20],
    [2, 67, 257, 257, 67],
    [4, 33, 64, 3, 64],
    [1, 300, 130, 1000, 512],
    [2, 40, 1100, 7, 50],
    [3, 200, 33, 1, 200],
];

/// A lookup.
#[derive(Clone, Copy, Debug)]
struct LookupCase {
    lookup: Lookup,
    /// Rows of the table.
    rows: usize,
    /// Number of the first row, where positions are added.
    first_row: Option<usize>,
    accumulate: bool,
}

/// Whole tables and parts of them, token types, with and without positions and accumulation.
fn lookup_cases(vocab: usize, seq: usize) -> Vec<LookupCase> {
    let part = Lookup::Token { first: vocab / 3, vocab };
    let tables =
        [(Lookup::whole(vocab), vocab), (part, vocab.div_ceil(2).min(vocab - vocab / 3)), (Lookup::Type, 2)];
    let mut lookup_cases = Vec::new();
    for (lookup, rows) in tables {
        for first_row in [None, Some(0), Some(1), Some(2 * seq + seq / 2)] {
            for accumulate in [false, true] {
                lookup_cases.push(LookupCase { lookup, rows, first_row, accumulate });
            }
        }
    }
    lookup_cases
}

/// Tokens, with types in the upper bit.
fn ids(count: usize, vocab: usize) -> Vec<u32> {
    indices(1, count, vocab).iter().zip(indices(9, count, 2)).map(|(token, t)| token | t << 31).collect()
}

/// The row of a table, by the contract.
fn row(id: u32, lookup_case: LookupCase) -> Option<usize> {
    match lookup_case.lookup {
        Lookup::Type => Some(id as usize / (1 << 31)),
        Lookup::Token { first, .. } => {
            (id as usize % (1 << 31)).checked_sub(first).filter(|row| *row < lookup_case.rows)
        }
    }
}

#[test]
fn forward() {
    for (dtype, shape) in FLOATS.into_iter().flat_map(|d| SHAPES.map(|s| (d, s))) {
        let [batch, seq, hidden, vocab, places] = shape;
        let (ids, positions) = (ids(batch * seq, vocab), rounded(dtype, &numbers(3, places * hidden)));
        let before = rounded(dtype, &numbers(4, batch * seq * hidden));
        for lookup_case in lookup_cases(vocab, seq) {
            let table = rounded(dtype, &numbers(2, lookup_case.rows * hidden));
            let kernel = |device: &Device| {
                let ids = tokens(device, [batch, seq], &ids);
                let table = tensor_as(device, dtype, [lookup_case.rows, hidden], &table);
                let positions = tensor_as(device, dtype, [places, hidden], &positions);
                let positions =
                    lookup_case.first_row.map(|r| Positions { table: positions.view(), first_row: r, seq });
                let mut y = output_as(device, dtype, [batch, seq, hidden], &before, lookup_case.accumulate);
                let to = y.view_mut();
                device.embedding(
                    ids.view(),
                    lookup_case.lookup,
                    table.view(),
                    positions,
                    lookup_case.accumulate,
                    to,
                );
                vec![read_f32(device, &y)]
            };
            let mut y = Expected { value: Vec::new(), magnitude: Vec::new(), roundings: 2.0 };
            for (t, id) in ids.iter().enumerate() {
                for i in 0..hidden {
                    let of_table = row(*id, lookup_case).map_or(0.0, |row| table[row * hidden + i]);
                    let of_place =
                        lookup_case.first_row.map_or(0.0, |r| positions[(r + t) % seq * hidden + i]);
                    let before = if lookup_case.accumulate { before[t * hidden + i] } else { 0.0 };
                    let terms = [of_table, of_place, before].map(f64::from);
                    y.value.push(terms.iter().sum());
                    y.magnitude.push(terms.map(f64::abs).iter().sum());
                }
            }
            check_as(&format!("embedding {shape:?} {lookup_case:?}"), kernel, &[y], &[dtype]);
        }
    }
}

/// Parts of a table, then positions of parts of the rows, give the bits of the whole.
#[test]
fn parts_and_pieces_are_the_whole() {
    for dtype in FLOATS {
        let [batch, seq, hidden, vocab] = [2, 9, 67, 11];
        let device = cpu(2, Isa::detect());
        let table = numbers(2, vocab * hidden);
        let positions = tensor_as(&device, dtype, [seq, hidden], &numbers(3, seq * hidden));
        let ids = tokens(&device, [batch, seq], &ids(batch * seq, vocab));
        let place = |first_row| Positions { table: positions.view(), first_row, seq };
        let all = tensor_as(&device, dtype, [vocab, hidden], &table);
        let mut whole = poisoned_as(&device, dtype, [batch, seq, hidden]);
        let to = whole.view_mut();
        device.embedding(ids.view(), Lookup::whole(vocab), all.view(), Some(place(0)), false, to);

        let mut parts = poisoned_as(&device, dtype, [batch, seq, hidden]);
        for (first, end) in [(0, 4), (4, 5), (5, vocab)] {
            let rows = &table[first * hidden..end * hidden];
            let rows = tensor_as(&device, dtype, [end - first, hidden], rows);
            let lookup = Lookup::Token { first, vocab };
            device.embedding(ids.view(), lookup, rows.view(), None, first > 0, parts.view_mut());
        }
        for (first, end) in [(0, 5), (5, 16), (16, batch * seq)] {
            device.add_positions(
                place(first),
                parts.view_mut().range(first * hidden..end * hidden).reshape([end - first, hidden]),
            );
        }
        assert_eq!(read_f32(&device, &whole), read_f32(&device, &parts), "{}", dtype.name());
    }
}

#[test]
fn backward() {
    let types = FLOATS.into_iter().flat_map(|d| gradient_types(d).into_iter().map(move |g| (d, g)));
    for ((dtype, stored), shape) in types.flat_map(|types| SHAPES.map(|shape| (types, shape))) {
        let [batch, seq, hidden, vocab, _] = shape;
        let ids = ids(batch * seq, vocab);
        let dy = rounded(dtype, &numbers(2, batch * seq * hidden));
        for lookup_case in
            lookup_cases(vocab, seq).into_iter().filter(|lookup_case| lookup_case.first_row.is_none())
        {
            let before = rounded(stored, &numbers(3, lookup_case.rows * hidden));
            let kernel = |device: &Device| {
                let ids = tokens(device, [batch, seq], &ids);
                let dy = tensor_as(device, dtype, [batch, seq, hidden], &dy);
                let mut dtable =
                    output_as(device, stored, [lookup_case.rows, hidden], &before, lookup_case.accumulate);
                let into = dtable.view_mut();
                device.embedding_backward(
                    ids.view(),
                    lookup_case.lookup,
                    dy.view(),
                    into,
                    lookup_case.accumulate,
                );
                vec![read_f32(device, &dtable)]
            };
            let rows = ids.iter().map(|id| row(*id, lookup_case));
            let expected = sums(rows, hidden, &dy, &before, lookup_case.accumulate);
            check_as(
                &format!("embedding backward {shape:?} {lookup_case:?}"),
                kernel,
                &[expected],
                &[stored],
            );
        }
    }
}

#[test]
fn gradient_of_positions() {
    let types = FLOATS.into_iter().flat_map(|d| gradient_types(d).into_iter().map(move |g| (d, g)));
    for ((dtype, stored), shape) in types.flat_map(|types| SHAPES.map(|shape| (types, shape))) {
        let [batch, seq, hidden, _, places] = shape;
        let before = rounded(stored, &numbers(4, places * hidden));
        // All rows, and pieces that start and end anywhere.
        for (first, rows) in [(0, batch * seq), (1, batch * seq - 1), (seq / 2, 1), (3 * seq + seq / 2, seq)]
        {
            let dy = rounded(dtype, &numbers(2, rows * hidden));
            for accumulate in [false, true] {
                let kernel = |device: &Device| {
                    let dy = tensor_as(device, dtype, [rows, hidden], &dy);
                    let mut dpositions = output_as(device, stored, [places, hidden], &before, accumulate);
                    device.position_gradient(dy.view(), first, seq, dpositions.view_mut(), accumulate);
                    vec![read_f32(device, &dpositions)]
                };
                let to = (0..rows).map(|i| Some((first + i) % seq));
                let expected = sums(to, hidden, &dy, &before, accumulate);
                let what = format!("positions {shape:?}, {rows} rows from {first}");
                check_as(&what, kernel, &[expected], &[stored]);
            }
        }
    }
}

/// The sum of the rows of dy for each table row: at most one addition per row, in f32 for every type.
fn sums(
    rows: impl Iterator<Item = Option<usize>>,
    hidden: usize,
    dy: &[f32],
    before: &[f32],
    accumulate: bool,
) -> Expected {
    let mut value = if accumulate { wide(before) } else { vec![0.0; before.len()] };
    let mut magnitude: Vec<f64> = value.iter().map(|x| x.abs()).collect();
    for (t, row) in rows.enumerate() {
        let Some(row) = row else { continue };
        for i in 0..hidden {
            let d = f64::from(dy[t * hidden + i]);
            value[row * hidden + i] += d;
            magnitude[row * hidden + i] += d.abs();
        }
    }
    Expected { value, magnitude, roundings: (dy.len() / hidden) as f64 }
}

fn look_up(ids: &[u32], lookup: Lookup, rows: usize) -> Tensor {
    let device = cpu(1, Isa::detect());
    let ids = tokens(&device, [ids.len()], ids);
    let table = tensor(&device, [rows, 4], &vec![0.0; rows * 4]);
    let mut y = poisoned(&device, [2, 4]);
    device.embedding(ids.view(), lookup, table.view(), None, false, y.view_mut());
    y
}

#[test]
#[should_panic(expected = "token 7 is outside the vocabulary of 5")]
fn a_token_out_of_range_is_named() {
    look_up(&[1, 7], Lookup::whole(5), 5);
}

#[test]
#[should_panic(expected = "token 5 is outside the vocabulary of 5")]
fn a_token_out_of_range_is_named_by_a_part_and_with_its_type() {
    look_up(&[1, 1 << 31 | 5], Lookup::Token { first: 1, vocab: 5 }, 2);
}

#[test]
#[should_panic(expected = "token type 1 is outside the table of 1 rows")]
fn a_type_out_of_range_is_named() {
    look_up(&[1, 1 << 31], Lookup::Type, 1);
}

#[test]
fn one_token_type_has_all_of_the_gradient() {
    let device = cpu(2, Isa::detect());
    let (ids, dy) =
        (tokens(&device, [3], &[1, 2, 3]), tensor(&device, [3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
    let mut dtable = poisoned_as(&device, DType::F32, [1, 2]);
    device.embedding_backward(ids.view(), Lookup::Type, dy.view(), dtable.view_mut(), false);
    assert_eq!(read_f32(&device, &dtable), [9.0, 12.0]);
}
