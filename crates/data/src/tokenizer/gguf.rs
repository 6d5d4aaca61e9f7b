//! A tokenizer as GGUF files describe it to llama.cpp, which has algorithms of its own: byte-level byte-pair encoding with a split
//! that it knows by name, and SentencePiece's byte-pair encoding. What it would encode otherwise is refused. Source: `conversion/base.py`
//! and `src/llama-vocab.cpp` of llama.cpp, August 2026.

use serde_json::Value;

use super::Tokenizer;
use super::bounds::leaves;
use super::from_files::FromFiles;

/// Vocabulary and settings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufVocabulary {
    /// `tokenizer.ggml.model`: `gpt2` for byte-level byte-pair encoding, `llama` for SentencePiece's.
    pub model: &'static str,
    /// `tokenizer.ggml.pre`: how text is split before it is encoded.
    pub pre: &'static str,
    /// The spelling of each row of the token table.
    pub tokens: Vec<String>,
    /// Kind of each token: normal, unknown, control, user-defined, unused, byte.
    pub kinds: Vec<i32>,
    /// SentencePiece's scores: the higher, the earlier two tokens become this one. Empty for `gpt2`.
    pub scores: Vec<f32>,
    /// Pairs of tokens that become one, the first of them first. Empty for `llama`.
    pub merges: Vec<String>,
    /// Ids of special tokens by the name of their key (`bos_token_id`).
    pub ids: Vec<(&'static str, u32)>,
    /// Settings (`add_bos_token`).
    pub flags: Vec<(&'static str, bool)>,
    /// The first chat template.
    pub chat_template: Option<String>,
    /// `general.name`, where llama.cpp does something by it: with Phi-3's, it removes spaces behind added tokens.
    pub name: Option<&'static str>,
    /// Differences of llama.cpp's encoding, for people.
    pub notes: Vec<String>,
}

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;

/// The mark of a space in SentencePiece's vocabularies.
const SPACE: &str = "\u{2581}";

/// Names of keys, and the roles of their tokens.
const IDS: [(&str, &str); 4] = [
    ("bos_token_id", "bos_token"),
    ("eos_token_id", "eos_token"),
    ("unknown_token_id", "unk_token"),
    ("padding_token_id", "pad_token"),
];

/// Patterns by which vocabularies split text, with whether a word that is a token is one without merges, and llama.cpp's name.
const SPLITS: [(&str, bool, &str); 4] = [
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        true,
        "llama-bpe",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        false,
        "dbrx",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        false,
        "qwen2",
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        true,
        "tekken",
    ),
];

impl Tokenizer {
    /// The vocabulary in a GGUF file, for a model with `rows` rows. The error names what llama.cpp does otherwise.
    pub fn gguf(&self, rows: usize) -> Result<GgufVocabulary, String> {
        let opened = self.opened().ok_or("this build has no reader of Hugging Face tokenizers")?;
        let super::Algorithm::HuggingFace(opened) = &*opened.algorithm else {
            unreachable!("it was opened as one")
        };
        let mut left_out = Vec::new();
        for id in rows..self.vocab_size() {
            match opened.library.token(id as u32) {
                Some((token, true)) => left_out.push(format!("{token:?}")),
                Some((_, false)) => {
                    let ids = self.vocab_size();
                    return Err(format!(
                        "the tokenizer has {ids} ids, and the model {rows} rows: it takes one token a row"
                    ));
                }
                None => {}
            }
        }
        let content = opened.library.content();
        let mut vocabulary = algorithm(&content)?;
        let roles = |role| opened.role(role).map(|token| token.id).filter(|id| (*id as usize) < rows);
        vocabulary.ids = IDS.into_iter().filter_map(|(key, role)| Some((key, roles(role)?))).collect();
        vocabulary.flags.extend(framing(opened)?);
        vocabulary.fill_rows(&content, opened, rows);
        vocabulary.chat_template = self.chat_template();
        vocabulary.name = strips_as_phi3(&content).then_some("phi-3");
        vocabulary.notes = vocabulary.differences(&content, &left_out);
        Ok(vocabulary)
    }
}

/// Settings for what documents begin and end with.
fn framing(opened: &FromFiles) -> Result<[(&'static str, bool); 2], String> {
    let is = |ids: &[u32], role: &str| match ids {
        [] => Ok(false),
        [id] if opened.role(role).is_some_and(|token| token.id == *id) => Ok(true),
        _ => Err(format!("texts are enclosed by other tokens than the {role}, which it cannot do")),
    };
    let [begin, end] = opened.framing();
    Ok([("add_bos_token", is(begin, "bos_token")?), ("add_eos_token", is(end, "eos_token")?)])
}

/// The algorithm of the content of a `tokenizer.json`, with its merges.
fn algorithm(content: &Value) -> Result<GgufVocabulary, String> {
    let model = &content["model"];
    if model["type"] != "BPE" {
        return Err(format!("the tokenizer's model is {}, and it has BPE alone", model["type"]));
    }
    for (key, expected) in [("continuing_subword_prefix", ""), ("end_of_word_suffix", "")] {
        if model[key].as_str().is_some_and(|given| given != expected) {
            return Err(format!("the tokenizer's model has {key} = {}, which it has not", model[key]));
        }
    }
    let merges = model["merges"].as_array().into_iter().flatten().map(|pair| {
        let sides = pair.as_array().into_iter().flatten().filter_map(Value::as_str);
        sides.collect::<Vec<_>>()
    });
    if model["byte_fallback"] == true {
        let prefix = space_prefix(content)?;
        let mut made = GgufVocabulary { model: "llama", pre: "default", ..GgufVocabulary::default() };
        made.flags.push(("add_space_prefix", prefix));
        // Until the rows are known: what each merge makes.
        made.merges = merges.map(|pair| pair.concat()).collect();
        return Ok(made);
    }
    let merges = merges.map(|pair| pair.join(" ")).collect();
    let pre = split(content)?;
    Ok(GgufVocabulary { model: "gpt2", pre, merges, ..GgufVocabulary::default() })
}

/// llama.cpp's name of the split of byte-level byte-pair encoding.
fn split(content: &Value) -> Result<&'static str, String> {
    let normalizers = leaves(&content["normalizer"]);
    if let Some(other) = normalizers.iter().find(|part| !part.is_null() && part["type"] != "NFC") {
        return Err(format!("the tokenizer's normalizer is {}, which it has not", other["type"]));
    }
    let parts = leaves(&content["pre_tokenizer"]);
    let ignores = content["model"]["ignore_merges"] == true;
    let bytes = |part: &Value, splits: bool| {
        part["type"] == "ByteLevel" && part["use_regex"] == splits && part["add_prefix_space"] == false
    };
    let digits = |part: &Value| part["type"] == "Digits" && part["individual_digits"] == true;
    let matched =
        |part: &Value| part["type"] == "Split" && (part["behavior"] == "Isolated" || part["invert"] == true);
    let known = match parts[..] {
        [one] if bytes(one, true) && !ignores => Some("gpt-2"),
        [first, second] if digits(first) && bytes(second, true) && !ignores => Some("smollm"),
        [first, second] if matched(first) && bytes(second, false) => {
            let pattern = &first["pattern"]["Regex"];
            SPLITS.iter().find(|split| pattern == split.0 && split.1 == ignores).map(|split| split.2)
        }
        _ => None,
    };
    known.ok_or_else(|| {
        format!("the tokenizer splits text in a way that it has no name for: {}", content["pre_tokenizer"])
    })
}

/// Returns whether SentencePiece's algorithm puts a space before a text.
fn space_prefix(content: &Value) -> Result<bool, String> {
    let parts: Vec<&Value> =
        leaves(&content["normalizer"]).into_iter().chain(leaves(&content["pre_tokenizer"])).collect();
    let (mut prefix, mut replaced) = (false, false);
    for part in parts.into_iter().filter(|part| !part.is_null()) {
        let known = match part["type"].as_str().unwrap_or_default() {
            "Prepend" if part["prepend"] == SPACE => {
                prefix = true;
                true
            }
            "Replace" => {
                replaced = part["pattern"]["String"] == " " && part["content"] == SPACE;
                replaced
            }
            // Gemma's: no space is left to split at.
            "Split" => replaced && part["pattern"]["String"] == " ",
            "Metaspace" if part["replacement"] == SPACE => {
                prefix = part["prepend_scheme"] != "never";
                part["split"] == false
            }
            _ => false,
        };
        if !known {
            return Err(format!("the tokenizer prepares text by {part}, which it does not do"));
        }
    }
    Ok(prefix)
}

impl GgufVocabulary {
    /// Differences of llama.cpp's encoding; `left_out` are the added tokens behind the rows.
    fn differences(&self, content: &Value, left_out: &[String]) -> Vec<String> {
        let mut notes = Vec::new();
        if !left_out.is_empty() {
            notes.push(format!(
                "added tokens without a row in the model are left out: {}",
                left_out.join(", ")
            ));
        }
        if leaves(&content["normalizer"]).iter().any(|part| part["type"] == "NFC") {
            notes.push("the tokenizer normalises text to NFC, and llama.cpp does not".to_string());
        }
        let mut added = content["added_tokens"].as_array().into_iter().flatten();
        if self.name.is_none() && added.any(|token| token["lstrip"] == true || token["rstrip"] == true) {
            notes
                .push("the tokenizer removes spaces beside added tokens, and llama.cpp does not".to_string());
        }
        notes
    }

    /// A token for each row.
    fn fill_rows(&mut self, content: &Value, opened: &FromFiles, rows: usize) {
        let is_pieces = self.model == "llama";
        let special: Vec<&Value> = content["added_tokens"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|token| token["special"] == true)
            .collect();
        let unknown = opened.unknown_id();
        for row in 0..rows as u32 {
            let (token, kind) = match opened.library.token(row) {
                None => (format!("[PAD{row}]"), UNUSED),
                Some((token, _)) if is_pieces && unknown == Some(row) => (token, UNKNOWN),
                Some((token, true)) if special.iter().any(|special| special["id"] == row) => (token, CONTROL),
                Some((token, true)) => (token.replace(SPACE, " "), USER_DEFINED),
                Some((token, false)) if is_pieces && is_byte(&token) => (token, BYTE),
                Some((token, false)) => (token, NORMAL),
            };
            self.tokens.push(token);
            self.kinds.push(kind);
        }
        if is_pieces {
            let mut ranks = std::collections::HashMap::new();
            for (rank, made) in self.merges.drain(..).enumerate() {
                ranks.entry(made).or_insert(rank);
            }
            self.scores = self
                .tokens
                .iter()
                .map(|token| ranks.get(token).map_or(0.0, |rank| -(*rank as f32)))
                .collect();
        }
    }
}

/// Returns whether spaces are removed behind added tokens as llama.cpp does it for a model that is called Phi-3: behind all but three. It
/// needs those three, and `</s>`.
fn strips_as_phi3(content: &Value) -> bool {
    let tokens = content["added_tokens"].as_array().map_or(&[][..], Vec::as_slice);
    let kept = ["<unk>", "<s>", "<|endoftext|>"];
    let keeps = |token: &Value| kept.iter().any(|name| token["content"] == *name);
    let strips = |token: &Value| token["rstrip"] == !keeps(token) && token["lstrip"] == false;
    let has = |name: &&str| tokens.iter().any(|token| token["content"] == **name);
    kept.iter().chain(&["</s>"]).all(has) && tokens.iter().all(strips)
}

/// Returns whether a token of SentencePiece's vocabulary is a byte: `<0x0A>`.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}
