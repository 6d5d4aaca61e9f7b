//! Half precision to single, by hand: every value of both formats is exact in binary32.

/// Upper half of binary32 to binary32.
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// IEEE binary16 to binary32. NaN keeps its sign and payload.
pub const fn f16_to_f32(bits: u16) -> f32 {
    let sign = (bits as u32 & 0x8000) << 16;
    let exponent = (bits as u32 >> 10) & 0x1f;
    let fraction = bits as u32 & 0x3ff;
    let magnitude = match (exponent, fraction) {
        (0, 0) => 0,
        // Subnormal: fraction * 2^-24. Its leading one becomes the implicit bit.
        (0, _) => {
            let leading = 31 - fraction.leading_zeros();
            ((leading + 127 - 24) << 23) | ((fraction << (23 - leading)) & 0x7f_ffff)
        }
        (31, _) => 0x7f80_0000 | (fraction << 13),
        _ => ((exponent + 127 - 15) << 23) | (fraction << 13),
    };
    f32::from_bits(sign | magnitude)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition of binary16, in f64 arithmetic, against every one of its 65,536 values.
    #[test]
    fn f16_agrees_with_its_definition() {
        for bits in 0..=u16::MAX {
            let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
            let exponent = i32::from(bits >> 10 & 0x1f);
            let fraction = f64::from(bits & 0x3ff);
            let value = f64::from(f16_to_f32(bits));
            match exponent {
                0 => assert_eq!(value, sign * fraction * 2f64.powi(-24), "{bits:#06x}"),
                31 if fraction == 0.0 => assert_eq!(value, sign * f64::INFINITY, "{bits:#06x}"),
                31 => assert!(value.is_nan(), "{bits:#06x}"),
                _ => {
                    let expected = sign * (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15);
                    assert_eq!(value, expected, "{bits:#06x}");
                }
            }
            assert_eq!(value.is_sign_negative(), bits >> 15 == 1, "{bits:#06x}");
        }
    }

    #[test]
    fn bf16_is_the_upper_half() {
        for (bits, value) in [(0x3f80, 1.0), (0xc049, -3.140625), (0x0000, 0.0), (0x7f80, f32::INFINITY)] {
            assert_eq!(bf16_to_f32(bits), value);
        }
        assert!(bf16_to_f32(0x7fc0).is_nan());
        assert_eq!(bf16_to_f32(0x0001), f32::from_bits(0x0001_0000));
    }
}
