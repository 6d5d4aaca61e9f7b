//! The declaration of keys: `table!` makes a table of the configuration, a plain struct, and the list of its keys, from one text; `words!`
//! makes a choice of words. What is known of a key stands there and nowhere else: type, default, bounds, help, and of words what each means.

use phalanx_models::Values;
use serde_json::Value;

use super::ConfigError;
use super::needs::Need;

/// Description of a configuration key.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The table that has it.
    pub table: &'static str,
    /// Its name in the table.
    pub name: &'static str,
    /// Help text, in lines.
    pub help: &'static [&'static str],
    /// Kind of its values.
    pub kind: Kind,
    /// The numbers that it takes.
    pub bounds: Bounds,
    /// Text added to the error for a number out of bounds.
    pub hint: &'static str,
    /// True if a written configuration leaves it out when it has its default value.
    pub is_quiet: bool,
    /// Names of other programs for it.
    pub foreign: &'static [Foreign],
    /// Requirements of its values on other keys.
    pub needs: &'static [Need],
    /// Consequence of another value when a run is resumed.
    pub resume: Resume,
    /// True if a value that the program has decided stays when the run is resumed.
    pub keeps: bool,
    /// Key to whose value this one belongs: a resumed run with another value of it leaves this one out; "" for none.
    pub unset_by: &'static str,
    /// Key that says the same otherwise: of the two, the later given counts; "" for none.
    pub either: &'static str,
}

/// Consequence of another value of a key when a run is resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// It is named, with what follows; "" where the values say all.
    Said(&'static str),
    /// It is named. The key says where and how a step is computed, and not what is trained: a stored value gives way to what it contradicts.
    Free,
    /// It names other data: tokens are made anew.
    Data,
    /// It isn't named: nothing follows from it, or a line of its own says what.
    Unsaid,
    /// It is refused, for this reason.
    Fixed(&'static str),
}

/// Name of another program for a key: the program, the name, how its values become ours, and the difference in meaning ("" if none).
pub type Foreign = (&'static str, &'static str, Conversion, &'static str);

/// Conversion of another program's value into that of the key.
#[derive(Clone, Copy, Debug)]
pub enum Conversion {
    /// It is the same value.
    Same,
    /// One word or value of theirs, as written, for each of ours.
    Words(&'static [(&'static str, &'static str)]),
    /// No value follows from this name alone: a rule over several of their names has it, or the name is only explained.
    Rule,
}

/// nanoGPT.
pub const NANOGPT: &str = "nanoGPT's";
/// DeepSpeed.
pub const DEEPSPEED: &str = "DeepSpeed's";
/// Transformers, its Trainer and its files.
pub const HUGGING_FACE: &str = "Hugging Face's";
/// Megatron-LM.
pub const MEGATRON: &str = "Megatron's";
/// Colossal-AI.
pub const GEMINI: &str = "Colossal-AI's";
/// torchtitan, its TOML.
pub const TORCHTITAN: &str = "torchtitan's";
/// axolotl.
pub const AXOLOTL: &str = "axolotl's";
/// LLaMA-Factory.
pub const LLAMA_FACTORY: &str = "LLaMA-Factory's";
/// An earlier version of this program.
pub const EARLIER: &str = "an earlier version's";

/// Kind of a value, which determines how it is written.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// True or false.
    Flag,
    /// A whole number, 0 or more.
    Whole,
    /// A number.
    Number,
    /// A text.
    Text,
    /// A list of texts.
    Texts,
    /// A path, or a list of paths.
    Paths,
    /// A text or a list of texts, in these words.
    TextOrTexts(&'static str),
    /// One of some words, each with what it means.
    Words(&'static [(&'static str, &'static [&'static str])]),
    /// A list of such words.
    WordList(&'static [(&'static str, &'static [&'static str])]),
    /// One of some words that say what they mean.
    Names(fn() -> Vec<&'static str>),
    /// A word or a number, in these words.
    WordOrNumber(&'static str),
    /// A table with entries of its own.
    Table,
    /// A list of tables with these keys.
    Tables(&'static [Key]),
}

/// The numbers that a key takes; none of them is infinite. A key without a number takes them all.
#[derive(Clone, Copy, Debug)]
pub enum Bounds {
    /// Any.
    Any,
    /// From one to another.
    From(f64, f64),
    /// Those above one, up to another.
    Above(f64, f64),
}

/// A key without bounds: where declarations begin.
pub(super) const KEY: Key = Key {
    table: "",
    name: "",
    help: &[],
    kind: Kind::Flag,
    bounds: Bounds::Any,
    hint: "",
    is_quiet: false,
    foreign: &[],
    needs: &[],
    resume: Resume::Said(""),
    keeps: false,
    unset_by: "",
    either: "",
};

/// A key that says where and how a step is computed.
pub(super) const FREE: Key = KEY.resume(Resume::Free);

impl Key {
    /// Takes numbers from `min` to `max`.
    pub(super) const fn from(self, min: f64, max: f64) -> Key {
        Key { bounds: Bounds::From(min, max), ..self }
    }

    /// Takes numbers above `min`, up to `max`.
    pub(super) const fn above(self, min: f64, max: f64) -> Key {
        Key { bounds: Bounds::Above(min, max), ..self }
    }

    /// Says more where a number is out of bounds.
    pub(super) const fn hint(self, hint: &'static str) -> Key {
        Key { hint, ..self }
    }

    /// Is not written where it has its default.
    pub(super) const fn quiet(self) -> Key {
        Key { is_quiet: true, ..self }
    }

    /// Has these names elsewhere.
    pub(super) const fn foreign(self, foreign: &'static [Foreign]) -> Key {
        Key { foreign, ..self }
    }

    /// Needs these of other keys.
    pub(super) const fn needs(self, needs: &'static [Need]) -> Key {
        Key { needs, ..self }
    }

    /// Has this consequence on a resume.
    pub(super) const fn resume(self, resume: Resume) -> Key {
        Key { resume, ..self }
    }

    /// Keeps what was decided on a resume.
    pub(super) const fn keeps(self) -> Key {
        Key { keeps: true, ..self }
    }

    /// Belongs to the value of another key.
    pub(super) const fn unset_by(self, unset_by: &'static str) -> Key {
        Key { unset_by, ..self }
    }

    /// Says the same as another key, otherwise.
    pub(super) const fn either(self, either: &'static str) -> Key {
        Key { either, ..self }
    }

    /// `table.name`
    pub fn path(&self) -> String {
        format!("{}.{}", self.table, self.name)
    }

    /// Words for the values that it takes.
    pub fn expected(&self) -> String {
        match self.kind {
            Kind::Flag => "true or false".to_string(),
            Kind::Whole => format!("a whole number{}", self.within()),
            Kind::Number => format!("a number{}", self.within()),
            Kind::Text => "text in quotes".to_string(),
            Kind::Texts => "a list of texts, as [\"a.txt\", \"b.txt\"]".to_string(),
            Kind::Paths => "a path in quotes, or a list of paths, as [\"/mnt/a\", \"/mnt/b\"]".to_string(),
            Kind::Words(words) => list(&words.iter().map(|(word, _)| *word).collect::<Vec<_>>()),
            Kind::WordList(words) => {
                format!(
                    "a list of {}",
                    words.iter().map(|(word, _)| format!("{word:?}")).collect::<Vec<_>>().join(", ")
                )
            }
            Kind::Names(names) => list(&names()),
            Kind::WordOrNumber(expected) | Kind::TextOrTexts(expected) => expected.to_string(),
            Kind::Table => "a table, as { rope_type = \"linear\", factor = 4.0 }".to_string(),
            Kind::Tables(_) => format!("a list of tables, each with a line [[{}]] of its own", self.path()),
        }
    }

    /// Words for its bounds, behind "a number".
    fn within(&self) -> String {
        let more = if self.hint.is_empty() { String::new() } else { format!("; {}", self.hint) };
        match self.bounds {
            Bounds::Any => String::new(),
            Bounds::From(min, max) if max < f64::MAX => format!(" from {min} to {max}{more}"),
            Bounds::From(min, _) => format!(", {min} or more{more}"),
            Bounds::Above(min, max) if max < f64::MAX => format!(" above {min}, at most {max}{more}"),
            Bounds::Above(min, _) => format!(" above {min}{more}"),
        }
    }

    /// Refuses a number that it does not take.
    pub(super) fn check(&self, number: f64, given: impl FnOnce() -> String) -> Result<(), ConfigError> {
        let is_real = matches!(self.kind, Kind::Number);
        let expected = match self.bounds {
            Bounds::Any => return Ok(()),
            Bounds::From(min, max) if is_real && max < f64::MAX && !(min..=max).contains(&number) => {
                format!("must lie between {min} and {max}")
            }
            Bounds::From(min, _) if number.is_nan() || number < min => match is_real {
                true => format!("must be {min} or more"),
                false => format!("must be at least {min}"),
            },
            Bounds::Above(min, _) if number.is_nan() || number <= min => {
                format!("must be a number above {min}")
            }
            Bounds::From(_, f64::MAX) | Bounds::Above(_, f64::MAX) if number > f64::MAX => {
                "must be finite".to_string()
            }
            Bounds::From(_, max) | Bounds::Above(_, max) if number > max => {
                format!("must be at most {max}")
            }
            Bounds::From(..) | Bounds::Above(..) => return Ok(()),
        };
        let hint = if let Kind::WordOrNumber(expected) = self.kind { expected } else { self.hint };
        let more = if hint.is_empty() { String::new() } else { format!("; {hint}") };
        Err(ConfigError::new(self.path(), given(), format!("{expected}{more}")))
    }
}

/// The words as a message lists them: `"a" or "b"`, `one of "a", "b", "c"`.
fn list(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    if quoted.len() == 2 { quoted.join(" or ") } else { format!("one of {}", quoted.join(", ")) }
}

/// A table that `table!` has made.
pub trait Declared {
    /// Its keys.
    const KEYS: &'static [Key];
}

/// A table with its values.
pub trait Table {
    /// Its keys.
    fn keys(&self) -> &'static [Key];

    /// The value of a key; `None` if it is left out.
    fn value(&self, name: &str) -> Option<Value>;

    /// The value of a key as errors write it.
    fn given(&self, name: &str) -> String;

    /// Refuses the first number that is out of bounds.
    ///
    /// # Errors
    /// The key, its value and the bound.
    fn check_bounds(&self) -> Result<(), ConfigError>;
}

/// The kind of a key that architectures read.
pub(super) fn kind_of(values: Values) -> Kind {
    match values {
        Values::Count { .. } => Kind::Whole,
        Values::Positive { .. } => Kind::Number,
        Values::Flag => Kind::Flag,
        Values::Word => Kind::Text,
        Values::Table => Kind::Table,
        Values::Names => Kind::Texts,
    }
}

/// Declares a table: `/// help`, `name: type = default, key;` for each key, where `key` is [`KEY`] with what is to be said of it. After
/// `..`, a field that has all keys of other names.
macro_rules! table {
    (
        $(#[$about:meta])* $table:literal $part:ident {
            $($(#[doc = $help:literal])+ $field:ident: $ty:ty = $default:expr, $key:expr;)*
            $(.. $(#[doc = $rest_help:literal])+ $rest:ident: $rest_ty:ty;)?
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $part {
            $($(#[doc = $help])+ pub $field: $ty,)*
            $($(#[doc = $rest_help])+ pub $rest: $rest_ty,)?
        }

        impl Default for $part {
            fn default() -> $part {
                $part { $($field: $default,)* $($rest: <$rest_ty>::default(),)? }
            }
        }

        impl $crate::config::declare::Declared for $part {
            const KEYS: &'static [$crate::config::Key] = &[$($crate::config::Key {
                table: $table,
                name: stringify!($field),
                help: &[$($help),+],
                kind: <$ty as $crate::config::KeyType>::KIND,
                ..$key
            }),*];
        }

        impl $crate::config::declare::Table for $part {
            fn keys(&self) -> &'static [$crate::config::Key] {
                <Self as $crate::config::Declared>::KEYS
            }

            fn value(&self, name: &str) -> Option<serde_json::Value> {
                use $crate::config::KeyType;
                match name {
                    $(stringify!($field) if self.$field.is_left_out() => None,)*
                    $(stringify!($field) => serde_json::to_value(&self.$field).ok(),)*
                    _ => None,
                }
            }

            fn given(&self, name: &str) -> String {
                match name {
                    $(stringify!($field) => $crate::config::KeyType::given(&self.$field),)*
                    _ => String::new(),
                }
            }

            fn check_bounds(&self) -> Result<(), $crate::config::ConfigError> {
                let mut keys = <Self as $crate::config::Declared>::KEYS.iter();
                $($crate::config::KeyType::check(&self.$field, keys.next().expect("as many as fields"))?;)*
                Ok(())
            }
        }

        impl serde::Serialize for $part {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                use serde::ser::SerializeMap;
                use $crate::config::declare::Declared;
                use $crate::config::KeyType;
                let (mut map, left_out) = (serializer.serialize_map(None)?, $part::default());
                let mut keys = Self::KEYS.iter();
                $(
                    let is_quiet = keys.next().is_some_and(|key| key.is_quiet);
                    if !(self.$field.is_left_out() || is_quiet && self.$field == left_out.$field) {
                        map.serialize_entry(stringify!($field), &self.$field)?;
                    }
                )*
                $(self.$rest.iter().try_for_each(|(name, value)| map.serialize_entry(name, value))?;)?
                map.end()
            }
        }

        impl<'de> serde::Deserialize<'de> for $part {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<$part, D::Error> {
                struct Visit;
                impl<'de> serde::de::Visitor<'de> for Visit {
                    type Value = $part;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str(concat!("the table [", $table, "]"))
                    }

                    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<$part, A::Error> {
                        let mut part = $part::default();
                        #[allow(unused_mut, reason = "most tables have no further keys")]
                        let mut others = serde_json::Map::new();
                        while let Some(name) = map.next_key::<String>()? {
                            match name.as_str() {
                                $(stringify!($field) => part.$field = map.next_value()?,)*
                                _ => table!(@other name map others $part [$($field)*] $($rest)?),
                            }
                        }
                        $(part.$rest = <$rest_ty as serde::Deserialize>::deserialize(serde_json::Value::Object(others))
                            .map_err(serde::de::Error::custom)?;)?
                        Ok(part)
                    }
                }
                deserializer.deserialize_map(Visit)
            }
        }
    };
    (@other $name:ident $map:ident $others:ident $part:ident [$($field:ident)*]) => {{
        let _: &serde_json::Map<String, serde_json::Value> = &$others;
        return Err(serde::de::Error::unknown_field(&$name, &[$(stringify!($field)),*]));
    }};
    (@other $name:ident $map:ident $others:ident $part:ident [$($field:ident)*] $rest:ident) => {
        drop($others.insert($name, $map.next_value()?))
    };
}

/// Declares a choice of words: `/// help`, `Variant = "word" | "another word for it"` for each.
macro_rules! words {
    ($(#[$about:meta])* $name:ident { $($(#[doc = $help:literal])+ $variant:ident = $word:literal $(| $alias:literal)*,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $($(#[doc = $help])+ #[serde(rename = $word $(, alias = $alias)*)] $variant,)*
        }

        impl $name {
            /// The word in configurations.
            pub fn name(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)*
                }
            }
        }

        impl $crate::config::KeyType for $name {
            const KIND: $crate::config::declare::Kind =
                $crate::config::declare::Kind::Words(&[$(($word, &[$($help),+])),*]);
        }
    };
}
