//! Configurations of other programs, translated into keys of ours.
//!
//! A format has a reader, which returns values with their lines, and a table of names. Names of what we have stand in the declarations of
//! our keys ([`phalanx_train::config::declare`]), with the conversion of their values; others in the format's own list with the
//! reason. What follows from several names at once are the format's rules. Every name of a file is in one row of the result: the same here,
//! different and how, not needed and why, or refused. A name that is in no table is an error.

mod adapters;
mod chats;
mod data_sets;
mod deepspeed;
mod hjson;
mod hugging_face;
mod merge;
mod nanogpt;
mod preferences;
mod python;
mod report;
mod torchtitan;
mod trainer_rate;
mod value;
mod yaml;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use phalanx_plan::Mesh;
use phalanx_train::config::Kind;
use phalanx_train::config::declare::Conversion;

use crate::configuration::{foreign_keys, keys, user_config::UserConfig};
use value::{Entry, Fault, Value, flat};

pub use deepspeed::DEEPSPEED;
pub use merge::read_both;

/// Message about names of loggers.
const LOGS: &str = "nothing is sent anywhere: every step is in metrics.jsonl of the run folder, and with metrics.sinks = [\"tensorboard\"] in an event file of \
     TensorBoard";

/// The formats that are read.
pub const FORMATS: [&Format; 5] = [
    &DEEPSPEED,
    &nanogpt::NANOGPT,
    &torchtitan::TORCHTITAN,
    &hugging_face::AXOLOTL,
    &hugging_face::LLAMA_FACTORY,
];

/// The format of a file, by its name and, for YAML, by the key of its model.
///
/// # Errors
/// A file of another kind.
pub fn format_of(path: &Path) -> Result<&'static Format> {
    let kind = path.extension().and_then(|kind| kind.to_str()).unwrap_or_default();
    Ok(match kind {
        "json" | "hjson" => FORMATS[0],
        "py" => FORMATS[1],
        "toml" => FORMATS[2],
        "yaml" | "yml" => {
            let text = text_of(path)?;
            let is_axolotl = text.lines().any(|line| line.starts_with("base_model:"));
            FORMATS[if is_axolotl { 3 } else { 4 }]
        }
        _ => bail!(
            "{}: the end of the name does not say whose configuration it is (.json, .py, .toml, .yaml): give --from",
            path.display()
        ),
    })
}

fn text_of(path: &Path) -> Result<String> {
    let text = phalanx_system::files::read_text(path, MAX_BYTES);
    text.with_context(|| format!("cannot read the configuration {}", path.display()))
}

/// The largest file that is read, in bytes.
const MAX_BYTES: u64 = 256 << 10;

/// A format of configurations.
pub struct Format {
    /// Its program.
    pub name: &'static str,
    /// Programs under whose names our keys are declared, as `DeepSpeed's`.
    programs: &'static [&'static str],
    read: fn(&str) -> Result<Vec<Entry>, Fault>,
    /// Names that are no key here.
    others: &'static [Other],
    /// Keys that follow from several names at once.
    rules: fn(&mut Draft) -> Result<()>,
}

/// A name that is no key here, the type of its values, and its fate. `a.*` stands for all names in `a`.
type Other = (&'static str, Type, Verdict);

/// Type of a value of theirs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Type {
    Flag,
    Number,
    Text,
    List,
    Any,
}

/// Fate of a name that is no key here.
#[derive(Clone, Copy, Debug)]
enum Verdict {
    /// Any value, since nothing has to be set for it: the reason.
    Unneeded(&'static str),
    /// Any value, for which nothing can be set: what is different here.
    Differs(&'static str),
    /// These values, as written, since they turn off what is not here; for all others: what to do instead.
    Only(&'static [&'static str], &'static str),
    /// No value: what to do instead.
    Refused(&'static str),
}

/// Outcome of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is the value of a key here.
    Same,
    /// It is the value of a key here, which differs as the reason says.
    Differs,
    /// Nothing was given, and their default is not ours.
    Default,
    /// Nothing has to be set.
    Unneeded,
    /// It is not here.
    Refused,
}

/// A name of theirs with what has become of it.
#[derive(Clone, Debug)]
pub struct Row {
    /// Line in their file; None for what is not in it.
    pub line: Option<usize>,
    /// Their name.
    pub name: String,
    /// Their value, as written.
    pub value: String,
    /// Our key and its value.
    pub ours: Option<(String, toml::Value)>,
    /// Its outcome.
    pub outcome: Outcome,
    /// Why, or what differs.
    pub why: String,
}

/// A configuration of another program and what has become of it.
pub struct Translation {
    /// The program.
    pub program: &'static str,
    /// The file.
    pub path: String,
    /// A row for each of its values, in their order, then their defaults.
    pub rows: Vec<Row>,
}

/// A translation that is being made.
struct Draft {
    format: &'static Format,
    /// The values that no rule has taken yet.
    left: Vec<Entry>,
    rows: Vec<Row>,
    /// Errors, by line.
    faults: Vec<(usize, String)>,
    /// Names whose value was left to a program, with the source of the value.
    autos: Vec<(String, String)>,
    /// Keys that the user has given here.
    given: UserConfig,
    /// True if it is translated alone: the number of ranks may follow from it.
    is_alone: bool,
    /// Folder of the file.
    folder: PathBuf,
}

impl Translation {
    /// Reads a file of `format` and translates it. `given` is what the user has given here. The number of ranks may follow from
    /// one that `is_alone`, not merged with a configuration.
    ///
    /// # Errors
    /// A file that cannot be read, and all names and values in it that are wrong or unknown, with their lines.
    pub fn read(
        format: &'static Format,
        path: &Path,
        given: UserConfig,
        is_alone: bool,
    ) -> Result<Translation> {
        let shown = path.display().to_string();
        let text = text_of(path)?;
        Translation::parse(format, &text, shown, given, is_alone)
    }

    fn parse(
        format: &'static Format,
        text: &str,
        path: String,
        given: UserConfig,
        is_alone: bool,
    ) -> Result<Translation> {
        let entries = match (format.read)(text) {
            Ok(entries) => entries,
            Err(Fault { line, what }) => {
                bail!(
                    "{path}:{line}: {what}; this is no configuration of {}, nothing was written",
                    format.name
                )
            }
        };
        let left = flat(entries);
        let order: Vec<(usize, String)> = left.iter().map(|entry| (entry.line, entry.name.clone())).collect();
        let folder = Path::new(&path).parent().unwrap_or(Path::new("")).to_path_buf();
        let (rows, faults, autos) = (Vec::new(), Vec::new(), Vec::new());
        let mut draft = Draft { format, left, rows, faults, autos, given, is_alone, folder };
        (format.rules)(&mut draft).with_context(|| path.clone())?;
        std::mem::take(&mut draft.left).into_iter().for_each(|entry| draft.translate(entry));
        let Draft { mut rows, mut faults, .. } = draft;
        faults.sort_by_key(|(line, _)| *line);
        if !faults.is_empty() {
            let said: Vec<String> =
                faults.iter().map(|(line, fault)| format!("{path}:{line}: {fault}")).collect();
            bail!("{}", said.join("\n"));
        }
        let place = |row: &Row| {
            let at = order.iter().position(|(line, name)| (Some(*line), name) == (row.line, &row.name));
            at.unwrap_or(order.len())
        };
        rows.sort_by_key(place);
        Ok(Translation { program: format.name, path, rows })
    }

    /// Refuses what is not here.
    ///
    /// # Errors
    /// All that is refused, with what to do instead.
    pub fn refuse(&self) -> Result<()> {
        let refused = self.rows.iter().filter(|row| row.outcome == Outcome::Refused);
        let said = |row: &Row| {
            let line = row.line.map_or(String::new(), |line| format!("{line}: "));
            format!("{}:{line}{} = {} is refused: {}", self.path, row.name, row.value, row.why)
        };
        let refused: Vec<String> = refused.map(said).collect();
        if refused.is_empty() { Ok(()) } else { bail!("{}", refused.join("\n")) }
    }
}

/// Two texts as one.
fn with(one: &str, other: &str) -> String {
    match (one, other) {
        ("", text) | (text, "") => text.to_string(),
        _ => format!("{one}; {other}"),
    }
}

impl Draft {
    /// The mesh of what is given here, and of what has been translated so far.
    fn mesh(&self) -> Result<Mesh> {
        let mut given = self.given.clone();
        for (key, value) in self.rows.iter().filter_map(|row| row.ours.as_ref()) {
            if key.starts_with("parallel.") && !given.has(key) {
                given.set(key, value.clone());
            }
        }
        Ok(given.config()?.mesh()?)
    }

    /// Translates names by the table before the rules that need them.
    fn first(&mut self, names: &[&str]) {
        names.iter().for_each(|name| self.take(name).into_iter().for_each(|entry| self.translate(entry)));
    }

    /// Takes the value of a name; nothing is `None`.
    fn take(&mut self, name: &str) -> Option<Entry> {
        let at = self.left.iter().position(|entry| entry.name == name)?;
        Some(self.left.remove(at))
    }

    /// The value of a name.
    fn peek(&self, name: &str) -> Option<&Entry> {
        self.left.iter().find(|entry| entry.name == name)
    }

    /// Takes a value that must be a word of `known`; the same with its number there.
    fn take_word(&mut self, name: &str, known: &[&str]) -> Option<(Entry, usize)> {
        let entry = self.take(name)?;
        let word = entry.value.word();
        let found = known.iter().position(|known| known.eq_ignore_ascii_case(&word));
        if found.is_none() {
            let known: Vec<String> = known.iter().map(|word| format!("{word:?}")).collect();
            self.wrong(&entry, &format!("one of {}", known.join(", ")));
        }
        Some((entry, found?))
    }

    /// Takes a value that must be a number; `None` where it is missing, or wrong, which is said.
    fn take_number(&mut self, name: &str) -> Option<(Entry, f64)> {
        let entry = self.take(name)?;
        let Some(number) = entry.value.number() else {
            self.wrong(&entry, "a number");
            return None;
        };
        Some((entry, number))
    }

    /// Takes a value that must be a whole number above 0.
    fn take_count(&mut self, name: &str) -> Option<(Entry, u64)> {
        let entry = self.take(name)?;
        let Some(count) = entry.value.whole().filter(|count| *count > 0) else {
            self.wrong(&entry, "a whole number, 1 or more");
            return None;
        };
        Some((entry, count))
    }

    /// Takes a value that must be true or false.
    fn take_flag(&mut self, name: &str) -> Option<(Entry, bool)> {
        let entry = self.take(name)?;
        let Some(flag) = entry.value.flag() else {
            self.wrong(&entry, "true or false");
            return None;
        };
        Some((entry, flag))
    }

    /// Says that a value has the wrong type.
    fn wrong(&mut self, entry: &Entry, expected: &str) {
        self.faults.push((entry.line, format!("{} = {}: expected {expected}", entry.name, entry.value)));
    }

    fn row(&mut self, entry: &Entry, ours: Option<(&str, toml::Value)>, outcome: Outcome, why: &str) {
        let auto = self.autos.iter().find(|(name, _)| *name == entry.name);
        let (value, why) = match auto {
            Some((_, source)) => ("\"auto\"".to_string(), with(source, why)),
            None => (entry.value.to_string(), why.to_string()),
        };
        let ours = ours.map(|(key, value)| (key.to_string(), value));
        self.rows.push(Row { line: Some(entry.line), name: entry.name.clone(), value, ours, outcome, why });
    }

    /// Gives a key the value that a name of theirs has; `differs` says what is different, or "".
    fn give(&mut self, entry: &Entry, key: &str, value: impl Into<toml::Value>, differs: &str) {
        let value = value.into();
        if let Err(fault) = keys::check_value(key, &value) {
            let expected = fault.split_once(": ").map_or(fault.as_str(), |(_, expected)| expected);
            self.faults
                .push((entry.line, format!("{} = {}: {expected} ({key} here)", entry.name, entry.value)));
            return;
        }
        let outcome = if differs.is_empty() { Outcome::Same } else { Outcome::Differs };
        self.row(entry, Some((key, value)), outcome, differs);
    }

    /// Says that a value needs nothing here.
    fn unneeded(&mut self, entry: &Entry, why: &str) {
        self.row(entry, None, Outcome::Unneeded, why);
    }

    /// Says that a value is refused, and what to do instead.
    fn refuse(&mut self, entry: &Entry, instead: &str) {
        self.row(entry, None, Outcome::Refused, instead);
    }

    /// Gives a key the default that `name` has in their program, or another value that follows from what they give.
    fn default(&mut self, name: &str, key: &str, value: impl Into<toml::Value>, why: &str) {
        let value = value.into();
        let (name, shown) = (name.to_string(), value.to_string());
        let ours = Some((key.to_string(), value));
        let why = why.to_string();
        self.rows.push(Row { line: None, name, value: shown, ours, outcome: Outcome::Default, why });
    }

    /// Translates a value by the table of names.
    fn translate(&mut self, entry: Entry) {
        let is = |name: &str| match name.strip_suffix(".*") {
            Some(table) => {
                entry.name.strip_prefix(table).is_some_and(|rest| rest.starts_with('.') || rest.is_empty())
            }
            None => name == entry.name,
        };
        let other = self.format.others.iter().find(|(name, ..)| !name.ends_with(".*") && is(name));
        if let Some((key, conversion, differs)) = self.declared(&entry.name).filter(|_| other.is_none()) {
            return self.convert(&entry, &key, conversion, differs);
        }
        let other = other.or_else(|| self.format.others.iter().find(|(name, ..)| is(name)));
        let Some((_, expected, verdict)) = other else {
            let fault = self.unknown(&entry.name);
            return self.faults.push((entry.line, fault));
        };
        let is_auto = entry.value == Value::Null || self.autos.iter().any(|(name, _)| *name == entry.name);
        let is_right = match expected {
            Type::Any => true,
            Type::Flag => entry.value.flag().is_some(),
            Type::Number => entry.value.number().is_some(),
            Type::Text => entry.value.text().is_some(),
            Type::List => matches!(entry.value, Value::List(_)),
        };
        if !is_right && !is_auto {
            let expected = ["true or false", "a number", "text", "a list", ""][*expected as usize];
            return self.wrong(&entry, expected);
        }
        match verdict {
            Verdict::Unneeded(why) => self.unneeded(&entry, why),
            Verdict::Differs(_) if entry.value == Value::Null || entry.value == Value::Flag(false) => {
                self.unneeded(&entry, "off here, too");
            }
            Verdict::Differs(why) => self.row(&entry, None, Outcome::Differs, why),
            Verdict::Only(..) if is_auto => self.unneeded(&entry, "off by default"),
            Verdict::Only(values, _) if values.contains(&entry.value.word().as_str()) => {
                self.unneeded(&entry, "off here, too");
            }
            Verdict::Only(_, instead) | Verdict::Refused(instead) => self.refuse(&entry, instead),
        }
    }

    /// The key, or the option, here that has a name of theirs.
    fn declared(&self, name: &str) -> Option<(String, Conversion, &'static str)> {
        let programs = self.format.programs;
        let (key, of) = foreign_keys::names().find(|(_, of)| programs.contains(&of.0) && of.1 == name)?;
        Some((key, of.2, of.3))
    }

    fn convert(&mut self, entry: &Entry, path: &str, conversion: Conversion, differs: &str) {
        let Some(key) = keys::find(path) else {
            return self.unneeded(entry, &format!("{path}, {differs}"));
        };
        if entry.value == Value::Null
            || self.autos.iter().any(|(name, _)| *name == entry.name) && entry.value.word() == "auto"
        {
            return self.unneeded(entry, &format!("{path} decides"));
        }
        match conversion {
            Conversion::Same => {
                let value = match (key.kind, entry.value.to_toml()) {
                    (Kind::Texts, Some(toml::Value::String(one))) => Some(vec![one].into()),
                    (Kind::Number, Some(toml::Value::Integer(whole))) => Some((whole as f64).into()),
                    (_, value) => value,
                };
                match value {
                    Some(value) => self.give(entry, path, value, differs),
                    None => self.wrong(entry, &key.expected()),
                }
            }
            Conversion::Words(words) => {
                let word = entry.value.word();
                match words.iter().find(|(theirs, _)| *theirs == word) {
                    Some((_, ours)) if matches!(key.kind, Kind::WordList(_)) => {
                        self.give(entry, path, vec![*ours], differs);
                    }
                    Some((_, ours)) => self.give(entry, path, *ours, differs),
                    None => {
                        let words: Vec<&str> = words.iter().map(|(theirs, _)| *theirs).collect();
                        self.wrong(entry, &format!("one of {}", words.join(", ")));
                    }
                }
            }
            Conversion::Rule => self.refuse(entry, &format!("set {path} here")),
        }
    }

    /// Error text for a name that is in no table.
    fn unknown(&self, name: &str) -> String {
        let programs = self.format.programs;
        let declared = foreign_keys::names().filter(|(_, of)| programs.contains(&of.0)).map(|(_, of)| of.1);
        let others = self.format.others.iter().map(|(name, ..)| name.trim_end_matches(".*"));
        let near = keys::nearest(name.trim(), declared.chain(others));
        let meant = near.map_or(String::new(), |near| format!("; did you mean {near}?"));
        format!("{name} is no key of {} that is known{meant}", self.format.name)
    }
}
