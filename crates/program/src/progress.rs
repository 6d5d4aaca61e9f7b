//! Progress of a run on standard error: a bar on a terminal, a line every few seconds elsewhere.

use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use phalanx_train::job::Job;
use phalanx_train::metrics::{EvaluationRecord, Staleness, StepRecord};
use phalanx_train::run::{Observer, ScaleChange};

use crate::output::{TrainOutput, note};
use crate::report;

/// Time between two lines if there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Shows the progress of rank 0.
pub struct Progress {
    bar: ProgressBar,
    steps: u64,
    memory: String,
    first_step: u64,
    started: Instant,
    line_due: Instant,
    val_loss: Option<f32>,
}

impl Progress {
    /// Progress of the run of `job`.
    pub fn new(job: &Job) -> Progress {
        let steps = job.config.train.steps;
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr_with_hz(5));
        let style = ProgressStyle::with_template("{prefix} {bar:24} {pos}/{len}  {wide_msg}");
        bar.set_style(style.expect("a template that is well formed").progress_chars("█▉▊▋▌▍▎▏ "));
        bar.set_prefix("step");
        let ranks = job.plan.spec.world_size();
        let arena = report::bytes(job.plan.arena_bytes_max());
        Progress {
            bar,
            steps,
            memory: if ranks == 1 { arena } else { format!("{ranks} x {arena}") },
            first_step: 0,
            started: Instant::now(),
            line_due: Instant::now(),
            val_loss: None,
        }
    }

    fn describe(&self, record: &StepRecord) -> String {
        let mut text = format!("loss {:.4}", record.loss);
        if let Some(val_loss) = self.val_loss {
            text.push_str(&format!("  val {val_loss:.4}"));
        }
        if let Some(Staleness { staleness, staleness_max, .. }) = &record.staleness {
            text.push_str(&format!("  staleness {staleness:.1} (max {staleness_max})"));
        }
        text.push_str(&format!("  {} tokens/s", report::count(record.tokens_per_s)));
        for (name, share) in [("mfu", record.mfu), ("hfu", record.hfu)] {
            if let Some(share) = share {
                text.push_str(&format!("  {name} {:.0}%", 100.0 * share));
            }
        }
        text.push_str(&format!("  {}", self.memory));
        let done = record.step - self.first_step;
        let left = self.started.elapsed().as_secs_f64() / done as f64 * (self.steps - record.step) as f64;
        if record.step < self.steps && done > 0 {
            text.push_str(&format!("  {} left", report::seconds(left)));
        }
        text
    }

    /// Prints a line that stays, above the bar if there is one.
    fn say(&self, line: &str) {
        if self.bar.is_hidden() {
            note(line);
        } else {
            self.bar.println(line);
        }
    }
}

impl Observer for Progress {
    fn starts(&mut self, step: u64) {
        self.first_step = step;
        self.started = Instant::now();
        self.bar.set_position(step);
    }

    fn step(&mut self, record: &StepRecord) {
        let text = self.describe(record);
        let due = Instant::now() >= self.line_due;
        if self.bar.is_hidden() && (due || record.step == self.steps) {
            self.line_due = Instant::now() + LINE_EVERY;
            note(&format!("step {}/{}  {text}", record.step, self.steps));
        }
        self.bar.set_message(text);
        self.bar.set_position(record.step);
    }

    fn loss_scale(&mut self, change: &ScaleChange) {
        let ScaleChange { step, skipped, from, to } = *change;
        self.say(&match (skipped, from == to) {
            (false, _) => format!("step {step}: no overflow for a while: loss scale {from} -> {to}"),
            (true, false) => {
                format!("step {step}: gradients overflowed, step skipped: loss scale {from} -> {to}")
            }
            (true, true) => format!("step {step}: gradients overflowed, step skipped: loss scale stays {to}"),
        });
    }

    fn evaluation(&mut self, record: &EvaluationRecord) {
        self.val_loss = Some(record.val_loss);
        self.say(&format!("step {}: validation loss {:.4}", record.step, record.val_loss));
    }

    fn saved(&mut self, step: u64, path: &Path) {
        self.say(&format!("step {step}: saved {}", path.display()));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.abandon();
        if !self.bar.is_hidden() {
            note("");
        }
    }
}

/// Prints the lines of `metrics.jsonl` on standard output.
pub struct Records {
    output: TrainOutput,
}

impl Records {
    /// Records that are printed on `output`.
    pub fn new(output: &TrainOutput) -> Records {
        Records { output: output.clone() }
    }

    fn print(&self, record: &impl serde::Serialize) {
        // Records hold only numbers, so serialization cannot fail.
        self.output.print_line(&serde_json::to_string(record).unwrap_or_default());
    }
}

impl Observer for Records {
    fn step(&mut self, record: &StepRecord) {
        self.print(record);
    }

    fn evaluation(&mut self, record: &EvaluationRecord) {
        self.print(record);
    }
}
