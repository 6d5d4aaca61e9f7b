//! `phalanx tokenize`: text to a token file, or what of chats is trained.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use phalanx_data::{
    ChatExample, ChatFiles, ChatFormat, Corpus, CorpusSpec, TokenFile, TokenFormat, Tokenizer, token_paths,
    tokenize_to_file,
};
use phalanx_train::config::Paths;
use phalanx_train::dataset::TextProgress;
use phalanx_train::{RunConfig, chats};
use serde_json::json;

use crate::arguments::args::TokenizeArgs;
use crate::arguments::overrides::Overrides;
use crate::configuration::user_config::UserConfig;
use crate::folders::ownership::check_output;
use crate::host::{colour, environment, machine, output};
use crate::plans::tokenizing;
use phalanx_drawing::report;

/// Writes the token file, or shows chats.
///
/// # Errors
/// Missing or unreadable text or tokenizer, a file that cannot be written or that exists already.
pub fn tokenize(args: &TokenizeArgs) -> Result<()> {
    match (args.show, &args.out) {
        (Some(count), _) => show(args, count),
        (None, Some(out)) => write(args, out),
        (None, None) => bail!("--out names the token file to write"),
    }
}

/// Prints the first chats.
fn show(args: &TokenizeArgs, count: usize) -> Result<()> {
    let given = UserConfig::of(&RunConfig::default())?;
    let set = args.set.clone();
    let mut given = given.with(&Overrides { set, ..Overrides::default() }, &[])?;
    let paths = args.text.iter().map(|path| path.display().to_string().into()).collect();
    given.set("data.chat", toml::Value::Array(paths));
    let config = given.config()?;
    config.check()?;
    let (encoder, tokenizer) = chats::encoder(&config.data, Tokenizer::from_key(&args.tokenizer, None)?)?;
    let paths: Vec<PathBuf> = config.data.chat.iter().flat_map(Paths::paths).collect();
    let files = ChatFiles::read(&token_paths(&paths)?, config.data.chat_format())?;
    let examples = encoder.examples(&files, count)?;
    if args.json {
        let one = |example: &ChatExample| {
            json!({
                "ids": example.ids, "trained": example.trained, "text": tokenizer.decode(&example.ids),
                "format": example.format.map(ChatFormat::name), "spelled": example.spelled,
            })
        };
        return output::print_json(&json!({ "chats": examples.iter().map(one).collect::<Vec<_>>() }));
    }
    let has_colours = output::terminal_width().is_some() && environment::colours();
    let [begins, ends] = if has_colours { colour::TRAINED } else { ["[[", "]]"] };
    for (number, example) in examples.iter().enumerate() {
        let trained = example.trained.iter().filter(|trained| **trained).count();
        let format = example.format.map_or("", ChatFormat::name);
        output::print_line(&format!(
            "--- chat {}: {format}, {} tokens, {trained} trained",
            number + 1,
            example.ids.len()
        ))?;
        let mut at = 0;
        for run in example.trained.chunk_by(|one, other| one == other) {
            let text = tokenizer.decode(&example.ids[at..at + run.len()]);
            output::print(&if run[0] { format!("{begins}{text}{ends}") } else { text })?;
            at += run.len();
        }
        output::print_line("")?;
    }
    Ok(())
}

/// Writes the token file.
fn write(args: &TokenizeArgs, out: &Path) -> Result<()> {
    if !args.force && out.symlink_metadata().is_ok() {
        bail!(
            "{} exists already, and nothing was changed: choose another --out, or give --force to replace it",
            out.display()
        );
    }
    let is_tokens =
        |path: &Path| TokenFile::open(path).is_ok_and(|file| file.format() == TokenFormat::Phalanx);
    check_output(out, "--out", is_tokens)?;
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
        let written = tokenize_to_file(&corpus, &tokenizer, out, machine::cores(), progress)?;
        Ok((corpus, tokenizer, written))
    })?;
    let findings = corpus.findings();
    let told = [tokenizer.notes(), &tokenizer.describe_spelled(&written.spelled)].concat();
    if args.json {
        return output::print_json(&json!({
            "out": out, "tokens": written.tokens, "documents": written.documents, "bytes": written.bytes,
            "files": findings.files, "text_bytes": corpus.bytes(), "vocab": tokenizer.vocab_size(),
            "skipped": findings.skipped_files.count(), "skipped_lines": findings.skipped_lines.count(),
            "findings": findings, "notes": told,
        }));
    }
    output::print_line(&format!(
        "{}: {} tokens of {} in {} ({}) by {}; {}",
        out.display(),
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
    output::print_line(&format!("train on it with data.tokens = {:?}", out.display().to_string()))?;
    Ok(())
}
