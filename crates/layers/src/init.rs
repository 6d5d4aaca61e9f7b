//! Initial values: a function of seed, parameter name and element index alone.
//!
//! The generator of the module `random` gives element `i` its own bits, so every rank can fill any range of any
//! parameter, and initial values do not depend on the layout.

use crate::random;

/// The initial values of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal with this standard deviation and mean 0.
    Normal(f32),
    /// Uniform between the negative of this bound and the bound.
    Uniform(f32),
}

impl Init {
    /// Fills `out` with the elements from `start` on of the parameter `name`.
    pub fn fill(self, seed: u64, name: &str, start: u64, out: &mut [f32]) {
        match self {
            Init::Zeros => out.fill(0.0),
            Init::Ones => out.fill(1.0),
            Init::Normal(std) => {
                let key = random::key(seed, name);
                for (i, value) in out.iter_mut().enumerate() {
                    *value = std * normal(key, start + i as u64);
                }
            }
            Init::Uniform(bound) => {
                let key = random::key(seed, name);
                for (i, value) in out.iter_mut().enumerate() {
                    *value = bound * symmetric(key, start + i as u64);
                }
            }
        }
    }
}

/// One number from -1 to below 1, for this counter; 24 of its bits are random.
fn symmetric(key: u64, counter: u64) -> f32 {
    (random::number(key, counter) >> 40) as f32 * (1.0 / 8_388_608.0) - 1.0
}

/// One standard normal number (Box and Muller) for this counter.
fn normal(key: u64, counter: u64) -> f32 {
    let bits = random::number(key, counter);
    // Upper and lower 32 bits as two uniforms, the first in (0, 1].
    let u = ((bits >> 32) as f32 + 1.0) * (1.0 / 4_294_967_296.0);
    let v = (bits as u32 >> 8) as f32 * (1.0 / 16_777_216.0);
    (-2.0 * u.ln()).sqrt() * (std::f32::consts::TAU * v).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_range_gives_the_same_values() {
        let mut whole = vec![0.0; 1000];
        Init::Normal(0.02).fill(7, "h.0.weight", 0, &mut whole);
        let mut part = vec![0.0; 300];
        Init::Normal(0.02).fill(7, "h.0.weight", 450, &mut part);
        assert_eq!(part, whole[450..750]);
        Init::Normal(0.02).fill(7, "h.1.weight", 450, &mut part);
        assert_ne!(part, whole[450..750]);
    }

    #[test]
    fn moments_are_those_of_a_uniform() {
        let n = 200_000;
        let mut x = vec![0.0; n];
        Init::Uniform(0.5).fill(1, "w", 0, &mut x);
        let moment = |p: i32| x.iter().map(|v| (2.0 * *v as f64).powi(p)).sum::<f64>() / n as f64;
        // Of numbers from -1 to 1: 0, 1/3 and 1/5, with standard errors sqrt(1/3n), sqrt(4/45n) and sqrt(16/225n); five of each.
        assert!(moment(1).abs() < 5.0 * (1.0 / 3.0 / n as f64).sqrt());
        assert!((moment(2) - 1.0 / 3.0).abs() < 5.0 * (4.0 / 45.0 / n as f64).sqrt());
        assert!((moment(4) - 1.0 / 5.0).abs() < 5.0 * (16.0 / 225.0 / n as f64).sqrt());
        assert!(x.iter().all(|v| (-0.5..0.5).contains(v)));
        let mut part = vec![0.0; 300];
        Init::Uniform(0.5).fill(1, "w", 450, &mut part);
        assert_eq!(part, x[450..750]);
    }

    #[test]
    fn moments_are_those_of_a_normal() {
        let n = 200_000;
        let mut x = vec![0.0; n];
        Init::Normal(1.0).fill(1, "w", 0, &mut x);
        let moment = |p: i32| x.iter().map(|v| (*v as f64).powi(p)).sum::<f64>() / n as f64;
        // Standard errors of the moments: 1/sqrt(n), sqrt(2/n), sqrt(96/n); five of each.
        assert!(moment(1).abs() < 5.0 / (n as f64).sqrt());
        assert!((moment(2) - 1.0).abs() < 5.0 * (2.0 / n as f64).sqrt());
        assert!((moment(4) - 3.0).abs() < 5.0 * (96.0 / n as f64).sqrt());
        assert!(x.iter().all(|v| v.is_finite()));
    }
}
