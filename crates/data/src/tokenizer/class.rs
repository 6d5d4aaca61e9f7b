//! Assumptions of transformers' classes about their vocabulary files: the special tokens and how text is split. A folder names the class,
//! or the type of the model, to which one belongs.

use serde_json::Value;

use super::files::{MODEL_CONFIG, TOKENIZER_CONFIG, TokenizerFiles};

/// Classes whose vocabulary files are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Byte-level byte-pair encoding.
    Gpt2,
    /// The same encoding with other special tokens, of which two enclose a text.
    Roberta,
    /// WordPiece; two special tokens enclose a text.
    Bert,
}

/// Names of classes, without the suffix `Fast`, and types of models.
const NAMES: [(&str, Class); 15] = [
    ("GPT2Tokenizer", Class::Gpt2),
    ("CodeGenTokenizer", Class::Gpt2),
    ("RobertaTokenizer", Class::Roberta),
    ("BartTokenizer", Class::Roberta),
    ("LongformerTokenizer", Class::Roberta),
    ("BertTokenizer", Class::Bert),
    ("DistilBertTokenizer", Class::Bert),
    ("ElectraTokenizer", Class::Bert),
    ("MobileBertTokenizer", Class::Bert),
    ("gpt2", Class::Gpt2),
    ("roberta", Class::Roberta),
    ("bart", Class::Roberta),
    ("bert", Class::Bert),
    ("distilbert", Class::Bert),
    ("electra", Class::Bert),
];

/// A class as a folder names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamedClass {
    /// The class, if it is known.
    pub class: Option<Class>,
    /// Key that names it, and its file, for messages: `tokenizer_class "BertTokenizer" of tokenizer_config.json`.
    pub named: String,
}

impl NamedClass {
    /// The class that the files name, or else that of the model's type; `None` where neither is named.
    pub(super) fn of(files: &TokenizerFiles) -> Result<Option<NamedClass>, String> {
        let keys = [
            (TOKENIZER_CONFIG, "tokenizer_class"),
            (MODEL_CONFIG, "tokenizer_class"),
            (MODEL_CONFIG, "model_type"),
        ];
        for (file, key) in keys {
            let Value::String(name) = &files.object(file)?[key] else { continue };
            // These read a tokenizer.json as it is, and say nothing about other files.
            if matches!(name.as_str(), "PreTrainedTokenizerFast" | "TokenizersBackend") {
                return Ok(None);
            }
            let plain = name.strip_suffix("Fast").unwrap_or(name);
            let class = NAMES.into_iter().find(|(known, _)| *known == plain).map(|(_, class)| class);
            return Ok(Some(NamedClass { class, named: format!("{key} {name:?} of {file}") }));
        }
        Ok(None)
    }
}

impl Class {
    /// The special tokens by role that hold where no file names others.
    pub(super) fn roles(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Class::Gpt2 => &[
                ("bos_token", "<|endoftext|>"),
                ("eos_token", "<|endoftext|>"),
                ("unk_token", "<|endoftext|>"),
            ],
            Class::Roberta => &[
                ("bos_token", "<s>"),
                ("eos_token", "</s>"),
                ("unk_token", "<unk>"),
                ("sep_token", "</s>"),
                ("pad_token", "<pad>"),
                ("cls_token", "<s>"),
                ("mask_token", "<mask>"),
            ],
            Class::Bert => &[
                ("unk_token", "[UNK]"),
                ("sep_token", "[SEP]"),
                ("pad_token", "[PAD]"),
                ("cls_token", "[CLS]"),
                ("mask_token", "[MASK]"),
            ],
        }
    }

    /// Name for messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Class::Gpt2 => "GPT2Tokenizer",
            Class::Roberta => "RobertaTokenizer",
            Class::Bert => "BertTokenizer",
        }
    }
}
