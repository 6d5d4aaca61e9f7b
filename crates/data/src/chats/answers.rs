//! Answers in the text of a chat: which parts of it are trained.
//!
//! Templates need not write the beginning of a chat as they write that chat alone (Qwen 3 drops earlier reasoning), so the whole chat is
//! rendered once, with marks. A template with `{% generation %}` says itself what is generated. For another one the content of each
//! answer is marked: the answer begins behind what the template writes before a generated one, and ends with the first token behind
//! its content that ends a text. Whatever the marks do, the text without them must be the one of the unmarked chat.

use minijinja::value::{Value, ValueKind};

use super::template::Template;
use super::{Dialogue, MARK, Message, Spans, TrainOn, mark};

/// A text with the places of its marks.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Marked {
    pub text: String,
    /// Offset in the text, kind and number of each mark.
    pub marks: Vec<(usize, char, usize)>,
}

/// Sets of marks around the content of answers, of which the first that a template leaves alone is used: `s` before it and `e` behind it.
const AROUND: [&str; 3] = ["se", "e", "s"];

/// Spellings of tokens that an answer may end with.
pub(super) struct Ends {
    /// Those that end a generated text.
    pub of_text: Vec<String>,
    /// All special tokens.
    pub special: Vec<String>,
}

impl Marked {
    /// Reads the marks of a rendered text; `None` where the template has cut one.
    pub(super) fn parse(rendered: &str) -> Option<Marked> {
        let mut marked = Marked::default();
        for (number, part) in rendered.split(MARK).enumerate() {
            if number % 2 == 0 {
                marked.text.push_str(part);
                continue;
            }
            let kind = part.chars().next().filter(|kind| "seghxy".contains(*kind))?;
            marked.marks.push((marked.text.len(), kind, part[1..].parse().ok()?));
        }
        rendered.matches(MARK).count().is_multiple_of(2).then_some(marked)
    }

    fn places(&self, kinds: &str, index: usize) -> impl Iterator<Item = usize> {
        let of = move |(_, kind, number): &&(usize, char, usize)| kinds.contains(*kind) && *number == index;
        self.marks.iter().filter(of).map(|(at, ..)| *at)
    }
}

impl Template {
    /// The text of a chat with the places of spelled tokens, and its trained parts. The error is a reason to print.
    pub(super) fn split(
        &self,
        chat: &Dialogue,
        spell: &dyn Fn(&str) -> String,
        ends: &Ends,
        train_on: TrainOn,
    ) -> Result<(Marked, Spans), String> {
        let plain = self.plain(chat)?;
        let tools = chat.tools.as_ref().map(|tools| spelled(tools, spell));
        let attempt = |around: &str| -> Result<Option<Marked>, String> {
            let values = chat.values(&|number, message| marked(number, message, around, spell));
            let rendered = Marked::parse(&self.render(values, tools.as_ref(), false)?);
            Ok(rendered.filter(|marked| marked.text == plain))
        };
        let unsplit = "the chat template writes another text where parts of a message are marked, so its answers cannot be told apart";
        let whole = |marked: Marked| (marked.text.len(), marked);
        if train_on == TrainOn::All || self.marks_generation {
            let (length, marked) = whole(attempt("")?.ok_or(unsplit)?);
            let spans = match train_on {
                TrainOn::All => vec![(0, length)],
                _ => generated(&marked, chat, train_on)?,
            };
            return Ok((marked, spans));
        }
        let mut refused = None;
        for around in AROUND {
            let found = attempt(around).and_then(|marked| match marked {
                Some(marked) => self.found(&marked, chat, ends, train_on).map(|spans| (marked, spans)),
                None => Err(unsplit.to_string()),
            });
            match found {
                Ok(found) => return Ok(found),
                // The first reason tells most: other marks are tried because of it.
                Err(reason) => refused = refused.or(Some(reason)),
            }
        }
        Err(refused.unwrap_or_default())
    }

    /// The text of a chat without marks.
    fn plain(&self, chat: &Dialogue) -> Result<String, String> {
        let rendered = self.render(chat.values(&|_, value| value.clone()), chat.tools.as_ref(), false)?;
        Ok(Marked::parse(&rendered).ok_or("the chat template cuts the text of `generation`")?.text)
    }

    /// The chat with texts in place of the parts of its contents, where the template does not write the parts.
    pub(super) fn joined(&self, chat: &Dialogue) -> Option<Dialogue> {
        let contents = || chat.messages.iter().filter_map(|message| message.get("content"));
        let mut parts = contents().filter(|content| content.kind() != ValueKind::String).peekable();
        parts.peek()?;
        let plain = self.plain(chat).unwrap_or_default();
        let is_written = |part: Value| {
            let text = part.get_attr("text").unwrap_or_default();
            plain.contains(text.as_str().unwrap_or_default().trim())
        };
        if parts.flat_map(|parts| parts.try_iter().into_iter().flatten()).all(is_written) {
            return None;
        }
        let mut joined = chat.clone();
        for (key, value) in joined.messages.iter_mut().flat_map(|message| &mut message.fields) {
            if key == "content" {
                *value = Value::from(text_of(value));
            }
        }
        Some(joined)
    }

    /// Parts of answers whose content is marked.
    fn found(
        &self,
        marked: &Marked,
        chat: &Dialogue,
        ends: &Ends,
        train_on: TrainOn,
    ) -> Result<Spans, String> {
        let answers: Vec<usize> = chat.answers().collect();
        let (mut spans, mut before) = (Spans::new(), 0);
        for (place, number) in answers.iter().enumerate() {
            let at: Vec<usize> = marked.places("se", *number).collect();
            let (Some(first), Some(last)) = (at.iter().min().copied(), at.iter().max().copied()) else {
                return Err(format!("the chat template leaves out the content of message {}", number + 1));
            };
            let next = answers.get(place + 1).and_then(|number| marked.places("se", *number).min());
            let limit = next.unwrap_or(marked.text.len()).max(last);
            let front = marked.text.get(before..first).unwrap_or_default();
            let behind_header =
                |header: &String| front.rfind(header.as_str()).map(|at| before + at + header.len());
            let begins = self.headers.iter().find_map(behind_header);
            let begins = begins.or_else(|| marked.places("s", *number).min());
            let begins = begins.ok_or("the chat template does not show where an answer begins")?;
            let behind = &marked.text[last..limit];
            let first_of = |tokens: &[String]| {
                let found =
                    tokens.iter().filter_map(|token| behind.find(token.as_str()).map(|at| (at, token.len())));
                found.min().map(|(at, length)| last + at + length)
            };
            let end = first_of(&ends.of_text).or_else(|| first_of(&ends.special)).unwrap_or(last);
            if chat.is_trained(*number, train_on) {
                spans.push((begins, end));
            }
            before = end;
        }
        Ok(spans)
    }

    /// The first special token that the template writes behind an answer, or else the rest of what it marks as generated.
    pub(super) fn end(&self, special: &[String]) -> Option<String> {
        let message = |(role, content): (&str, &str)| {
            Value::from_pairs([("role", Value::from(role)), ("content", Value::from(content))])
        };
        let turns = [("user", "question"), ("assistant", "answer")].map(message).to_vec();
        let marked = Marked::parse(&self.render(turns, None, false).ok()?)?;
        let last = marked.text.rfind("answer")? + "answer".len();
        let token =
            special.iter().filter_map(|token| marked.text[last..].find(token.as_str()).map(|at| (at, token)));
        let generated =
            marked.places("h", 0).last().and_then(|end| marked.text.get(last..end)).map(str::trim);
        token
            .min()
            .map(|(_, token)| token.clone())
            .or(generated.filter(|end| !end.is_empty()).map(str::to_string))
    }

    /// Texts that the template writes before an answer: the one that a generated answer follows, as far as the answer of a chat follows it,
    /// too, at the end and before another question. None where it writes nothing.
    pub(super) fn find_headers(&self) -> Vec<String> {
        let message = |(role, content): (&str, &str)| {
            Value::from_pairs([("role", Value::from(role)), ("content", Value::from(content))])
        };
        let (question, answer) = (("user", "question"), ("assistant", "answer"));
        let render = |turns: &[(&str, &str)], begins_answer: bool| {
            self.render(turns.iter().copied().map(message).collect(), None, begins_answer)
        };
        let (Ok(asked), Ok(begun)) = (render(&[question], false), render(&[question], true)) else {
            return Vec::new();
        };
        let same = |one: &str, other: &str| {
            let chars = one.chars().zip(other.chars()).take_while(|(one, other)| one == other);
            chars.map(|(char, _)| char.len_utf8()).sum::<usize>()
        };
        let before = same(&asked, &begun);
        let answered = [render(&[question, answer], false), render(&[question, answer, question], false)];
        let ends = answered.iter().flatten().map(|answered| same(&begun, answered));
        let mut headers: Vec<String> =
            ends.filter(|end| *end > before).map(|end| begun[before..end].to_string()).collect();
        headers.sort_by_key(|header| std::cmp::Reverse(header.len()));
        headers.dedup();
        headers
    }
}

/// Parts that the template marks as generated.
fn generated(marked: &Marked, chat: &Dialogue, train_on: TrainOn) -> Result<Spans, String> {
    let begins = marked.places("g", 0);
    let spans: Spans = begins.zip(marked.places("h", 0)).collect();
    let answers: Vec<usize> = chat.answers().collect();
    if answers.iter().all(|number| chat.is_trained(*number, train_on)) {
        return Ok(spans);
    }
    if spans.len() != answers.len() {
        return Err(format!(
            "the chat template marks {} parts as generated and the chat has {} answers: which of them a weight of 0, or \
             data.train_on = \"last-answer\", leaves out cannot be told",
            spans.len(),
            answers.len()
        ));
    }
    let trained = answers.iter().zip(spans).filter(|(number, _)| chat.is_trained(**number, train_on));
    Ok(trained.map(|(_, span)| span).collect())
}

/// A message with marks around its content, if it is an answer, and around tokens that it spells.
fn marked(number: usize, message: &Message, around: &str, spell: &dyn Fn(&str) -> String) -> Message {
    let fields = message.fields.iter().map(|(key, value)| (key.clone(), spelled(value, spell))).collect();
    let mut message = Message { fields, ..message.clone() };
    if !message.is_answer() || around.is_empty() {
        return message;
    }
    let has_text = |key: &&str| message.get(key).is_some_and(|value| !text_of(value).trim().is_empty());
    let Some(first) = ["content", "tool_calls", "reasoning_content"]
        .into_iter()
        .find(|key| if *key == "tool_calls" { message.get(key).is_some() } else { has_text(key) })
    else {
        return message;
    };
    let last = if message.get("tool_calls").is_some() { "tool_calls" } else { first };
    for (kind, key) in [('s', first), ('e', last)].into_iter().filter(|(kind, _)| around.contains(*kind)) {
        let text = mark(kind, number);
        let is_start = kind == 's';
        let value = message.fields.iter_mut().find(|(name, _)| name == key).map(|(_, value)| value);
        let Some(value) = value else { continue };
        *value = match key {
            "tool_calls" => at_edge(value, is_start, &|call| {
                let function = call.get_attr("function").unwrap_or_default();
                let name = Value::from(beside(
                    function.get_attr("name").unwrap_or_default().as_str().unwrap_or_default(),
                    is_start,
                    &text,
                ));
                with_key(call, "function", with_key(&function, "name", name))
            }),
            _ if value.kind() == ValueKind::String => {
                Value::from(beside(value.as_str().unwrap_or_default(), is_start, &text))
            }
            _ => at_edge(value, is_start, &|part| {
                let inner = part.get_attr("text").unwrap_or_default();
                with_key(
                    part,
                    "text",
                    Value::from(beside(inner.as_str().unwrap_or_default(), is_start, &text)),
                )
            }),
        };
    }
    message
}

/// The text of a content: itself, or that of its parts.
pub(super) fn text_of(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_string(),
        None => value
            .try_iter()
            .into_iter()
            .flatten()
            .map(|part| {
                part.get_attr("text")
                    .ok()
                    .and_then(|text| text.as_str().map(str::to_string))
                    .unwrap_or_default()
            })
            .collect(),
    }
}

/// A text with a mark at its first or last character that is not white space, which templates cut off.
fn beside(text: &str, is_start: bool, mark: &str) -> String {
    let at = if is_start { text.len() - text.trim_start().len() } else { text.trim_end().len() };
    [&text[..at], mark, &text[at..]].concat()
}

/// A list whose first or last item is changed.
fn at_edge(list: &Value, is_start: bool, change: &dyn Fn(&Value) -> Value) -> Value {
    let mut items: Vec<Value> = list.try_iter().into_iter().flatten().collect();
    if let Some(item) = if is_start { items.first_mut() } else { items.last_mut() } {
        *item = change(item);
    }
    Value::from(items)
}

/// A map with another value of a key.
fn with_key(map: &Value, key: &str, value: Value) -> Value {
    let pairs = map.try_iter().into_iter().flatten().map(|name| {
        let own = map.get_item(&name).unwrap_or_default();
        let is_it = name.as_str() == Some(key);
        (name, if is_it { value.clone() } else { own })
    });
    Value::from_pairs(pairs.collect::<Vec<_>>())
}

/// A value whose texts are changed.
pub(super) fn spelled(value: &Value, spell: &dyn Fn(&str) -> String) -> Value {
    let items = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::String => Value::from(spell(value.as_str().unwrap_or_default())),
        ValueKind::Map => {
            let pairs = items().map(|key| {
                let inner = spelled(&value.get_item(&key).unwrap_or_default(), spell);
                (key, inner)
            });
            Value::from_pairs(pairs.collect::<Vec<_>>())
        }
        ValueKind::Seq | ValueKind::Iterable => {
            Value::from(items().map(|item| spelled(&item, spell)).collect::<Vec<_>>())
        }
        _ => value.clone(),
    }
}
