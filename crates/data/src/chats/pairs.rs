//! Records of preferences: two answers to a prompt, of which one is chosen, or one answer with a label.

use minijinja::value::{Value, ValueKind};

use super::formats::{continued, field, keys_of, list, listed, note_unread, short, tools};
use super::{Chat, ChatFormat};

/// Kinds of preferences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairKind {
    /// A chosen and a rejected answer in each record.
    Pairs,
    /// One answer in each record, with a label. The answer of the record before it makes a pair of it: one to another prompt.
    Labelled,
}

/// A record of preferences.
pub(super) struct Preferred {
    prompt: Value,
    /// The answer, or the chosen and the rejected one.
    answers: Vec<(Value, &'static str)>,
    tools: Option<Value>,
    /// False for an answer with a bad label.
    pub(super) is_chosen: bool,
    pub(super) format: ChatFormat,
}

/// Reads a record. Keys that are not read are added to `unread`. The error is a reason to print.
pub(super) fn read(record: &Value, kind: PairKind, unread: &mut Vec<String>) -> Result<Preferred, String> {
    let keys = keys_of(record)?;
    let need = |key: &'static str, of: &Value| {
        let found = field(of, key).map(|value| (value, key));
        found.ok_or_else(|| format!("there is no {key:?}: the record has {}", listed(&keys)))
    };
    let prompt = prompt(record)?;
    let preferred = match kind {
        PairKind::Labelled => {
            let (label, _) =
                need("label", record).or_else(|error| need("kto_tag", record).map_err(|_| error))?;
            let is_chosen = match (label.is_true(), label.as_i64(), label.to_string().as_str()) {
                (_, Some(0 | 1), _) | (_, _, "true" | "false") => label.is_true(),
                _ => return Err(format!("\"label\" is {}, expected true or false", short(&label))),
            };
            let answer =
                need("completion", record).or_else(|error| need("output", record).map_err(|_| error))?;
            let answers = vec![as_of(&prompt, answer)];
            let (tools, format) = (tools(record)?, ChatFormat::Labelled);
            Preferred { prompt, answers, tools, is_chosen, format }
        }
        PairKind::Pairs if field(record, "preferred_output").is_some() => {
            let answers = ["preferred_output", "non_preferred_output"].map(|key| need(key, record));
            let (input, _) = need("input", record)?;
            let (prompt, _) = need("messages", &input)?;
            let answers = answers.into_iter().collect::<Result<_, _>>()?;
            let (tools, format) = (tools(&input)?, ChatFormat::Preferred);
            Preferred { prompt, answers, tools, is_chosen: true, format }
        }
        PairKind::Pairs => {
            let answers = [need("chosen", record)?, need("rejected", record)?];
            let [chosen, rejected] = answers.map(|answer| as_of(&prompt, answer));
            // A text beside messages repeats how they begin, as TRL reads it.
            let is_given = !prompt.is_undefined() && prompt.as_str().is_some() == chosen.0.as_str().is_some();
            let (prompt, answers) = match is_given {
                true => (prompt, vec![chosen, rejected]),
                false => parted(chosen, rejected)?,
            };
            let (tools, format) = (tools(record)?, ChatFormat::Pair);
            Preferred { prompt, answers, tools, is_chosen: true, format }
        }
    };
    note_unread(record, keys, preferred.format, unread)?;
    Ok(preferred)
}

/// The prompt of a record: a text, or messages, as Alpaca's and ShareGPT's keys make them; undefined where there is none.
fn prompt(record: &Value) -> Result<Value, String> {
    if let Some(given) = field(record, "prompt") {
        return Ok(given);
    }
    let turns = match field(record, "conversations") {
        Some(given) => list(&given, "\"conversations\"")?,
        None if field(record, "instruction").is_none() => return Ok(Value::UNDEFINED),
        None => {
            let parts: Vec<String> = ["instruction", "input"]
                .into_iter()
                .filter_map(|key| field(record, key)?.as_str().map(str::to_string))
                .filter(|text| !text.is_empty())
                .collect();
            vec![turn("user", &parts.join("\n"))]
        }
    };
    let system = field(record, "system").and_then(|text| text.as_str().map(|text| turn("system", text)));
    Ok(Value::from(system.into_iter().chain(turns).collect::<Vec<_>>()))
}

fn turn(role: &str, content: &str) -> Value {
    Value::from_pairs([("role", Value::from(role)), ("content", Value::from(content))])
}

/// An answer in the kind of its prompt: beside messages, a text or a single message is one.
fn as_of(prompt: &Value, (answer, key): (Value, &'static str)) -> (Value, &'static str) {
    let answer = match answer.as_str() {
        Some(text) if prompt.kind() == ValueKind::Seq => Value::from(vec![turn("assistant", text)]),
        _ if answer.kind() == ValueKind::Map => Value::from(vec![answer]),
        _ => answer,
    };
    (answer, key)
}

impl Preferred {
    /// The chats of both answers, the second one perhaps that of the record `before`.
    pub(super) fn chats(&self, before: Option<&Preferred>) -> Result<[Chat; 2], String> {
        let first = &self.answers[0];
        let second = before.map_or_else(|| &self.answers[1], |before| &before.answers[0]);
        let chat = |(answer, key): &(Value, &'static str)| {
            continued(&self.prompt, (answer, key), self.tools.clone())
        };
        Ok([chat(first)?, chat(second)?])
    }
}

/// Values of answers by their keys.
type Answers = Vec<(Value, &'static str)>;

/// What two answers begin with, as their prompt, and what follows it in each.
fn parted(
    chosen: (Value, &'static str),
    rejected: (Value, &'static str),
) -> Result<(Value, Answers), String> {
    let same = "\"chosen\" and \"rejected\" are the same, or one is the beginning of the other: no answer is left in it";
    if let (Some(one), Some(other)) = (chosen.0.as_str(), rejected.0.as_str()) {
        let differs = one.char_indices().zip(other.chars()).find(|((_, a), b)| a != b);
        let Some(((at, _), _)) = differs else { return Err(same.to_string()) };
        // A space belongs to the word behind it.
        let at = if one[..at].ends_with(' ') { at - 1 } else { at };
        let [first, second] = [one, other].map(|text| Value::from(&text[at..]));
        return Ok((Value::from(&one[..at]), vec![(first, chosen.1), (second, rejected.1)]));
    }
    let [one, other] = [list(&chosen.0, "\"chosen\"")?, list(&rejected.0, "\"rejected\"")?];
    let shared = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
    if shared == one.len() || shared == other.len() {
        return Err(same.to_string());
    }
    let [first, second] = [&one, &other].map(|all| Value::from(all[shared..].to_vec()));
    Ok((Value::from(one[..shared].to_vec()), vec![(first, chosen.1), (second, rejected.1)]))
}
