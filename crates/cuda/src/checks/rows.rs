//! Layer norm, embeddings, and the cross entropy of a vocabulary.

use phalanx_tensor::arguments::{
    CrossEntropy, IGNORED, Layout, Lookup, Positions, Weight, logits_stride, vocabulary_blocks,
};
use phalanx_tensor::preference::PREFERENCE_SUMS;
use phalanx_tensor::{
    Category, DType, Device, LayerNorm, LayerNormBackward, NormSums, Preference, PreferenceKind,
    PreferenceLoss, Rescale, RescaleGradient, RowNorm, Tensor, VocabularyLoss, VocabularyStatistics,
    WholeSums,
};

use super::bench::{Bench, FLOATS, ids, random, read, tensor, tolerance};

pub(super) fn layer_norm_and_its_gradients(bench: &Bench) {
    for dtype in FLOATS {
        // In registers, and not: odd rows, and long ones.
        let shapes = [[3, 5], [37, 96], [9, 770], [5, 1540]];
        for ([rows, hidden], centred) in shapes.into_iter().flat_map(|s| [(s, true), (s, false)]) {
            let norm = if centred { "layer norm" } else { "RMS norm" };
            bench.compare(&format!("{norm} {dtype:?} {rows} x {hidden}"), tolerance(dtype), |device| {
                let x = random(device, dtype, &[rows, hidden], 1);
                let [gamma, beta] = [2, 3].map(|seed| random(device, dtype, &[hidden], seed));
                let [mut y, mut dx] = [4, 5].map(|seed| random(device, dtype, &[rows, hidden], seed));
                let [mut mean, mut rstd] = [6, 7].map(|seed| random(device, DType::F32, &[rows], seed));
                let statistics = (centred.then(|| mean.view_mut()), rstd.view_mut());
                device.layer_norm(
                    x.view(),
                    (gamma.view(), Some(beta.view())),
                    1e-5,
                    y.view_mut(),
                    statistics,
                );
                let dy = random(device, dtype, &[rows, hidden], 8);
                let [mut dgamma, mut dbeta] = [9, 10].map(|seed| random(device, DType::F32, &[hidden], seed));
                device.run(LayerNormBackward {
                    x: x.view(),
                    gamma: gamma.view(),
                    norm: 1e-5.into(),
                    products: None,
                    mean: centred.then(|| mean.view()),
                    rstd: rstd.view(),
                    dy: dy.view(),
                    dx: dx.view_mut(),
                    accumulate_input: true,
                    gradients: [dgamma.view_mut(), dbeta.view_mut()].map(Some),
                    accumulate_parameters: true,
                });
                let all = [
                    ("y", &y),
                    ("mean", &mean),
                    ("rstd", &rstd),
                    ("dx", &dx),
                    ("dgamma", &dgamma),
                    ("dbeta", &dbeta),
                ];
                all.map(|(name, x)| (name, read(device, x.view()))).into()
            });
        }
    }
}

/// Norms of weights in both layouts, and columns over them, with a bias and without one.
pub(super) fn magnitudes(bench: &Bench) {
    let ([inputs, outputs, rank], [rows, first, columns]) = ([70, 37, 5], [50, 3, 45]);
    for (dtype, layout) in FLOATS.into_iter().flat_map(|t| [(t, Layout::OutIn), (t, Layout::InOut)]) {
        bench.compare(&format!("magnitudes {dtype:?} {layout:?}"), tolerance(dtype), |device| {
            let extents = if layout == Layout::OutIn { [outputs, inputs] } else { [inputs, outputs] };
            let matrix = random(device, dtype, &extents, 1);
            let (a, b) =
                (random(device, dtype, &[rank, inputs], 2), random(device, dtype, &[outputs, rank], 3));
            let mut squares = random(device, DType::F32, &[outputs], 4);
            let w = Weight { matrix: matrix.view(), layout };
            device.weight_squares(w, [a.view(), b.view()], 0.5, squares.view_mut());
            let [x, dy] = [5, 6].map(|seed| random(device, dtype, &[rows, columns], seed));
            let [magnitudes, bias] = [7, 8].map(|seed| random(device, dtype, &[outputs], seed));
            let (x, dy, given) = (x.view(), dy.view(), squares.view());
            let mut all = vec![("squares", read(device, given))];
            for bias in [None, Some(bias.view())] {
                let mut y = random(device, dtype, &[rows, columns], 9);
                let (magnitudes, to) = (magnitudes.view(), y.view_mut());
                device.run(Rescale { x, first, magnitudes, squares: given, bias, y: to });
                let mut dm = random(device, DType::F32, &[outputs], 10);
                let (to, accumulate) = (dm.view_mut(), bias.is_some());
                device.run(RescaleGradient { x, first, squares: given, bias, dy, dm: to, accumulate });
                all.extend([("y", read(device, y.view())), ("dm", read(device, dm.view()))]);
            }
            all
        });
    }
}

/// Heads, in whole fours and not, with weights counted from 1; and a vector of which other ranks have other parts.
pub(super) fn norms_among_columns(bench: &Bench) {
    for dtype in FLOATS {
        for ([rows, first, count, hidden, columns], by_heads) in
            [([37, 8, 3, 64, 300], true), ([9, 3, 2, 7, 19], true), ([37, 8, 1, 192, 300], false)]
        {
            let name = format!("RMS norm {dtype:?} of {count} x {hidden} among {columns}");
            bench.compare(&name, tolerance(dtype), |device| {
                let norm = RowNorm { offset: 1.0, first, count, by_heads, ..1e-5.into() };
                let [x, dy] = [1, 2].map(|seed| random(device, dtype, &[rows, columns], seed));
                let gamma = random(device, dtype, &[hidden], 3);
                let [mut y, mut dx] = [4, 5].map(|seed| random(device, dtype, &[rows, columns], seed));
                let mut rstd = random(device, DType::F32, &[rows, count], 6);
                let mut dgamma = random(device, DType::F32, &[hidden], 7);
                let [squares, products] = [None, Some(dy.view())].map(|dy| {
                    let mut sums = random(device, DType::F32, &[rows, count], 8);
                    let sums_of = RowNorm { by_heads: false, ..norm };
                    let (x, gamma) = (x.view(), gamma.view());
                    device.run(NormSums { x, gamma, norm: sums_of, dy, sums: sums.view_mut() });
                    sums
                });
                let [of_squares, of_products] = [&squares, &products]
                    .map(|sums| (!by_heads).then(|| WholeSums { sums: sums.view(), elements: 2 * hidden }));
                device.run(LayerNorm {
                    x: x.view(),
                    gamma: gamma.view(),
                    beta: None,
                    norm,
                    squares: of_squares,
                    y: y.view_mut(),
                    mean: None,
                    rstd: rstd.view_mut(),
                });
                device.run(LayerNormBackward {
                    x: x.view(),
                    gamma: gamma.view(),
                    norm,
                    products: of_products,
                    mean: None,
                    rstd: rstd.view(),
                    dy: dy.view(),
                    dx: dx.view_mut(),
                    accumulate_input: false,
                    gradients: [Some(dgamma.view_mut()), None],
                    accumulate_parameters: true,
                });
                let all = [
                    ("squares", &squares),
                    ("products", &products),
                    ("y", &y),
                    ("rstd", &rstd),
                    ("dx", &dx),
                    ("dgamma", &dgamma),
                ];
                all.map(|(name, x)| (name, read(device, x.view()))).into()
            });
        }
    }
}

/// Ids with repeats, some of type 1.
fn some_ids(n: usize, vocab: u32) -> Vec<u32> {
    (0..n as u32).map(|i| ((i * i * 7 + i / 3) % vocab) | ((i % 3 / 2) << 31)).collect()
}

pub(super) fn embeddings_and_their_gradients(bench: &Bench) {
    let (n, vocab, hidden, seq) = (1200, 50, 133, 128);
    for dtype in FLOATS {
        for (first, rows) in [(0, 50), (20, 17)] {
            for gradient in [dtype, DType::F32] {
                // Sums of f32 have the processor's order, so results have its bits.
                bench.compare(&format!("embedding {dtype:?} rows {first}.. {gradient:?}"), 0.0, |device| {
                    let ids = ids(device, &some_ids(n, vocab));
                    let lookup = Lookup::Token { first, vocab: vocab as usize };
                    let table = random(device, dtype, &[rows, hidden], 1);
                    let types = random(device, dtype, &[2, hidden], 2);
                    let positions = random(device, dtype, &[seq + 2, hidden], 3);
                    let positions = Positions { table: positions.view(), first_row: 60, seq };
                    let mut y = random(device, dtype, &[n, hidden], 4);
                    device.embedding(ids.view(), lookup, table.view(), Some(positions), false, y.view_mut());
                    device.embedding(ids.view(), Lookup::Type, types.view(), None, true, y.view_mut());
                    device.add_positions(positions, y.view_mut());
                    let dy = random(device, dtype, &[n, hidden], 5);
                    let mut dtable = random(device, gradient, &[rows, hidden], 6);
                    let mut dtypes = random(device, gradient, &[2, hidden], 7);
                    let mut dpositions = random(device, gradient, &[seq + 2, hidden], 8);
                    let accumulate = gradient == dtype;
                    device.embedding_backward(ids.view(), lookup, dy.view(), dtable.view_mut(), accumulate);
                    device.embedding_backward(
                        ids.view(),
                        Lookup::Type,
                        dy.view(),
                        dtypes.view_mut(),
                        accumulate,
                    );
                    device.position_gradient(dy.view(), 60, seq, dpositions.view_mut(), accumulate);
                    let all =
                        [("y", &y), ("dtable", &dtable), ("dtypes", &dtypes), ("dpositions", &dpositions)];
                    all.map(|(name, x)| (name, read(device, x.view()))).into()
                });
            }
        }
    }
}

/// Rows, hidden, classes. The last has more columns than a block of threads computes at a time.
const VOCABULARIES: [[usize; 3]; 3] = [[7, 16, 40], [70, 24, 301], [2, 8, 49_411]];

fn targets(rows: usize, classes: usize) -> Vec<u32> {
    (0..rows).map(|row| if row % 5 == 3 { IGNORED } else { (row * 37 % classes) as u32 }).collect()
}

/// Statistics of two parts of the classes, as tensors: `[2, rows, 4]` and the blocks of each.
struct Parts {
    statistics: Tensor,
    blocks: [Tensor; 2],
    exponentials: [Tensor; 2],
}

fn statistics(
    device: &Device,
    dtype: DType,
    [rows, hidden, classes]: [usize; 3],
    cut: usize,
    stored: bool,
) -> Parts {
    let f32s = |dims: &[usize]| device.alloc(DType::F32, dims, Category::Workspace, "statistics");
    let ids = ids(device, &targets(rows, classes));
    let mut statistics = f32s(&[2, rows, 4]);
    let part = |part: usize, statistics: &mut Tensor| {
        let (first, columns) = if part == 0 { (0, cut) } else { (cut, classes - cut) };
        let mut blocks = f32s(&[rows, 4 * vocabulary_blocks(columns)]);
        // The first part's have padding.
        let stride = if part == 0 && !stored { logits_stride(columns) } else { columns };
        let mut exponentials = random(device, dtype, &[rows, stride], 20 + part as u64);
        let range = part * rows * 4..(part + 1) * rows * 4;
        let of_part = statistics.view_mut().range(range).reshape([rows, 4]);
        if stored {
            device.logits_statistics(exponentials.view_mut(), ids.view(), first, blocks.view_mut(), of_part);
            return (blocks, exponentials);
        }
        let layout = if part == 0 { Layout::OutIn } else { Layout::InOut };
        let dims = if part == 0 { [columns, hidden] } else { [hidden, columns] };
        let x = random(device, dtype, &[rows, hidden], 1);
        let w = random(device, dtype, &dims, 2 + part as u64);
        let bias = random(device, dtype, &[columns], 9);
        device.run(VocabularyStatistics {
            x: x.view(),
            w: Weight { matrix: w.view(), layout },
            bias: (part == 1).then(|| bias.view()),
            targets: ids.view(),
            first,
            exponentials: Some(exponentials.view_mut()),
            blocks: blocks.view_mut(),
            statistics: of_part,
        });
        (blocks, exponentials)
    };
    let (first, second) = (part(0, &mut statistics), part(1, &mut statistics));
    Parts { statistics, blocks: [first.0, second.0], exponentials: [first.1, second.1] }
}

pub(super) fn cross_entropy_of_a_vocabulary_in_parts(bench: &Bench) {
    let numbers = CrossEntropy { scale: 1.0, gradient_scale: 3.0, label_smoothing: 0.1, z_loss: 0.01 };
    for dtype in FLOATS {
        for size in VOCABULARIES {
            for stored in [false, true] {
                bench.compare(&format!("{dtype:?} {size:?} stored {stored}"), tolerance(dtype), |device| {
                    let [rows, _, classes] = size;
                    let cut = classes / 3;
                    let Parts { statistics, blocks, mut exponentials } =
                        statistics(device, dtype, size, cut, stored);
                    let seen = read(device, statistics.view());
                    let ids = ids(device, &targets(rows, classes));
                    let mut loss = tensor(device, DType::F64, &[1], &[2.0]);
                    let weights = random(device, DType::F32, &[rows], 12);
                    let mut losses = random(device, DType::F32, &[rows], 13);
                    for (part, exponentials) in exponentials.iter_mut().enumerate() {
                        device.run(VocabularyLoss {
                            statistics: statistics.view(),
                            blocks: blocks[part].view(),
                            targets: ids.view(),
                            first: part * cut,
                            columns: if part == 0 { cut } else { classes - cut },
                            classes,
                            numbers,
                            exponentials: Some(exponentials.view_mut()),
                            weights: stored.then(|| weights.view()),
                            losses: stored.then(|| losses.view_mut()),
                            loss: loss.view_mut(),
                            accumulate: part == 0,
                        });
                    }
                    vec![
                        ("statistics", seen),
                        ("loss", read(device, loss.view())),
                        ("losses", read(device, losses.view())),
                        ("first part", read(device, exponentials[0].view())),
                        ("second part", read(device, exponentials[1].view())),
                    ]
                });
            }
        }
    }
}

pub(super) fn losses_of_preferences(bench: &Bench) {
    use PreferenceKind::{Dpo, DpoNorm, Ipo, Kto, Orpo, Robust, Simpo};
    for kind in [Dpo, Robust, DpoNorm, Ipo, Orpo, Simpo, Kto] {
        for (pairs, seq) in [(2, 5), (6, 700)] {
            bench.compare(&format!("{kind:?} {pairs} x {seq}"), tolerance(DType::F32), |device| {
                let (sequences, rows) = (2 * pairs, 2 * pairs * seq);
                // Losses of tokens are above 0; some tokens are none of the answer, and one pair has none.
                let losses: Vec<f32> = (0..rows).map(|row| 0.05 + (row % 7) as f32 * 0.1).collect();
                let target =
                    |row: usize| if row.is_multiple_of(3) || row < seq { IGNORED } else { row as u32 };
                let targets = ids(device, &(0..rows).map(target).collect::<Vec<_>>());
                let reference = |at: usize| {
                    if at.is_multiple_of(2) { -0.2 * (seq + at) as f32 } else { (at % 4 / 2) as f32 }
                };
                let references: Vec<f32> = (0..2 * sequences).map(reference).collect();
                let losses = tensor(device, DType::F32, &[rows], &losses);
                let references = tensor(device, DType::F32, &[sequences, 2], &references);
                let mut weights = random(device, DType::F32, &[rows], 3);
                let mut sums = random(device, DType::F32, &[PREFERENCE_SUMS + sequences], 4);
                device.run(PreferenceLoss {
                    losses: losses.view(),
                    targets: targets.view().reshape([sequences, seq]),
                    references: references.view(),
                    preference: Preference {
                        kind,
                        beta: 0.1,
                        label_smoothing: 0.1,
                        gamma: 0.5,
                        weights: [1.0, 0.5],
                        kl_pairs: 2,
                    },
                    scale: 1.0 / pairs as f32,
                    weights: weights.view_mut(),
                    sums: sums.view_mut(),
                });
                vec![("weights", read(device, weights.view())), ("sums", read(device, sums.view()))]
            });
        }
    }
}
