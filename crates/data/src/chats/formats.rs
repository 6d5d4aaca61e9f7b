//! Formats of records: what of a record is a message, and what is refused.

use minijinja::value::{Value, ValueKind};
use serde::{Deserialize, Serialize};

use super::answers::{spelled, text_of};
use super::{Chat, Dialogue, MARK, Message};

/// Format of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ChatFormat {
    /// OpenAI's: `messages`, `tools`.
    Messages,
    /// ShareGPT's: `conversations` of `from` and `value`, `system`, `tools`.
    ShareGpt,
    /// Alpaca's: `instruction`, `input`, `output`, `system`, `history`.
    Alpaca,
    /// `prompt` and `completion`: texts, or messages.
    Prompt,
    /// Pairs: `prompt`, `chosen`, `rejected`, each a text or messages; without `prompt`, it is what both begin with.
    Pair,
    /// OpenAI's pairs: `input`, `preferred_output`, `non_preferred_output`.
    Preferred,
    /// `prompt`, `completion`, and whether it is a good one: `label`.
    Labelled,
}

/// Roles of messages, and the names of ShareGPT and others for them.
const ROLES: [(&str, &[&str]); 5] = [
    ("system", &[]),
    ("developer", &[]),
    ("user", &["human"]),
    ("assistant", &["gpt", "chatgpt", "model", "bot"]),
    ("tool", &["observation", "ipython", "function", "function_response"]),
];

/// A message of ShareGPT that is a call of a tool.
const CALL: &str = "function_call";

impl ChatFormat {
    const ALL: [ChatFormat; 4] =
        [ChatFormat::Messages, ChatFormat::ShareGpt, ChatFormat::Alpaca, ChatFormat::Prompt];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            ChatFormat::Messages => "messages",
            ChatFormat::ShareGpt => "sharegpt",
            ChatFormat::Alpaca => "alpaca",
            ChatFormat::Prompt => "prompt",
            ChatFormat::Pair => "chosen and rejected",
            ChatFormat::Preferred => "preferred_output",
            ChatFormat::Labelled => "label",
        }
    }

    /// Keys that are read, of which the first shows the format.
    fn keys(self) -> &'static [&'static str] {
        match self {
            ChatFormat::Messages => &["messages", "tools"],
            ChatFormat::ShareGpt => &["conversations", "system", "tools"],
            ChatFormat::Alpaca => &["instruction", "input", "output", "system", "history"],
            ChatFormat::Prompt => &["prompt", "completion", "tools"],
            ChatFormat::Pair => {
                &["chosen", "rejected", "prompt", "tools", "system", "instruction", "input", "conversations"]
            }
            ChatFormat::Preferred => &["preferred_output", "non_preferred_output", "input"],
            ChatFormat::Labelled => &[
                "label",
                "kto_tag",
                "prompt",
                "completion",
                "output",
                "tools",
                "system",
                "instruction",
                "input",
                "conversations",
            ],
        }
    }
}

/// The chat of a record, in the format `given` or the one that its keys show. Keys that are not read are added to `unread`. The error is
/// a reason to print.
pub(super) fn read(
    record: &Value,
    given: Option<ChatFormat>,
    unread: &mut Vec<String>,
) -> Result<(Chat, ChatFormat), String> {
    let keys = keys_of(record)?;
    let has = |key: &str| field(record, key).is_some();
    let names = || listed(&keys);
    if has("chosen") || has("rejected") || has("preferred_output") {
        return Err("it is a pair of a preferred and another answer: name its file in data.pairs".to_string());
    }
    let shown = ChatFormat::ALL.into_iter().find(|format| has(format.keys()[0]));
    let format = match given {
        Some(format) if !has(format.keys()[0]) => {
            let (name, key) = (format.name(), format.keys()[0]);
            return Err(format!(
                "there is no {key:?}, which the format {name} has: the record has {}",
                names()
            ));
        }
        given => given.or(shown).ok_or_else(|| {
            let expected = "\"messages\", \"conversations\", \"instruction\" or \"prompt\"";
            format!(
                "no format of chats is known that has its keys: expected {expected}, and the record has {}",
                names()
            )
        })?,
    };
    note_unread(record, keys, format, unread)?;
    let chat = match format {
        ChatFormat::Messages => dialogue(messages(record, "messages")?, tools(record)?),
        ChatFormat::ShareGpt => {
            let mut all: Vec<Message> = system(record)?.into_iter().collect();
            all.extend(messages(record, "conversations")?);
            dialogue(all, tools(record)?)
        }
        ChatFormat::Alpaca => dialogue(alpaca(record)?, None),
        ChatFormat::Prompt => return prompt(record).map(|chat| (chat, format)),
        ChatFormat::Pair | ChatFormat::Preferred | ChatFormat::Labelled => {
            unreachable!("chats are not given in formats of pairs")
        }
    };
    Ok((Chat::Dialogue(checked(chat)?), format))
}

/// Keys of a record, which is an object.
pub(super) fn keys_of(record: &Value) -> Result<Vec<String>, String> {
    if record.kind() != ValueKind::Map {
        return Err(format!("it is {}, expected an object", short(record)));
    }
    Ok(record.try_iter().into_iter().flatten().map(|key| key.to_string()).collect())
}

pub(super) fn listed(keys: &[String]) -> String {
    keys.iter().map(|key| format!("{key:?}")).collect::<Vec<_>>().join(", ")
}

/// Adds the keys that a format does not read to `unread`, and refuses a record with marks.
pub(super) fn note_unread(
    record: &Value,
    keys: Vec<String>,
    format: ChatFormat,
    unread: &mut Vec<String>,
) -> Result<(), String> {
    unread.extend(keys.into_iter().filter(|key| !format.keys().contains(&key.as_str())));
    match has_mark(record) {
        true => {
            Err("it has the character U+F0000, which is for private use and marks answers here".to_string())
        }
        false => Ok(()),
    }
}

fn dialogue(messages: Vec<Message>, tools: Option<Value>) -> Dialogue {
    Dialogue { messages, tools }
}

/// A value that is there and is not null.
pub(super) fn field(of: &Value, key: &str) -> Option<Value> {
    of.get_attr(key).ok().filter(|value| !value.is_none() && !value.is_undefined())
}

fn has_mark(value: &Value) -> bool {
    let found = std::cell::Cell::new(false);
    spelled(value, &|text| {
        found.set(found.get() || text.contains(MARK));
        String::new()
    });
    found.get()
}

/// The beginning of a value, for messages.
pub(super) fn short(value: &Value) -> String {
    const SHOWN: usize = 40;
    let text = super::python::shown(value).unwrap_or_default();
    let cut: String = text.chars().take(SHOWN).collect();
    if cut.len() < text.len() { format!("{cut} ...") } else { text }
}

fn text(of: &Value, key: &str) -> Result<Option<String>, String> {
    let Some(value) = field(of, key) else { return Ok(None) };
    let text = value.as_str().map(str::to_string);
    text.map(Some).ok_or_else(|| format!("{key:?} is {}, expected a text", short(&value)))
}

/// The items of a list; the error is a reason to print.
pub(super) fn list(of: &Value, what: &str) -> Result<Vec<Value>, String> {
    match of.kind() {
        ValueKind::Seq => Ok(of.try_iter().into_iter().flatten().collect()),
        _ => Err(format!("{what} is {}, expected a list", short(of))),
    }
}

fn message(role: &str, content: String) -> Message {
    let fields = [("role", Value::from(role)), ("content", Value::from(content))];
    Message { fields: fields.map(|(key, value)| (key.to_string(), value)).to_vec(), has_weight: true }
}

fn system(record: &Value) -> Result<Option<Message>, String> {
    Ok(text(record, "system")?.filter(|text| !text.is_empty()).map(|text| message("system", text)))
}

/// Descriptions of tools: a list, or the JSON of one.
pub(super) fn tools(record: &Value) -> Result<Option<Value>, String> {
    let Some(given) = field(record, "tools") else { return Ok(None) };
    let given = match given.as_str() {
        Some(text) if text.trim().is_empty() => return Ok(None),
        Some(text) => serde_json::from_str(text)
            .map_err(|error| format!("\"tools\" is a text that is not JSON: {error}"))?,
        None => given,
    };
    let tools = list(&given, "\"tools\"")?;
    Ok((!tools.is_empty()).then_some(given))
}

fn messages(record: &Value, key: &str) -> Result<Vec<Message>, String> {
    messages_of(&field(record, key).unwrap_or_default(), key)
}

fn messages_of(given: &Value, key: &str) -> Result<Vec<Message>, String> {
    let all = list(given, &format!("{key:?}"))?;
    let numbered = all.iter().enumerate();
    numbered.map(|(at, value)| one(value).map_err(|reason| format!("message {}: {reason}", at + 1))).collect()
}

/// A message: `role` and `content`, or `from` and `value`.
fn one(given: &Value) -> Result<Message, String> {
    if given.kind() != ValueKind::Map {
        return Err(format!("it is {}, expected an object", short(given)));
    }
    let role = match text(given, "role")? {
        Some(role) => role,
        None => text(given, "from")?.ok_or("it has neither \"role\" nor \"from\"")?,
    };
    let known = ROLES.iter().find(|(name, others)| *name == role || others.contains(&role.as_str()));
    let name = match known {
        Some((name, _)) => *name,
        None if role == CALL => "assistant",
        None => {
            let known: Vec<&str> = ROLES
                .iter()
                .flat_map(|(name, others)| [*name].into_iter().chain(others.iter().copied()))
                .collect();
            return Err(format!("its role is {role:?}, expected one of {}, {CALL}", known.join(", ")));
        }
    };
    let mut fields = vec![("role".to_string(), Value::from(name))];
    let mut has_weight = true;
    for key in given.try_iter().into_iter().flatten() {
        let (name, value) = (key.to_string(), given.get_item(&key).unwrap_or_default());
        match name.as_str() {
            _ if value.is_none() => {}
            "role" | "from" => {}
            "weight" => {
                has_weight = match value.as_i64() {
                    Some(0) => false,
                    Some(1) => true,
                    _ => return Err(format!("\"weight\" is {}, expected 0 or 1", short(&value))),
                }
            }
            "content" | "value" if role == CALL => fields.push(("tool_calls".into(), called(&value)?)),
            "content" | "value" => fields.push(("content".into(), content(&value)?)),
            "tool_calls" if value.len() == Some(0) => {}
            "tool_calls" => fields.push((name, calls(&value)?)),
            _ => fields.push((name, value)),
        }
    }
    let get = |key: &str| fields.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone());
    if let Some(reasoning) = ["reasoning_content", "thinking", "reasoning"].iter().find_map(|key| get(key)) {
        let missing = ["thinking", "reasoning_content"].into_iter().filter(|key| get(key).is_none());
        let missing: Vec<_> = missing.map(|key| (key.to_string(), reasoning.clone())).collect();
        fields.extend(missing);
    }
    Ok(Message { fields, has_weight })
}

/// A content: a text, or parts that are texts.
fn content(given: &Value) -> Result<Value, String> {
    if given.kind() == ValueKind::String {
        return Ok(given.clone());
    }
    for part in list(given, "\"content\"")? {
        let kind = text(&part, "type")?.unwrap_or_default();
        if kind != "text" || text(&part, "text")?.is_none() {
            return Err(format!("\"content\" has a part of type {kind:?}, and only texts are trained"));
        }
    }
    Ok(given.clone())
}

/// Calls of tools, whose arguments are objects: a text is read as the JSON of one.
fn calls(given: &Value) -> Result<Value, String> {
    let calls = list(given, "\"tool_calls\"")?.into_iter().map(|call| {
        // Some files leave out the object around the function.
        let function = field(&call, "function").unwrap_or_else(|| call.clone());
        if text(&function, "name")?.is_none_or(|name| name.trim().is_empty()) {
            return Err(format!("a call of a tool has no name: {}", short(&call)));
        }
        let keys: Vec<Value> = function.try_iter().into_iter().flatten().collect();
        let mut fields = Vec::new();
        for key in keys {
            let value = function.get_item(&key).unwrap_or_default();
            let is_arguments = key.as_str() == Some("arguments");
            fields.push((key, if is_arguments { arguments(&value)? } else { value }));
        }
        let mut outer = vec![("type".to_string(), Value::from("function"))];
        outer.extend(text(&call, "id")?.map(|id| ("id".to_string(), Value::from(id))));
        outer.push(("function".to_string(), Value::from_pairs(fields)));
        Ok(Value::from_pairs(outer))
    });
    calls.collect::<Result<Vec<Value>, String>>().map(Value::from)
}

fn arguments(given: &Value) -> Result<Value, String> {
    let read = match given.as_str() {
        Some(text) if text.trim().is_empty() => return Ok(Value::from_pairs(Vec::<(String, Value)>::new())),
        Some(text) => serde_json::from_str(text)
            .map_err(|error| format!("\"arguments\" of a call is not JSON: {error}"))?,
        None => given.clone(),
    };
    match read.kind() {
        ValueKind::Map => Ok(read),
        _ => Err(format!("\"arguments\" of a call is {}, expected an object", short(&read))),
    }
}

/// The calls in a text of ShareGPT's `function_call`: JSON of one, or of a list of them.
fn called(given: &Value) -> Result<Value, String> {
    let text = given.as_str().unwrap_or_default();
    let read: Value = serde_json::from_str(text).map_err(|error| format!("{CALL} is not JSON: {error}"))?;
    calls(&if read.kind() == ValueKind::Map { Value::from(vec![read]) } else { read })
}

fn alpaca(record: &Value) -> Result<Vec<Message>, String> {
    let get = |key| text(record, key).map(Option::unwrap_or_default);
    let mut all: Vec<Message> = system(record)?.into_iter().collect();
    let history = field(record, "history").map(|history| list(&history, "\"history\"")).transpose()?;
    for turn in history.unwrap_or_default() {
        let pair = list(&turn, "an entry of \"history\"")?;
        let [Some(question), Some(answer)] =
            [pair.first(), pair.get(1)].map(|text| text.and_then(Value::as_str))
        else {
            return Err(format!(
                "an entry of \"history\" is {}, expected a question and an answer",
                short(&turn)
            ));
        };
        all.extend([message("user", question.to_string()), message("assistant", answer.to_string())]);
    }
    let (instruction, input) = (get("instruction")?, get("input")?);
    let between = if instruction.is_empty() || input.is_empty() { "" } else { "\n" };
    let Some(output) = text(record, "output")? else { return Err("there is no \"output\"".to_string()) };
    all.extend([message("user", [&instruction, between, &input].concat()), message("assistant", output)]);
    Ok(all)
}

fn prompt(record: &Value) -> Result<Chat, String> {
    let [prompt, completion] = ["prompt", "completion"].map(|key| field(record, key));
    let Some(completion) = completion else { return Err("there is no \"completion\"".to_string()) };
    continued(&prompt.unwrap_or_default(), (&completion, "completion"), tools(record)?)
}

/// A prompt and what follows it, which is under `key`: both texts, or both messages.
pub(super) fn continued(
    prompt: &Value,
    (completion, key): (&Value, &str),
    tools: Option<Value>,
) -> Result<Chat, String> {
    if let (Some(prompt), Some(completion)) = (prompt.as_str(), completion.as_str()) {
        if completion.is_empty() {
            return Err(format!("its {key} is empty"));
        }
        return Ok(Chat::Text { prompt: prompt.to_string(), completion: completion.to_string() });
    }
    if prompt.as_str().is_some() != completion.as_str().is_some() {
        return Err(format!("of \"prompt\" and {key:?} one is a text and one is not"));
    }
    let (mut all, answers) = (messages_of(prompt, "prompt")?, messages_of(completion, key)?);
    // What was said before is not trained.
    all.iter_mut().for_each(|message| message.has_weight = false);
    all.extend(answers);
    checked(dialogue(all, tools)).map(Chat::Dialogue)
}

/// Refuses a chat without anything to train, and empty turns of users and answers.
fn checked(chat: Dialogue) -> Result<Dialogue, String> {
    let has_text = |message: &Message, key: &str| {
        message.get(key).is_some_and(|value| !text_of(value).trim().is_empty())
    };
    for (number, message) in chat.messages.iter().enumerate() {
        let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
        let calls = message.get("tool_calls").and_then(Value::len).unwrap_or(0);
        let says = has_text(message, "content")
            || message.is_answer() && (calls > 0 || has_text(message, "reasoning_content"));
        if !says && ["user", "assistant"].contains(&role) {
            return Err(format!("message {} ({role}) is empty", number + 1));
        }
    }
    if chat.messages.is_empty() {
        return Err("it has no message".to_string());
    }
    if chat.answers().next().is_none() {
        return Err("it has no answer (a message of the role assistant) to train".to_string());
    }
    if chat.answers().all(|number| !chat.messages[number].has_weight) {
        return Err("all its answers have the weight 0: there is nothing to train".to_string());
    }
    Ok(chat)
}
