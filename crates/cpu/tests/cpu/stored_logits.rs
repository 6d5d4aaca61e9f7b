//! Cross entropy of logits that are stored, against formulas in f64, in every element type.

use phalanx_cpu::Cpu;
use phalanx_tensor::{
    Arena, Category, CrossEntropy, DType, Device, IGNORED, Tensor, VocabularyLoss, vocabulary_blocks,
};

const ROWS: usize = 5;

/// The stored logits, widened to f32.
fn stored(device: &Device, dtype: DType, numbers: &[f32], columns: usize) -> (Tensor, Vec<f64>) {
    let alloc = |dtype| device.alloc(dtype, [ROWS, columns], Category::Workspace, "test");
    let (mut wide, mut logits) = (alloc(DType::F32), alloc(dtype));
    device.upload(numbers, wide.view_mut());
    device.convert(wide.view(), logits.view_mut());
    let back = read(device, &logits);
    (logits, back)
}

fn read(device: &Device, x: &Tensor) -> Vec<f64> {
    let mut wide = device.alloc(DType::F32, x.shape(), Category::Workspace, "test");
    device.convert(x.view(), wide.view_mut());
    let mut out = vec![0f32; x.shape().elements()];
    device.download(wide.view(), &mut out).unwrap();
    out.into_iter().map(f64::from).collect()
}

/// Losses of one row, and derivatives, by the formula.
fn reference(logits: &[f64], target: u32, n: CrossEntropy) -> (f64, Vec<f64>) {
    if target == IGNORED {
        return (0.0, vec![0.0; logits.len()]);
    }
    let top = logits.iter().fold(f64::NEG_INFINITY, |a, x| a.max(*x));
    let total: f64 = logits.iter().map(|l| (l - top).exp()).sum();
    let log_sum_exp = total.ln() + top;
    let (e, z) = (f64::from(n.label_smoothing), f64::from(n.z_loss));
    let mean = logits.iter().sum::<f64>() / logits.len() as f64;
    let loss = (1.0 - e) * (log_sum_exp - logits[target as usize])
        + e * (log_sum_exp - mean)
        + z * log_sum_exp * log_sum_exp;
    let derivative = |(v, l): (usize, &f64)| {
        let p = (l - log_sum_exp).exp();
        let at_target = if v == target as usize { 1.0 - e } else { 0.0 };
        f64::from(n.gradient_scale)
            * (p * (1.0 + 2.0 * z * log_sum_exp) - at_target - e / logits.len() as f64)
    };
    (loss, logits.iter().enumerate().map(derivative).collect())
}

#[test]
fn losses_and_derivatives_are_those_of_the_formula() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for columns in [1, 7, 128, 129, 1000] {
            for threads in [1, 3] {
                case(dtype, columns, threads);
            }
        }
    }
}

fn case(dtype: DType, columns: usize, threads: usize) {
    let device = Device::new(Cpu::new(threads), Arena::heap());
    let number = |i: usize| ((i * 2654435761) % 10007) as f32 / 10007.0 * 12.0 - 6.0;
    let numbers: Vec<f32> = (0..ROWS * columns).map(number).collect();
    let mut targets: Vec<u32> = (0..ROWS).map(|row| (row * 37 % columns) as u32).collect();
    targets[3] = IGNORED;
    let n = CrossEntropy { scale: 0.25, gradient_scale: 0.5, label_smoothing: 0.1, z_loss: 1e-3 };
    let (mut logits, wide) = stored(&device, dtype, &numbers, columns);
    let alloc = |dtype, shape: &[usize]| device.alloc(dtype, shape, Category::Workspace, "test");
    let mut ids = alloc(DType::U32, &[ROWS]);
    device.upload(&targets, ids.view_mut());
    let mut blocks = alloc(DType::F32, &[ROWS, 4 * vocabulary_blocks(columns)]);
    let mut statistics = alloc(DType::F32, &[ROWS, 4]);
    let mut sum = alloc(DType::F64, &[1]);
    device.logits_statistics(logits.view_mut(), ids.view(), 0, blocks.view_mut(), statistics.view_mut());
    let all = statistics.view().reshape([1, ROWS, 4]);
    let into = Some(logits.view_mut());
    device.run(VocabularyLoss {
        statistics: all,
        blocks: blocks.view(),
        targets: ids.view(),
        first: 0,
        columns,
        classes: columns,
        numbers: n,
        exponentials: into,
        weights: None,
        losses: None,
        loss: sum.view_mut(),
        accumulate: false,
    });
    let mut loss = [0f64];
    device.download(sum.view(), &mut loss).unwrap();
    let derivatives = read(&device, &logits);
    // f32 statistics: sums of up to 128 exponentials of relative error 128 * 2^-24 each, blocks in f64: 1e-5 of a
    // loss of at most ln(1000) + 12 + 1e-3 * 19^2 a row.
    let what = format!("{} x {columns}, {threads} threads", dtype.name());
    let references: Vec<_> =
        (0..ROWS).map(|r| reference(&wide[r * columns..(r + 1) * columns], targets[r], n)).collect();
    let expected: f64 = references.iter().map(|(loss, _)| loss).sum();
    assert!((loss[0] - expected).abs() < 1e-5 * 20.0 * ROWS as f64, "{what}: {} for {expected}", loss[0]);
    // An exponential is rounded to the type when it is stored, and its derivative again: two half units of the
    // type, of numbers up to gradient_scale; f16 keeps nothing below 2^-25. Beside them the same 1e-5.
    let unit = match dtype {
        DType::F32 => 2f64.powi(-24),
        DType::BF16 => 2f64.powi(-9),
        _ => 2f64.powi(-12),
    };
    let half_of_smallest = if dtype == DType::F16 { 2f64.powi(-25) } else { 0.0 };
    assert_eq!(derivatives.len(), ROWS * columns);
    for (i, (got, expected)) in derivatives.iter().zip(references.iter().flat_map(|(_, d)| d)).enumerate() {
        // The terms subtracted at the target and for smoothing may be as large as the probability.
        let size = expected.abs() + 0.5 * 1.1;
        let near = if i % columns == targets[i / columns] as usize { size } else { expected.abs() + 0.05 };
        let tolerance = 2.0 * unit * near + 1e-5 * near + 2.0 * half_of_smallest;
        assert!((got - expected).abs() <= tolerance, "{what}: derivative {i}: {got} for {expected}");
    }
}
