//! Names by which other programs call what the configuration has, and where it is here.

use phalanx_models::Keys;
use phalanx_train::RunConfig;
use phalanx_train::config::declare::Conversion::{Rule, Same};
use phalanx_train::config::declare::{Foreign, HUGGING_FACE, MEGATRON, NANOGPT};

/// Note on names of `model.positions`: the difference from `model.seq`.
const POSITIONS: &str = "model.seq is the length of training sequences";

/// Names of options, and of keys that architectures read, beside those of their files.
const OTHERS: [(&str, Foreign); 10] = [
    ("model.layers", (NANOGPT, "n_layer", Same, "")),
    ("model.layers", (MEGATRON, "num_layers", Rule, "")),
    ("model.heads", (NANOGPT, "n_head", Same, "")),
    ("model.hidden", (NANOGPT, "n_embd", Same, "")),
    ("model.positions", (HUGGING_FACE, "max_position_embeddings", Rule, POSITIONS)),
    ("model.positions", (HUGGING_FACE, "n_positions", Rule, POSITIONS)),
    ("model.rope_scaling", (HUGGING_FACE, "rope_parameters", Rule, "with rope_theta in model.rope_theta")),
    ("--run", (NANOGPT, "out_dir", Rule, "an option of the command line")),
    ("--run", (HUGGING_FACE, "output_dir", Rule, "an option of the command line")),
    ("--resume", (HUGGING_FACE, "resume_from_checkpoint", Rule, "an option of the command line")),
];

/// All names that are known, with the key here.
pub fn names() -> impl Iterator<Item = (String, Foreign)> {
    let declared = RunConfig::keys().into_iter();
    let declared = declared.flat_map(|key| key.foreign.iter().map(move |foreign| (key.path(), *foreign)));
    let others = OTHERS.iter().map(|(key, foreign)| (key.to_string(), *foreign));
    let of_files = Keys::known().filter(|key| key.name != key.file);
    declared
        .chain(others)
        .chain(of_files.map(|key| (format!("model.{}", key.name), (HUGGING_FACE, key.file, Rule, ""))))
}

/// Explains a name that another program uses: `block_size is nanoGPT's name; here it is model.seq`. A name in a table is written
/// `table.key`.
pub fn explain(given: &str) -> Option<String> {
    let normal = given.trim_start_matches('-').replace('-', "_").to_lowercase();
    let leaf = normal.rsplit('.').next()?;
    // The whole name first: `fp16.enabled` is more than `enabled`.
    let known = |name: &str| names().find(|(_, (_, foreign, ..))| *foreign == name);
    let (own, (program, name, _, note)) = known(&normal).or_else(|| known(leaf))?;
    let note = if note.is_empty() { String::new() } else { format!(" ({note})") };
    Some(format!("{name} is {program} name; here it is {own}{note}"))
}
