//! `plan --explain`: the formulas that people quote beside the exact figures of a plan, and what each difference is.

use phalanx_layers::Checkpointing;
use phalanx_plan::trace::Category;

use crate::plans::deepspeed_estimate::Estimate;
use crate::plans::formulas::{Recomputed, Sizes};
use crate::plans::planned::Planned;
use phalanx_drawing::report::{Table, bytes, count};

/// The formulas beside the plan of the rank with the largest peak.
pub fn to_text(planned: &Planned) -> String {
    let (plan, spec) = (&planned.plan, &planned.plan.spec);
    let whole = spec.model.whole();
    let definition = &spec.model.definition;
    let sizes = Sizes {
        layers: whole.layers() as f64,
        hidden: whole.width() as f64,
        heads: definition.attention().map_or(0.0, |heads| heads.heads as f64),
        vocab: definition.vocab() as f64,
        seq: spec.batch.seq as f64,
        sequences: spec.batch.micro_batch_size as f64,
        tensor: spec.mesh.axes.tensor as f64,
    };
    let Some(rank) = plan.ranks.iter().max_by_key(|rank| rank.memory.arena_bytes) else {
        return String::new();
    };
    let peak = rank.peak().categories;
    let mut table = Table::new(&["formula", "bytes or operations", "plan", "difference"]);
    let mut row = |formula: &str, theirs: f64, ours: f64, is_bytes: bool, why: &str| {
        let shown = |value: f64| if is_bytes { bytes(value as u64) } else { count(value) };
        let percent = if theirs > 0.0 { 100.0 * (ours / theirs - 1.0) } else { 0.0 };
        table.row([formula.to_string(), shown(theirs), shown(ours), format!("{percent:+.1} %: {why}")]);
    };
    row(
        "parameters in f32, 4nh(13+12h)",
        sizes.parameters_f32(),
        4.0 * plan.parameters() as f64,
        true,
        "embeddings, and blocks of another form than GPT's",
    );
    let zero = format!("ZeRO-{}, model states of a rank", spec.zero.stage.number());
    let (book, states) =
        (&plan.textbook.state, [Category::Parameters, Category::Gradients, Category::Optimizer]);
    let ours: u64 = states.iter().map(|category| peak.get(*category)).sum();
    row(&zero, book.total() as f64, ours as f64, true, states_why(planned));
    let stages = (spec.mesh.axes.pipeline as f64).max(1.0);
    let activations = peak.get(Category::Activations) as f64;
    row(
        "activations in f32, nblh(67+9ml/h)",
        sizes.activations_f32() / stages,
        activations,
        true,
        "attention here keeps no matrix of l x l; types, what is recomputed, and micro-batches in flight",
    );
    let (recomputed, name) = match spec.model.checkpointing {
        Checkpointing::None => (Recomputed::Nothing, "none"),
        Checkpointing::Selective => (Recomputed::Selective, "selective"),
        _ => (Recomputed::All, "full"),
    };
    let korthikanti =
        sizes.layers / stages * sizes.activations_of_layer(spec.mesh.sequence_parallel, recomputed);
    row(
        &format!("activations, Korthikanti, {name} recomputed"),
        korthikanti,
        activations,
        true,
        "no dropout masks, no matrix of scores; logits and the block that is computed come on top, and micro-batches in flight",
    );
    let batch = (spec.tokens_per_step() / spec.batch.seq.max(1) as u64) as f64;
    row(
        "operations, 72BLsh^2(1+s/6h+V/12hL)",
        sizes.model_flops(batch),
        plan.model_flops_per_step() as f64,
        false,
        "widths of the MLP, heads of keys, causal halves of attention",
    );
    let theirs = Estimate::of(planned).map_or(String::new(), |estimate| format!("\n{}", estimate.to_text()));
    format!("\nFormulas that are quoted, beside rank {}\n{table}{theirs}", rank.rank)
}

/// Names what makes model states differ from the formula.
fn states_why(planned: &Planned) -> &'static str {
    let spec = &planned.plan.spec;
    match () {
        () if planned.config.memory.placement.is_some() => {
            "parts that lie in other memories, padding of chunks"
        }
        () if spec.mesh.axes.pipeline > 1 => {
            "padding of chunks, uneven stages, and gradients that wait for the last micro-batch"
        }
        () if spec.batch.micro_batches > 1 => {
            "padding of chunks, and gradients that are reduced once in a step"
        }
        () => "padding of chunks, parameters that all ranks hold",
    }
}
