//! Rotary positions (Su et al., arXiv 2104.09864): by how much each pair of a head's elements turns from one position to the
//! next. The scalings that stretch a model to longer texts change these frequencies and nothing else, yarn and longrope also the
//! length of what is turned.

use std::f64::consts::{PI, TAU};
use std::sync::Arc;

/// Most frequencies of a head: a kernel takes them as an argument.
pub const ROTARY_FREQUENCIES_MAX: usize = 128;

/// Rotation of heads: elements `i` and `i + rotated / 2` of a head are rotated by `position * frequencies[i]`, the elements from
/// `rotated` on not at all.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotary {
    head_dim: usize,
    scale: f64,
    frequencies: Arc<[f64]>,
}

/// Scaling of the frequencies `f[i] = theta^(-2i / rotated)`: the `rope_type` of a configuration.
#[derive(Clone, Debug, PartialEq)]
pub enum RotaryScaling {
    /// Nothing.
    Default,
    /// They are divided by `factor`.
    Linear {
        /// Factor by which texts may be longer.
        factor: f64,
    },
    /// A larger theta for texts that are longer than those of training.
    Dynamic {
        /// Factor by which texts may be longer.
        factor: f64,
        /// Positions of training (`max_position_embeddings`).
        trained: usize,
        /// Positions of the text.
        length: usize,
    },
    /// Low ones are divided by `factor`, high ones stay, those between are blended.
    Llama3 {
        /// Factor by which texts may be longer.
        factor: f64,
        /// `low_freq_factor`
        low: f64,
        /// `high_freq_factor`
        high: f64,
        /// Positions of training (`original_max_position_embeddings`).
        original: usize,
    },
    /// Yarn (Peng et al., arXiv 2309.00071).
    Yarn(Yarn),
    /// Each is divided by a factor of its own (longrope: Ding et al., arXiv 2402.13753).
    LongRope(LongRope),
}

/// The numbers of yarn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Factor by which texts may be longer.
    pub factor: f64,
    /// Positions of training (`original_max_position_embeddings`).
    pub original: usize,
    /// Turns within `original` positions from which on a frequency stays; 32 if none is given.
    pub beta_fast: f64,
    /// Turns below which a frequency is divided by `factor`; 1 if none is given.
    pub beta_slow: f64,
    /// True if the ends of the ramp between the two are rounded to whole entries; true by default.
    pub truncate: bool,
    /// Factor of cosine and sine, if it is given.
    pub attention_factor: Option<f64>,
    /// `mscale` and `mscale_all_dim`, if both are given: the factor of cosine and sine follows from them.
    pub mscales: Option<[f64; 2]>,
}

/// The numbers of longrope.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Divisor of each frequency in texts of at most `original` positions.
    pub short: Arc<[f64]>,
    /// The same in longer ones.
    pub long: Arc<[f64]>,
    /// Positions of training (`original_max_position_embeddings`).
    pub original: usize,
    /// Factor by which texts may be longer.
    pub factor: f64,
    /// Factor of cosine and sine, if it is given.
    pub attention_factor: Option<f64>,
    /// Positions of the text.
    pub length: usize,
}

impl LongRope {
    fn scale(&self) -> f64 {
        let follows = match self.factor > 1.0 {
            true => (1.0 + self.factor.ln() / (self.original as f64).ln()).sqrt(),
            false => 1.0,
        };
        self.attention_factor.unwrap_or(follows)
    }
}

impl Yarn {
    /// The ends of the ramp, as entries of `rotated / 2`.
    fn ramp(&self, rotated: usize, theta: f64) -> [f64; 2] {
        let rotated = rotated as f64;
        let entry = |turns: f64| rotated * (self.original as f64 / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (low, high) = (entry(self.beta_fast), entry(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(rotated - 1.0));
        [low, if low == high { high + 0.001 } else { high }]
    }

    fn scale(&self) -> f64 {
        let of = |mscale: f64| if self.factor <= 1.0 { 1.0 } else { 0.1 * mscale * self.factor.ln() + 1.0 };
        let from_scales = self.mscales.map_or_else(|| of(1.0), |[mscale, all]| of(mscale) / of(all));
        self.attention_factor.unwrap_or(from_scales)
    }
}

impl Rotary {
    /// Turns the first `rotated` elements of heads of `head_dim`.
    ///
    /// # Panics
    /// Unless `rotated` is even, from 2 to `head_dim`, with at most [`ROTARY_FREQUENCIES_MAX`] frequencies that are numbers; for factors
    /// of longrope that are not one a frequency.
    #[track_caller]
    pub fn new(head_dim: usize, rotated: usize, theta: f64, scaling: RotaryScaling) -> Rotary {
        assert!(rotated > 0 && rotated.is_multiple_of(2), "pairs of elements turn, not {rotated} of them");
        let plain = |theta: f64| {
            (0..rotated / 2)
                .map(move |i| 1.0 / theta.powf((2 * i) as f64 / rotated as f64))
                .collect::<Vec<_>>()
        };
        let (mut frequencies, mut scale) = (plain(theta), 1.0);
        match scaling {
            RotaryScaling::Default => {}
            RotaryScaling::Linear { factor } => frequencies.iter_mut().for_each(|f| *f /= factor),
            RotaryScaling::Dynamic { factor, trained, length } => {
                let stretch = factor * length.max(trained) as f64 / trained as f64 - (factor - 1.0);
                let power = rotated as f64 / (rotated as f64 - 2.0);
                frequencies = plain(if length > trained { theta * stretch.powf(power) } else { theta });
            }
            RotaryScaling::Llama3 { factor, low, high, original } => {
                for f in &mut frequencies {
                    let turns = original as f64 * *f / (2.0 * PI);
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    *f = (1.0 - kept) * (*f / factor) + kept * *f;
                }
            }
            RotaryScaling::Yarn(yarn) => {
                let [low, high] = yarn.ramp(rotated, theta);
                for (i, f) in frequencies.iter_mut().enumerate() {
                    let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    *f = (1.0 - divided) * *f + divided * (*f / yarn.factor);
                }
                scale = yarn.scale();
            }
            RotaryScaling::LongRope(rope) => {
                let factors = if rope.length > rope.original { &rope.long } else { &rope.short };
                assert_eq!(factors.len(), frequencies.len(), "{rope:?} for {rotated} elements");
                frequencies.iter_mut().zip(factors.iter()).for_each(|(f, factor)| *f /= factor);
                scale = rope.scale();
            }
        }
        Rotary::of(head_dim, scale, frequencies)
    }

    /// Turns the pairs of a head by these frequencies, and multiplies them by `scale`.
    ///
    /// # Panics
    /// As [`Rotary::new`].
    #[track_caller]
    pub fn of(head_dim: usize, scale: f64, frequencies: impl Into<Arc<[f64]>>) -> Rotary {
        let rotary = Rotary { head_dim, scale, frequencies: frequencies.into() };
        let count = rotary.frequencies.len();
        assert!(
            (1..=ROTARY_FREQUENCIES_MAX).contains(&count) && 2 * count <= head_dim,
            "{count} frequencies for heads of {head_dim}, expected at most half as many, and {ROTARY_FREQUENCIES_MAX}"
        );
        assert!(rotary.frequencies.iter().all(|f| f.is_finite()) && scale.is_finite(), "{rotary:?}");
        rotary
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Elements of a head that turn.
    pub fn rotated(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Factor of cosine and sine: 1, but for yarn and longrope.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Radians from one position to the next, for each pair.
    pub fn frequencies(&self) -> &[f64] {
        &self.frequencies
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(rotated: usize, theta: f64) -> Vec<f64> {
        Rotary::new(rotated, rotated, theta, RotaryScaling::Default).frequencies().to_vec()
    }

    #[track_caller]
    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() <= 1e-14 * expected.abs(), "{found}, expected {expected}");
    }

    #[test]
    fn powers_of_theta_and_their_quotients() {
        let rotary = Rotary::new(256, 8, 1e4, RotaryScaling::Default);
        assert_eq!((rotary.head_dim(), rotary.rotated(), rotary.scale()), (256, 8, 1.0));
        rotary.frequencies().iter().zip([1.0, 0.1, 0.01, 0.001]).for_each(|(f, e)| near(*f, e));
        let linear = Rotary::new(8, 8, 1e4, RotaryScaling::Linear { factor: 4.0 });
        linear.frequencies().iter().zip([0.25, 0.025, 0.0025, 0.00025]).for_each(|(f, e)| near(*f, e));
    }

    /// The shape of llama3-8b 3.1.
    #[test]
    fn llama3_keeps_high_frequencies_and_divides_low_ones() {
        let scaling = RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 };
        let rotary = Rotary::new(128, 128, 5e5, scaling);
        for (i, (scaled, plain)) in rotary.frequencies().iter().zip(plain(128, 5e5)).enumerate() {
            match i {
                0..=28 => assert_eq!(*scaled, plain, "entry {i}"),
                35.. => assert_eq!(*scaled, plain / 8.0, "entry {i}"),
                _ => assert!(plain / 8.0 < *scaled && *scaled < plain, "entry {i}"),
            }
        }
        // Between: with s = (o / w - low) / (high - low), (1 - s) f / factor + s f.
        let f = plain(128, 5e5)[31];
        let s = (8192.0 / (2.0 * PI / f) - 1.0) / 3.0;
        near(rotary.frequencies()[31], (1.0 - s) * f / 8.0 + s * f);
        assert_eq!(rotary.scale(), 1.0);
    }

    /// Qwen's numbers: the ramp from entry 23 to entry 40.
    #[test]
    fn yarn_blends_along_a_ramp_and_lengthens() {
        let yarn = Yarn {
            factor: 4.0,
            original: 32_768,
            beta_fast: 32.0,
            beta_slow: 1.0,
            truncate: true,
            attention_factor: None,
            mscales: None,
        };
        assert_eq!(yarn.ramp(128, 1e6), [23.0, 40.0]);
        let rotary = Rotary::new(128, 128, 1e6, RotaryScaling::Yarn(yarn));
        assert!((rotary.scale() - 1.1386).abs() < 5e-5, "{}", rotary.scale());
        for (i, (scaled, plain)) in rotary.frequencies().iter().zip(plain(128, 1e6)).enumerate() {
            let r = ((i as f64 - 23.0) / 17.0).clamp(0.0, 1.0);
            near(*scaled, (1.0 - r) * plain + r * plain / 4.0);
        }
        let exact = Yarn { truncate: false, ..yarn }.ramp(128, 1e6);
        assert!(23.0 < exact[0] && exact[0] < 24.0 && 39.0 < exact[1] && exact[1] < 40.0, "{exact:?}");
        let scale = |yarn: Yarn| Rotary::new(128, 128, 1e6, RotaryScaling::Yarn(yarn)).scale();
        let mscales = Yarn { mscales: Some([0.707, 1.0]), ..yarn };
        near(scale(mscales), (0.0707 * 4f64.ln() + 1.0) / (0.1 * 4f64.ln() + 1.0));
        assert_eq!(scale(Yarn { attention_factor: Some(1.25), ..mscales }), 1.25);
        assert_eq!(scale(Yarn { factor: 1.0, ..yarn }), 1.0);
    }

    /// A ramp whose ends meet is a step.
    #[test]
    fn yarn_of_few_positions_is_finite() {
        let scaling = RotaryScaling::Yarn(Yarn {
            factor: 2.0,
            original: 4,
            beta_fast: 32.0,
            beta_slow: 32.0,
            truncate: true,
            attention_factor: None,
            mscales: None,
        });
        assert!(Rotary::new(8, 8, 1e4, scaling).frequencies().iter().all(|f| *f > 0.0));
    }

    #[test]
    fn dynamic_is_the_default_up_to_the_length_of_training() {
        let of = |length| {
            let scaling = RotaryScaling::Dynamic { factor: 2.0, trained: 1024, length };
            Rotary::new(64, 64, 1e4, scaling).frequencies().to_vec()
        };
        assert_eq!(of(1), plain(64, 1e4));
        assert_eq!(of(1024), plain(64, 1e4));
        let theta = 1e4 * 3f64.powf(64.0 / 62.0);
        of(2048).iter().zip(plain(64, theta)).for_each(|(f, e)| near(*f, e));
    }

    /// The numbers of Phi-3 with 131,072 positions: the factor of cosine and sine is 1.1902.
    #[test]
    fn longrope_divides_by_the_factors_of_the_length() {
        let of = |length, attention_factor| {
            let (short, long) = ([1.0, 2.0].into(), [4.0, 8.0].into());
            let scaling = LongRope { short, long, original: 4096, factor: 32.0, attention_factor, length };
            Rotary::new(4, 4, 1e4, RotaryScaling::LongRope(scaling))
        };
        of(4096, None).frequencies().iter().zip([1.0, 0.005]).for_each(|(f, e)| near(*f, e));
        of(4097, None).frequencies().iter().zip([0.25, 0.00125]).for_each(|(f, e)| near(*f, e));
        near(of(1, None).scale(), (1.0f64 + 5.0 / 12.0).sqrt());
        assert_eq!(of(1, Some(1.5)).scale(), 1.5);
    }

    #[test]
    #[should_panic(expected = "pairs of elements turn, not 5 of them")]
    fn an_odd_number_of_elements_does_not_turn() {
        Rotary::new(8, 5, 1e4, RotaryScaling::Default);
    }

    #[test]
    #[should_panic(expected = "5 frequencies for heads of 8")]
    fn more_than_a_head_does_not_turn() {
        Rotary::new(8, 10, 1e4, RotaryScaling::Default);
    }
}
