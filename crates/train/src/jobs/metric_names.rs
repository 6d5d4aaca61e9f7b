//! The names of metrics, with their units. docs/runs.md has them, too.
//!
//! In `metrics.jsonl`, a line of an evaluation has its names without `val_`, but for `val_loss`, by which it is known.

/// A number of a step or an evaluation, besides `step`, `time_s` and `elapsed_s`, which all lines have.
pub struct Metric {
    /// Its name.
    pub name: &'static str,
    /// Its unit; "" for a number without one.
    pub unit: &'static str,
    /// What it is.
    pub help: &'static str,
}

const fn metric(name: &'static str, unit: &'static str, help: &'static str) -> Metric {
    Metric { name, unit, help }
}

/// All names, those of a step before those of an evaluation.
pub const METRICS: &[Metric] = &[
    metric("loss", "nats per target", "mean loss over the targets of the global batch, before the update"),
    metric("targets", "targets", "number of targets of the step, where samples leave some out"),
    metric("grad_norm", "", "global norm of the gradient before clipping"),
    metric("loss_scale", "", "loss scale of the step (f16)"),
    metric(
        "skipped",
        "",
        "1 (true) if the step was not applied: its gradients overflowed, or its batch had no target",
    ),
    metric("lr", "", "learning rate of the step"),
    metric("tokens", "tokens", "tokens of the run so far"),
    metric("step_s", "seconds", "time of the step"),
    metric("tokens_per_s", "tokens per second", "tokens of the step over its time"),
    metric(
        "mfu",
        "share of the peak",
        "model FLOPs utilisation: products of the model over the peak of all ranks",
    ),
    metric("hfu", "share of the peak", "hardware FLOPs utilisation, with products that were computed again"),
    metric("comm_bytes", "bytes", "sent by rank 0 in the step"),
    metric("exposed_comm_s", "seconds", "in which rank 0 waited for communication"),
    metric("staleness", "updates", "mean age of the parameters of gradients, with asynchronous updates"),
    metric("staleness_max", "updates", "largest such age"),
    metric("waited_s", "seconds", "in which rank 0 waited for servers, with asynchronous updates"),
    metric("reward_chosen", "nats", "mean reward of the chosen answers of pairs"),
    metric("reward_rejected", "nats", "mean reward of the rejected answers"),
    metric("reward_margin", "nats", "the first minus the second"),
    metric("reward_accuracy", "share of pairs", "pairs whose chosen answer has the larger reward"),
    metric("val_loss", "nats per target", "mean loss over the targets of the held-out windows"),
    metric("val_accuracy", "share of windows", "windows whose class was right, of a model with classes"),
    metric("val_f1_macro", "", "mean F1 of its classes"),
    metric("val_f1", "", "F1 of the second of two classes"),
    metric("val_reward_chosen", "nats", "as `reward_chosen`, of the held-out pairs"),
    metric("val_reward_rejected", "nats", "as `reward_rejected`, of the held-out pairs"),
    metric("val_reward_margin", "nats", "as `reward_margin`, of the held-out pairs"),
    metric("val_reward_accuracy", "share of pairs", "as `reward_accuracy`, of the held-out pairs"),
];

/// The metrics of a line of `metrics.jsonl`, each with its name there.
pub fn names_in(is_evaluation: bool) -> impl Iterator<Item = (&'static Metric, &'static str)> {
    METRICS.iter().filter_map(move |metric| match metric.name.strip_prefix("val_") {
        Some("loss") => is_evaluation.then_some((metric, metric.name)),
        Some(name) => is_evaluation.then_some((metric, name)),
        None => (!is_evaluation).then_some((metric, metric.name)),
    })
}

#[cfg(test)]
mod tests {
    use super::METRICS;

    #[test]
    fn the_table_in_docs_has_all() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/runs.md");
        let docs = std::fs::read_to_string(path).unwrap();
        let row =
            |metric: &super::Metric| format!("| `{}` | {} | {} |", metric.name, metric.unit, metric.help);
        let table: Vec<String> = METRICS.iter().map(row).collect();
        assert!(docs.contains(&table.join("\n")), "expected in {path}:\n{}", table.join("\n"));
    }
}
