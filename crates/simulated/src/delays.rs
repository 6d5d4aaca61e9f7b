//! Delay of each call before it starts: a function of the seed, the stream and the call's number.

use std::time::Duration;

use phalanx_system::random::{GOLDEN, mix};

/// A delay from zero to `max`; a `share` of the calls is delayed at all.
pub(crate) fn delay(seed: u64, stream: usize, number: u64, max: Duration, share: f64) -> Duration {
    let key = mix(mix(seed.wrapping_add(GOLDEN)).wrapping_add((stream as u64).wrapping_mul(GOLDEN)));
    let drawn = mix(key.wrapping_add(number.wrapping_mul(GOLDEN)));
    let fraction = |bits: u64| (bits >> 11) as f64 / (1u64 << 53) as f64;
    if fraction(mix(drawn)) < share { max.mul_f64(fraction(drawn)) } else { Duration::ZERO }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_depend_on_seed_stream_and_number_and_fill_their_range() {
        let max = Duration::from_micros(200);
        let drawn = |seed, stream, number| delay(seed, stream, number, max, 1.0);
        assert_eq!(drawn(1, 2, 3), drawn(1, 2, 3));
        for other in [drawn(2, 2, 3), drawn(1, 3, 3), drawn(1, 2, 4)] {
            assert_ne!(drawn(1, 2, 3), other);
        }
        let all: Vec<f64> = (0..1000).map(|number| drawn(7, 0, number).as_secs_f64() / 200e-6).collect();
        let mean = all.iter().sum::<f64>() / 1000.0;
        // The mean of 1000 even draws misses 1/2 by more than 5 * sqrt(1 / 12000) = 0.046 once in a million.
        assert!((mean - 0.5).abs() < 0.046, "{mean}");
        assert!(all.iter().all(|x| (0.0..=1.0).contains(x)));
        assert_eq!(delay(1, 2, 3, Duration::ZERO, 1.0), Duration::ZERO);
        let delayed = (0..1000).filter(|number| delay(7, 0, *number, max, 0.1) > Duration::ZERO).count();
        // 100 are expected; 5 standard deviations are 47.
        assert!((53..=147).contains(&delayed), "{delayed}");
    }
}
