//! Numbers that Rust does not have: f16, bf16, tf32 and rounding in a direction.
//!
//! An operation on 16 bits computes in f64, where sums, products and fused products of such numbers are exact or so
//! close that one more rounding is right, and rounds once.

/// An IEEE half: 5 bits of exponent, 10 of fraction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Binary16(pub u16);

/// The upper half of an f32: 8 bits of exponent, 7 of fraction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bfloat16(pub u16);

/// Two numbers in one register, the lower one first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pair<T>(pub T, pub T);

/// A number of 16 bits.
pub trait Narrow: Copy {
    /// Its value, which is exact.
    fn wide(self) -> f32;
    /// The nearest number; ties go to the even one.
    fn nearest(value: f32) -> Self;
    /// The nearest number of a more exact value, rounded once.
    #[inline(always)]
    fn nearest64(value: f64) -> Self {
        Self::nearest(to_odd(value))
    }
    /// The next number towards zero.
    fn towards_zero(value: f32) -> Self;
}

impl Narrow for Binary16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        let bits = u32::from(self.0);
        let sign = (bits & 0x8000) << 16;
        let magnitude = bits & 0x7fff;
        // Scaling by 2^112 maps the exponents, subnormal numbers too; infinity and NaN keep their exponent of ones.
        let scaled = f32::from_bits(magnitude << 13) * f32::from_bits(0x7780_0000);
        let special = f32::from_bits(magnitude << 13 | 0x7f80_0000);
        let value = if magnitude >= 0x7c00 { special } else { scaled };
        f32::from_bits(value.to_bits() | sign)
    }

    #[inline(always)]
    fn nearest(value: f32) -> Self {
        let bits = value.to_bits();
        let sign = (bits >> 16 & 0x8000) as u16;
        let magnitude = bits & 0x7fff_ffff;
        // Subnormal results: adding 0.5 aligns the fraction with the lowest bit of a half, and rounds.
        let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let odd = magnitude >> 13 & 1;
        let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
        let result = if magnitude > 0x7f80_0000 {
            0x7fff
        } else if magnitude >= 0x477f_f000 {
            0x7c00
        } else if magnitude < 0x3880_0000 {
            small
        } else {
            normal
        };
        Self(result as u16 | sign)
    }

    fn towards_zero(value: f32) -> Self {
        let near = Self::nearest(value);
        let beyond = near.wide().abs() > value.abs();
        Self(near.0 - u16::from(beyond))
    }
}

impl Narrow for Bfloat16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    fn nearest(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        Self(if bits & 0x7fff_ffff > 0x7f80_0000 { 0x7fff } else { rounded as u16 })
    }

    fn towards_zero(value: f32) -> Self {
        Self(if value.is_nan() { 0x7fff } else { (value.to_bits() >> 16) as u16 })
    }
}

/// f64 to f32 with the last bit set if anything was lost, so that a second rounding to fewer bits is right.
#[inline(always)]
fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    let lost = f64::from(near) - value;
    let bits = near.to_bits();
    if lost == 0.0 || lost.is_nan() || bits & 1 == 1 {
        return near;
    }
    // The other neighbour of the value is odd.
    let outwards = (lost < 0.0) == (value > 0.0);
    f32::from_bits(if outwards { bits.wrapping_add(1) } else { bits.wrapping_sub(1) })
}

/// An f32 with the 10 bits of fraction that tensor cores read; ties go away from zero (`cvt.rna.tf32`).
#[inline(always)]
pub fn nearest_tf32(value: f32) -> f32 {
    let bits = value.to_bits();
    if bits & 0x7f80_0000 == 0x7f80_0000 {
        return value;
    }
    f32::from_bits(bits.wrapping_add(0x1000) & !0x1fff)
}

/// An f32 as a tensor core reads it for tf32: the low 13 bits do not count.
#[inline(always)]
pub fn truncated_tf32(bits: u32) -> f32 {
    f32::from_bits(bits & !0x1fff)
}

/// A rounding mode of PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// `.rn`: to the nearest, ties to even.
    Nearest,
    /// `.rz`: towards zero.
    Zero,
    /// `.rm`: towards minus infinity.
    Down,
    /// `.rp`: towards plus infinity.
    Up,
}

/// Rounds the exact value `sum + rest` to f32; `rest` is at most half a last place of `sum`.
pub fn rounded(sum: f64, rest: f64, rounding: Rounding) -> f32 {
    let near = sum as f32;
    if !near.is_finite() && !sum.is_finite() {
        return near;
    }
    let error = f64::from(near) - sum;
    let above = error > 0.0 || error == 0.0 && rest < 0.0;
    let below = error < 0.0 || error == 0.0 && rest > 0.0;
    let down = match rounding {
        Rounding::Nearest => return near,
        Rounding::Down => true,
        Rounding::Up => false,
        Rounding::Zero => sum > 0.0,
    };
    if down && above {
        near.next_down()
    } else if !down && below {
        near.next_up()
    } else {
        near
    }
}

/// `a * b + c` rounded to f32 in a direction.
pub fn fused(a: f32, b: f32, c: f32, rounding: Rounding) -> f32 {
    let product = f64::from(a) * f64::from(b);
    let (sum, rest) = two_sum(product, f64::from(c));
    rounded(sum, rest, rounding)
}

/// A sum and what its rounding lost.
fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_survive_a_round_trip() {
        for bits in 0..=u16::MAX {
            let value = Binary16(bits).wide();
            if value.is_nan() {
                assert!(Binary16::nearest(value).wide().is_nan());
            } else {
                assert_eq!(Binary16::nearest(value), Binary16(bits), "{value}");
                assert_eq!(Binary16::towards_zero(value), Binary16(bits), "{value}");
            }
        }
    }

    #[test]
    fn halves_round_to_the_nearest_even() {
        let step = 2f32.powi(-10);
        for (value, expected) in [
            (1.0 + step / 2.0, 1.0),
            (1.0 + step * 1.5, 1.0 + 2.0 * step),
            (65519.0, 65504.0),
            (65520.0, f32::INFINITY),
            (2f32.powi(-25), 0.0),
            (2f32.powi(-25) * 1.01, 2f32.powi(-24)),
        ] {
            assert_eq!(Binary16::nearest(value).wide(), expected, "{value}");
            assert_eq!(Binary16::nearest(-value).wide(), -expected, "{value}");
        }
        assert_eq!(Binary16::towards_zero(65535.0).wide(), 65504.0);
    }

    #[test]
    fn two_roundings_are_one() {
        // Half a last place of bf16 above 1, and a little more: the first rounding to f32 would lose it.
        let tie = 1.0 + 2f64.powi(-8);
        assert_eq!(Bfloat16::nearest64(tie).wide(), 1.0);
        assert_eq!(Bfloat16::nearest64(tie + 2f64.powi(-40)).wide(), 1.0 + 2f32.powi(-7));
        assert_eq!(Bfloat16::nearest64(-tie - 2f64.powi(-40)).wide(), -1.0 - 2f32.powi(-7));
    }

    #[test]
    fn directions() {
        let third = |rounding| fused(1.0, 1.0, 2f32.powi(-40), rounding);
        assert_eq!(third(Rounding::Nearest), 1.0);
        assert_eq!(third(Rounding::Down), 1.0);
        assert_eq!(third(Rounding::Zero), 1.0);
        assert_eq!(third(Rounding::Up), 1.0f32.next_up());
        assert_eq!(fused(-1.0, 1.0, -2f32.powi(-100), Rounding::Down), (-1.0f32).next_down());
        assert_eq!(fused(-1.0, 1.0, -2f32.powi(-100), Rounding::Zero), -1.0);
    }
}
