//! The tokenizer of a Hugging Face folder: its vocabulary, what the files beside it say about special tokens and
//! settings, and those files as they were read.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::beside;
use super::class::NamedClass;
use super::files::{self, TOKENIZER_CONFIG, TOKENIZER_FILE, TokenizerFiles};
#[cfg(feature = "tokenizers")]
use super::hugging_face::HuggingFace;
use super::settings::{self, Changes};
use super::special_tokens::{self, Declared, Lookup, SpecialToken};
#[cfg(not(feature = "tokenizers"))]
use super::without_feature::HuggingFace;

/// An opened tokenizer with all that its files say.
pub(super) struct FromFiles {
    pub library: HuggingFace,
    files: TokenizerFiles,
    /// The `tokenizer.json` that was made of other files.
    made: Option<String>,
    changes: Changes,
    special: Vec<SpecialToken>,
    framing: [Vec<u32>; 2],
    /// The added tokens that a text can spell.
    added: HashMap<u32, String>,
    /// Notes for people on what was assumed, guessed, applied or added.
    notes: Vec<String>,
}

/// Parts of a `tokenizer.json` that settings change.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Parts {
    normalizer: Value,
    pre_tokenizer: Value,
}

impl FromFiles {
    /// Opens the files. The error is a reason to print.
    pub(super) fn open(files: TokenizerFiles) -> Result<FromFiles, String> {
        let class = NamedClass::of(&files)?;
        let mut notes = Vec::new();
        let made = match files.get(TOKENIZER_FILE) {
            Some(content) => {
                files::check_parts(content)?;
                None
            }
            None => {
                let (content, assumed) = super::vocabulary_files::tokenizer_json(&files, class.as_ref())?;
                notes.extend(assumed);
                Some(content.to_string())
            }
        };
        let content = made.as_deref().or(files.get(TOKENIZER_FILE)).unwrap_or_default();
        let parts: Parts =
            serde_json::from_str(content).map_err(|error| format!("it is not JSON: {error}"))?;
        let config = files.object(TOKENIZER_CONFIG)?;
        let (changes, applied) = settings::changes(&config, &parts.normalizer, &parts.pre_tokenizer)?;
        if made.is_none() && !applied.is_empty() {
            notes.push(format!(
                "{TOKENIZER_CONFIG} changes {TOKENIZER_FILE}, as in transformers: {}",
                applied.join(", ")
            ));
        }
        notes.extend(beside::unknown_keys(&config));
        let mut library = HuggingFace::from_json(content, &changes)?;
        let declared = Declared::of(&files)?;
        notes.extend(declared.notes.iter().cloned());
        for token in &declared.added {
            if let Some(id) = library.add(token)? {
                let content = &token.content;
                notes.push(format!(
                    "{content:?} of {} is added to the vocabulary with the id {id}",
                    token.file
                ));
            }
        }
        let (special, said) = special_tokens(&mut library, &files, &declared, class.as_ref())?;
        notes.extend(said);
        notes.extend(beside::disagreements(&files, &|token| library.id(token)));
        let framing = framing(&config, &library, &special)?;
        let added = library.added().into_iter().collect();
        Ok(FromFiles { library, files, made, changes, special, framing, added, notes })
    }

    /// Says how vocabularies of other libraries in the folder of the files disagree with `tokenizer.json`.
    pub(super) fn compare(&mut self, folder: &Path) {
        if self.made.is_none() {
            self.notes.extend(beside::foreign(folder, &|token| self.library.id(token)));
        }
    }

    pub(super) fn files(&self) -> &TokenizerFiles {
        &self.files
    }

    /// The content of its `tokenizer.json`, read or made.
    pub(super) fn tokenizer_json(&self) -> &str {
        self.made.as_deref().or(self.files.get(TOKENIZER_FILE)).unwrap_or_default()
    }

    /// Replacements of parts of [`FromFiles::tokenizer_json`]; `None` if there are none.
    pub(super) fn changes(&self) -> Option<Value> {
        self.changes.to_json()
    }

    pub(super) fn special(&self) -> &[SpecialToken] {
        &self.special
    }

    /// Ids with which documents begin and end.
    pub(super) fn framing(&self) -> &[Vec<u32>; 2] {
        &self.framing
    }

    pub(super) fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns whether special tokens that are spelled in a text are read as plain text.
    pub(super) fn reads_special_as_plain(&self) -> bool {
        self.changes.plain_special
    }

    pub(super) fn added_ids(&self) -> &HashMap<u32, String> {
        &self.added
    }

    /// The id of the model's token for unknown text.
    pub(super) fn unknown_id(&self) -> Option<u32> {
        self.library.unknown().and_then(|token| self.library.id(&token))
    }

    /// Returns whether the ids of `self` mean the same in `other`.
    pub(super) fn agrees_with(&self, other: &FromFiles) -> bool {
        let added = |of: &FromFiles, (id, token): (&u32, &String)| of.library.id(token) == Some(*id);
        self.added.iter().all(|token| added(other, token))
            && self.library.meaning() == other.library.meaning()
    }

    /// The token that ends a text, or else the one between two.
    pub(super) fn separator(&self) -> Option<&SpecialToken> {
        ["eos_token", "sep_token"].into_iter().find_map(|role| self.role(role))
    }

    /// The token with a role.
    pub(super) fn role(&self, role: &str) -> Option<&SpecialToken> {
        self.special.iter().find(|token| token.role == role)
    }
}

/// The special tokens. Those of a class that are ordinary tokens of its vocabulary file become special in texts, too.
fn special_tokens(
    library: &mut HuggingFace,
    files: &TokenizerFiles,
    declared: &Declared,
    class: Option<&NamedClass>,
) -> Result<(Vec<SpecialToken>, Vec<String>), String> {
    let unknown = library.unknown();
    let lookup = Lookup {
        id: &|content| library.id(content),
        token: &|id| library.token(id),
        unknown: unknown.as_deref(),
    };
    let (special, notes) = special_tokens::find(files, declared, class, &lookup)?;
    if files.get(TOKENIZER_FILE).is_none() {
        for token in &special {
            library.add(&special_tokens::plain(&token.content, "the class of the tokenizer"))?;
        }
    }
    Ok((special, notes))
}

/// Ids with which documents begin and end: as `add_bos_token` and `add_eos_token` say, or else as the post-processor does.
fn framing(config: &Value, library: &HuggingFace, special: &[SpecialToken]) -> Result<[Vec<u32>; 2], String> {
    let keys = [("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")];
    let given = [settings::boolean(config, keys[0].0)?, settings::boolean(config, keys[1].0)?];
    if given == [None, None] {
        return library.framing();
    }
    let ids = |given: Option<bool>, (key, role): (&str, &str)| {
        let token = special.iter().find(|token| token.role == role);
        match (given.unwrap_or(false), token) {
            (false, _) => Ok(Vec::new()),
            (true, Some(token)) => Ok(vec![token.id]),
            (true, None) => Err(format!("{key} = true of {TOKENIZER_CONFIG}, and no file names the {role}")),
        }
    };
    Ok([ids(given[0], keys[0])?, ids(given[1], keys[1])?])
}
