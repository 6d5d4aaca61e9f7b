//! The keys of the configuration as people write them: the known name that a wrong one probably means, values of the wrong type, `--set`.
//!
//! The declaration of a key (`phalanx_train::config`) has all that is known of it. An unknown name is an error that names a key that is
//! spelled alike, or the key that another program's name stands for.

use std::sync::LazyLock;

use anyhow::{Result, bail};
use phalanx_train::RunConfig;
use phalanx_train::config::{Key, Kind};
use serde::Deserialize;
use strsim::levenshtein;
use toml::de::DeTable;
use toml::{Table, Value};

use crate::configuration::foreign_keys;

/// All keys.
static KEYS: LazyLock<Vec<Key>> = LazyLock::new(RunConfig::keys);

/// All keys, in the order in which they are declared.
pub fn all() -> &'static [Key] {
    &KEYS
}

/// The key `table.name`.
pub fn find(path: &str) -> Option<&'static Key> {
    let (table, name) = path.split_once('.')?;
    KEYS.iter().find(|key| key.table == table && key.name == name)
}

/// The key that says the same as `path`, otherwise.
pub fn either(path: &str) -> Option<String> {
    let other = find(path).map(|key| key.either).filter(|other| !other.is_empty());
    other.map(str::to_string).or_else(|| KEYS.iter().find(|key| key.either == path).map(Key::path))
}

/// The tables, in order.
fn tables() -> Vec<&'static str> {
    let mut tables: Vec<&str> = KEYS.iter().map(|key| key.table).collect();
    tables.dedup();
    tables
}

/// `table.key` with its value, for every key of a table of tables.
pub fn flat(tables: &Table) -> impl Iterator<Item = (String, &Value)> {
    tables
        .iter()
        .filter_map(|(name, value)| Some((name, value.as_table()?)))
        .flat_map(|(name, table)| table.iter().map(move |(key, value)| (format!("{name}.{key}"), value)))
}

/// Keys whose value is or may be a number.
#[cfg(test)]
pub fn numeric() -> Vec<String> {
    let is_number = |key: &&Key| matches!(key.kind, Kind::Whole | Kind::Number | Kind::WordOrNumber(_));
    KEYS.iter().filter(is_number).map(Key::path).collect()
}

/// Refuses unknown tables, unknown keys, and values of the wrong type or out of bounds, all at once. `origin` names their source, whose `text` tells
/// their lines.
pub fn check(given: &Table, origin: &str, text: &str) -> Result<()> {
    let lines = toml::de::DeTable::parse(text).ok();
    let line = |table: &str, key: Option<&str>| line_in(lines.as_ref()?.get_ref(), text, table, key);
    let mut faults = Vec::new();
    for (name, value) in given {
        let is_known = tables().contains(&name.as_str());
        if let Some(table) = value.as_table()
            && (is_known || !table.is_empty())
        {
            let wrong = |(key, value): (&String, &Value)| {
                let fault = check_value(&format!("{name}.{key}"), value).err()?;
                Some((line(name, Some(key)), fault))
            };
            faults.extend(table.iter().filter_map(wrong));
            continue;
        }
        let fault = match value {
            Value::Table(_) => {
                let near = nearest(name, tables().into_iter());
                let meant = near.map_or_else(all_tables, |near| format!("did you mean [{near}]?"));
                format!("unknown table [{name}]; {meant}")
            }
            _ if is_known => format!("{name} = {value}: expected a table, as [{name}]"),
            _ => unknown(name),
        };
        faults.push((line(name, None), fault));
    }
    faults.sort_by_key(|(line, _)| *line);
    let said = |(line, fault): &(Option<usize>, String)| match line {
        Some(line) => format!("{origin}:{line}: {fault}"),
        None => format!("{origin}: {fault}"),
    };
    let faults: Vec<String> = faults.iter().map(said).collect();
    if faults.is_empty() { Ok(()) } else { bail!("{}", faults.join("\n")) }
}

/// The line of a table, or of a key in it, in a text and its parsed tables.
fn line_in(tables: &DeTable, text: &str, table: &str, key: Option<&str>) -> Option<usize> {
    let (name, value) = tables.get_key_value(table)?;
    let key = key.and_then(|key| Some(value.get_ref().as_table()?.get_key_value(key)?.0));
    Some(text[..key.unwrap_or(name).span().start].matches('\n').count() + 1)
}

/// The line of `table.key` in a text, or of a key outside of tables.
pub fn line_of(text: &str, path: &str) -> Option<usize> {
    let (table, key) = path.split_once('.').map_or((path, None), |(table, key)| (table, Some(key)));
    line_in(DeTable::parse(text).ok()?.get_ref(), text, table, key)
}

/// Reads `table.key=value`. The value is TOML; text needs no quotes, and a single text is accepted for a list.
pub fn assignment(text: &str) -> Result<(String, Value)> {
    let Some((key, raw)) = text.split_once('=') else {
        bail!("--set {text}: expected TABLE.KEY=VALUE, as --set train.steps=200");
    };
    let (key, raw) = (key.trim(), raw.trim());
    let Some(known) = find(key) else { bail!("--set: {}", unknown(key)) };
    let parsed = toml::from_str::<Table>(&format!("value = {raw}")).ok();
    let parsed = parsed.filter(|table| table.len() == 1).and_then(|mut table| table.remove("value"));
    let text = || Value::String(raw.into());
    let value = match (known.kind, parsed) {
        (Kind::Paths | Kind::TextOrTexts(_), Some(value)) if value.is_array() || value.is_str() => value,
        (Kind::Text | Kind::Paths | Kind::TextOrTexts(_) | Kind::Words(_) | Kind::Names(_), Some(value))
            if !value.is_str() =>
        {
            text()
        }
        (Kind::Texts | Kind::WordList(_) | Kind::Tables(_), Some(value)) if value.is_array() => value,
        (Kind::Texts | Kind::WordList(_) | Kind::Tables(_), Some(Value::String(one))) => {
            Value::Array(vec![Value::String(one)])
        }
        (Kind::Texts | Kind::WordList(_) | Kind::Tables(_), _) => Value::Array(vec![text()]),
        (_, Some(value)) => value,
        (_, None) => text(),
    };
    check_value(key, &value).map_err(|fault| anyhow::anyhow!("--set: {fault}"))?;
    Ok((key.to_string(), value))
}

/// The value of `table.key`.
pub fn lookup<'a>(tables: &'a Table, key: &str) -> Option<&'a Value> {
    let (table, key) = key.split_once('.')?;
    tables.get(table)?.as_table()?.get(key)
}

/// Writes the value of `table.key`, making the table when it is not there.
pub fn insert(tables: &mut Table, key: &str, value: Value) {
    let (table, key) = key.split_once('.').expect("a known key has a table");
    let table = tables.entry(table).or_insert_with(|| Value::Table(Table::new()));
    table.as_table_mut().expect("checked tables").insert(key.to_string(), value);
}

/// Refuses an unknown key, and a value of the wrong type or out of bounds: each is tried alone, so that the error names its own key.
pub fn check_value(path: &str, value: &Value) -> Result<(), String> {
    let Some(key) = find(path) else { return Err(unknown(path)) };
    let mut tried = Table::new();
    insert(&mut tried, path, value.clone());
    if let Ok(config) = RunConfig::deserialize(Value::Table(tried)) {
        return config.check_bounds().map_err(|error| error.to_string());
    }
    if let (Kind::Tables(keys), Some(tables)) = (key.kind, tables_in(value)) {
        tables.into_iter().try_for_each(|given| check_table(path, keys, given))?;
    }
    Err(format!("{path} = {value}: expected {}", key.expected()))
}

/// The tables of a list of nothing else.
fn tables_in(value: &Value) -> Option<Vec<&Table>> {
    value.as_array()?.iter().map(Value::as_table).collect()
}

/// Refuses unknown keys and values of the wrong type in one table of the list `list`.
fn check_table(list: &str, keys: &[Key], given: &Table) -> Result<(), String> {
    for (name, value) in given {
        let Some(key) = keys.iter().find(|key| key.name == name) else {
            let names: Vec<&str> = keys.iter().map(|key| key.name).collect();
            let meant = nearest(name, names.iter().copied()).map_or_else(
                || format!("its keys are {}", names.join(", ")),
                |near| format!("did you mean {near}?"),
            );
            return Err(format!("unknown key {name} in [[{list}]]; {meant}"));
        };
        let is_right = match key.kind {
            Kind::Number => value.is_float() || value.is_integer(),
            Kind::Texts => value.as_array().is_some_and(|texts| texts.iter().all(Value::is_str)),
            _ => true,
        };
        if !is_right {
            return Err(format!("{list}.{name} = {value}: expected {}", key.expected()));
        }
    }
    Ok(())
}

/// Error text for an unknown name: names the key that was probably meant.
pub fn unknown(path: &str) -> String {
    let keys: Vec<String> = KEYS.iter().map(Key::path).collect();
    let same_leaf = |name: &&String| leaf(name) == leaf(path);
    let near = match keys.iter().find(same_leaf) {
        Some(name) => Some(name.as_str()),
        None => match foreign_keys::explain(path) {
            Some(explained) => return format!("unknown key {path}; {explained}"),
            None => nearest(path, keys.iter().map(String::as_str)),
        },
    };
    let table = path.split_once('.').map(|(table, _)| table).filter(|table| tables().contains(table));
    let meant = match (near, table) {
        (Some(near), _) => {
            let (table, leaf) = near.split_once('.').unwrap_or(("", near));
            format!("did you mean {leaf} in table [{table}] ({near})?")
        }
        (None, Some(table)) => {
            let keys: Vec<&str> = KEYS.iter().filter(|key| key.table == table).map(|key| key.name).collect();
            format!("the keys of [{table}] are {}", keys.join(", "))
        }
        (None, _) => all_tables(),
    };
    format!("unknown key {path}; {meant}")
}

/// Names the tables, for a name that is like no other.
fn all_tables() -> String {
    let names: Vec<String> = tables().iter().map(|name| format!("[{name}]")).collect();
    format!("the tables are {}; phalanx keys, and docs/configuration.md, list their keys", names.join(", "))
}

/// The name without its table.
fn leaf(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// The known name that was most likely meant: the same name but for a third of its letters at most, or a longer or
/// shorter form of it. Tables count only among those that are equally near.
pub fn nearest<'a>(given: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let (whole, given) = (given, leaf(given));
    let edits = |name: &'a str| {
        let other = leaf(name);
        let (shorter, longer) = if other.len() < given.len() { (other, given) } else { (given, other) };
        let edits = levenshtein(given, other);
        let is_form = shorter.len() >= 4 && longer.split('_').any(|word| word == shorter);
        let is_near = edits <= (longer.len() / 3).max(1) && shorter.len() > 1;
        (is_form || is_near).then_some((edits, name))
    };
    known
        .filter_map(edits)
        .min_by_key(|(edits, name)| (*edits, levenshtein(whole, name)))
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        check(&toml::from_str(text).unwrap(), "a.toml", text).unwrap_err().to_string()
    }

    #[test]
    fn unknown_names_are_told_the_nearest() {
        for (text, near) in [
            ("[model]\nhiden = 1", "model.hidden"),
            ("[train]\nlr = 1", "optimizer.lr"),
            ("[optimiser]\nlr = 1", "optimizer.lr"),
            ("steps = 1", "train.steps"),
            ("[optimiser]", "[optimizer]"),
            ("[batch]\nmicro_batch = 2", "batch.micro"),
            ("[memory]\nchunk_size = 2", "memory.chunk"),
            ("[schedule]\ndecay_step = 8", "schedule.decay_steps"),
            ("[schedule]\nlr_decay_iters = 8", "schedule.decay_steps"),
            ("[fp16]\ninitial_scale_power = 8", "precision.initial_scale_power"),
            ("[model]\nlayer = 8", "model.layers"),
            ("[data]\ntokeniser = \"byte\"", "data.tokenizer"),
            ("[parallel]\nsequence = true", "parallel.sequence_parallel"),
        ] {
            assert!(refusal(text).contains(near), "{text}: {}", refusal(text));
        }
    }

    #[test]
    fn all_that_is_wrong_is_said_at_once_with_its_lines() {
        let text = "[train]\nsteps = 1\nstepz = 2\n\n[parallel]\nzero = 300\npipeline = -1\n[optimiser]\n[model]\nlayers = 0\n[batch]\nmicro = 0\n";
        let lines: Vec<String> = refusal(text).lines().map(str::to_string).collect();
        assert!(lines.iter().any(|line| line.starts_with("a.toml:3: unknown key train.stepz;")), "{lines:?}");
        assert!(
            lines.iter().any(|line| line.starts_with("a.toml:6: parallel.zero = 300: expected")),
            "{lines:?}"
        );
        assert!(
            lines.iter().any(|line| line.starts_with("a.toml:8: unknown table [optimiser];")),
            "{lines:?}"
        );
        for line in [
            "a.toml:7: parallel.pipeline = -1: expected a whole number",
            "a.toml:10: model.layers = 0: must be at least 1",
            "a.toml:12: batch.micro = 0: must be at least 1",
        ] {
            assert!(lines.iter().any(|said| said.starts_with(line)), "{line}: {lines:?}");
        }
        assert_eq!(lines.len(), 6, "{lines:?}");
    }

    #[test]
    fn names_of_other_programs_are_explained() {
        for (text, words) in [
            ("block_size = 8", "block_size is nanoGPT's name; here it is model.seq"),
            ("[model]\nn_layer = 8", "n_layer is nanoGPT's name; here it is model.layers"),
            ("learning_rate = 0.1", "here it is optimizer.lr"),
            ("train_micro_batch_size_per_gpu = 4", "is DeepSpeed's name; here it is batch.micro"),
            (
                "[zero_optimization]\nstage = 2",
                "zero_optimization.stage is DeepSpeed's name; here it is parallel.zero",
            ),
            ("[fp16]\nenabled = true", "here it is precision.compute (set it to \"f16\")"),
            ("[model]\nnum_hidden_layers = 8", "is Hugging Face's name; here it is model.layers"),
            ("tensor-model-parallel-size = 2", "is Megatron's name; here it is parallel.tensor"),
            ("[train]\nwarmup_ratio = 0.1", "here it is schedule.warmup_share"),
            // A key of this program in another table is a key of this program.
            ("[train]\nweight_decay = 0.1", "did you mean weight_decay in table [optimizer]"),
        ] {
            assert!(refusal(text).contains(words), "{text}: {}", refusal(text));
        }
        let text = assignment("n_head=4").unwrap_err().to_string();
        assert!(text.contains("here it is model.heads"), "{text}");
    }

    /// Those that are also names of keys here need no explanation.
    #[test]
    fn foreign_names_are_explained() {
        let foreign = KEYS.iter().flat_map(|key| key.foreign).map(|(_, name, ..)| *name);
        for name in foreign {
            if KEYS.iter().any(|key| key.name == name) {
                continue;
            }
            let explained = foreign_keys::explain(name).unwrap();
            assert!(explained.starts_with(name), "{name}: {explained}");
        }
    }

    #[test]
    fn a_name_that_is_like_no_other_is_told_what_there_is() {
        for (text, words, without) in [
            ("[model]\nqqzz = 1", "the keys of [model] are arch, ", "did you mean"),
            ("flash = true", "the tables are [model], ", "did you mean"),
            ("[wandb]\nproject = \"x\"", "the tables are [model], ", "did you mean"),
            ("[wandb]", "the tables are [model], ", "did you mean"),
        ] {
            let found = refusal(text);
            assert!(found.contains(words) && !found.contains(without), "{text}: {found}");
        }
    }

    #[test]
    fn wrong_types_name_key_value_and_what_is_expected() {
        for (text, words) in [
            ("[train]\nsteps = \"many\"", ["train.steps", "\"many\"", "a whole number"]),
            ("[train]\nsteps = -1", ["train.steps", "-1", "a whole number"]),
            ("[data]\norder = \"random\"", ["data.order", "\"random\"", "\"shuffled\" or \"sequential\""]),
            ("[data]\ntext = \"a\"", ["data.text", "\"a\"", "a list"]),
            ("[memory]\nchunk = \"big\"", ["memory.chunk", "\"big\"", "\"auto\""]),
            ("[memory]\ncheckpointing = \"all\"", ["memory.checkpointing", "\"all\"", "\"selective\""]),
            ("[parallel]\nzero = 300", ["parallel.zero", "300", "0, 1, 2 or 3"]),
            ("[optimizer]\nlr = \"x\"", ["optimizer.lr", "\"x\"", "a number"]),
            ("[parallel]\noverlap = 1", ["parallel.overlap", "1", "true or false"]),
            ("[precision]\ncompute = \"fp16\"", ["precision.compute", "fp16", "\"bf16\", \"f16\""]),
            ("[precision]\nhysteresis = 0.5", ["precision.hysteresis", "0.5", "a whole number"]),
            (
                "[device]\nkind = \"gpu\"",
                ["device.kind", "\"gpu\"", "\"auto\", \"cpu\", \"cuda\", \"simulated\""],
            ),
            ("model = 3", ["model", "3", "[model]"]),
        ] {
            for word in words {
                assert!(refusal(text).contains(word), "{text}: {}", refusal(text));
            }
        }
    }

    #[test]
    fn assignments_take_values_as_people_write_them() {
        for (text, key, value) in [
            ("train.steps=200", "train.steps", Value::Integer(200)),
            ("data.tokenizer=gpt2", "data.tokenizer", Value::String("gpt2".into())),
            ("data.tokenizer=\"char\"", "data.tokenizer", Value::String("char".into())),
            ("memory.chunk=none", "memory.chunk", Value::String("none".into())),
            ("memory.chunk = 2", "memory.chunk", Value::Integer(2)),
            ("memory.checkpointing=2", "memory.checkpointing", Value::Integer(2)),
            ("memory.checkpointing=block", "memory.checkpointing", Value::String("block".into())),
            ("data.text=a.txt", "data.text", Value::Array(vec![Value::String("a.txt".into())])),
            ("train.sample=12", "train.sample", Value::String("12".into())),
            ("train.sample=a = b", "train.sample", Value::String("a = b".into())),
            ("optimizer.lr=1", "optimizer.lr", Value::Integer(1)),
        ] {
            assert_eq!(assignment(text).unwrap(), (key.to_string(), value), "{text}");
        }
        for (text, words) in [
            ("train.steps", "expected TABLE.KEY=VALUE"),
            ("train.stepz=1", "unknown key train.stepz"),
            ("train.steps=x", "expected a whole number"),
            ("steps=1", "unknown key steps"),
        ] {
            let refusal = assignment(text).unwrap_err().to_string();
            assert!(refusal.contains(words), "no {words:?} in: {refusal}");
        }
    }
}
