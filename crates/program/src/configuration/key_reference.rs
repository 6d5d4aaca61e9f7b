//! All that is known of keys of the configuration, from their declarations: as `phalanx keys` prints it, and as docs/configuration.md has it.

use phalanx_models::Arch;
use phalanx_train::RunConfig;
use phalanx_train::config::{Key, Kind, Need, Resume};
use toml::Table;

use crate::configuration::keys;

/// Lines above the keys on the page.
const HEAD: &str = "\
# Configuration

A configuration is a TOML file; `examples/` has complete ones. A key that is left out has its default. `--set TABLE.KEY=VALUE` replaces a key on
the command line, and `--unset TABLE.KEY` leaves one out. An unknown key is an error that suggests a key of similar spelling, or the key that stands
for a name of nanoGPT, DeepSpeed, Hugging Face or Megatron (`block_size` is `model.seq`); all that is wrong is said at once, each with its line.
`phalanx keys memory.checkpointing` prints what this page says of a key, and `phalanx keys --schema` a JSON schema with which editors check and
complete a configuration. [data.md](data.md) says how text and token files are read, [models.md](models.md) what each architecture computes.

This page is printed by `phalanx keys --markdown` from the declarations of the keys.
";

/// The page with all of `keys`, in Markdown.
pub fn markdown(keys: &[Key]) -> String {
    let (mut text, mut table) = (HEAD.to_string(), "");
    for key in keys {
        if key.table != table {
            table = key.table;
            text += &format!("\n## [{table}]\n");
        }
        text += &format!("\n### `{}`\n\n{}\n\n", key.path(), help(key));
        facts(key).iter().for_each(|fact| text += &fact.lines("- "));
    }
    text
}

/// All that is known of a key, as text.
pub fn page(key: &Key) -> String {
    let facts: String = facts(key).iter().map(|fact| fact.lines("  ")).collect();
    format!("{}\n  {}\n{facts}", key.path(), help(key))
}

/// `table.name = default`, and what it says.
pub fn line(key: &Key) -> String {
    let given = default(key).map_or(String::new(), |value| format!(" = {value}"));
    let help = help(key);
    let first = help.split_inclusive(". ").next().unwrap_or_default().trim();
    format!("{:<34} {first}\n", format!("{}{given}", key.path()))
}

/// Help text of a key. That of a key of architectures names those that have it, and its names in their files.
pub fn help(key: &Key) -> String {
    let text = joined(key.help);
    let having: Vec<Arch> =
        Arch::all().filter(|arch| arch.keys.iter().any(|own| own.name == key.name)).collect();
    if key.table != "model" || having.is_empty() {
        return text;
    }
    let mut files: Vec<String> =
        having.iter().map(|arch| format!("`{}`", arch.file_name(key.name))).collect();
    files.sort_unstable();
    files.dedup();
    let of = match having.len() == Arch::all().count() {
        true => "all".to_string(),
        false => having.iter().map(|arch| arch.name).collect::<Vec<_>>().join(", "),
    };
    format!("{text} Of {of}; {} in config.json.", files.join(", "))
}

/// The lines of help text as one.
pub fn joined(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

/// The value of a key that is left out, where the configuration has one.
fn default(key: &Key) -> Option<toml::Value> {
    let defaults = Table::try_from(RunConfig::default()).expect("a configuration is a table of tables");
    keys::lookup(&defaults, &key.path()).cloned()
}

/// One thing that is known of a key, with its parts.
struct Fact {
    text: String,
    parts: Vec<String>,
}

impl Fact {
    fn of(text: String) -> Fact {
        Fact { text, parts: Vec::new() }
    }

    /// It, and each of its parts, behind `mark`.
    fn lines(&self, mark: &str) -> String {
        let parts: String = self.parts.iter().map(|part| format!("  {mark}{part}\n")).collect();
        format!("{mark}{}\n{parts}", self.text)
    }
}

fn facts(key: &Key) -> Vec<Fact> {
    let parts = match key.kind {
        Kind::Words(words) | Kind::WordList(words) => {
            words.iter().map(|(word, help)| format!("{word:?}: {}", joined(help))).collect()
        }
        Kind::Tables(keys) => {
            let part = |key: &Key| format!("{}: {} Values: {}.", key.name, help(key), key.expected());
            keys.iter().map(part).collect()
        }
        _ => Vec::new(),
    };
    let default = default(key);
    let has_default = default.is_some();
    let default = default.map_or("left out by default".to_string(), |value| format!("default: {value}"));
    let mut facts = vec![Fact { text: format!("values: {}", key.expected()), parts }, Fact::of(default)];
    facts.extend(key.needs.iter().map(|own| Fact::of(need(own, has_default))));
    let either = keys::either(&key.path());
    facts.extend(either.map(|other| Fact::of(format!("says the same as {other}: the later given counts"))));
    facts.extend(resume(key).map(|said| Fact::of(format!("on a resume: {said}"))));
    if !key.foreign.is_empty() {
        let name = |(program, name, _, note): &(&str, &str, _, &str)| match note.is_empty() {
            true => format!("{program} `{name}`"),
            false => format!("{program} `{name}` ({note})"),
        };
        facts.push(Fact::of(format!(
            "elsewhere: {}",
            key.foreign.iter().map(name).collect::<Vec<_>>().join(", ")
        )));
    }
    facts
}

/// `"nvme" needs memory.nvme_path: a folder on a local disk`
fn need(need: &Need, has_default: bool) -> String {
    let (of, needs) = (need.values(), need.describe());
    let of = match of.is_empty() {
        true if has_default && needs.starts_with("needs") => "any other ".to_string(),
        true => of,
        false => format!("{of} "),
    };
    format!("{of}{needs}{}", need.reason())
}

/// Effect of another value on a resumed run; `None` where there is nothing to say.
fn resume(key: &Key) -> Option<String> {
    let words = match key.resume {
        Resume::Said("") | Resume::Unsaid => "",
        Resume::Said(follows) => follows,
        Resume::Free => "gives way to what it contradicts",
        Resume::Data => "another value means other data",
        Resume::Fixed(why) => &format!("stays, because {why}"),
    };
    let keeps = if key.keeps { "what the program has decided stays" } else { "" };
    let unset = match key.unset_by {
        "" => String::new(),
        other => format!("left out with another {other}"),
    };
    let parts = [words, keeps, &unset].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>();
    (!parts.is_empty()).then(|| parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `phalanx keys --markdown > docs/configuration.md`
    #[test]
    fn the_page_is_the_one_in_docs() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/configuration.md");
        let (page, docs) = (markdown(&RunConfig::keys()), std::fs::read_to_string(path).unwrap());
        let differing = docs.lines().zip(page.lines()).find(|(has, is)| has != is);
        assert!(docs == page, "{path} is not what phalanx keys --markdown prints: {differing:?}");
    }

    #[test]
    fn every_key_says_what_it_is_for() {
        for key in RunConfig::keys() {
            let page = page(&key);
            let said = ["values: ", "default"].iter().all(|words| page.contains(words));
            assert!(said && !key.help.concat().is_empty() && !help(&key).is_empty(), "{page}");
        }
        let page = |path| page(keys::find(path).unwrap());
        assert!(
            page("memory.gradients").contains("\"nvme\" needs memory.nvme_path: a folder on a local disk")
        );
        assert!(page("model.kv_heads").contains("num_key_value_heads"));
        assert!(
            page("train.seed").contains("on a resume: the samples that are left of this epoch are others")
        );
    }
}
