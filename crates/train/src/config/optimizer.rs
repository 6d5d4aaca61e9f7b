//! `[optimizer]` and `[schedule]`: what an update does, and at which rate.

use super::ParameterGroup;
use super::bounds::{BELOW_1, MAX_STEPS};
use super::declare::Conversion::{Rule, Same};
use super::declare::Resume::Unsaid;
use super::declare::{AXOLOTL, DEEPSPEED, HUGGING_FACE, KEY, MEGATRON, NANOGPT, TORCHTITAN};
use super::needs::{Need, SET};

const OF_DECAY: Need = Need::is_for(&[("schedule.kind", &["cosine", "linear"])], "");

table! {
    /// `[optimizer]`
    "optimizer" OptimizerConfig {
        /// `adamw` or `sgd`.
        kind: OptimizerKind = OptimizerKind::Adamw, KEY
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
        /// AdamW: decay of the first moment. SGD: momentum.
        beta1: f64 = 0.9, KEY.from(0.0, BELOW_1)
            .foreign(&[
                (HUGGING_FACE, "adam_beta1", Same, ""),
                (NANOGPT, "beta1", Same, ""),
                (TORCHTITAN, "optimizer.beta1", Same, ""),
                (DEEPSPEED, "optimizer.params.betas", Rule, "the first of the two"),
            ]);
        /// AdamW: decay of the second moment.
        beta2: f64 = 0.95, KEY.from(0.0, BELOW_1).foreign(&[
                (HUGGING_FACE, "adam_beta2", Same, ""),
                (NANOGPT, "beta2", Same, ""),
                (TORCHTITAN, "optimizer.beta2", Same, ""),
            ]);
        /// AdamW: added to the root of the second moment.
        eps: f64 = 1e-8, KEY.from(0.0, 1.0)
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
    }
}

table! {
    /// `[schedule]`
    "schedule" ScheduleConfig {
        /// `cosine`, `linear` or `constant`.
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
        /// Learning rate at the end of cosine and linear.
        min_lr: f64 = 0.0, KEY.from(0.0, f64::MAX)
            .foreign(&[
                (NANOGPT, "min_lr", Same, ""),
                (TORCHTITAN, "lr_scheduler.min_lr_factor", Rule, "the rate itself, not a share of the highest"),
                (DEEPSPEED, "scheduler.params.cos_min_ratio", Rule, "the rate itself, not a share of the highest"),
            ]);
        /// Step at which cosine and linear reach `min_lr`, where the rate stays (nanoGPT's `lr_decay_iters`);
        /// `train.steps` when left out. A resumed run keeps it.
        decay_steps: Option<u64> = None, KEY.from(1.0, u64::MAX as f64).resume(Unsaid)
            .foreign(&[(NANOGPT, "lr_decay_iters", Same, ""), (DEEPSPEED, "scheduler.params.total_num_steps", Rule, "")])
            .needs(&[OF_DECAY]);
        /// Step after which cosine and linear begin again, warm-up included (a warm restart); `decay_steps` counts
        /// from there. None when left out.
        restart_step: Option<u64> = None, KEY.from(1.0, u64::MAX as f64).resume(Unsaid)
            .needs(&[OF_DECAY]);
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
