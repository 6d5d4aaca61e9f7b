//! Published sizes of the families, by name: what their model cards and `config.json` say.

use phalanx_tensor::RotaryScaling;

/// A published size.
#[derive(Debug, PartialEq)]
pub struct Size {
    /// Its name, in small letters.
    pub name: &'static str,
    /// Transformer blocks.
    pub layers: usize,
    /// Width.
    pub hidden: usize,
    /// Heads of queries; those of keys and values; elements of each.
    pub heads: [usize; 3],
    /// Width within the MLP.
    pub intermediate: usize,
    /// Rows of the token table.
    pub vocab: usize,
    /// The longest sequence.
    pub positions: usize,
    /// Base of the rotary frequencies.
    pub theta: f64,
    /// Factor of llama3 RoPE scaling from 8,192 positions on (`rope_type` llama3); None without scaling.
    pub llama3: Option<f64>,
    /// Added to the mean square in a norm.
    pub eps: f32,
    /// True if the output projection shares the token table.
    pub tied: bool,
    /// Keys that a query sees.
    pub window: Option<usize>,
}

impl Size {
    /// The scaling of the frequencies.
    pub(super) fn scaling(&self) -> RotaryScaling {
        let of = |factor| RotaryScaling::Llama3 { factor, low: 1.0, high: 4.0, original: 8192 };
        self.llama3.map_or(RotaryScaling::Default, of)
    }
}

/// A size without a window, whose frequencies are not stretched.
const PLAIN: Size = Size {
    name: "",
    layers: 0,
    hidden: 0,
    heads: [0; 3],
    intermediate: 0,
    vocab: 0,
    positions: 0,
    theta: 1e4,
    llama3: None,
    eps: 1e-6,
    tied: false,
    window: None,
};

const LLAMA3: Size =
    Size { vocab: 128_256, positions: 8192, theta: 5e5, eps: 1e-5, heads: [32, 8, 128], ..PLAIN };

const LLAMA31: Size = Size { positions: 131_072, llama3: Some(8.0), ..LLAMA3 };

const LLAMA32: Size = Size { positions: 131_072, llama3: Some(32.0), tied: true, ..LLAMA3 };

const SMOLLM2: Size = Size { vocab: 49_152, positions: 8192, theta: 1e5, eps: 1e-5, tied: true, ..PLAIN };

/// Sizes of Llama, and of families whose files say that they are Llamas.
pub static LLAMA: [Size; 11] = [
    Size {
        name: "llama2-7b",
        layers: 32,
        hidden: 4096,
        heads: [32, 32, 128],
        intermediate: 11_008,
        vocab: 32_000,
        positions: 4096,
        eps: 1e-5,
        ..PLAIN
    },
    Size { name: "llama3-8b", layers: 32, hidden: 4096, intermediate: 14_336, ..LLAMA3 },
    Size {
        name: "llama3-70b",
        layers: 80,
        hidden: 8192,
        heads: [64, 8, 128],
        intermediate: 28_672,
        ..LLAMA3
    },
    Size { name: "llama3.1-8b", layers: 32, hidden: 4096, intermediate: 14_336, ..LLAMA31 },
    Size {
        name: "llama3.1-70b",
        layers: 80,
        hidden: 8192,
        heads: [64, 8, 128],
        intermediate: 28_672,
        ..LLAMA31
    },
    Size {
        name: "llama3.1-405b",
        layers: 126,
        hidden: 16_384,
        heads: [128, 8, 128],
        intermediate: 53_248,
        ..LLAMA31
    },
    Size { name: "llama3.2-1b", layers: 16, hidden: 2048, heads: [32, 8, 64], intermediate: 8192, ..LLAMA32 },
    Size {
        name: "llama3.2-3b",
        layers: 28,
        hidden: 3072,
        heads: [24, 8, 128],
        intermediate: 8192,
        ..LLAMA32
    },
    Size { name: "smollm2-135m", layers: 30, hidden: 576, heads: [9, 3, 64], intermediate: 1536, ..SMOLLM2 },
    Size { name: "smollm2-360m", layers: 32, hidden: 960, heads: [15, 5, 64], intermediate: 2560, ..SMOLLM2 },
    Size {
        name: "smollm2-1.7b",
        layers: 24,
        hidden: 2048,
        heads: [32, 32, 64],
        intermediate: 8192,
        theta: 1.3e5,
        ..SMOLLM2
    },
];

const MISTRAL_7B: Size = Size {
    layers: 32,
    hidden: 4096,
    heads: [32, 8, 128],
    intermediate: 14_336,
    vocab: 32_000,
    positions: 32_768,
    eps: 1e-5,
    ..PLAIN
};

/// Sizes of Mistral.
pub static MISTRAL: [Size; 3] = [
    Size { name: "mistral-7b-v0.1", window: Some(4096), ..MISTRAL_7B },
    Size { name: "mistral-7b", vocab: 32_768, theta: 1e6, ..MISTRAL_7B },
    Size {
        name: "mistral-nemo-12b",
        layers: 40,
        hidden: 5120,
        vocab: 131_072,
        positions: 131_072,
        theta: 1e6,
        ..MISTRAL_7B
    },
];

const QWEN: Size = Size { vocab: 151_936, positions: 32_768, theta: 1e6, tied: true, ..PLAIN };

/// Sizes of Qwen2 and Qwen2.5.
pub static QWEN2: [Size; 4] = [
    Size { name: "qwen2.5-0.5b", layers: 24, hidden: 896, heads: [14, 2, 64], intermediate: 4864, ..QWEN },
    Size { name: "qwen2.5-1.5b", layers: 28, hidden: 1536, heads: [12, 2, 128], intermediate: 8960, ..QWEN },
    Size {
        name: "qwen2.5-7b",
        layers: 28,
        hidden: 3584,
        heads: [28, 4, 128],
        intermediate: 18_944,
        vocab: 152_064,
        tied: false,
        ..QWEN
    },
    Size {
        name: "qwen2.5-72b",
        layers: 80,
        hidden: 8192,
        heads: [64, 8, 128],
        intermediate: 29_568,
        vocab: 152_064,
        eps: 1e-5,
        tied: false,
        ..QWEN
    },
];

const QWEN3_BASE: Size = Size { positions: 40_960, ..QWEN };

/// Sizes of Qwen3.
pub static QWEN3: [Size; 6] = [
    Size {
        name: "qwen3-0.6b",
        layers: 28,
        hidden: 1024,
        heads: [16, 8, 128],
        intermediate: 3072,
        ..QWEN3_BASE
    },
    Size {
        name: "qwen3-1.7b",
        layers: 28,
        hidden: 2048,
        heads: [16, 8, 128],
        intermediate: 6144,
        ..QWEN3_BASE
    },
    Size {
        name: "qwen3-4b",
        layers: 36,
        hidden: 2560,
        heads: [32, 8, 128],
        intermediate: 9728,
        ..QWEN3_BASE
    },
    Size {
        name: "qwen3-8b",
        layers: 36,
        hidden: 4096,
        heads: [32, 8, 128],
        intermediate: 12_288,
        tied: false,
        ..QWEN3_BASE
    },
    Size {
        name: "qwen3-14b",
        layers: 40,
        hidden: 5120,
        heads: [40, 8, 128],
        intermediate: 17_408,
        tied: false,
        ..QWEN3_BASE
    },
    Size {
        name: "qwen3-32b",
        layers: 64,
        hidden: 5120,
        heads: [64, 8, 128],
        intermediate: 25_600,
        tied: false,
        ..QWEN3_BASE
    },
];

/// Sizes of SmolLM3.
pub static SMOLLM3: [Size; 1] = [Size {
    name: "smollm3-3b",
    layers: 36,
    hidden: 2048,
    heads: [16, 4, 128],
    intermediate: 11_008,
    vocab: 128_256,
    positions: 65_536,
    theta: 5e6,
    tied: true,
    ..PLAIN
}];

/// Sizes of OLMo 2.
pub static OLMO2: [Size; 2] = [
    Size {
        name: "olmo2-1b",
        layers: 16,
        hidden: 2048,
        heads: [16, 16, 128],
        intermediate: 8192,
        vocab: 100_352,
        positions: 4096,
        theta: 5e5,
        ..PLAIN
    },
    Size {
        name: "olmo2-7b",
        layers: 32,
        hidden: 4096,
        heads: [32, 32, 128],
        intermediate: 11_008,
        vocab: 100_352,
        positions: 4096,
        theta: 5e5,
        ..PLAIN
    },
];

const PHI3_4K: Size = Size { vocab: 32_064, positions: 4096, eps: 1e-5, window: Some(2047), ..PLAIN };

/// Sizes of Phi-3 and Phi-4.
pub static PHI3: [Size; 3] = [
    Size {
        name: "phi3-mini-4k",
        layers: 32,
        hidden: 3072,
        heads: [32, 32, 96],
        intermediate: 8192,
        ..PHI3_4K
    },
    Size { name: "phi3-medium-4k", ..PHI3_MEDIUM },
    Size { name: "phi4", vocab: 100_352, positions: 16_384, theta: 2.5e5, window: None, ..PHI3_MEDIUM },
];

const PHI3_MEDIUM: Size =
    Size { layers: 40, hidden: 5120, heads: [40, 10, 128], intermediate: 17_920, ..PHI3_4K };

const GEMMA3_SIZE: Size =
    Size { vocab: 262_144, positions: 32_768, theta: 1e6, tied: true, window: Some(512), ..PLAIN };

/// Sizes of Gemma 3 that read text alone.
pub static GEMMA3: [Size; 2] = [
    Size {
        name: "gemma3-270m",
        layers: 18,
        hidden: 640,
        heads: [4, 1, 256],
        intermediate: 2048,
        ..GEMMA3_SIZE
    },
    Size {
        name: "gemma3-1b",
        layers: 26,
        hidden: 1152,
        heads: [4, 1, 256],
        intermediate: 6912,
        ..GEMMA3_SIZE
    },
];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::{Arch, Keys};

    /// The counts that transformers gives for these shapes.
    #[test]
    fn a_size_has_the_parameters_of_the_published_model() {
        for (arch, size, parameters) in [
            ("llama", "llama2-7b", 6_738_415_616u64),
            ("llama", "llama3-8b", 8_030_261_248),
            ("llama", "llama3-70b", 70_553_706_496),
            ("llama", "llama3.1-405b", 405_853_388_800),
            ("llama", "llama3.2-1b", 1_235_814_400),
            ("llama", "llama3.2-3b", 3_212_749_824),
            ("llama", "smollm2-135m", 134_515_008),
            ("llama", "smollm2-360m", 361_821_120),
            ("llama", "smollm2-1.7b", 1_711_376_384),
            ("mistral", "mistral-7b-v0.1", 7_241_732_096),
            ("mistral", "mistral-7b", 7_248_023_552),
            ("mistral", "mistral-nemo-12b", 12_247_782_400),
            ("qwen2", "qwen2.5-0.5b", 494_032_768),
            ("qwen2", "qwen2.5-1.5b", 1_543_714_304),
            ("qwen2", "qwen2.5-7b", 7_615_616_512),
            ("qwen2", "qwen2.5-72b", 72_706_203_648),
            ("qwen3", "qwen3-0.6b", 596_049_920),
            ("qwen3", "qwen3-1.7b", 1_720_574_976),
            ("qwen3", "qwen3-4b", 4_022_468_096),
            ("qwen3", "qwen3-8b", 8_190_735_360),
            ("qwen3", "qwen3-14b", 14_768_307_200),
            ("qwen3", "qwen3-32b", 32_762_123_264),
            ("smollm3", "smollm3-3b", 3_075_098_624),
            ("olmo2", "olmo2-1b", 1_484_916_736),
            ("olmo2", "olmo2-7b", 7_298_617_344),
            ("gemma3_text", "gemma3-270m", 268_098_176),
            ("gemma3_text", "gemma3-1b", 999_885_952),
            ("phi3", "phi3-mini-4k", 3_821_079_552),
            ("phi3", "phi3-medium-4k", 13_960_238_080),
            ("phi3", "phi4", 14_659_507_200),
        ] {
            let (arch, keys) = (Arch::named(arch).unwrap(), Keys::from([("size", json!(size))]));
            let vocab = (arch.vocab)(arch, &keys).unwrap();
            let network = arch.model(&keys, vocab, 128).unwrap().whole();
            let count: u64 = network.members().map(|parameter| parameter.elements() as u64).sum();
            assert_eq!(count, parameters, "{size}");
        }
    }

    #[test]
    fn a_given_key_wins_over_that_of_the_size_and_a_wrong_size_lists_the_names() {
        let arch = Arch::named("llama").unwrap();
        let keys = Keys::from([("size", json!("llama3.2-1b")), ("layers", json!(2))]);
        let found = arch.model(&keys, 64, 128).unwrap().keys();
        assert_eq!((found.get("layers"), found.get("kv_heads")), (Some(&json!(2)), Some(&json!(8))));
        assert_eq!(found.get("rope_scaling").unwrap()["factor"], 32.0);
        let error = arch.model(&Keys::from([("size", json!("llama4"))]), 64, 128).unwrap_err().to_string();
        assert!(
            error
                .starts_with("model.size = \"llama4\": the sizes of arch \"llama\" are llama2-7b, llama3-8b"),
            "{error}"
        );
    }
}
