//! The programs: which file of kernels is compiled with which definitions, and the kernels in it.
//!
//! A program is one file of `kernels/`, compiled for one element type (and, where kernels have a second type, for that). The
//! names of kernels are those of the files, without any mangling.

use phalanx_plan::trace::DType;

/// The headers, by the names under which files include them.
pub const HEADERS: [(&str, &str); 5] = [
    ("attention.cuh", include_str!("../kernels/attention.cuh")),
    ("numbers.cuh", include_str!("../kernels/numbers.cuh")),
    ("product.cuh", include_str!("../kernels/product.cuh")),
    ("spans.cuh", include_str!("../kernels/spans.cuh")),
    ("tile.cuh", include_str!("../kernels/tile.cuh")),
];

/// Options with which every program is compiled. Nothing is contracted to a multiply-add but what the source says. Functions are the
/// card's without saying so, as lambdas cannot: NVRTC before 13.2 takes those with parameters of any type for the host's.
pub const OPTIONS: [&str; 5] =
    ["-std=c++17", "-default-device", "-fmad=false", "-lineinfo", "--ptxas-options=-v"];

/// One file of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// `adamw.cu`
    AdamW,
    /// `attention.cu`
    Attention,
    /// `attention_backward.cu`
    AttentionBackward,
    /// `bias.cu`
    Bias,
    /// `blocks.cu`
    Blocks,
    /// `cross_entropy.cu`
    CrossEntropy,
    /// `dropout.cu`
    Dropout,
    /// `elementwise.cu`
    Elementwise,
    /// `elementwise_f64.cu`
    ElementwiseF64,
    /// `embedding.cu`
    Embedding,
    /// `gated.cu`
    Gated,
    /// `gelu.cu`
    Gelu,
    /// `images.cu`
    Images,
    /// `layer_norm.cu`
    LayerNorm,
    /// `magnitudes.cu`
    Magnitudes,
    /// `matmul.cu`
    Matmul,
    /// `norm.cu`
    Norm,
    /// `norm_f64.cu`
    NormF64,
    /// `preference.cu`
    Preference,
    /// `rotary.cu`
    Rotary,
    /// `sgd.cu`
    Sgd,
    /// `sum_parts.cu`
    SumParts,
    /// `tanh.cu`
    Tanh,
}

impl Source {
    /// The name of the file, and its text.
    pub fn file(self) -> (&'static str, &'static str) {
        macro_rules! file {
            ($name:literal) => {
                ($name, include_str!(concat!("../kernels/", $name)))
            };
        }
        match self {
            Source::AdamW => file!("adamw.cu"),
            Source::Attention => file!("attention.cu"),
            Source::AttentionBackward => file!("attention_backward.cu"),
            Source::Bias => file!("bias.cu"),
            Source::Blocks => file!("blocks.cu"),
            Source::CrossEntropy => file!("cross_entropy.cu"),
            Source::Dropout => file!("dropout.cu"),
            Source::Elementwise => file!("elementwise.cu"),
            Source::ElementwiseF64 => file!("elementwise_f64.cu"),
            Source::Embedding => file!("embedding.cu"),
            Source::Gated => file!("gated.cu"),
            Source::Gelu => file!("gelu.cu"),
            Source::Images => file!("images.cu"),
            Source::LayerNorm => file!("layer_norm.cu"),
            Source::Magnitudes => file!("magnitudes.cu"),
            Source::Matmul => file!("matmul.cu"),
            Source::Norm => file!("norm.cu"),
            Source::NormF64 => file!("norm_f64.cu"),
            Source::Preference => file!("preference.cu"),
            Source::Rotary => file!("rotary.cu"),
            Source::Sgd => file!("sgd.cu"),
            Source::SumParts => file!("sum_parts.cu"),
            Source::Tanh => file!("tanh.cu"),
        }
    }

    /// Returns whether its kernels have a second type.
    fn has_other(self) -> bool {
        use Source::*;
        matches!(self, AdamW | Bias | Elementwise | Embedding | Matmul | Sgd)
    }

    /// Returns whether its kernels have an element type.
    fn has_element(self) -> bool {
        !matches!(self, Source::ElementwiseF64 | Source::NormF64 | Source::Preference)
    }
}

/// The sizes of heads for which attention is compiled: a head is padded to the next of them.
pub const HEADS: [u32; 4] = [32, 64, 128, 256];

/// Features of an attention beyond the plain one, in which each head has its own keys and sees all (earlier) positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AttentionForm {
    /// Heads of queries share those of keys and values.
    pub grouped: bool,
    /// Positions see only near ones.
    pub windowed: bool,
    /// Scores are capped.
    pub capped: bool,
    /// Positions see their own document only.
    pub documents: bool,
    /// They see all of it, the later positions too.
    pub ahead: bool,
}

/// One file of kernels with its definitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Program {
    /// The file.
    pub source: Source,
    /// The compute type; None for a file of f64 alone.
    pub element: Option<DType>,
    /// The second type.
    pub other: Option<DType>,
    /// Columns of a tile of attention; one of [`HEADS`].
    pub head: Option<u32>,
    /// Features of an attention beyond the plain one.
    pub form: AttentionForm,
    /// Small tiles, for results of a matrix product with few of them.
    pub small: bool,
    /// Products of f32 as TF32.
    pub tf32: bool,
}

impl Program {
    fn plain(source: Source) -> Program {
        let form = AttentionForm::default();
        Program { source, element: None, other: None, head: None, form, small: false, tf32: false }
    }

    /// A file of f64 alone.
    pub fn of_f64(source: Source) -> Program {
        assert!(!source.has_element(), "{source:?} has an element type");
        Program::plain(source)
    }

    /// The sum of parts of f64, in the file that has the others.
    pub fn sum_of_f64_parts() -> Program {
        Program::plain(Source::SumParts)
    }

    /// A file for one element type. A second type, where it has one, is the same.
    pub fn of(source: Source, element: DType) -> Program {
        assert!(source.has_element(), "{source:?} has no element type");
        let other = source.has_other().then_some(element);
        Program { source, element: Some(element), other, ..Program::plain(source) }
    }

    /// The same with a second type.
    #[must_use]
    pub fn with_other(self, other: DType) -> Program {
        assert!(self.source.has_other(), "{self:?} has no second type");
        Program { other: Some(other), ..self }
    }

    /// The same for heads of at most so many elements; None where attention is not compiled for them.
    #[must_use]
    pub fn with_head(self, size: usize) -> Option<Program> {
        let head = HEADS.into_iter().find(|head| *head as usize >= size)?;
        Some(Program { head: Some(head), ..self })
    }

    /// The definitions, as options of the compiler.
    pub fn definitions(&self) -> Vec<String> {
        let mut options = Vec::new();
        options.extend(self.element.map(|dtype| format!("-DELEMENT={}", type_name(dtype))));
        options.extend(self.other.map(|dtype| format!("-DOTHER={}", type_name(dtype))));
        options.extend(self.head.map(|head| format!("-DHEAD={head}")));
        let AttentionForm { grouped, windowed, capped, documents, ahead } = self.form;
        let defined = [
            ("GROUPED", grouped),
            ("WINDOWED", windowed),
            ("CAPPED", capped),
            ("DOCUMENTS", documents),
            ("AHEAD", ahead),
        ];
        for (name, defined) in defined {
            options.extend(defined.then(|| format!("-D{name}")));
        }
        options.extend(self.small.then(|| "-DSMALL".to_string()));
        options.extend(self.tf32.then(|| "-DTF32".to_string()));
        options
    }

    /// The name of the file and what is defined, for people.
    pub fn describe(&self) -> String {
        let definitions: Vec<String> =
            self.definitions().iter().map(|option| option.trim_start_matches("-D").to_string()).collect();
        format!("{} {}", self.source.file().0, definitions.join(" ")).trim_end().to_string()
    }
}

/// The name of an element type in the kernels.
fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        other => panic!("kernels compute with f32, bf16 and f16, not with {}", other.name()),
    }
}
