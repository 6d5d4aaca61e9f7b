//! `[optimizer]` and `[schedule]`: what an update does, and at which rate.

use super::ParameterGroup;
use super::bounds::{BELOW_1, MAX_STEPS};
use super::declare::Conversion::{Rule, Same};
use super::declare::Resume::{Fixed, Unsaid};
use super::declare::{AXOLOTL, DEEPSPEED, HUGGING_FACE, KEY, MEGATRON, NANOGPT, TORCHTITAN};
use super::needs::{Need, SET};

const OF_DECAY: Need = Need::is_for(
    &[("schedule.kind", &["cosine", "linear", "cosine_with_restarts", "polynomial", "wsd"])],
    "",
);
const OF_WSD: Need = Need::is_for(&[("schedule.kind", &["wsd"])], "");

table! {
    /// `[optimizer]`
    "optimizer" OptimizerConfig {
        /// The rule by which parameters are updated.
        kind: OptimizerKind = OptimizerKind::Adamw, KEY.resume(Fixed("its checkpoints have the states of this optimizer"))
            .needs(&[Need::of(&["lion", "adafactor"], &[("device.kind", &["auto", "cpu", "simulated"]), ("memory.update", &["host"])], "the host processor computes it")])
            .foreign(&[
                (HUGGING_FACE, "optim", Rule, ""),
                (TORCHTITAN, "optimizer.name", Rule, ""),
                (DEEPSPEED, "optimizer.type", Rule, ""),
            ]);
        /// Peak learning rate.
        lr: f64 = 6e-4, KEY.from(0.0, f64::MAX)
            .foreign(&[
                (NANOGPT, "learning_rate", Same, ""),
                (HUGGING_FACE, "learning_rate", Same, ""),
                (TORCHTITAN, "optimizer.lr", Same, ""),
                (DEEPSPEED, "optimizer.params.lr", Rule, ""),
            ]);
        /// AdamW: decay of the first moment. SGD: momentum. Lion: share of the momentum in an update.
        beta1: f64 = 0.9, KEY.from(0.0, BELOW_1).needs(&[Need::is_for(&[("optimizer.kind", &["adamw", "sgd", "lion"])], "")])
            .foreign(&[
                (HUGGING_FACE, "adam_beta1", Same, ""),
                (NANOGPT, "beta1", Same, ""),
                (TORCHTITAN, "optimizer.beta1", Same, ""),
                (DEEPSPEED, "optimizer.params.betas", Rule, "the first of the two"),
            ]);
        /// AdamW: decay of the second moment. Lion: decay of the momentum (0.99 in its paper, 0.98 for language models).
        beta2: f64 = 0.95, KEY.from(0.0, BELOW_1).needs(&[Need::is_for(&[("optimizer.kind", &["adamw", "lion"])], "")]).foreign(&[
                (HUGGING_FACE, "adam_beta2", Same, ""),
                (NANOGPT, "beta2", Same, ""),
                (TORCHTITAN, "optimizer.beta2", Same, ""),
            ]);
        /// AdamW: added to the root of the second moment.
        eps: f64 = 1e-8, KEY.from(0.0, 1.0).needs(&[Need::is_for(&[("optimizer.kind", &["adamw"])], "")])
            .foreign(&[
                (HUGGING_FACE, "adam_epsilon", Same, ""),
                (TORCHTITAN, "optimizer.eps", Same, ""),
                (DEEPSPEED, "optimizer.params.eps", Rule, ""),
            ]);
        /// Weight decay of matrices; biases and norms have none.
        weight_decay: f64 = 0.1, KEY.from(0.0, f64::MAX)
            .foreign(&[
                (DEEPSPEED, "optimizer.params.weight_decay", Rule, "biases and norms have none here"),
                (NANOGPT, "weight_decay", Same, ""),
                (HUGGING_FACE, "weight_decay", Same, ""),
                (TORCHTITAN, "optimizer.weight_decay", Same, "biases and norms have none here"),
            ]);
        /// Gradients are clipped to this global norm; 0 disables clipping.
        clip: f64 = 1.0, KEY.from(0.0, f64::MAX)
            .foreign(&[
                (NANOGPT, "grad_clip", Same, ""), (TORCHTITAN, "training.max_norm", Same, ""),
                (DEEPSPEED, "gradient_clipping", Same, ""),
                (HUGGING_FACE, "max_grad_norm", Same, ""),
                (MEGATRON, "clip_grad", Rule, ""),
            ]);
        /// Parameters with another learning rate or weight decay; the first group that matches a parameter has it.
        group: Vec<ParameterGroup> = Vec::new(), KEY;
    }
}

words! {
    /// The optimizers.
    OptimizerKind {
        /// AdamW.
        Adamw = "adamw",
        /// SGD with momentum.
        Sgd = "sgd",
        /// Lion: the sign of a momentum; one state for each element. Its rate is a third to a tenth of AdamW's. The host processor computes
        /// it: on cards, set `memory.update = "host"`.
        Lion = "lion",
        /// Adafactor as transformers' Trainer runs it: a state for each row and each column of a matrix. It needs whole parameters, so not
        /// `parallel.tensor`. The host processor computes it: on cards, set `memory.update = "host"`.
        Adafactor = "adafactor",
    }
}

table! {
    /// `[schedule]`
    "schedule" ScheduleConfig {
        /// How the rate falls behind the warm-up.
        kind: ScheduleKind = ScheduleKind::Cosine, KEY
            .foreign(&[
                (NANOGPT, "decay_lr", Rule, "\"constant\" does not decay"),
                (DEEPSPEED, "scheduler.type", Rule, ""),
                (HUGGING_FACE, "lr_scheduler_type", Rule, ""),
                (AXOLOTL, "lr_scheduler", Rule, ""),
                (TORCHTITAN, "lr_scheduler.decay_type", Rule, ""),
                (MEGATRON, "lr_decay_style", Rule, ""),
            ]);
        /// Steps of warm-up. Steps that f16 skips count neither for it nor for the decay.
        warmup: u64 = 0, KEY.from(0.0, MAX_STEPS)
            .foreign(&[
                (NANOGPT, "warmup_iters", Same, ""), (TORCHTITAN, "lr_scheduler.warmup_steps", Same, ""),
                (DEEPSPEED, "scheduler.params.warmup_num_steps", Rule, ""),
                (HUGGING_FACE, "warmup_steps", Same, ""),
                (MEGATRON, "lr_warmup_iters", Rule, ""),
            ]);
        /// The same as a share of the steps of the decay, rounded up. The run records `schedule.warmup`.
        warmup_share: Option<f64> = None, KEY.quiet().either("schedule.warmup").from(0.0, 1.0).resume(Unsaid)
            .foreign(&[(HUGGING_FACE, "warmup_ratio", Rule, "")]);
        /// Rate during the warm-up, as a share of `optimizer.lr`, at step k from 0.
        warmup_shape: WarmupShape = WarmupShape::Linear, KEY.quiet().needs(&[Need::is_for(&[("schedule.warmup", &["1.."]), ("schedule.warmup_share", SET)], "")])
            .foreign(&[(DEEPSPEED, "scheduler.params.warmup_type", Rule, "\"deepspeed-log\" for \"log\"")]);
        /// Learning rate at the end of a decay.
        min_lr: f64 = 0.0, KEY.from(0.0, f64::MAX)
            .foreign(&[
                (NANOGPT, "min_lr", Same, ""),
                (TORCHTITAN, "lr_scheduler.min_lr_factor", Rule, "the rate itself, not a share of the highest"),
                (DEEPSPEED, "scheduler.params.cos_min_ratio", Rule, "the rate itself, not a share of the highest"),
            ]);
        /// Step at which a decay reaches `min_lr`, where the rate stays (nanoGPT's `lr_decay_iters`);
        /// `train.steps` when left out. A resumed run keeps it.
        decay_steps: Option<u64> = None, KEY.from(1.0, u64::MAX as f64).resume(Unsaid)
            .foreign(&[(NANOGPT, "lr_decay_iters", Same, ""), (DEEPSPEED, "scheduler.params.total_num_steps", Rule, "")])
            .needs(&[OF_DECAY]);
        /// Step after which a decay begins again, warm-up included (a warm restart); `decay_steps` counts
        /// from there. None when left out.
        restart_step: Option<u64> = None, KEY.from(1.0, u64::MAX as f64).resume(Unsaid)
            .needs(&[OF_DECAY]);
        /// Cosines of `cosine_with_restarts`.
        cycles: u64 = 1, KEY.quiet().from(1.0, MAX_STEPS)
            .needs(&[Need::is_for(&[("schedule.kind", &["cosine_with_restarts"])], "")])
            .foreign(&[(HUGGING_FACE, "lr_scheduler_kwargs.num_cycles", Rule, "")]);
        /// Power of `polynomial`.
        power: f64 = 1.0, KEY.quiet().above(0.0, f64::MAX)
            .needs(&[Need::is_for(&[("schedule.kind", &["polynomial"])], "")])
            .foreign(&[(HUGGING_FACE, "lr_scheduler_kwargs.power", Rule, "")]);
        /// Step at which `inverse_sqrt` is at `lr`, counted as if the root fell from there; `warmup` when left out, or 10,000 without one.
        timescale: Option<u64> = None, KEY.from(1.0, MAX_STEPS)
            .needs(&[Need::is_for(&[("schedule.kind", &["inverse_sqrt"])], "")])
            .foreign(&[(HUGGING_FACE, "lr_scheduler_kwargs.timescale", Rule, "")]);
        /// Steps of the decay of `wsd`, the last before `decay_steps`; a tenth of these, rounded up, when left out.
        last_steps: Option<u64> = None, KEY.from(1.0, MAX_STEPS).needs(&[OF_WSD])
            .foreign(&[
                (HUGGING_FACE, "lr_scheduler_kwargs.num_decay_steps", Rule, ""),
                (TORCHTITAN, "lr_scheduler.decay_ratio", Rule, "the steps, not a share of all"),
            ]);
        /// Shape of the decay of `wsd`.
        last_shape: LastShape = LastShape::Cosine, KEY.quiet().needs(&[OF_WSD])
            .foreign(&[(HUGGING_FACE, "lr_scheduler_kwargs.decay_type", Rule, "")]);
    }
}

words! {
    /// Shapes of the learning rate.
    ScheduleKind {
        /// Half a cosine from `lr` to `min_lr`.
        Cosine = "cosine",
        /// A line from `lr` to `min_lr`.
        Linear = "linear",
        /// `lr`.
        Constant = "constant",
        /// `cycles` half cosines from `lr` to `min_lr`, each behind the one before.
        CosineWithRestarts = "cosine_with_restarts",
        /// From `lr` to `min_lr` by the share of steps that is left, to the power `power`.
        Polynomial = "polynomial",
        /// `lr` times the root of `timescale` / (steps behind the warm-up + `timescale`).
        InverseSqrt = "inverse_sqrt",
        /// Warm-up, stable, decay: `lr`, and over the last steps a decay to `min_lr`.
        Wsd = "wsd" | "warmup_stable_decay",
    }
}

words! {
    /// Shapes of the decay of `wsd`.
    LastShape {
        /// Half a cosine.
        Cosine = "cosine",
        /// A line.
        Linear = "linear",
        /// One less the root of the share that is done.
        Sqrt = "1-sqrt" | "sqrt",
    }
}

words! {
    /// Shapes of the warm-up.
    WarmupShape {
        /// (k + 1) / (steps + 1), which is never 0 (nanoGPT's).
        Linear = "linear",
        /// k / steps: the first update changes nothing (transformers').
        FromZero = "from-zero",
        /// (k - 1) / steps: the first two updates change nothing, and a linear decay is a step late, too (DeepSpeed's `linear`).
        DeepspeedLinear = "deepspeed-linear",
        /// ln(k) / ln(steps), and 0 at step 0 (DeepSpeed's `log`, its default).
        DeepspeedLog = "deepspeed-log",
    }
}
