//! The formulas that people quote for the memory and the operations of a Transformer, to print beside exact figures. Nothing is decided by
//! them.
//!
//! With L layers, h hidden, a heads, s tokens of a sequence, b sequences, t tensor ranks, V token ids. Sources: the formulas 4nh(13+12h) and
//! nblh(67+9ml/h) of f32 training (n layers, m heads, l tokens); Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
//! Models", arXiv 2205.05198, equations 1 to 7 and appendix A. ZeRO's table is [`phalanx_plan::textbook`].

/// The sizes of a Transformer, and of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub layers: f64,
    pub hidden: f64,
    pub heads: f64,
    pub vocab: f64,
    pub seq: f64,
    pub sequences: f64,
    pub tensor: f64,
}

/// What backward recomputes in Korthikanti's formulas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recomputed {
    Nothing,
    Selective,
    All,
}

impl Sizes {
    /// 4nh(13 + 12h): bytes of the parameters in f32, without embeddings.
    pub fn parameters_f32(&self) -> f64 {
        4.0 * self.layers * self.hidden * (13.0 + 12.0 * self.hidden)
    }

    /// nblh(67 + 9ml/h): bytes of the activations in f32.
    pub fn activations_f32(&self) -> f64 {
        let Sizes { layers, hidden, heads, seq, sequences, .. } = self;
        layers * sequences * seq * hidden * (67.0 + 9.0 * heads * seq / hidden)
    }

    /// Bytes of the activations of a layer in 16 bits (Korthikanti, table 2).
    pub fn activations_of_layer(&self, has_sequence_parallelism: bool, recomputed: Recomputed) -> f64 {
        let Sizes { hidden, heads, seq, sequences, tensor, .. } = self;
        let (sbh, scores) = (seq * sequences * hidden, 5.0 * heads * seq / hidden);
        match (has_sequence_parallelism, recomputed) {
            (_, Recomputed::All) => 2.0 * sbh,
            (true, Recomputed::Nothing) => sbh / tensor * (34.0 + scores),
            (true, Recomputed::Selective) => sbh / tensor * 34.0,
            (false, Recomputed::Nothing) => sbh * (10.0 + 24.0 / tensor + scores / tensor),
            (false, Recomputed::Selective) => sbh * (10.0 + 24.0 / tensor),
        }
    }

    /// 72 B L s h^2 (1 + s/6h + V/12hL): operations of a step of `batch` sequences without recomputation.
    pub fn model_flops(&self, batch: f64) -> f64 {
        self.flops(batch, 6.0)
    }

    /// The same with attention computed again in backward: s/3h.
    #[cfg(test)]
    pub fn hardware_flops(&self, batch: f64) -> f64 {
        self.flops(batch, 3.0)
    }

    fn flops(&self, batch: f64, attention: f64) -> f64 {
        let Sizes { layers, hidden, vocab, seq, .. } = self;
        72.0 * batch
            * layers
            * seq
            * hidden
            * hidden
            * (1.0 + seq / (attention * hidden) + vocab / (12.0 * hidden * layers))
    }
}

#[cfg(test)]
mod tests {
    use phalanx_plan::trace::DType;
    use phalanx_plan::{Precision, ZeroStage, textbook};

    use super::*;

    /// ZeRO's table 1: GB of model states for each device with 16-bit Adam. Printed values are cut off or rounded.
    #[test]
    fn zero_needs_what_its_table_says() {
        let half = Precision { compute: DType::F16, accumulate: DType::F16, communicate: DType::F16 };
        for (ranks, of_7b, of_1t) in [
            (1, [120.0, 120.0, 120.0], [16000.0, 16000.0, 16000.0]),
            (4, [52.5, 41.3, 30.0], [7000.0, 5500.0, 4000.0]),
            (16, [35.6, 21.6, 7.5], [4750.0, 2875.0, 1000.0]),
            (64, [31.4, 16.6, 1.88], [4187.0, 2218.0, 250.0]),
            (256, [30.4, 15.4, 0.47], [4046.0, 2054.0, 62.5]),
            (1024, [30.1, 15.1, 0.12], [4011.0, 2013.0, 15.6]),
        ] {
            for (parameters, printed) in [(7_500_000_000, of_7b), (1_000_000_000_000, of_1t)] {
                for (stage, printed) in
                    [ZeroStage::One, ZeroStage::Two, ZeroStage::Three].into_iter().zip(printed)
                {
                    let bytes = textbook([parameters; 2], ranks, stage, half, 2).state.total();
                    // One unit in the last digit that is printed.
                    let digits = printed.to_string().split_once('.').map_or(0, |(_, digits)| digits.len());
                    let unit = 0.1f64.powi(digits as i32).max(if printed >= 100.0 { 1.0 } else { 0.0 });
                    let found = bytes as f64 / 1e9;
                    assert!(
                        (found - printed).abs() <= unit * 1.001,
                        "{parameters} {ranks} {stage:?}: {found} {printed}"
                    );
                }
            }
        }
    }

    fn sizes([heads, hidden, layers, tensor]: [u32; 4], sequences: f64) -> Sizes {
        let [heads, hidden, layers, tensor] = [heads, hidden, layers, tensor].map(f64::from);
        Sizes { layers, hidden, heads, vocab: 51_200.0, seq: 2048.0, sequences, tensor }
    }

    /// Table 2 for the 22B model of its figures: bytes of a layer, in units of sbh.
    #[test]
    fn activations_are_those_of_korthikanti() {
        let of = sizes([64, 6144, 48, 8], 4.0);
        let sbh = 2048.0 * 4.0 * 6144.0;
        // 5as/h = 106.67
        for (sequence, recomputed, expected) in [
            (false, Recomputed::Nothing, 10.0 + 24.0 / 8.0 + 320.0 / 3.0 / 8.0),
            (true, Recomputed::Nothing, (34.0 + 320.0 / 3.0) / 8.0),
            (true, Recomputed::Selective, 34.0 / 8.0),
            (true, Recomputed::All, 2.0),
        ] {
            let found = of.activations_of_layer(sequence, recomputed) / sbh;
            assert!((found - expected).abs() < 1e-9, "{sequence} {recomputed:?}: {found}");
        }
        let alone = Sizes { tensor: 1.0, ..of };
        for sequence in [false, true] {
            let found = alone.activations_of_layer(sequence, Recomputed::Nothing) / sbh;
            assert!((found - (34.0 + 320.0 / 3.0)).abs() < 1e-9, "one rank divides nothing: {found}");
        }
    }

    /// Table 5: utilisations follow from the times, which have three digits.
    #[test]
    fn utilisations_are_those_of_korthikanti() {
        for (shape, gpus, batch, seconds, [mfu, hfu]) in [
            ([64, 6144, 48, 8], 8.0, 4.0, 1.10, [41.5, 43.7]),
            ([128, 20480, 105, 8], 280.0, 280.0, 37.83, [56.0, 57.0]),
        ] {
            let (of, peak) = (sizes(shape, 1.0), 312e12 * gpus * seconds);
            let found = [of.model_flops(batch), of.hardware_flops(batch)].map(|flops| 100.0 * flops / peak);
            for (found, printed) in found.into_iter().zip([mfu, hfu]) {
                assert!((found - printed).abs() < 0.006 * printed, "{shape:?}: {found} {printed}");
            }
        }
    }
}
