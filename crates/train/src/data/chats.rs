//! Chats or pairs of answers of a run: read from files, encoded and packed into the run's token file.

use std::path::Path;

use phalanx_data::{
    ChatEncoder, ChatFiles, ChatFormat, ChatLengths, DataError, Day, PackedChats, PairKind, RowKind,
    Tokenizer, named_template, token_paths,
};

use crate::config::{DataConfig, Pack, Paths, PreferenceWord, RunConfig};
use crate::data::learned::Learned;
use crate::data::prepared::{DataRead, Prepared, TextProgress};
use crate::data::token_data::TOKENS_FILE;

/// Largest chat template.
const TEMPLATE_BYTES: u64 = 1 << 20;

/// Keys and tokens that a note names.
const SHOWN: usize = 5;

/// The chats of a configuration, in rows.
pub struct Chats {
    kind: RowKind,
    /// Rows to train on, and those for evaluation alone.
    parts: [Option<PackedChats>; 2],
    /// The tokenizer, with the chat template.
    pub tokenizer: Tokenizer,
    /// Files that were read.
    pub read: DataRead,
    /// For people.
    pub notes: Vec<String>,
}

/// The encoder of `data`, and the tokenizer, which keeps the template that `data` names.
///
/// # Errors
/// A template that cannot be read or does not compile.
pub fn encoder(data: &DataConfig, tokenizer: Tokenizer) -> Result<(ChatEncoder, Tokenizer), DataError> {
    let given = data.template.as_deref();
    let source = given.map(|given| match named_template(given) {
        Some(source) => Ok(source.to_string()),
        None => {
            let read = phalanx_system::files::read_text(Path::new(given), TEMPLATE_BYTES);
            let advice = "expected \"chatml\", \"llama3\" or a file";
            read.map_err(|error| DataError::Source {
                reason: format!("data.template = {given:?}: {error}; {advice}"),
            })
        }
    });
    let source = source.transpose()?;
    let day = data.date.as_deref().and_then(Day::parse).unwrap_or_else(Day::today);
    let template = source.as_deref().zip(given);
    let encoder = ChatEncoder::new(&tokenizer, template, data.train_on.into(), day)?;
    let tokenizer = source.iter().fold(tokenizer, |tokenizer, source| tokenizer.with_chat_template(source));
    Ok((encoder, tokenizer))
}

impl Chats {
    /// Reads, encodes and packs the chats of `config`.
    ///
    /// # Errors
    /// Files that cannot be read, records that are refused, a template that cannot be used, another tokenizer than that which the model has
    /// `learned`.
    pub fn encode(
        config: &RunConfig,
        learned: &Learned,
        threads: usize,
        watch: &mut dyn FnMut(TextProgress),
    ) -> Result<Chats, DataError> {
        let (data, seq) = (&config.data, config.model.seq);
        let (tokenizer, mut notes) = learned.for_text(data, None)?;
        let (encoder, tokenizer) = encoder(data, tokenizer)?;
        let mut read = DataRead { documents: Some(0), ..DataRead::default() };
        let one_each = data.pack == Pack::Off;
        let kind = if data.pairs.is_some() { RowKind::Pairs } else { RowKind::Chats };
        let of_answers = match config.preference.kind {
            PreferenceWord::Kto => PairKind::Labelled,
            _ => PairKind::Pairs,
        };
        let mut pack = |paths: &Option<Paths>, key: &'static str| -> Result<Option<PackedChats>, DataError> {
            let Some(paths) = paths else { return Ok(None) };
            let files =
                token_paths(&paths.paths()).and_then(|paths| ChatFiles::read(&paths, data.chat_format()));
            let files = files.map_err(|error| error.of_key(key))?;
            let (count, bytes) = files.size();
            let mut progress = |progress| watch(TextProgress::Tokenising(progress));
            let packed = match kind {
                RowKind::Pairs => {
                    PackedChats::encode_pairs(&files, &encoder, (seq, of_answers), threads, &mut progress)?
                }
                _ => PackedChats::encode(&files, &encoder, (seq, one_each), threads, &mut progress)?,
            };
            read.files += count;
            read.bytes += bytes;
            read.documents = read.documents.map(|all| all + packed.lengths.tokens.len() as u64);
            notes.extend(describe(&packed, (key, kind), seq));
            Ok(Some(packed))
        };
        let parts = match kind {
            RowKind::Pairs => {
                [pack(&data.pairs, "data.pairs")?, pack(&data.validation_pairs, "data.validation_pairs")?]
            }
            _ => [pack(&data.chat, "data.chat")?, pack(&data.validation_chat, "data.validation_chat")?],
        };
        notes.extend(encoder.marks_generation().map(|marks| {
            let template =
                data.template.as_ref().map_or("the tokenizer's".to_string(), |given| format!("{given:?}"));
            let how = match data.train_on {
                crate::config::TrainOn::All => "all tokens are trained",
                _ if marks => "it marks what is generated",
                _ => "answers are found by marks around their content",
            };
            format!("chat template: {template}; {how}")
        }));
        if !encoder.untokened.is_empty() {
            let spelled = encoder.untokened.join(", ");
            notes.push(format!(
                "chat template: {spelled} are no tokens of the tokenizer ({}), and become text",
                tokenizer.describe()
            ));
        }
        Ok(Chats { kind, parts, tokenizer, read, notes })
    }

    /// Numbers of rows to train on, and of those for evaluation alone.
    pub fn counts(&self) -> (usize, Option<usize>) {
        let [train, evaluated] = self.parts.each_ref().map(|rows| rows.as_ref().map(PackedChats::len));
        (train.unwrap_or(0), evaluated)
    }

    /// Writes the rows into the token file of `folder`, and the tokenizer beside it.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn prepare(self, folder: &Path) -> Result<Prepared, DataError> {
        let Chats { kind, parts, tokenizer, read, notes } = self;
        let rows = parts.each_ref().map(Option::as_ref);
        PackedChats::write(&folder.join(TOKENS_FILE), &tokenizer, kind, rows)?;
        tokenizer.save(folder)?;
        let (tokens, vocab) = (read.documents.unwrap_or(0), tokenizer.vocab_size());
        Ok(Prepared { tokens, vocab, tokenizer: Some(tokenizer), read, labels: Vec::new(), notes })
    }
}

/// Lines about the chats under a key: formats and lengths, what was cut, how full the rows are, what is text in them.
fn describe(packed: &PackedChats, (key, kind): (&str, RowKind), seq: usize) -> Vec<String> {
    let (chats, out) = match kind {
        RowKind::Pairs => {
            ("answers with their prompts", "pairs have an answer without a token in what is left")
        }
        _ => ("chats", "have no token to train in what is left"),
    };
    let ChatLengths { formats, tokens, left_out, joined, used: [used, trained], spelled, unread } =
        &packed.lengths;
    let percent = |part: u64, of: u64| 100.0 * part as f64 / of.max(1) as f64;
    let named: Vec<String> = formats
        .iter()
        .map(|(format, count): (&ChatFormat, _)| format!("{count} of {}", format.name()))
        .collect();
    let at = |share: f64| tokens[((tokens.len() - 1) as f64 * share) as usize];
    let longer = tokens.len() - tokens.partition_point(|length| *length as usize <= seq);
    let mut lines = vec![format!(
        "{key}: {} {chats} ({}) of {} to {} tokens, median {}, 95 % have at most {}; {longer} are longer than model.seq = {seq} and \
         cut at the end; {left_out} {out} and are left out",
        tokens.len(),
        named.join(", "),
        at(0.0),
        at(1.0),
        at(0.5),
        at(0.95)
    )];
    let room = (packed.len() * seq) as u64;
    lines.push(format!(
        "{key}: {} rows of {seq} tokens, {:.1} % padding; {trained} of {used} tokens are trained ({:.1} %)",
        packed.len(),
        percent(room - used, room),
        percent(*trained, *used)
    ));
    let listed = |all: Vec<String>| {
        let more = all.len().saturating_sub(SHOWN);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        all.into_iter().take(SHOWN).collect::<Vec<_>>().join(", ") + &more
    };
    if !spelled.is_empty() {
        let all = spelled.iter().map(|(token, count)| format!("{token:?} {count} times")).collect();
        lines.push(format!("{key}: messages spell special tokens, which are text there: {}", listed(all)));
    }
    if *joined > 0 {
        lines.push(format!(
            "{key}: in {joined} chats, the parts of a content are joined: the chat template reads texts alone"
        ));
    }
    if !unread.is_empty() {
        let all = unread.iter().map(|key| format!("{key:?}")).collect();
        lines.push(format!("{key}: of the records is not read: {}", listed(all)));
    }
    lines
}
