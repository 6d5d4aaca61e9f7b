//! `vocab.json` with `merges.txt`, and `vocab.txt`, as the `tokenizer.json` that gives the same ids as transformers.

use serde_json::{Map, Value, json};

use super::class::{Class, NamedClass};
use super::files::{MERGES, TOKENIZER_CONFIG, TokenizerFiles, VOCAB_JSON, VOCAB_TXT};
use super::layout::{byte_pairs, content_of};

/// The way out for files that are not read.
const CONVERT: &str =
    "make a tokenizer.json with Python: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)";

/// The content of a `tokenizer.json` for files that have none, and what was assumed. The error is a reason to print.
pub(super) fn tokenizer_json(
    files: &TokenizerFiles,
    class: Option<&NamedClass>,
) -> Result<(Value, Vec<String>), String> {
    let known = |expected: &[Class]| match class {
        None => Ok(None),
        Some(NamedClass { class: Some(class), .. }) if expected.contains(class) => Ok(Some(*class)),
        Some(NamedClass { named, .. }) => {
            Err(format!("{named} splits text in a way that is not known without a tokenizer.json; {CONVERT}"))
        }
    };
    let assumed = |what: &str| format!("no file names the class of the tokenizer: {what}");
    match (files.get(VOCAB_JSON), files.get(MERGES), files.get(VOCAB_TXT)) {
        (Some(vocab), Some(merges), _) => {
            let known = known(&[Class::Gpt2, Class::Roberta])?;
            let note = known.is_none().then(|| {
                assumed("vocab.json and merges.txt are read as byte-level byte-pair encoding, as GPT-2's")
            });
            Ok((byte_pair_encoding(vocab, merges, known)?, note.into_iter().collect()))
        }
        (None, None, Some(vocab)) => {
            let known = known(&[Class::Bert])?;
            let mut notes = Vec::new();
            if known.is_none() {
                notes.push(assumed("vocab.txt is read as WordPiece, as BERT's"));
            }
            if files.object(TOKENIZER_CONFIG)?["do_lower_case"].is_null() {
                notes.push(format!(
                    "no file says whether text is made lower case: it is, as BertTokenizer does by default (for another \
                     vocabulary, write {{\"do_lower_case\": false}} into {TOKENIZER_CONFIG})"
                ));
            }
            Ok((word_pieces(vocab, files)?, notes))
        }
        (Some(_), None, _) => {
            Err(format!("it has {VOCAB_JSON} without {MERGES}: put it beside, or {CONVERT}"))
        }
        (None, Some(_), _) => {
            Err(format!("it has {MERGES} without {VOCAB_JSON}: put it beside, or {CONVERT}"))
        }
        (None, None, None) => unreachable!("a folder without a vocabulary has no tokenizer"),
    }
}

/// Byte-level byte-pair encoding.
fn byte_pair_encoding(vocab: &str, merges: &str, class: Option<Class>) -> Result<Value, String> {
    let vocab: Map<String, Value> = serde_json::from_str(vocab)
        .map_err(|error| format!("{VOCAB_JSON} is not an object of tokens and ids: {error}"))?;
    if vocab.keys().any(|token| token.ends_with("</w>")) {
        return Err(format!("{VOCAB_JSON} marks ends of words by </w>, so it is not byte-level; {CONVERT}"));
    }
    let lines = merges.lines().zip(1..).filter(|(line, _)| !line.starts_with("#version"));
    let mut pairs = Vec::new();
    for (line, number) in lines.filter(|(line, _)| !line.is_empty()) {
        match line.split_once(' ') {
            Some((left, right)) if !left.is_empty() && !right.is_empty() && !right.contains(' ') => {
                pairs.push(line.to_string());
            }
            _ => return Err(format!("line {number} of {MERGES} is not two tokens: {line:?}")),
        }
    }
    let mut content = byte_pairs(vocab, pairs);
    if class == Some(Class::Roberta) {
        content["post_processor"] = enclosing(&content["model"]["vocab"], "<s>", "</s>")?;
    }
    Ok(content)
}

/// BERT's WordPiece.
fn word_pieces(vocab: &str, files: &TokenizerFiles) -> Result<Value, String> {
    let vocab: Map<String, Value> =
        vocab.lines().zip(0u32..).map(|(token, id)| (token.to_string(), json!(id))).collect();
    let config = files.object(TOKENIZER_CONFIG)?;
    let spelling = |role: &str, default: &str| {
        let given = config[role].as_str().or_else(|| config[role]["content"].as_str());
        given.unwrap_or(default).to_string()
    };
    let (unknown, prefix) =
        (spelling("unk_token", "[UNK]"), config["wordpieces_prefix"].as_str().unwrap_or("##"));
    if !vocab.contains_key(&unknown) {
        return Err(format!("{VOCAB_TXT} has no {unknown:?}, which stands for unknown words"));
    }
    let normalizer = json!({
        "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
        "lowercase": true,
    });
    let decoder = json!({"type": "WordPiece", "prefix": prefix, "cleanup": true});
    let enclosing = enclosing(
        &Value::Object(vocab.clone()),
        &spelling("cls_token", "[CLS]"),
        &spelling("sep_token", "[SEP]"),
    )?;
    let model = json!({
        "type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": prefix, "max_input_chars_per_word": 100,
        "vocab": vocab,
    });
    let mut content = content_of(json!({"type": "BertPreTokenizer"}), decoder, model);
    content["normalizer"] = normalizer;
    content["post_processor"] = enclosing;
    Ok(content)
}

/// A post-processor that puts two special tokens around a text.
fn enclosing(vocab: &Value, first: &str, last: &str) -> Result<Value, String> {
    let [begin, end] = [first, last].map(|token| match &vocab[token] {
        Value::Null => Err(format!("the vocabulary has no {token:?}, which encloses a text")),
        id => Ok(json!({"id": token, "ids": [id], "tokens": [token]})),
    });
    let special = |token: &str| json!({"SpecialToken": {"id": token, "type_id": 0}});
    let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    Ok(json!({
        "type": "TemplateProcessing",
        "single": [special(first), text("A"), special(last)],
        "pair": [special(first), text("A"), special(last), text("B"), special(last)],
        "special_tokens": {first: begin?, last: end?},
    }))
}
