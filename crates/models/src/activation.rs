//! The activations of `config.json` that the kernels compute: every spelling of the two forms of GELU.

use phalanx_tensor::Gelu;
use serde_json::{Value, json};

use crate::ModelError;

/// The words of transformers' `ACT2FN` for what is computed here; others (`gelu_10`, `quick_gelu`, `relu`) are other functions.
const WORDS: [(&str, Gelu); 7] = [
    ("gelu", Gelu::Erf),
    ("gelu_python", Gelu::Erf),
    ("gelu_new", Gelu::Tanh),
    ("gelu_fast", Gelu::Tanh),
    ("gelu_accurate", Gelu::Tanh),
    ("gelu_pytorch_tanh", Gelu::Tanh),
    ("gelu_python_tanh", Gelu::Tanh),
];

/// The activation of the MLPs. It remembers its word, so that a folder is exported with the word that it had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Activation {
    word: &'static str,
    /// The GELU formula.
    pub gelu: Gelu,
}

impl Activation {
    /// With erf, as in BERT.
    pub const GELU: Activation = Activation { word: "gelu", gelu: Gelu::Erf };

    /// With tanh, as in GPT-2.
    pub const GELU_NEW: Activation = Activation { word: "gelu_new", gelu: Gelu::Tanh };

    /// With tanh, as in Gemma.
    pub const GELU_PYTORCH_TANH: Activation = Activation { word: "gelu_pytorch_tanh", gelu: Gelu::Tanh };

    /// The activation under `key`; `absent` if the file does not give one.
    pub(crate) fn read(
        config: &Value,
        key: &'static str,
        absent: Activation,
    ) -> Result<Activation, ModelError> {
        let Some(given) = config.get(key) else { return Ok(absent) };
        let known = WORDS.into_iter().find(|(word, _)| given == word);
        known.map(|(word, gelu)| Activation { word, gelu }).ok_or_else(|| {
            let words = WORDS.map(|(word, _)| format!("{word:?}")).join(", ");
            ModelError::Key { key, given: given.to_string(), expected: format!("one of {words}") }
        })
    }

    /// Returns its name in `config.json`.
    pub(crate) fn word(self) -> Value {
        json!(self.word)
    }
}
