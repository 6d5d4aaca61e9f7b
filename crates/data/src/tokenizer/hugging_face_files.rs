//! The tokenizer as files that Hugging Face's programs read: `tokenizer.json` and the special tokens. The built-in
//! tokenizers are written as models of the `tokenizers` library that give the same ids.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value, json};

use super::files::{
    ADDED_TOKENS, CHAT_TEMPLATE, GENERATION_CONFIG, MERGES, MODEL_CONFIG, SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG, TOKENIZER_FILE, VOCAB_JSON, VOCAB_TXT,
};
use super::from_files::FromFiles;
use super::layout::{byte_pairs, content_of, printable_bytes};
use super::special_tokens::SpecialToken;

/// Keys of `config.json` and `generation_config.json` that hold the ids of special tokens, and the tokens' roles.
const MODEL_IDS: [(&str, &str); 3] =
    [("bos_token_id", "bos_token"), ("eos_token_id", "eos_token"), ("pad_token_id", "pad_token")];

/// Tokenizer files that an export writes beside the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HuggingFaceFiles {
    /// Contents by the names within the folder; `tokenizer.json` is always among them.
    files: BTreeMap<String, String>,
    special: Vec<SpecialToken>,
    /// Settings about tokens in the `config.json` that was read.
    of_model: Value,
}

impl HuggingFaceFiles {
    /// The files that were read, and a `tokenizer.json` if it is not among them.
    pub(super) fn of_files(tokenizer: &FromFiles) -> HuggingFaceFiles {
        let read = tokenizer.files();
        let mut files: BTreeMap<String, String> =
            read.iter().map(|(name, content)| (name.to_string(), content.to_string())).collect();
        files.entry(TOKENIZER_FILE.to_string()).or_insert_with(|| tokenizer.tokenizer_json().to_string());
        let of_model = read.object(MODEL_CONFIG).unwrap_or_default();
        HuggingFaceFiles { files, special: tokenizer.special().to_vec(), of_model }
    }

    /// Each byte is its own id. With `separated`, the byte 255, which no UTF-8 has, ends a document.
    pub(super) fn of_bytes(separated: bool) -> HuggingFaceFiles {
        let bytes: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
        let ordinary = if separated { &bytes[..255] } else { &bytes[..] };
        HuggingFaceFiles::made(byte_level(ordinary, &[]), separated.then_some(255))
    }

    /// The ids of `chars` in their order; with `separator`, that id ends a document.
    pub(super) fn of_characters(chars: &str, separator: Option<u32>) -> HuggingFaceFiles {
        HuggingFaceFiles::made(characters(chars), separator)
    }

    /// GPT-2's tokens by id, and behind them the end-of-text token.
    pub(super) fn of_gpt2(tokens: &[Vec<u8>], end: u32) -> HuggingFaceFiles {
        HuggingFaceFiles::made(byte_level(tokens, &merges(tokens)), Some(end))
    }

    /// The content of a `tokenizer.json`, to which the token that ends a text is added.
    fn made(mut content: Value, end: Option<u32>) -> HuggingFaceFiles {
        let mut special = Vec::new();
        if let Some(id) = end {
            content["model"]["vocab"][END_OF_TEXT] = json!(id);
            add(&mut content, END_OF_TEXT, id);
            let token = |role| SpecialToken {
                role,
                content: END_OF_TEXT.to_string(),
                id,
                source: "the tokenizer".to_string(),
            };
            special = ["bos_token", "eos_token", "unk_token"].map(token).to_vec();
        }
        let files = [(TOKENIZER_FILE.to_string(), content.to_string())].into();
        HuggingFaceFiles { files, special, of_model: Value::Null }
    }

    /// The same files with the token `[MASK]` behind the vocabulary. Files that say the same as `tokenizer.json` and
    /// `tokenizer_config.json` are left out.
    #[must_use]
    pub(super) fn with_mask(mut self, id: u32) -> HuggingFaceFiles {
        let parse = |content: &String| serde_json::from_str(content).expect("it was read or written as JSON");
        let mut content: Value = parse(&self.files[TOKENIZER_FILE]);
        add(&mut content, MASK, id);
        self.files.insert(TOKENIZER_FILE.to_string(), content.to_string());
        self.special.push(SpecialToken {
            role: "mask_token",
            content: MASK.to_string(),
            id,
            source: "the model".to_string(),
        });
        [SPECIAL_TOKENS_MAP, ADDED_TOKENS, VOCAB_JSON, MERGES, VOCAB_TXT]
            .into_iter()
            .for_each(|name| drop(self.files.remove(name)));
        if let Some(config) = self.files.get_mut(TOKENIZER_CONFIG) {
            let mut changed: Value = parse(config);
            self.special.iter().for_each(|token| changed[token.role] = json!(token.content));
            *config = format!("{changed:#}\n");
        }
        self
    }

    /// The same files with another chat template.
    #[must_use]
    pub(super) fn with_chat_template(mut self, source: &str) -> HuggingFaceFiles {
        self.files.insert(CHAT_TEMPLATE.to_string(), source.to_string());
        self
    }

    /// The content of `tokenizer.json`.
    pub fn tokenizer(&self) -> &str {
        &self.files[TOKENIZER_FILE]
    }

    /// The special tokens by role.
    pub fn special(&self) -> &[SpecialToken] {
        &self.special
    }

    /// The id of the token with a role.
    pub fn id(&self, role: &str) -> Option<u32> {
        self.special.iter().find(|token| token.role == role).map(|token| token.id)
    }

    /// The keys of `config.json` about special tokens. A list that was read stays one if it has the token's id.
    pub fn model_ids(&self) -> Map<String, Value> {
        let value = |(key, role): (&str, &str)| {
            let (read, id) = (&self.of_model[key], self.id(role));
            let keeps = read.as_array().is_some_and(|list| id.is_none_or(|id| list.contains(&json!(id))));
            (key.to_string(), if keeps { read.clone() } else { json!(id) })
        };
        MODEL_IDS.map(value).into_iter().collect()
    }

    /// The same keys for a model without a tokenizer: no token has a role.
    pub fn no_model_ids() -> Map<String, Value> {
        MODEL_IDS.map(|(key, _)| (key.to_string(), Value::Null)).into_iter().collect()
    }

    /// All files by name: those that were read, and `tokenizer_config.json` (for sequences of at most `length` tokens)
    /// and, for a model that continues text, `generation_config.json` where they were not.
    pub fn complete(mut self, length: usize, continues: bool) -> BTreeMap<String, String> {
        let (config, ids) = (self.config(length), self.model_ids());
        self.files.entry(TOKENIZER_CONFIG.to_string()).or_insert_with(|| format!("{config:#}\n"));
        if continues {
            let generation = || format!("{:#}\n", Value::Object(ids));
            self.files.entry(GENERATION_CONFIG.to_string()).or_insert_with(generation);
        }
        self.files
    }

    /// A `tokenizer_config.json` for files that had none.
    fn config(&self, length: usize) -> Value {
        let mut config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": length,
            "clean_up_tokenization_spaces": false,
        });
        for token in &self.special {
            config[token.role] = json!(token.content);
        }
        config
    }
}

/// Spelling of the end of a text by the built-in tokenizers.
pub(super) const END_OF_TEXT: &str = "<|endoftext|>";

/// The token that a masked model fills, where the vocabulary has none.
pub(super) const MASK: &str = "[MASK]";

/// Adds a special token to the content of a `tokenizer.json`.
fn add(content: &mut Value, token: &str, id: u32) {
    let token = json!({
        "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true,
    });
    match content["added_tokens"].as_array_mut() {
        Some(added) => added.push(token),
        None => content["added_tokens"] = json!([token]),
    }
}

/// Byte-pair encoding of bytes as GPT-2 has it: `tokens` in the order of their ids, and pairs of ids to merge, the
/// earlier first.
fn byte_level(tokens: &[Vec<u8>], merges: &[[usize; 2]]) -> Value {
    let chars = printable_bytes();
    let spelled = |token: &Vec<u8>| token.iter().map(|byte| chars[*byte as usize]).collect::<String>();
    let tokens: Vec<String> = tokens.iter().map(spelled).collect();
    let merges: Vec<String> = merges.iter().map(|[a, b]| format!("{} {}", tokens[*a], tokens[*b])).collect();
    byte_pairs(tokens.into_iter().zip(0u32..).map(|(token, id)| (token, json!(id))).collect(), merges)
}

/// One id for each of `chars`, in their order. Another character is an error of the library, as it is here.
fn characters(chars: &str) -> Value {
    let vocab: Map<String, Value> =
        chars.chars().zip(0u32..).map(|(c, id)| (c.to_string(), json!(id))).collect();
    let each =
        json!({"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": false});
    let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"});
    content_of(each, json!({"type": "Fuse"}), model)
}

/// For each of `tokens` that is longer than a byte, in order: the ids of the two tokens that were merged into it. They
/// are what remains when its bytes are merged by the earlier merges.
fn merges(tokens: &[Vec<u8>]) -> Vec<[usize; 2]> {
    let ids: HashMap<&[u8], usize> = tokens.iter().map(Vec::as_slice).zip(0..).collect();
    let merged = |(id, token): (usize, &Vec<u8>)| {
        // Where the parts of the token begin, and its end.
        let mut edges: Vec<usize> = (0..=token.len()).collect();
        while edges.len() > 3 {
            let pair =
                |at: usize| ids.get(&token[edges[at]..edges[at + 2]]).copied().filter(|pair| *pair < id);
            let pairs = (0..edges.len() - 2).filter_map(|at| Some((pair(at)?, at)));
            let (_, at) = pairs.min().expect("a token is made of two earlier ones");
            edges.remove(at + 1);
        }
        [ids[&token[..edges[1]]], ids[&token[edges[1]..]]]
    };
    tokens.iter().enumerate().filter(|(_, token)| token.len() > 1).map(merged).collect()
}
