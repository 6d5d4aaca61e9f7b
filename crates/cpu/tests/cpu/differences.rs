//! Central differences of an f64 function.

/// Gradient of `f` at `x`. With h = 1e-5 the error is about h² times the third derivative plus
/// 1e-16 * |f| / h: below 1e-9 for the functions here.
pub fn gradient(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let h = 1e-5;
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let at = x[i];
            x[i] = at + h;
            let up = f(&x);
            x[i] = at - h;
            let down = f(&x);
            x[i] = at;
            (up - down) / (2.0 * h)
        })
        .collect()
}

/// Sum of `weights * values`: the scalar whose gradient a backward computes from `dy = weights`.
pub fn weighted(values: &[f64], weights: &[f32]) -> f64 {
    values.iter().zip(weights).map(|(v, w)| v * f64::from(*w)).sum()
}
