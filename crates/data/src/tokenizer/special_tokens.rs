//! Which tokens of a folder are special, and what for: as its files say, or else as the named class of transformers assumes.
//! Only where no file says anything, known spellings decide, and that is said to be a guess.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::class::NamedClass;
use super::files::{
    ADDED_TOKENS, GENERATION_CONFIG, MODEL_CONFIG, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, TokenizerFiles,
};

/// The roles of special tokens, as transformers names them and in its order.
pub(super) const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Spellings of special tokens in known `tokenizer.json` files, by role; the first that is there is the guess.
const KNOWN: [(&str, &[&str]); 7] = [
    ("bos_token", &["<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|endoftext|>"]),
    (
        "eos_token",
        &["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>", "<|end▁of▁sentence|>"],
    ),
    ("unk_token", &["[UNK]", "<unk>", "<|endoftext|>"]),
    ("pad_token", &["[PAD]", "<pad>", "<|pad|>"]),
    ("cls_token", &["[CLS]"]),
    ("sep_token", &["[SEP]"]),
    ("mask_token", &["[MASK]", "<mask>", "<|mask|>"]),
];

/// A token with a role, as `transformers` names it: `eos_token`, `mask_token`, ...
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    /// The key of `tokenizer_config.json`.
    pub role: &'static str,
    /// Spelling of the token.
    pub content: String,
    /// Its id.
    pub id: u32,
    /// Source of the token, for messages.
    pub source: String,
}

/// A token that is added to a vocabulary, with the fields of the `tokenizers` library.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct AddedToken {
    pub content: String,
    #[serde(default)]
    pub single_word: bool,
    #[serde(default)]
    pub lstrip: bool,
    #[serde(default)]
    pub rstrip: bool,
    #[serde(default)]
    pub normalized: bool,
    #[serde(default = "yes")]
    pub special: bool,
    /// The id that the file gives it.
    #[serde(skip)]
    pub id: Option<u32>,
    /// The file that names it.
    #[serde(skip)]
    pub file: &'static str,
}

fn yes() -> bool {
    true
}

/// Declarations of special tokens in the files.
#[derive(Debug, Default)]
pub(super) struct Declared {
    /// The token of a role, or `None` where a file says that there is none.
    roles: Vec<(&'static str, Option<AddedToken>)>,
    /// Tokens that a vocabulary has or gets, in the order in which transformers adds them.
    pub added: Vec<AddedToken>,
    /// Contradictions, for people.
    pub notes: Vec<String>,
}

impl Declared {
    /// Reads the files. The error is a reason to print.
    pub(super) fn of(files: &TokenizerFiles) -> Result<Declared, String> {
        let (config, map) = (files.object(TOKENIZER_CONFIG)?, files.object(SPECIAL_TOKENS_MAP)?);
        let with_ids = config.get("added_tokens_decoder").and_then(Value::as_object);
        let mut declared = Declared::default();
        for role in ROLES {
            let both = [(TOKENIZER_CONFIG, config.get(role)), (SPECIAL_TOKENS_MAP, map.get(role))]
                .map(|(file, token)| token.map(|token| parse(role, token, file)).transpose());
            let [of_config, of_map] = both;
            // transformers reads the map only where the configuration does not list the added tokens.
            let (counts, other) = match with_ids {
                Some(_) => (of_config?, of_map?),
                None => (of_map?, of_config?),
            };
            if let (Some(Some(counts)), Some(Some(other))) = (&counts, &other)
                && counts.content != other.content
            {
                declared.notes.push(format!(
                    "{role} is {:?} in {} and {:?} in {}: the former counts, as in transformers",
                    counts.content, counts.file, other.content, other.file
                ));
            }
            declared.roles.extend(counts.or(other).map(|token| (role, token)));
        }
        declared.added = match with_ids {
            Some(tokens) => by_id(tokens)?,
            None => declared.of_added_tokens(files)?,
        };
        let roles = declared.roles.iter().filter_map(|(_, token)| token.clone());
        let further = ["additional_special_tokens", "extra_special_tokens"].into_iter().flat_map(|key| {
            [(TOKENIZER_CONFIG, &config[key]), (SPECIAL_TOKENS_MAP, &map[key])]
                .into_iter()
                .flat_map(move |(file, tokens)| each(tokens).map(move |token| parse(key, token, file)))
        });
        let further: Vec<Option<AddedToken>> = further.collect::<Result<_, String>>()?;
        for token in roles.chain(further.into_iter().flatten()).collect::<Vec<_>>() {
            if declared.added.iter().all(|added| added.content != token.content) {
                declared.added.push(token);
            }
        }
        Ok(declared)
    }

    /// The tokens of `added_tokens.json`, in the order of their ids.
    fn of_added_tokens(&self, files: &TokenizerFiles) -> Result<Vec<AddedToken>, String> {
        let object = files.object(ADDED_TOKENS)?;
        let mut tokens = Vec::new();
        for (content, id) in object.as_object().into_iter().flatten() {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.ok_or_else(|| format!("{ADDED_TOKENS}: the id of {content:?} is not a number"))?;
            let role = self.roles.iter().filter_map(|(_, token)| token.as_ref());
            let token = match role.into_iter().find(|token| token.content == *content) {
                Some(token) => token.clone(),
                None => AddedToken { special: false, normalized: true, ..plain(content, ADDED_TOKENS) },
            };
            tokens.push(AddedToken { id: Some(id), file: ADDED_TOKENS, ..token });
        }
        tokens.sort_by_key(|token| token.id);
        Ok(tokens)
    }

    /// Returns whether a file names the token of any role.
    fn names_roles(&self) -> bool {
        self.roles.iter().any(|(_, token)| token.is_some())
    }
}

/// The vocabulary in which tokens are looked up.
pub(super) struct Lookup<'a> {
    /// The id of a token.
    pub id: &'a dyn Fn(&str) -> Option<u32>,
    /// The token of an id, and whether it is an added one.
    pub token: &'a dyn Fn(u32) -> Option<(String, bool)>,
    /// The spelling of the token for unknown text in the model of `tokenizer.json`.
    pub unknown: Option<&'a str>,
}

/// The special tokens of a vocabulary that has those of `declared`, and notes for people. The error is a reason to print.
pub(super) fn find(
    files: &TokenizerFiles,
    declared: &Declared,
    class: Option<&NamedClass>,
    lookup: &Lookup,
) -> Result<(Vec<SpecialToken>, Vec<String>), String> {
    let mut notes = Vec::new();
    let ids = [MODEL_CONFIG, GENERATION_CONFIG].map(|file| files.object(file).map(|object| (file, object)));
    let ids = ids.into_iter().collect::<Result<Vec<_>, String>>()?;
    let defaults = class.and_then(|named| named.class);
    let guesses = !declared.names_roles() && class.is_none();
    let mut found: Vec<SpecialToken> = Vec::new();
    for role in ROLES {
        let made = |content: &str, source: String| {
            (lookup.id)(content).map(|id| SpecialToken { role, content: content.to_string(), id, source })
        };
        let said = declared.roles.iter().find(|(name, _)| *name == role);
        if let Some((_, token)) = said {
            found.extend(token.as_ref().and_then(|token| made(&token.content, token.file.to_string())));
            continue;
        }
        let of_model = lookup.unknown.filter(|_| role == "unk_token");
        let default = defaults.and_then(|class| {
            let (_, content) = class.roles().iter().find(|(name, _)| *name == role)?;
            made(content, format!("as {} assumes", class.name()))
        });
        let token = of_model
            .and_then(|content| made(content, "tokenizer.json".to_string()))
            .or_else(|| of_ids(role, &ids, lookup, default.as_ref().map(|token| token.id), &mut notes))
            .or(default);
        found.extend(token);
    }
    if guesses {
        let known = |role: &str| KNOWN.iter().find(|(name, _)| *name == role).map(|(_, known)| *known);
        let missing = ROLES.into_iter().filter(|role| found.iter().all(|token| token.role != *role));
        let guess = |role: &'static str| {
            let is_added = |id| (lookup.token)(id).is_some_and(|(_, added)| added);
            let spelled = known(role)?.iter().find_map(|content| Some((*content, (lookup.id)(content)?)));
            let (content, id) = spelled.filter(|(_, id)| is_added(*id))?;
            Some(SpecialToken { role, content: content.to_string(), id, source: "a guess".to_string() })
        };
        let guessed: Vec<SpecialToken> = missing.filter_map(guess).collect();
        if !guessed.is_empty() {
            let shown: Vec<String> =
                guessed.iter().map(|token| format!("{} {:?}", token.role, token.content)).collect();
            notes.push(format!(
                "no file says what the special tokens are for; guessed by their spelling: {}",
                shown.join(", ")
            ));
        }
        found.extend(guessed);
    }
    notes.extend(contradictions(&found, &ids));
    Ok((found, notes))
}

/// The token of a role whose id a model's files give. An ordinary token in that place means that the files are of another
/// vocabulary.
fn of_ids(
    role: &'static str,
    files: &[(&'static str, Value)],
    lookup: &Lookup,
    default: Option<u32>,
    notes: &mut Vec<String>,
) -> Option<SpecialToken> {
    for (file, object) in files {
        let key = format!("{role}_id");
        let Some(id) = listed(&object[&key]).next() else { continue };
        match (lookup.token)(id) {
            Some((content, added)) if added || default == Some(id) => {
                return Some(SpecialToken { role, content, id, source: (*file).to_string() });
            }
            Some((content, _)) => {
                notes.push(format!(
                    "{key} = {id} of {file} is not used: it is the ordinary token {content:?}"
                ));
            }
            None => notes.push(format!("{key} = {id} of {file} is not used: the tokenizer has no such id")),
        }
    }
    None
}

/// Ids of a model's files that differ from those of the tokenizer's.
fn contradictions(found: &[SpecialToken], files: &[(&'static str, Value)]) -> Vec<String> {
    let mut notes = Vec::new();
    for token in found {
        for (file, object) in files {
            let key = format!("{}_id", token.role);
            let value = &object[&key];
            if listed(value).next().is_some()
                && listed(value).all(|id| id != token.id)
                && token.source != *file
            {
                notes.push(format!(
                    "{key} is {value} in {file} and {} ({:?}) by {}: the latter is used",
                    token.id, token.content, token.source
                ));
            }
        }
    }
    notes
}

/// An id, or those of a list.
pub(super) fn listed(value: &Value) -> impl Iterator<Item = u32> {
    let ids = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    ids.iter().filter_map(Value::as_u64).filter_map(|id| u32::try_from(id).ok())
}

/// The tokens of a list, or the values of an object.
fn each(tokens: &Value) -> Box<dyn Iterator<Item = &Value> + '_> {
    match tokens {
        Value::Array(list) => Box::new(list.iter()),
        Value::Object(named) => Box::new(named.values()),
        _ => Box::new(std::iter::empty()),
    }
}

/// A token as a string or an object; `None` for null.
fn parse(key: &str, token: &Value, file: &'static str) -> Result<Option<AddedToken>, String> {
    match token {
        Value::Null => Ok(None),
        Value::String(content) => Ok(Some(plain(content, file))),
        other => {
            let token = AddedToken::deserialize(other);
            let token = token.map_err(|error| format!("{key} of {file} is not a token: {error}"))?;
            // A token with a role is special, whatever the object says.
            Ok(Some(AddedToken { special: true, file, ..token }))
        }
    }
}

/// A special token that is found wherever a text spells it.
pub(super) fn plain(content: &str, file: &'static str) -> AddedToken {
    AddedToken {
        content: content.to_string(),
        single_word: false,
        lstrip: false,
        rstrip: false,
        normalized: false,
        special: true,
        id: None,
        file,
    }
}

/// The tokens of `added_tokens_decoder`, in the order of their ids.
fn by_id(tokens: &Map<String, Value>) -> Result<Vec<AddedToken>, String> {
    let mut added = Vec::new();
    for (id, token) in tokens {
        let what = || format!("added_tokens_decoder of {TOKENIZER_CONFIG}: {id:?}");
        let token = AddedToken::deserialize(token).map_err(|error| format!("{}: {error}", what()))?;
        let id = Some(id.parse().map_err(|error| format!("{}: {error}", what()))?);
        added.push(AddedToken { id, file: TOKENIZER_CONFIG, ..token });
    }
    added.sort_by_key(|token| token.id);
    Ok(added)
}
