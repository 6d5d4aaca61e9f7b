//! Chats and instructions: records of JSON become messages, a chat template makes their text, and of its tokens those of answers are
//! trained.
//!
//! A row of the encoded file is a sequence of whole chats, with two bits beside each id: whether a chat begins there, and whether the
//! token is one to predict.

mod answers;
mod encode;
mod formats;
pub(crate) mod pack;
mod pairs;
mod python;
mod records;
mod template;

use minijinja::Value;
use serde::{Deserialize, Serialize};

pub use encode::{ChatEncoder, ChatExample};
pub use formats::ChatFormat;
pub use pack::{ChatLengths, PackedChats};
pub use pairs::PairKind;
pub use python::Day;
pub use records::ChatFiles;
pub use template::named_template;

/// A character for private use, which encloses marks in texts that a template renders; transformers uses it, too.
const MARK: char = '\u{f0000}';

/// Parts of a text, in bytes: beginning and end.
type Spans = Vec<(usize, usize)>;

/// Tokens of a chat that are predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TrainOn {
    /// Those of all answers.
    Answers,
    /// Those of the last answer.
    LastAnswer,
    /// All.
    All,
}

/// Content of a record.
#[derive(Clone, Debug, PartialEq)]
enum Chat {
    /// Messages, for a template.
    Dialogue(Dialogue),
    /// A text and what follows it, without a template.
    Text { prompt: String, completion: String },
}

/// Messages of a chat.
#[derive(Clone, Debug, PartialEq)]
struct Dialogue {
    messages: Vec<Message>,
    tools: Option<Value>,
}

/// A message: what templates read of it.
#[derive(Clone, Debug, PartialEq)]
struct Message {
    /// Keys in their order, `role` among them; none is null.
    fields: Vec<(String, Value)>,
    /// False for an answer of weight 0.
    has_weight: bool,
}

impl Dialogue {
    /// Messages for a template, each as `change` makes it.
    fn values(&self, change: &dyn Fn(usize, &Message) -> Message) -> Vec<Value> {
        let changed = self.messages.iter().enumerate().map(|(number, message)| change(number, message));
        changed.map(|message| Value::from_pairs(message.fields)).collect()
    }

    /// Indices of the answers.
    fn answers(&self) -> impl Iterator<Item = usize> {
        self.messages.iter().enumerate().filter(|(_, message)| message.is_answer()).map(|(number, _)| number)
    }

    /// Returns whether the answer `number` is trained.
    fn is_trained(&self, number: usize, train_on: TrainOn) -> bool {
        let is_chosen = train_on != TrainOn::LastAnswer || self.answers().last() == Some(number);
        self.messages[number].has_weight && is_chosen
    }
}

impl Message {
    fn get(&self, key: &str) -> Option<&Value> {
        self.fields.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    fn is_answer(&self) -> bool {
        self.get("role").and_then(Value::as_str) == Some("assistant")
    }
}

/// A mark as it stands in a text.
fn mark(kind: char, number: usize) -> String {
    format!("{MARK}{kind}{number}{MARK}")
}
