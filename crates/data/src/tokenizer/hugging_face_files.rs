//! The tokenizer as files that Hugging Face's programs read: `tokenizer.json` and the special tokens. The built-in
//! tokenizers are written as models of the `tokenizers` library that give the same ids.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

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
    /// A `tokenizer.json` as it is; `id` finds the tokens of its vocabulary.
    pub(super) fn of_file(content: &str, id: impl Fn(&str) -> Option<u32>) -> HuggingFaceFiles {
        HuggingFaceFiles { tokenizer: content.to_string(), special: known_tokens(id) }
    }

    /// Each byte is its own id.
    pub(super) fn of_bytes() -> HuggingFaceFiles {
        let bytes: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
        HuggingFaceFiles { tokenizer: byte_level(&bytes, &[]).to_string(), special: Vec::new() }
    }

    /// The ids of `chars` in their order.
    pub(super) fn of_characters(chars: &str) -> HuggingFaceFiles {
        HuggingFaceFiles { tokenizer: characters(chars).to_string(), special: Vec::new() }
    }

    /// GPT-2's tokens by id, and behind them the end-of-text token.
    pub(super) fn of_gpt2(tokens: &[Vec<u8>], end: u32) -> HuggingFaceFiles {
        let mut content = byte_level(tokens, &merges(tokens));
        content["model"]["vocab"][GPT2_END_OF_TEXT] = json!(end);
        add(&mut content, GPT2_END_OF_TEXT, end);
        HuggingFaceFiles::of_file(&content.to_string(), |content| {
            (content == GPT2_END_OF_TEXT).then_some(end)
        })
    }

    /// The same files with the token `[MASK]` behind the vocabulary.
    #[must_use]
    pub(super) fn with_mask(mut self, id: u32) -> HuggingFaceFiles {
        let mut content =
            serde_json::from_str(&self.tokenizer).expect("the file was read or written as JSON");
        add(&mut content, MASK, id);
        self.special.push(SpecialToken { role: "mask_token", content: MASK.to_string(), id });
        HuggingFaceFiles { tokenizer: content.to_string(), special: self.special }
    }

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

/// The special token of GPT-2.
const GPT2_END_OF_TEXT: &str = "<|endoftext|>";

/// The token that a masked model fills, where the vocabulary has none.
const MASK: &str = "[MASK]";

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
