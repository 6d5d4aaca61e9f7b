//! The files of a Hugging Face folder that say how text becomes ids and what its special tokens are for, as they were read.
//!
//! A run keeps them whole, so that an export writes back what was read. Of `config.json`, which describes the model, only
//! the keys about tokens are kept.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::limits::{self, KEPT_TOKENIZER_BYTES, TOKENIZER_FILE_BYTES, TOKENIZER_PARTS};
use crate::{DataError, Result};

/// A tokenizer of Hugging Face's library; the name of a run's own tokenizer, too.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
pub(super) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
pub(super) const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";
pub(super) const ADDED_TOKENS: &str = "added_tokens.json";
pub(super) const GENERATION_CONFIG: &str = "generation_config.json";
pub(super) const MODEL_CONFIG: &str = "config.json";
pub(super) const VOCAB_JSON: &str = "vocab.json";
pub(super) const MERGES: &str = "merges.txt";
pub(super) const VOCAB_TXT: &str = "vocab.txt";
pub(super) const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// Files that are read of a folder.
const NAMES: [&str; 11] = [
    TOKENIZER_FILE,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS_MAP,
    ADDED_TOKENS,
    GENERATION_CONFIG,
    MODEL_CONFIG,
    VOCAB_JSON,
    MERGES,
    VOCAB_TXT,
    CHAT_TEMPLATE,
    "chat_template.json",
];

/// Files that hold a vocabulary.
const VOCABULARIES: [&str; 4] = [TOKENIZER_FILE, VOCAB_JSON, MERGES, VOCAB_TXT];

pub(super) const SENTENCE_PIECE: &str = "SentencePiece's";

/// Vocabularies of other libraries, which are not used.
pub(super) const FOREIGN: [(&str, &str); 8] = [
    ("tokenizer.model", SENTENCE_PIECE),
    ("spiece.model", SENTENCE_PIECE),
    ("sentencepiece.bpe.model", SENTENCE_PIECE),
    ("spm.model", SENTENCE_PIECE),
    ("source.spm", SENTENCE_PIECE),
    ("tekken.json", "Mistral's"),
    ("qwen.tiktoken", "tiktoken's"),
    ("encoder.json", "OpenAI's, which others name vocab.json"),
];

/// The folder of further chat templates.
const TEMPLATES: &str = "additional_chat_templates";

/// The name of the template for chats with tools.
const TOOL_USE: &str = "tool_use";

/// Maximum number of further chat templates.
const MAX_TEMPLATES: usize = 64;

/// Files by their names within the folder. At least one of them holds a vocabulary.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TokenizerFiles {
    files: BTreeMap<String, String>,
}

impl TokenizerFiles {
    /// Reads the files of the folder `dir`; `None` where no file holds a vocabulary.
    ///
    /// # Errors
    /// [`DataError::TokenizerFile`] for a file that is too large, not text or not JSON, and for a vocabulary that only
    /// another library reads, with the way to convert it.
    pub fn read(dir: &Path) -> Result<Option<TokenizerFiles>> {
        let mut files = BTreeMap::new();
        for name in NAMES.into_iter().filter(|name| is_there(dir, name)) {
            files.insert(name.to_string(), read_text(&dir.join(name), name)?);
        }
        if !VOCABULARIES.iter().any(|name| files.contains_key(*name)) {
            return foreign(dir).map_or(Ok(None), Err);
        }
        if let Some(config) = files.get_mut(MODEL_CONFIG) {
            *config = about_tokens(config);
        }
        read_templates(dir, &mut files)?;
        Ok(Some(TokenizerFiles { files }))
    }

    /// The names of files about tokens in a folder without vocabulary, which are of no use there.
    pub fn without_vocabulary(dir: &Path) -> Vec<&'static str> {
        let of_model = [MODEL_CONFIG, GENERATION_CONFIG];
        NAMES.into_iter().filter(|name| !of_model.contains(name) && is_there(dir, name)).collect()
    }

    /// The content of the `generation_config.json` of a folder, if there is one.
    ///
    /// # Errors
    /// Those of [`TokenizerFiles::read`].
    pub fn generation_config(dir: &Path) -> Result<Option<String>> {
        let name = GENERATION_CONFIG;
        is_there(dir, name).then(|| read_text(&dir.join(name), name)).transpose()
    }

    /// A `tokenizer.json` alone.
    pub(super) fn of_tokenizer_json(content: &str) -> TokenizerFiles {
        TokenizerFiles { files: [(TOKENIZER_FILE.to_string(), content.to_string())].into() }
    }

    /// The content of a file.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.files.get(name).map(String::as_str)
    }

    /// Names and contents of the files that belong to the tokenizer.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let all = self.files.iter().map(|(name, content)| (name.as_str(), content.as_str()));
        all.filter(|(name, _)| *name != MODEL_CONFIG)
    }

    /// The same with further special tokens, which the vocabulary gets if it lacks them.
    ///
    /// # Errors
    /// A reason to print: a `tokenizer_config.json` that is not as expected.
    pub(super) fn with_special_tokens(&self, tokens: &[String]) -> Result<TokenizerFiles, String> {
        let key = "additional_special_tokens";
        let mut config = self.object(TOKENIZER_CONFIG)?;
        if config[key].is_null() {
            config[key] = Value::Array(Vec::new());
        }
        let Some(list) = config[key].as_array_mut() else {
            return Err(format!("{key} of {TOKENIZER_CONFIG} is {}, expected a list", config[key]));
        };
        list.extend(tokens.iter().map(|token| Value::from(token.as_str())));
        let mut files = self.files.clone();
        files.insert(TOKENIZER_CONFIG.to_string(), format!("{config:#}\n"));
        Ok(TokenizerFiles { files })
    }

    /// The first chat template: `chat_template.jinja` counts before `tokenizer_config.json`, whose list has one named "default".
    pub(super) fn chat_template(&self) -> Option<String> {
        if let Some(template) = self.get(CHAT_TEMPLATE) {
            return Some(template.to_string());
        }
        match &self.object(TOKENIZER_CONFIG).ok()?["chat_template"] {
            Value::Array(templates) => named(templates, "default"),
            template => template.as_str().map(str::to_string),
        }
    }

    /// The chat template for chats with descriptions of tools, where there is one of its own: the one named "tool_use".
    pub(super) fn tool_template(&self) -> Option<String> {
        if let Some(template) = self.get(&format!("{TEMPLATES}/{TOOL_USE}.jinja")) {
            return Some(template.to_string());
        }
        match &self.object(TOKENIZER_CONFIG).ok()?["chat_template"] {
            // A file counts before this list.
            Value::Array(templates) if self.get(CHAT_TEMPLATE).is_none() => named(templates, TOOL_USE),
            _ => None,
        }
    }

    /// The name of the file whose vocabulary counts.
    pub(super) fn vocabulary(&self) -> &'static str {
        VOCABULARIES.into_iter().find(|name| self.files.contains_key(*name)).unwrap_or(TOKENIZER_FILE)
    }

    /// Returns whether there is nothing but a `tokenizer.json`.
    pub(super) fn is_tokenizer_json_alone(&self) -> bool {
        self.files.keys().eq([TOKENIZER_FILE])
    }

    /// A JSON object; empty where there is no such file. The error is a reason to print.
    pub(super) fn object(&self, name: &str) -> Result<Value, String> {
        match self.get(name) {
            None => Ok(Value::Object(serde_json::Map::new())),
            Some(content) => match serde_json::from_str(content) {
                Ok(object @ Value::Object(_)) => Ok(object),
                Ok(_) => Err(format!("{name} is not a JSON object")),
                Err(error) => Err(format!("{name} is not valid JSON: {error}")),
            },
        }
    }
}

/// The template of a list that has this name.
fn named(templates: &[Value], name: &str) -> Option<String> {
    let found = templates.iter().find(|each| each["name"] == name)?;
    found["template"].as_str().map(str::to_string)
}

/// Returns whether a folder has a file `name`. A folder of that name does not count; a link that leads nowhere does, and is an
/// error of reading.
fn is_there(dir: &Path, name: &str) -> bool {
    let path = dir.join(name);
    path.symlink_metadata().is_ok() && !path.is_dir()
}

fn read_text(path: &Path, name: &str) -> Result<String> {
    let bound = if name == TOKENIZER_FILE { KEPT_TOKENIZER_BYTES } else { TOKENIZER_FILE_BYTES };
    let bytes = limits::read(path, bound)?;
    let refuse = |reason: String| DataError::TokenizerFile { path: path.to_path_buf(), reason };
    let text = String::from_utf8(bytes).map_err(|error| refuse(format!("it is not UTF-8: {error}")))?;
    if name.ends_with(".json") {
        check_parts(&text).map_err(refuse)?;
    }
    Ok(text)
}

fn read_templates(dir: &Path, files: &mut BTreeMap<String, String>) -> Result<()> {
    let Ok(entries) = dir.join(TEMPLATES).read_dir() else { return Ok(()) };
    for entry in entries.take(MAX_TEMPLATES) {
        let entry = entry.map_err(DataError::reading(&dir.join(TEMPLATES)))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".jinja") {
            files.insert(format!("{TEMPLATES}/{name}"), read_text(&entry.path(), &name)?);
        }
    }
    Ok(())
}

/// The error for a folder whose vocabulary only another library reads.
fn foreign(dir: &Path) -> Option<DataError> {
    let (name, whose) = FOREIGN.into_iter().find(|(name, _)| dir.join(name).exists())?;
    let shown = dir.display();
    let reason = format!(
        "it is {whose}, and no tokenizer.json is beside it; make one with Python: python -c \"from transformers import \
         AutoTokenizer; AutoTokenizer.from_pretrained('{shown}').save_pretrained('{shown}')\" (pip install transformers \
         sentencepiece tiktoken protobuf)"
    );
    Some(DataError::TokenizerFile { path: dir.join(name), reason })
}

/// The part of a model's `config.json` that is about tokens. One that is no JSON object is refused where the model is read.
fn about_tokens(config: &str) -> String {
    let Ok(Value::Object(config)) = serde_json::from_str(config) else { return "{}".to_string() };
    let is_about_tokens =
        |key: &str| key.ends_with("_token_id") || key == "model_type" || key == "tokenizer_class";
    Value::Object(config.into_iter().filter(|(key, _)| is_about_tokens(key)).collect()).to_string()
}

/// Refuses a JSON text that would take too much memory when it is parsed. The error is a reason to print.
pub(super) fn check_parts(text: &str) -> Result<(), String> {
    let (mut parts, mut in_string, mut escaped) = (0, false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' | b':' | b'[' | b'{' if !in_string => parts += 1,
            _ => {}
        }
    }
    match parts > TOKENIZER_PARTS {
        true => {
            Err(format!("it has {parts} commas, colons and brackets; at most {TOKENIZER_PARTS} are read"))
        }
        false => Ok(()),
    }
}
