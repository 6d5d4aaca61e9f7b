//! `phalanx tokenize`: text to a token file.

use std::path::Path;

use anyhow::{Result, bail};
use phalanx_data::{Corpus, CorpusSpec, TokenFile, TokenFormat, Tokenizer, tokenize_to_file};
use phalanx_train::dataset::TextProgress;
use serde_json::json;

use crate::args::TokenizeArgs;
use crate::ownership::check_output;
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
    let is_tokens =
        |path: &Path| TokenFile::open(path).is_ok_and(|file| file.format() == TokenFormat::Phalanx);
    check_output(&args.out, "--out", is_tokens)?;
    let spec = CorpusSpec {
        paths: args.text.clone(),
        extensions: args.extension.clone(),
        plain: args.plain.clone(),
        text_key: Some(args.text_key.clone()),
        max_skipped: args.max_skipped,
    };
    let (corpus, tokenizer, written) = tokenizing::with_progress(false, &|_| {}, |watch| -> Result<_> {
        let corpus = Corpus::open_watched(&spec, &mut |bytes| watch(TextProgress::Reading(bytes)))?;
        watch(TextProgress::Read(corpus.findings()));
        let tokenizer = Tokenizer::from_key(&args.tokenizer, Some(&corpus))?;
        let progress = &mut |progress| watch(TextProgress::Tokenising(progress));
        let written = tokenize_to_file(&corpus, &tokenizer, &args.out, machine::cores(), progress)?;
        Ok((corpus, tokenizer, written))
    })?;
    let findings = corpus.findings();
    let told = [tokenizer.notes(), &tokenizer.describe_spelled(&written.spelled)].concat();
    if args.json {
        return output::print_json(&json!({
            "out": args.out, "tokens": written.tokens, "documents": written.documents, "bytes": written.bytes,
            "files": findings.files, "text_bytes": corpus.bytes(), "vocab": tokenizer.vocab_size(),
            "skipped": findings.skipped_files.count(), "skipped_lines": findings.skipped_lines.count(),
            "findings": findings, "notes": told,
        }));
    }
    output::print_line(&format!(
        "{}: {} tokens of {} in {} ({}) by {}; {}",
        args.out.display(),
        written.tokens,
        report::plural(written.documents as usize, "document"),
        report::plural(findings.files as usize, "file"),
        report::bytes(corpus.bytes()),
        tokenizer.describe(),
        report::bytes(written.bytes)
    ))?;
    output::print_line(&tokenizer.describe_boundaries())?;
    for line in told {
        output::print_line(&line)?;
    }
    output::print_line(&format!("train on it with data.tokens = {:?}", args.out.display().to_string()))?;
    Ok(())
}
