//! `phalanx tokenize`: text to a token file.

use anyhow::{Result, bail};
use phalanx_data::{Corpus, CorpusSpec, Tokenizer, tokenize_to_file};
use phalanx_train::dataset;
use serde_json::json;

use crate::args::TokenizeArgs;
use crate::{machine, output, report, tokenizing};

/// Writes the token file.
///
/// # Errors
/// Missing or unreadable text or tokenizer, a file that cannot be written or that exists already.
pub fn tokenize(args: &TokenizeArgs) -> Result<()> {
    if !args.force && args.out.symlink_metadata().is_ok() {
        bail!(
            "{} exists already, and nothing was changed: choose another --out, or give --force to replace it",
            args.out.display()
        );
    }
    let spec = CorpusSpec {
        paths: args.text.clone(),
        extensions: args.extension.clone(),
        text_key: Some(args.text_key.clone()),
    };
    let corpus = Corpus::open(&spec)?;
    let tokenizer = Tokenizer::from_key(&args.tokenizer, Some(&corpus))?;
    let written = tokenizing::with_progress(args.json, |progress| {
        tokenize_to_file(&corpus, &tokenizer, &args.out, machine::cores(), progress)
    })?;
    if args.json {
        return output::print_json(&json!({
            "out": args.out, "tokens": written.tokens, "documents": written.documents, "bytes": written.bytes,
            "text_bytes": corpus.bytes(), "vocab": tokenizer.vocab_size(), "skipped": corpus.skipped().len(),
            "skipped_lines": corpus.skipped_lines().iter().map(|(_, lines)| lines.skipped()).sum::<u64>(),
        }));
    }
    output::print_line(&format!(
        "{}: {} tokens of {} documents ({}) by {}; {}",
        args.out.display(),
        written.tokens,
        written.documents,
        report::bytes(corpus.bytes()),
        tokenizer.describe(),
        report::bytes(written.bytes)
    ))?;
    for skipped in corpus.skipped() {
        output::print_line(&format!("skipped {}: {}", skipped.path.display(), skipped.reason))?;
    }
    for line in dataset::notes(&corpus) {
        output::print_line(&line)?;
    }
    output::print_line(&format!("train on it with data.tokens = {:?}", args.out.display().to_string()))?;
    Ok(())
}
