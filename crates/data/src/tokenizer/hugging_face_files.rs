//! The tokenizer as files that Hugging Face's programs read: `tokenizer.json` and the special tokens. The built-in
//! tokenizers are written as models of the `tokenizers` library that give the same ids.

use serde_json::{Map, Value, json};

use super::{Algorithm, Tokenizer, gpt2};

/// A token with a role, as `transformers` names it: `eos_token`, `mask_token`, ...
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    /// The key of `tokenizer_config.json`.
    pub role: &'static str,
    /// How the token is spelled.
    pub content: String,
    /// Its id.
    pub id: u32,
}

/// What an export writes beside the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HuggingFaceFiles {
    /// The content of `tokenizer.json`.
    pub tokenizer: String,
    /// The special tokens that are in it.
    pub special: Vec<SpecialToken>,
}

impl HuggingFaceFiles {
    /// The id of the token with a role.
    pub fn id(&self, role: &str) -> Option<u32> {
        self.special.iter().find(|token| token.role == role).map(|token| token.id)
    }

    /// `tokenizer_config.json`, for sequences of at most `length` tokens.
    pub fn config(&self, length: usize) -> Value {
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

/// Spellings of special tokens in known `tokenizer.json` files, by role; the first that is there counts.
const KNOWN: [(&str, &[&str]); 7] = [
    ("bos_token", &["<|begin_of_text|>", "<s>", "<bos>", "<|endoftext|>"]),
    ("eos_token", &["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"]),
    ("unk_token", &["[UNK]", "<unk>", "<|endoftext|>"]),
    ("pad_token", &["[PAD]", "<pad>", "<|pad|>"]),
    ("cls_token", &["[CLS]"]),
    ("sep_token", &["[SEP]"]),
    ("mask_token", &["[MASK]", "<mask>", "<|mask|>"]),
];

impl Tokenizer {
    /// The files for Hugging Face's programs. `mask` is the id of the token that a masked model was trained to fill; if
    /// it is the first id behind the vocabulary, it becomes the token `[MASK]`.
    pub fn hugging_face_files(&self, mask: Option<u32>) -> HuggingFaceFiles {
        let (mut content, mut special) = match &self.algorithm {
            Algorithm::HuggingFace(known) => (None, known_tokens(|content| known.id(content))),
            Algorithm::Byte => {
                let bytes: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
                (Some(byte_level(&bytes, &[])), Vec::new())
            }
            Algorithm::Char(vocabulary) => (Some(characters(&vocabulary.to_string())), Vec::new()),
            Algorithm::Gpt2 => {
                let tokens = gpt2::ordinary_tokens();
                let mut content = byte_level(&tokens, &gpt2::merges(&tokens));
                content["model"]["vocab"][gpt2::END_OF_TEXT_SPELLING] = json!(gpt2::END_OF_TEXT);
                add(&mut content, gpt2::END_OF_TEXT_SPELLING, gpt2::END_OF_TEXT);
                let spelled =
                    |content: &str| (content == gpt2::END_OF_TEXT_SPELLING).then_some(gpt2::END_OF_TEXT);
                (Some(content), known_tokens(spelled))
            }
        };
        if let Some(id) = mask.filter(|id| *id as usize == self.vocab_size()) {
            let own = || serde_json::from_str(&self.to_json()).expect("the file was read as JSON");
            add(content.get_or_insert_with(own), "[MASK]", id);
            special.push(SpecialToken { role: "mask_token", content: "[MASK]".to_string(), id });
        }
        let tokenizer = content.map_or_else(|| self.to_json(), |content| content.to_string());
        HuggingFaceFiles { tokenizer, special }
    }
}

/// The special tokens of a vocabulary.
fn known_tokens(id: impl Fn(&str) -> Option<u32>) -> Vec<SpecialToken> {
    let find = |(role, spellings): &(&'static str, &[&str])| {
        let mut spellings = spellings.iter().map(|content| content.to_string());
        spellings.find_map(|content| Some(SpecialToken { role, id: id(&content)?, content }))
    };
    KNOWN.iter().filter_map(find).collect()
}

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

/// A `tokenizer.json` without special tokens.
fn file(pre_tokenizer: Value, decoder: Value, model: Value) -> Value {
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": decoder, "model": model,
    })
}

/// Byte-pair encoding of bytes as GPT-2 has it: `tokens` in the order of their ids, and pairs of ids to merge, the
/// earlier first.
fn byte_level(tokens: &[Vec<u8>], merges: &[[usize; 2]]) -> Value {
    let chars = printable_bytes();
    let spelled = |token: &Vec<u8>| token.iter().map(|byte| chars[*byte as usize]).collect::<String>();
    let tokens: Vec<String> = tokens.iter().map(spelled).collect();
    let merges: Vec<String> = merges.iter().map(|[a, b]| format!("{} {}", tokens[*a], tokens[*b])).collect();
    let vocab: Map<String, Value> =
        tokens.into_iter().zip(0u32..).map(|(token, id)| (token, json!(id))).collect();
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let model = json!({
        "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": merges,
    });
    file(bytes.clone(), bytes, model)
}

/// A character that can be printed for each byte, as GPT-2's vocabulary spells them.
fn printable_bytes() -> Vec<char> {
    let as_is = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = (256u32..).filter_map(char::from_u32);
    (0..=255u8)
        .map(
            |byte| {
                if as_is(byte) { char::from(byte) } else { others.next().expect("more than 256 characters") }
            },
        )
        .collect()
}

/// One id for each of `chars`, in their order. Another character is an error of the library, as it is here.
fn characters(chars: &str) -> Value {
    let vocab: Map<String, Value> =
        chars.chars().zip(0u32..).map(|(c, id)| (c.to_string(), json!(id))).collect();
    let each =
        json!({"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": false});
    let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"});
    file(each, json!({"type": "Fuse"}), model)
}
