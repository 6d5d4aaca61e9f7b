//! Files and keys beside a `tokenizer.json` that are not used: vocabularies in other files, if they disagree with it, and keys of
//! `tokenizer_config.json` that are not known. transformers reads `tokenizer.json`, too; a program that reads the others gets other ids, so
//! each difference is reported.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::files::{
    FOREIGN, MERGES, SENTENCE_PIECE, TOKENIZER_CONFIG, TOKENIZER_FILE, TokenizerFiles, VOCAB_JSON, VOCAB_TXT,
};
use crate::limits::{self, TOKENIZER_FILE_BYTES};

/// Keys of `tokenizer_config.json` that are read.
const READ: [&str; 26] = [
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "added_tokens_decoder",
    "additional_special_tokens",
    "bos_token",
    "chat_template",
    "cls_token",
    "do_basic_tokenize",
    "do_lower_case",
    "do_subword_tokenize",
    "do_word_tokenize",
    "eos_token",
    "extra_special_tokens",
    "mask_token",
    "never_split",
    "normalization",
    "pad_token",
    "sep_token",
    "split_special_tokens",
    "strip_accents",
    "tokenize_chinese_chars",
    "tokenizer_class",
    "unk_token",
    "use_fast",
    "wordpieces_prefix",
];

/// Keys that change neither the ids of a text nor the role of a token: about batches, decoding, names and programs; `legacy` and
/// `sp_model_kwargs` are for SentencePiece's library alone.
const WITHOUT_EFFECT: [&str; 33] = [
    "_commit_hash",
    "auto_map",
    "backend",
    "clean_up_tokenization_spaces",
    "device_map",
    "errors",
    "from_slow",
    "init_inputs",
    "is_local",
    "legacy",
    "local_files_only",
    "max_len",
    "max_length",
    "merges_file",
    "model_input_names",
    "model_max_length",
    "name_or_path",
    "pad_to_multiple_of",
    "pad_token_type_id",
    "padding_side",
    "processor_class",
    "sp_model_kwargs",
    "spaces_between_special_tokens",
    "special_tokens_map_file",
    "stride",
    "tokenizer_file",
    "transformers_version",
    "trim_offsets",
    "truncation_side",
    "truncation_strategy",
    "trust_remote_code",
    "use_default_system_prompt",
    "vocab_file",
];

/// Names or values that a message lists, and characters of a value.
const SHOWN: usize = 6;
const SHOWN_CHARS: usize = 40;

/// Keys of `config` (`tokenizer_config.json`) that are not known, for people.
pub(super) fn unknown_keys(config: &Value) -> Option<String> {
    let known = |key: &str| READ.contains(&key) || WITHOUT_EFFECT.contains(&key);
    let keys =
        config.as_object().into_iter().flatten().filter(|(key, value)| !known(key) && !value.is_null());
    let shown: Vec<String> = keys
        .map(|(key, value)| {
            let (value, short) = (value.to_string(), SHOWN_CHARS);
            match value.chars().count() > short {
                true => format!("{key} = {} ...", value.chars().take(short).collect::<String>()),
                false => format!("{key} = {value}"),
            }
        })
        .collect();
    let more = shown.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!shown.is_empty()).then(|| {
        format!(
            "{TOKENIZER_CONFIG} has keys that are not known here, and they change no id and no role: {}{more}",
            shown[..shown.len().min(SHOWN)].join(", ")
        )
    })
}

/// For people: how the vocabulary files beside a `tokenizer.json` disagree with it. `id` looks a token up in it.
pub(super) fn disagreements(files: &TokenizerFiles, id: &dyn Fn(&str) -> Option<u32>) -> Vec<String> {
    let Some(content) = files.get(TOKENIZER_FILE) else { return Vec::new() };
    let of_json =
        files.get(VOCAB_JSON).map(|vocab| match serde_json::from_str::<HashMap<String, u32>>(vocab) {
            Ok(vocab) => other_ids(VOCAB_JSON, vocab.into_iter(), id),
            Err(error) => Some(format!("{VOCAB_JSON} is not an object of tokens and ids ({error}){COUNTS}")),
        });
    let of_txt = files.get(VOCAB_TXT).map(|vocab| {
        other_ids(VOCAB_TXT, vocab.lines().zip(0..).map(|(token, id)| (token.to_string(), id)), id)
    });
    let of_merges = files.get(MERGES).map(|merges| other_merges(content, merges));
    [of_json, of_txt, of_merges].into_iter().flatten().flatten().collect()
}

/// The same for a vocabulary of SentencePiece or another library in the folder `dir`, which a run does not keep.
pub(super) fn foreign(dir: &Path, id: &dyn Fn(&str) -> Option<u32>) -> Vec<String> {
    let there = FOREIGN.iter().filter(|(name, _)| dir.join(name).exists());
    let note = |(name, whose): &(&str, &str)| {
        if *whose != SENTENCE_PIECE {
            return Some(format!("{name} ({whose}) is not compared with {TOKENIZER_FILE}, which counts"));
        }
        let read = limits::read(&dir.join(name), TOKENIZER_FILE_BYTES).map_err(|error| error.to_string());
        let pieces =
            read.and_then(|bytes| pieces(&bytes).ok_or("it is not a model of SentencePiece".to_string()));
        match pieces {
            Ok(pieces) => other_ids(name, pieces.into_iter().zip(0..), id),
            Err(reason) => Some(format!("{name} cannot be compared ({reason}){COUNTS}")),
        }
    };
    there.filter_map(note).collect()
}

const COUNTS: &str = ": tokenizer.json counts, as in transformers";

/// Describes how many tokens of the file `name` have another id in `tokenizer.json`, and the first of them.
fn other_ids(
    name: &str,
    vocab: impl Iterator<Item = (String, u32)>,
    id: &dyn Fn(&str) -> Option<u32>,
) -> Option<String> {
    let mut all = 0;
    let others = vocab.inspect(|_| all += 1).filter(|(token, given)| id(token) != Some(*given));
    let mut others: Vec<(u32, String)> = others.map(|(token, given)| (given, token)).collect();
    others.sort();
    let (given, token) = others.first()?;
    let found = id(token).map_or("none".to_string(), |found| found.to_string());
    Some(format!(
        "{name} disagrees with {TOKENIZER_FILE} about {} of its {all} tokens, first about {token:?} (id {given}, and {found} \
         there){COUNTS}",
        others.len()
    ))
}

/// The part of a `tokenizer.json` that `merges.txt` repeats.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Content {
    model: Model,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Model {
    merges: Vec<Merge>,
}

/// A pair of tokens: with a space between them, or as a list.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Text(String),
    Pair(String, String),
}

fn other_merges(content: &str, merges: &str) -> Option<String> {
    let content: Content = serde_json::from_str(content).unwrap_or_default();
    let spelled = |merge: Merge| match merge {
        Merge::Text(text) => text,
        Merge::Pair(left, right) => format!("{left} {right}"),
    };
    let used: Vec<String> = content.model.merges.into_iter().map(spelled).collect();
    let given: Vec<&str> =
        merges.lines().filter(|line| !line.is_empty() && !line.starts_with("#version")).collect();
    let differs = given.iter().zip(&used).position(|(given, used)| given != used);
    let first = differs.or((given.len() != used.len()).then(|| given.len().min(used.len())))?;
    let shown = |merge: Option<&str>| merge.map_or("none".to_string(), |merge| format!("{merge:?}"));
    Some(format!(
        "{MERGES} disagrees with {TOKENIZER_FILE} from merge {first} on ({}, and {} there){COUNTS}",
        shown(given.get(first).copied()),
        shown(used.get(first).map(String::as_str))
    ))
}

/// The pieces of a SentencePiece model in the order of their ids; `None` for another file. The format is protobuf: field 1 of
/// the model is a piece, and field 1 of a piece its spelling.
fn pieces(model: &[u8]) -> Option<Vec<String>> {
    let of_field_1 = |(field, bytes): (u64, &[u8])| (field == 1).then(|| bytes.to_vec());
    let pieces: Vec<Vec<u8>> = fields(model)?.into_iter().filter_map(of_field_1).collect();
    let spelling = |piece: &Vec<u8>| {
        let text = fields(piece)?.into_iter().find_map(of_field_1)?;
        String::from_utf8(text).ok()
    };
    pieces.iter().map(spelling).collect::<Option<Vec<String>>>().filter(|pieces| !pieces.is_empty())
}

/// The fields of a protobuf message with their bytes; those of numbers have none.
fn fields(mut message: &[u8]) -> Option<Vec<(u64, &[u8])>> {
    let mut found = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message)?;
        let length = match key & 7 {
            0 => varint(&mut message).map(|_| 0)?,
            1 => 8,
            2 => usize::try_from(varint(&mut message)?).ok()?,
            5 => 4,
            _ => return None,
        };
        let (bytes, rest) = message.split_at_checked(length)?;
        found.push((key >> 3, if key & 7 == 2 { bytes } else { &[] }));
        message = rest;
    }
    Some(found)
}

/// A number of seven bits a byte, the lowest first.
fn varint(message: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for at in 0..10 {
        let (byte, rest) = message.split_first()?;
        *message = rest;
        number |= u64::from(byte & 0x7f).checked_shl(7 * at)?;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}
