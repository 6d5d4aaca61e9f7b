//! The functions that cards approximate, computed in f64 without branches so that loops over lanes become vectors.
//!
//! Each is within one unit in the last place of f32 (the tests compare with the standard library).

/// 2 to the power of `x` (`ex2.approx`).
#[inline(always)]
pub fn exponential(x: f32) -> f32 {
    power_of_two(f64::from(x)) as f32
}

/// 2 to the power of `x` in f64, to 11 digits.
#[inline(always)]
fn power_of_two(x: f64) -> f64 {
    // Beyond this, f32 is zero or infinite. NaN passes the comparisons below.
    let x = if x > 200.0 { 200.0 } else { x };
    let x = if x < -200.0 { -200.0 } else { x };
    // Adding 1.5 * 2^52 rounds to an integer, which is then in the low bits.
    const ROUND: f64 = 6755399441055744.0;
    let shifted = x + ROUND;
    let whole = shifted - ROUND;
    let rest = (x - whole) * std::f64::consts::LN_2;
    let mut sum = 1.0 / 3628800.0;
    for divisor in [362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0] {
        sum = sum * rest + 1.0 / divisor;
    }
    let scale = f64::from_bits((shifted.to_bits() << 52).wrapping_add(1023 << 52));
    sum * scale
}

/// The logarithm to base 2 (`lg2.approx`).
#[inline(always)]
pub fn logarithm(x: f32) -> f32 {
    let wide = f64::from(x);
    let bits = wide.to_bits();
    // x = m * 2^e with m from sqrt(1/2) to sqrt(2).
    let offset = bits.wrapping_sub(0x3fe6_a09e_667f_3bcd);
    let exponent = (offset as i64) >> 52;
    let mantissa = f64::from_bits(bits.wrapping_sub((exponent << 52) as u64));
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut sum = 1.0 / 17.0;
    for divisor in [15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        sum = sum * square + 1.0 / divisor;
    }
    let result = exponent as i32 as f64 + s * sum * 2.0 * std::f64::consts::LOG2_E;
    let finite = result as f32;
    let special = if x == 0.0 {
        f32::NEG_INFINITY
    } else if x == f32::INFINITY {
        x
    } else {
        f32::NAN
    };
    if x > 0.0 && x < f32::INFINITY { finite } else { special }
}

/// The hyperbolic tangent (`tanh.approx`).
#[inline(always)]
pub fn tangent(x: f32) -> f32 {
    let wide = f64::from(x);
    let power = power_of_two(wide.abs() * (2.0 * std::f64::consts::LOG2_E));
    let large = 1.0 - 2.0 / (power + 1.0);
    // Near zero the difference above cancels.
    let square = wide * wide;
    let small = wide.abs() * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)));
    let value = if wide.abs() < 0.005 { small } else { large };
    (value as f32).copysign(x)
}

/// The sine (`sin.approx`).
pub fn sine(x: f32) -> f32 {
    f64::from(x).sin() as f32
}

/// The cosine (`cos.approx`).
pub fn cosine(x: f32) -> f32 {
    f64::from(x).cos() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Within one unit in the last place of the exact value.
    fn close(found: f32, exact: f64, what: f32) {
        let expected = exact as f32;
        let near = found == expected || found == expected.next_up() || found == expected.next_down();
        assert!(near || found.is_nan() && expected.is_nan(), "{found} instead of {expected} at {what}");
    }

    #[test]
    fn within_one_unit_in_the_last_place() {
        let mut x = -160.0f32;
        while x < 160.0 {
            close(exponential(x), f64::from(x).exp2(), x);
            close(tangent(x / 16.0), f64::from(x / 16.0).tanh(), x);
            close(logarithm(exponential(x)), f64::from(exponential(x)).log2(), x);
            close(logarithm(1.0 + x / 400.0), f64::from(1.0 + x / 400.0).log2(), x);
            x += 0.013;
        }
        for x in [1e-30f32, -1e-9, 1e-4, 0.00499, 0.00501] {
            close(tangent(x), f64::from(x).tanh(), x);
        }
    }

    #[test]
    fn special_values() {
        assert_eq!(exponential(f32::INFINITY), f32::INFINITY);
        assert_eq!(exponential(f32::NEG_INFINITY), 0.0);
        assert_eq!(logarithm(0.0), f32::NEG_INFINITY);
        assert_eq!(logarithm(f32::INFINITY), f32::INFINITY);
        assert!(logarithm(-1.0).is_nan() && exponential(f32::NAN).is_nan() && tangent(f32::NAN).is_nan());
        assert_eq!(tangent(f32::NEG_INFINITY), -1.0);
        assert!(tangent(-0.0).is_sign_negative());
    }
}
