//! The model card of an exported folder: what the model was trained from, on what, and how.

use std::path::Path;

use phalanx_checkpoint::{Checkpoint, FolderNames};
use serde_json::Value;

/// Its name.
pub const CARD: &str = "README.md";

/// What the folder holds.
#[derive(Clone, Copy, PartialEq)]
pub enum CardOf {
    /// A whole model.
    Model,
    /// An adapter, in PEFT's files.
    Adapter,
}

/// The card, unless the folder has a file of this name, which stays.
pub fn card(
    of: CardOf,
    checkpoint: &Checkpoint,
    out: &Path,
    found: &FolderNames,
) -> Option<(String, String)> {
    let is_free = !found.others.iter().any(|name| name == CARD);
    is_free.then(|| (CARD.to_string(), text(of, checkpoint, out)))
}

fn text(of: CardOf, checkpoint: &Checkpoint, out: &Path) -> String {
    let config = &checkpoint.state()["config"];
    let given = |table: &str, key: &str| config.get(table)?.get(key).filter(|value| !value.is_null());
    let shown = |table: &str, key: &str| given(table, key).map_or(String::new(), plain);
    let name =
        |path: &Path| path.file_name().map_or(String::new(), |name| name.to_string_lossy().into_owned());
    let (library, what) = match of {
        CardOf::Model => ("transformers", "model"),
        CardOf::Adapter => ("peft", "adapter"),
    };
    let base = given("model", "init").and_then(Value::as_str);
    let base = base.map_or("initial values".to_string(), |init| name(Path::new(init)));
    let data: Vec<String> = ["chat", "pairs", "rows", "text", "tokens"]
        .into_iter()
        .filter_map(|key| Some(format!("{}: {}", key, file_names(given("data", key)?)?)))
        .collect();
    let mut rows = vec![
        ("started from", base),
        ("data", data.join("; ")),
        ("steps", checkpoint.step().to_string()),
        ("sequences a step", format!("{} of {} tokens", shown("batch", "global"), shown("model", "seq"))),
        ("optimizer", format!("{}, learning rate {}", shown("optimizer", "kind"), shown("optimizer", "lr"))),
        ("computed in", shown("precision", "compute")),
    ];
    if given("data", "pairs").is_some() {
        let (kind, beta) = (shown("preference", "kind"), shown("preference", "beta"));
        rows.push(("loss of preferences", format!("{kind}, beta {beta}")));
    }
    if given("lora", "rank").is_some() {
        let base = shown("lora", "base");
        rows.push(("adapters", format!("rank {}, over weights in {base}", shown("lora", "rank"))));
    }
    let rows: String = rows.into_iter().map(|(key, value)| format!("| {key} | {value} |\n")).collect();
    format!(
        "---\nlibrary_name: {library}\ntags:\n- phalanx\n---\n\n# {}\n\nA {what} that was trained with Phalanx {}.\n\n\
         | | |\n|---|---|\n{rows}",
        name(out),
        env!("CARGO_PKG_VERSION")
    )
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}

/// The names of files, without their folders; None for an empty list.
fn file_names(paths: &Value) -> Option<String> {
    let all: Vec<&str> = match paths {
        Value::Array(several) => several.iter().filter_map(Value::as_str).collect(),
        one => one.as_str().into_iter().collect(),
    };
    let name = |path: &&str| Path::new(path).file_name().map(|name| name.to_string_lossy().into_owned());
    let names: Vec<String> = all.iter().filter_map(name).collect();
    (!names.is_empty()).then(|| names.join(", "))
}
