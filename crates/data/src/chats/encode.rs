//! The tokens of a chat, and which of them are trained.

use std::collections::BTreeMap;

use minijinja::Value;

use super::answers::{Ends, Marked};
use super::records::Place;
use super::template::Template;
use super::{Chat, ChatFiles, ChatFormat, Day, PairKind, Spans, TrainOn, mark};
use crate::windows::Placed;
use crate::{DataError, Result, Tokenizer};

/// Why messages have no text.
const NO_TEMPLATE: &str =
    "the tokenizer has no chat template: give one in data.template (\"chatml\", \"llama3\", or a file)";

/// Makes tokens of chats.
pub struct ChatEncoder {
    /// A tokenizer that tells where each token lies in the text.
    tokenizer: Tokenizer,
    template: Option<Template>,
    /// The template for chats with tools, if it is another one.
    tool_template: Option<Template>,
    train_on: TrainOn,
    ends: Ends,
    /// Special tokens, the longest first.
    special: Vec<String>,
    /// The ids of a line end, behind which a part of a text is encoded.
    new_line: Vec<u32>,
    /// Ids around a text that no template writes.
    framing: [Vec<u32>; 2],
    /// Spellings of the template that look like special tokens, and of which the tokenizer makes several.
    pub untokened: Vec<String>,
}

/// A chat in tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatExample {
    /// The ids.
    pub ids: Vec<u32>,
    /// For each id, whether it is a token to predict.
    pub trained: Vec<bool>,
    /// The format of its record.
    pub format: Option<ChatFormat>,
    /// Number of times that its texts spell special tokens, which are text in it.
    pub spelled: BTreeMap<String, u64>,
    /// Keys of the record that are not read.
    pub unread: Vec<String>,
    /// True if the parts of contents are joined to texts, which the template reads.
    pub is_joined: bool,
}

impl ChatEncoder {
    /// Encodes by `tokenizer`, with `template` (source and origin) or the tokenizer's own.
    ///
    /// # Errors
    /// A template that does not compile, and a tokenizer that does not tell where tokens lie (a build without the feature).
    pub fn new(
        tokenizer: &Tokenizer,
        template: Option<(&str, &str)>,
        train_on: TrainOn,
        day: Day,
    ) -> Result<ChatEncoder> {
        let refuse = |reason: String| DataError::Source { reason };
        let opened = tokenizer.opened().ok_or_else(|| {
            refuse("chats need the feature `tokenizers`, which this build does not have".to_string())
        })?;
        let own = tokenizer.chat_template();
        let source = template.or(own.as_deref().map(|own| (own, "of the tokenizer")));
        let compile = |(source, origin): (&str, &str)| {
            let compiled = Template::new(source, opened.special_roles(), day);
            compiled.map_err(|reason| refuse(format!("the chat template {origin}: {reason}")))
        };
        let of_tools = template.is_none().then(|| tokenizer.tool_template()).flatten();
        let tool_template =
            of_tools.as_deref().map(|own| compile((own, "\"tool_use\" of the tokenizer"))).transpose()?;
        let template = source.map(compile).transpose()?;
        let untokened = source.map_or_else(|| Ok(Vec::new()), |(source, _)| untokened(source, &opened))?;
        let of_text = tokenizer.ends().iter().filter_map(|id| tokenizer.token(*id)).collect();
        let mut special = opened.special_spellings();
        special.sort_by_key(|token| std::cmp::Reverse(token.len()));
        let ends = Ends { of_text, special: special.clone() };
        let [begin, end] = tokenizer.framing().map(<[u32]>::to_vec);
        let end = if end.is_empty() { tokenizer.separator().into_iter().collect() } else { end };
        let new_line = opened.encode("\n")?;
        let framing = [begin, end];
        Ok(ChatEncoder {
            tokenizer: opened,
            template,
            tool_template,
            train_on,
            ends,
            special,
            new_line,
            framing,
            untokened,
        })
    }

    /// Returns whether answers are found by the template's own marks; `None` without a template.
    pub fn marks_generation(&self) -> Option<bool> {
        self.template.as_ref().map(|template| template.marks_generation)
    }

    /// The chat of a record.
    pub(super) fn example(&self, files: &ChatFiles, place: &Place) -> Result<ChatExample> {
        let mut unread = Vec::new();
        let (chat, format) = files.chat(place, &mut unread)?;
        let example = self.encode(&chat).map_err(|error| match error {
            DataError::Source { reason } => place.refused(&reason),
            other => place.refused(&other.to_string()),
        })?;
        Ok(ChatExample { format: Some(format), unread, ..example })
    }

    /// The two answers of record `at` of `places`, and whether the first is chosen.
    pub(super) fn pair(
        &self,
        files: &ChatFiles,
        (places, at): (&[Place], usize),
        kind: PairKind,
    ) -> Result<([ChatExample; 2], bool)> {
        let (place, mut unread) = (&places[at], Vec::new());
        let preferred = files.preferred(place, kind, &mut unread)?;
        let before = match kind {
            PairKind::Pairs => None,
            PairKind::Labelled => {
                let place = &places[at.checked_sub(1).unwrap_or(places.len() - 1)];
                Some(files.preferred(place, kind, &mut Vec::new())?)
            }
        };
        let refuse = |error: DataError| match error {
            DataError::Source { reason } => place.refused(&reason),
            other => place.refused(&other.to_string()),
        };
        let chats = preferred.chats(before.as_ref()).map_err(|reason| place.refused(&reason))?;
        let [first, second] = chats.each_ref().map(|chat| self.encode(chat).map_err(refuse));
        let first = ChatExample { format: Some(preferred.format), unread, ..first? };
        Ok(([first, second?], preferred.is_chosen))
    }

    /// The first `count` chats of files.
    ///
    /// # Errors
    /// [`DataError::Row`] for the first record that is refused.
    pub fn examples(&self, files: &ChatFiles, count: usize) -> Result<Vec<ChatExample>> {
        files.records()?.iter().take(count).map(|place| self.example(files, place)).collect()
    }

    /// The ids of messages, by role and content, and of what comes before an answer to them.
    ///
    /// # Errors
    /// A template that refuses them, and those of the tokenizer.
    pub fn prompt(&self, turns: &[(&str, String)]) -> Result<Vec<u32>> {
        let refuse = |reason: String| DataError::Source { reason };
        let template = self.template.as_ref().ok_or_else(|| refuse(NO_TEMPLATE.to_string()))?;
        let spelled = turns.iter().map(|(role, content)| {
            Value::from_pairs([
                ("role", Value::from(*role)),
                ("content", self.marked_special(content).into()),
            ])
        });
        let text = template.render(spelled.collect(), None, true).map_err(refuse)?;
        let marked =
            Marked::parse(&text).ok_or_else(|| refuse("the chat template cuts a text".to_string()))?;
        Ok(self.tokens(&marked, &Spans::new())?.ids)
    }

    /// The ids with which an answer ends: those of tokens that end a text, and those that the template writes behind an answer.
    ///
    /// # Errors
    /// Those of the tokenizer.
    pub fn stops(&self) -> Result<Vec<Vec<u32>>> {
        let of_template = self.template.as_ref().and_then(|template| template.end(&self.special));
        let spelled = self.ends.of_text.iter().chain(&of_template).map(|end| self.tokenizer.encode(end));
        spelled.filter(|ids| ids.as_ref().map_or(true, |ids| !ids.is_empty())).collect()
    }

    fn encode(&self, chat: &Chat) -> Result<ChatExample> {
        let refuse = |reason: String| DataError::Source { reason };
        let spell = |text: &str| self.marked_special(text);
        let mut is_joined = false;
        let (marked, spans) = match chat {
            Chat::Dialogue(dialogue) => {
                let of_tools = self.tool_template.as_ref().filter(|_| dialogue.tools.is_some());
                let template = of_tools.or(self.template.as_ref());
                let template = template.ok_or_else(|| refuse(NO_TEMPLATE.to_string()))?;
                let joined = template.joined(dialogue);
                is_joined = joined.is_some();
                let dialogue = joined.as_ref().unwrap_or(dialogue);
                template.split(dialogue, &spell, &self.ends, self.train_on).map_err(refuse)?
            }
            Chat::Text { prompt, completion } => {
                let parse =
                    |text: &str| Marked::parse(text).expect("marks are whole in what no template renders");
                let begins = parse(&spell(prompt)).text.len();
                let marked = parse(&(spell(prompt) + &spell(completion)));
                let begins = if self.train_on == TrainOn::All { 0 } else { begins };
                let span = (begins, marked.text.len());
                (marked, vec![span])
            }
        };
        let mut example = ChatExample { is_joined, ..self.tokens(&marked, &spans)? };
        if let Chat::Text { .. } = chat {
            let [begin, end] = &self.framing;
            example.ids.splice(0..0, begin.iter().copied());
            example.trained.splice(0..0, begin.iter().map(|_| false));
            example.ids.extend(end);
            example.trained.extend(end.iter().map(|_| true));
        }
        Ok(example)
    }

    /// A text with marks around the special tokens that it spells.
    fn marked_special(&self, text: &str) -> String {
        let (mut marked, mut rest) = (String::new(), text);
        let begins = |byte: u8| self.special.iter().any(|token| token.as_bytes()[0] == byte);
        let mut first = [false; 256];
        (0..=255u8).for_each(|byte| first[usize::from(byte)] = begins(byte));
        let mut at = 0;
        while at < rest.len() {
            let token = (first[usize::from(rest.as_bytes()[at])] && rest.is_char_boundary(at))
                .then(|| self.special.iter().find(|token| rest[at..].starts_with(token.as_str())));
            let Some(Some(token)) = token else {
                at += 1;
                continue;
            };
            marked.extend([&rest[..at], &mark('x', 0), token, &mark('y', 0)]);
            (rest, at) = (&rest[at + token.len()..], 0);
        }
        marked + rest
    }

    /// The tokens of a text; special tokens between marks are text. A token that overlaps a span is trained, as in transformers.
    fn tokens(&self, marked: &Marked, spans: &Spans) -> Result<ChatExample> {
        let mut example = ChatExample::default();
        let mut span = spans.iter().peekable();
        let mut take = |token: Placed, before: usize, example: &mut ChatExample| {
            let (start, end) = (before + token.start as usize, before + token.end as usize);
            while span.next_if(|(_, behind)| start >= *behind).is_some() {}
            example.ids.push(token.id);
            example.trained.push(span.peek().is_some_and(|(begins, _)| end > *begins));
        };
        let cuts = marked.marks.iter().filter(|(_, kind, _)| "xy".contains(*kind));
        let cuts: Vec<(usize, char)> = cuts.map(|(at, kind, _)| (*at, *kind)).collect();
        let (mut before, mut kind) = (0, 'y');
        for (at, next) in cuts.into_iter().chain([(marked.text.len(), 'x')]) {
            let piece = &marked.text[before..at];
            let spells = (kind, next) == ('x', 'y') && self.special.iter().any(|token| token == piece);
            if spells {
                *example.spelled.entry(piece.to_string()).or_default() += 1;
            }
            for token in self.piece(piece, before == 0, spells)? {
                take(token, before, &mut example);
            }
            (before, kind) = (at, next);
        }
        Ok(example)
    }

    /// The tokens of a part of a text. Behind its beginning, a line end is encoded before it and left out again, so that the tokenizer
    /// adds no space that it adds at the beginning of a text.
    fn piece(&self, text: &str, is_first: bool, as_text: bool) -> Result<Vec<Placed>> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        let whole = text.len() as u32;
        let encode = |text: &str| match as_text {
            false => self.tokenizer.encode_window(text),
            true => Ok(self
                .tokenizer
                .encode_plain(text)?
                .into_iter()
                .map(|id| Placed { id, start: 0, end: whole, begins_word: false })
                .collect()),
        };
        if is_first {
            return encode(text);
        }
        let behind = encode(&["\n", text].concat())?;
        let line = self.new_line.len();
        if behind.len() < line
            || behind[..line].iter().map(|token| token.id).ne(self.new_line.iter().copied())
        {
            return encode(text);
        }
        let moved = |token: &Placed| Placed {
            start: if as_text { 0 } else { token.start.saturating_sub(1) },
            end: if as_text { whole } else { token.end.saturating_sub(1) },
            ..*token
        };
        Ok(behind[line..].iter().map(moved).collect())
    }
}

/// Spellings in `source` that look like special tokens, as `<|im_end|>`, and are several tokens.
fn untokened(source: &str, tokenizer: &Tokenizer) -> Result<Vec<String>> {
    let mut found: Vec<String> = Vec::new();
    for part in source.split("<|").skip(1) {
        let Some((word, _)) = part.split_once("|>") else { continue };
        let spelled = format!("<|{word}|>");
        let is_word =
            !word.is_empty() && word.chars().all(|char| char.is_alphanumeric() || "_-/▁".contains(char));
        if is_word && !found.contains(&spelled) && tokenizer.encode(&spelled)?.len() > 1 {
            found.push(spelled);
        }
    }
    Ok(found)
}
