//! The time of a transfer: a latency and a rate, or measured times by size.

use serde::{Deserialize, Serialize};

/// The time of a transfer by its size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TransferRate {
    /// A latency, and bytes per second beyond it.
    Line {
        /// Microseconds of the smallest transfer.
        latency_us: f64,
        /// 10^9 bytes per second.
        gb_per_s: f64,
    },
    /// Measured: bytes of a transfer and its microseconds, ascending. Between two sizes the time is interpolated; beyond the
    /// largest, and below the smallest, the rate stays.
    Measured {
        /// Pairs of bytes and microseconds.
        bytes_us: Vec<(u64, f64)>,
    },
}

impl TransferRate {
    /// Seconds of one transfer.
    pub fn seconds(&self, bytes: u64) -> f64 {
        let size = bytes as f64;
        match self {
            TransferRate::Line { latency_us, gb_per_s } => latency_us * 1e-6 + size / (gb_per_s * 1e9),
            TransferRate::Measured { bytes_us } => {
                let above = bytes_us.partition_point(|(known, _)| *known < bytes);
                let us = match (above.checked_sub(1).map(|below| bytes_us[below]), bytes_us.get(above)) {
                    (Some((low, low_us)), Some((high, high_us))) => {
                        low_us + (high_us - low_us) * (size - low as f64) / (high - low) as f64
                    }
                    (Some((known, us)), None) | (None, Some(&(known, us))) => us * size / known.max(1) as f64,
                    (None, None) => 0.0,
                };
                us * 1e-6
            }
        }
    }

    /// Bytes per second at one size.
    pub fn bytes_per_s(&self, bytes: u64) -> f64 {
        bytes as f64 / self.seconds(bytes)
    }

    /// Returns whether the rate is positive and its sizes ascend.
    pub(crate) fn is_valid(&self) -> bool {
        match self {
            TransferRate::Line { latency_us, gb_per_s } => {
                *latency_us >= 0.0 && latency_us.is_finite() && *gb_per_s > 0.0 && gb_per_s.is_finite()
            }
            TransferRate::Measured { bytes_us } => {
                let ascend = bytes_us.windows(2).all(|pair| pair[0].0 < pair[1].0);
                let positive = bytes_us.iter().all(|(bytes, us)| *bytes > 0 && us.is_finite() && *us > 0.0);
                !bytes_us.is_empty() && ascend && positive
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_line_or_between_the_measured_ones() {
        let line = TransferRate::Line { latency_us: 10.0, gb_per_s: 1.0 };
        assert!((line.seconds(1_000_000) - 1.01e-3).abs() < 1e-12);
        let measured = TransferRate::Measured { bytes_us: vec![(1000, 10.0), (3000, 20.0)] };
        for (bytes, us) in [(500, 5.0), (1000, 10.0), (2000, 15.0), (3000, 20.0), (6000, 40.0)] {
            assert!((measured.seconds(bytes) - us * 1e-6).abs() < 1e-15, "{bytes}");
        }
        assert!((measured.bytes_per_s(3000) - 1.5e8).abs() < 1.0);
    }
}
