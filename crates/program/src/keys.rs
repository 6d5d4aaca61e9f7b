//! Every key of the configuration with the type of its value, and the known name that a wrong name probably means.
//!
//! The list is the default configuration written out with its optional keys filled in, so it cannot
//! drift from the types. A key that is not on it is an error that names a key that is spelled alike, or the key that
//! another program's name stands for. Each value is tried alone, in a
//! configuration that is otherwise right, so the error for a wrong type names its own key.

use std::path::Path;

use anyhow::{Result, bail};
use phalanx_models::Keys;
use phalanx_train::RunConfig;
use phalanx_train::config::{Float, KernelChoice, ParameterGroup, Placement};
use serde::Deserialize;
use strsim::levenshtein;
use toml::{Table, Value};

use crate::{choices, foreign_keys};

/// Keys whose default is a word and whose value may be a number.
const WORD_OR_NUMBER: [&str; 2] = ["memory.chunk", "memory.checkpointing"];

/// Keys whose value is a text or a list of texts.
const TEXT_OR_LIST: [&str; 3] = ["memory.nvme_path", "data.tokens", "data.validation_tokens"];

/// The configuration with a value of the right type for every key.
fn full() -> Table {
    let mut config = RunConfig::default();
    config.model.keys = Keys::all();
    config.model.vocab = Some(1);
    config.model.embedding_dropout = Some(0.0);
    config.model.attention_dropout = Some(0.0);
    config.model.residual_dropout = Some(0.0);
    config.model.init = Some(String::new());
    config.model.trainable = vec![String::new()];
    config.model.frozen = vec![String::new()];
    config.data.text = vec![String::new()];
    config.data.extensions = vec![String::new()];
    config.data.plain = vec![String::new()];
    config.data.max_skipped = Some(0.0);
    config.data.tokens = Some(Path::new("").into());
    config.data.validation_tokens = Some(Path::new("").into());
    config.data.new_tokenizer = true;
    config.data.mask_token = Some(1);
    config.batch.micro = Some(1);
    config.parallel.ranks = Some(1);
    config.parallel.data = Some(1);
    config.parallel.micro_batches = Some(1);
    config.device.kernels = KernelChoice::named("portable").unwrap_or_default();
    config.device.communication = phalanx_train::config::Communication::Host;
    config.device.memory_mb = Some(1.0);
    config.device.slice_mb = Some(1.0);
    config.device.copy_gb_per_s = Some(1.0);
    config.device.seed = Some(1);
    config.memory.hidden_dim = Some(1);
    config.memory.nvme_path = Some(Path::new("").into());
    config.memory.pin_memory = Some(true);
    config.memory.limit_mb = Some(1.0);
    config.memory.placement = Some(Placement::Device);
    config.memory.shard_param_frac = Some(1.0);
    config.memory.offload_optim_frac = Some(1.0);
    config.memory.offload_param_frac = Some(1.0);
    config.memory.device_budget_mb = Some(1.0);
    config.memory.host_budget_mb = Some(1.0);
    config.memory.device_budget_filled_mb = Some(1.0);
    config.memory.host_budget_filled_mb = Some(1.0);
    config.precision.communicate = Some(Float::F32);
    config.optimizer.group =
        vec![ParameterGroup { parameters: vec![String::new()], lr: Some(1.0), weight_decay: Some(1.0) }];
    config.schedule.decay_steps = Some(1);
    config.schedule.restart_step = Some(1);
    config.train.threads = Some(1);
    Table::try_from(config).expect("a configuration is a table of tables")
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
    let full = full();
    let is_number = |(key, value): &(String, &Value)| {
        value.is_integer() || value.is_float() || WORD_OR_NUMBER.contains(&key.as_str())
    };
    flat(&full).filter(is_number).map(|(key, _)| key).collect()
}

/// Refuses unknown tables, unknown keys and values of the wrong type; `origin` names their source.
pub fn check(given: &Table, origin: &str) -> Result<()> {
    let full = full();
    for (name, value) in given {
        match (full.get(name), value.as_table()) {
            (Some(_), Some(_)) => {}
            (Some(_), None) => bail!("{origin}: {name} = {value}: expected a table, as [{name}]"),
            (None, Some(table)) if !table.is_empty() => {
                let key = table.keys().next().expect("not empty");
                return Err(unknown(&full, &format!("{name}.{key}"), origin));
            }
            (None, Some(_)) => {
                let near = nearest(name, full.keys().map(String::as_str));
                let meant = near.map_or_else(|| tables(&full), |near| format!("did you mean [{near}]?"));
                bail!("{origin}: unknown table [{name}]; {meant}");
            }
            (None, None) => return Err(unknown(&full, name, origin)),
        }
    }
    for (key, value) in flat(given) {
        check_value(&full, &key, value, origin)?;
    }
    Ok(())
}

/// Reads `table.key=value`. The value is TOML; text needs no quotes, and a single text is accepted for a list.
pub fn assignment(text: &str) -> Result<(String, Value)> {
    let Some((key, raw)) = text.split_once('=') else {
        bail!("--set {text}: expected TABLE.KEY=VALUE, as --set train.steps=200");
    };
    let (key, raw) = (key.trim(), raw.trim());
    let full = full();
    let Some(known) = lookup(&full, key) else { return Err(unknown(&full, key, "--set")) };
    let parsed = toml::from_str::<Table>(&format!("value = {raw}")).ok();
    let parsed = parsed.filter(|table| table.len() == 1).and_then(|mut table| table.remove("value"));
    let value = match (known, parsed) {
        (Value::String(_), Some(value)) if value.is_array() && TEXT_OR_LIST.contains(&key) => value,
        (Value::String(_), Some(value)) if !value.is_str() && !WORD_OR_NUMBER.contains(&key) => {
            Value::String(raw.into())
        }
        (Value::Array(_), Some(value)) if value.is_array() => value,
        (Value::Array(_), Some(Value::String(one))) => Value::Array(vec![Value::String(one)]),
        (Value::Array(_), _) => Value::Array(vec![Value::String(raw.into())]),
        (_, Some(value)) => value,
        (_, None) => Value::String(raw.into()),
    };
    check_value(&full, key, &value, "--set")?;
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

fn check_value(full: &Table, key: &str, value: &Value, origin: &str) -> Result<()> {
    let Some(known) = lookup(full, key) else { return Err(unknown(full, key, origin)) };
    let mut tried = full.clone();
    insert(&mut tried, key, value.clone());
    if RunConfig::deserialize(Value::Table(tried)).is_ok() {
        return Ok(());
    }
    if let (Some(keys), Some(tables)) = (keys_of_tables(known), tables_in(value)) {
        tables.into_iter().try_for_each(|given| check_table(key, keys, given, origin))?;
    }
    bail!("{origin}: {key} = {value}: expected {}", expected(key, known))
}

/// The keys of a list of tables, as `optimizer.group`.
fn keys_of_tables(known: &Value) -> Option<&Table> {
    known.as_array()?.first()?.as_table()
}

/// The tables of a list of nothing else.
fn tables_in(value: &Value) -> Option<Vec<&Table>> {
    value.as_array()?.iter().map(Value::as_table).collect()
}

/// Refuses unknown keys and values of the wrong type in one table of the list `key`.
fn check_table(key: &str, keys: &Table, given: &Table, origin: &str) -> Result<()> {
    for (name, value) in given {
        let known = keys.get(name);
        let is_right = match (known, value) {
            (Some(Value::Float(_)), Value::Integer(_)) => true,
            (Some(Value::Array(_)), Value::Array(texts)) => texts.iter().all(Value::is_str),
            (Some(known), value) => known.same_type(value),
            (None, _) => {
                let names: Vec<&str> = keys.keys().map(String::as_str).collect();
                let meant = nearest(name, names.iter().copied()).map_or_else(
                    || format!("its keys are {}", names.join(", ")),
                    |near| format!("did you mean {near}?"),
                );
                bail!("{origin}: unknown key {name} in [[{key}]]; {meant}");
            }
        };
        if let (Some(known), false) = (known, is_right) {
            bail!("{origin}: {key}.{name} = {value}: expected {}", expected("", known));
        }
    }
    Ok(())
}

/// Describes the values of a key.
fn expected(key: &str, known: &Value) -> String {
    match (key, known) {
        ("memory.chunk", _) => "\"auto\", \"none\" or a number of MiB".to_string(),
        ("memory.checkpointing", _) => {
            "\"none\", \"selective\", \"block\", or k for every k-th block".to_string()
        }
        (key, _) if TEXT_OR_LIST.contains(&key) => {
            "a path in quotes, or a list of paths, as [\"/mnt/a\", \"/mnt/b\"]".to_string()
        }
        ("train.keep", _) => "a number of checkpoints, or \"all\"".to_string(),
        ("parallel.zero", _) => "a ZeRO stage: 0, 1, 2 or 3".to_string(),
        (_, Value::String(_)) => match choices::of(key) {
            Some(choices) => choices::list(choices),
            None => "text in quotes".to_string(),
        },
        (_, Value::Integer(_)) => "a whole number, 0 or more".to_string(),
        (_, Value::Float(_)) => "a number".to_string(),
        (_, Value::Boolean(_)) => "true or false".to_string(),
        (key, known) if keys_of_tables(known).is_some() => {
            format!("a list of tables, each with a line [[{key}]] of its own")
        }
        ("model.rope_scaling", _) => "a table, as { rope_type = \"linear\", factor = 4.0 }".to_string(),
        _ => "a list of texts, as [\"a.txt\", \"b.txt\"]".to_string(),
    }
}

fn unknown(full: &Table, key: &str, origin: &str) -> anyhow::Error {
    let keys: Vec<String> = flat(full).map(|(key, _)| key).collect();
    let same_leaf = |name: &&String| leaf(name) == leaf(key);
    let near = match keys.iter().find(same_leaf) {
        Some(name) => Some(name.as_str()),
        None => match foreign_keys::explain(key) {
            Some(explained) => return anyhow::anyhow!("{origin}: unknown key {key}; {explained}"),
            None => nearest(key, keys.iter().map(String::as_str)),
        },
    };
    let table = key.split_once('.').and_then(|(table, _)| full.get_key_value(table));
    let meant = match (near, table) {
        (Some(near), _) => {
            let (table, leaf) = near.split_once('.').unwrap_or(("", near));
            format!("did you mean {leaf} in table [{table}] ({near})?")
        }
        (None, Some((name, Value::Table(table)))) => {
            let keys: Vec<&str> = table.keys().map(String::as_str).collect();
            format!("the keys of [{name}] are {}", keys.join(", "))
        }
        (None, _) => tables(full),
    };
    anyhow::anyhow!("{origin}: unknown key {key}; {meant}")
}

/// Names the tables, for a name that is like no other.
fn tables(full: &Table) -> String {
    let names: Vec<String> = full.keys().map(|name| format!("[{name}]")).collect();
    format!("the tables are {}, and docs/configuration.md lists their keys", names.join(", "))
}

/// The name without its table.
fn leaf(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// The known name that was most likely meant: the same name but for a third of its letters at most, or a longer or
/// shorter form of it. Tables count for nothing.
fn nearest<'a>(given: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let given = leaf(given);
    let edits = |name: &'a str| {
        let other = leaf(name);
        let (shorter, longer) = if other.len() < given.len() { (other, given) } else { (given, other) };
        let edits = levenshtein(given, other);
        let is_form = shorter.len() >= 4 && longer.split('_').any(|word| word == shorter);
        let is_near = edits <= (longer.len() / 3).max(1) && shorter.len() > 1;
        (is_form || is_near).then_some((edits, name))
    };
    known.filter_map(edits).min_by_key(|(edits, _)| *edits).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn refusal(text: &str) -> String {
        check(&toml::from_str(text).unwrap(), "a.toml").unwrap_err().to_string()
    }

    /// The error for an unknown key says that docs/configuration.md lists all of them.
    #[test]
    fn the_documentation_has_every_key_and_no_other() {
        let page = include_str!("../../../docs/configuration.md");
        let (mut in_block, mut table, mut documented) = (false, String::new(), BTreeSet::new());
        for line in page.lines() {
            if line.starts_with("```") {
                (in_block, table) = (line == "```toml", String::new());
            } else if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
                table = name.0.to_string();
            } else if let Some((key, _)) = line.trim_start_matches(['#', ' ']).split_once(" = ")
                && in_block
                && key.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
            {
                documented.insert(format!("{table}.{key}"));
            }
        }
        let known: BTreeSet<String> = flat(&full()).map(|(key, _)| key).collect();
        let missing: Vec<_> = known.difference(&documented).collect();
        assert!(missing.is_empty(), "docs/configuration.md lacks {missing:?}");
        let tables = full();
        let of_ours =
            |key: &&String| key.split_once('.').is_some_and(|(table, _)| tables.contains_key(table));
        let unknown: Vec<_> = documented.difference(&known).filter(of_ours).collect();
        assert!(unknown.is_empty(), "docs/configuration.md has {unknown:?}, which no configuration takes");
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
            ("[train]\nwarmup_ratio = 0.1", "here it is schedule.warmup (counted in steps"),
            // A key of this program in another table is a key of this program.
            ("[train]\nweight_decay = 0.1", "did you mean weight_decay in table [optimizer]"),
        ] {
            assert!(refusal(text).contains(words), "{text}: {}", refusal(text));
        }
        let text = assignment("n_head=4").unwrap_err().to_string();
        assert!(text.contains("here it is model.heads"), "{text}");
    }

    #[test]
    fn every_foreign_name_leads_to_a_key_and_none_is_a_key_here() {
        let full = full();
        let keys: Vec<String> = flat(&full).map(|(key, _)| key).collect();
        for (name, own) in foreign_keys::names() {
            let is_key = own.starts_with("--") || keys.iter().any(|key| key == own);
            assert!(is_key, "{name} -> {own}");
            assert!(!keys.iter().any(|key| leaf(key) == leaf(name)), "{name} would never be explained");
            assert_eq!(foreign_keys::names().filter(|(other, _)| *other == name).count(), 1, "{name}");
        }
    }

    #[test]
    fn a_name_that_is_like_no_other_is_told_what_there_is() {
        for (text, words, without) in [
            ("[model]\nqqzz = 1", "the keys of [model] are arch, ", "did you mean"),
            ("flash = true", "the tables are [batch], ", "did you mean"),
            ("[wandb]\nproject = \"x\"", "the tables are [batch], ", "did you mean"),
            ("[wandb]", "the tables are [batch], ", "did you mean"),
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
