//! `[metrics]`: the files of a run that have its metrics.

use super::declare::Conversion::Words;
use super::declare::{AXOLOTL, DEEPSPEED, KEY, Kind, Resume, TORCHTITAN};
use super::key_types::KeyType;

words! {
    /// Files of metrics in a run folder.
    MetricsSink {
        /// `metrics.jsonl`, a JSON object a line. Every run writes it, also where it is not named: a resumed run and the report at the end read
        /// it.
        JsonLines = "jsonl",
        /// `metrics.csv`, a row for each line of `metrics.jsonl`, with a column for each number.
        Csv = "csv",
        /// `tensorboard/`, an event file with each number as a scalar and the configuration as text. `tensorboard --logdir` shows it.
        TensorBoard = "tensorboard",
    }
}

impl KeyType for Vec<MetricsSink> {
    const KIND: Kind = match MetricsSink::KIND {
        Kind::Words(words) => Kind::WordList(words),
        _ => panic!("a choice of words"),
    };
}

/// A flag of other programs for event files.
const EVENTS: &[(&str, &str)] = &[("true", "tensorboard"), ("false", "jsonl")];

table! {
    /// `[metrics]`
    "metrics" MetricsConfig {
        /// Files that get the metrics of a run. docs/runs.md has their names and units. A resumed run makes those beside `metrics.jsonl` anew
        /// from its lines, so a sink that is added later has all steps.
        sinks: Vec<MetricsSink> = vec![MetricsSink::JsonLines], KEY.resume(Resume::Unsaid)
            .foreign(&[
                (DEEPSPEED, "tensorboard.enabled", Words(EVENTS), ""),
                (TORCHTITAN, "metrics.enable_tensorboard", Words(EVENTS), ""),
                (AXOLOTL, "use_tensorboard", Words(EVENTS), ""),
            ]);
    }
}
