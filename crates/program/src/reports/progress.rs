//! Progress of a run on standard error: a bar on a terminal, a line every few seconds elsewhere.

use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use phalanx_train::job::Job;
use phalanx_train::metrics::{EvaluationRecord, StepRecord};
use phalanx_train::run::{Observer, ScaleChange};
use phalanx_train::training::without_targets;

use crate::host::output::{TrainOutput, note, stderr_width};
use crate::host::progress_line::Line;
use phalanx_drawing::report;

/// Time between two lines if there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Columns of a terminal that does not say how many it has.
const DEFAULT_WIDTH: usize = 80;

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
        let style = ProgressStyle::with_template("{wide_msg}");
        bar.set_style(style.expect("a template that is well formed"));
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

    fn line<'a>(&'a self, record: &'a StepRecord) -> Line<'a> {
        let (done, steps_left) = (record.step - self.first_step, self.steps.saturating_sub(record.step));
        let left = self.started.elapsed().as_secs_f64() / done as f64 * steps_left as f64;
        let left_s = (steps_left > 0 && done > 0).then_some(left);
        Line { record, steps: self.steps, val_loss: self.val_loss, memory: &self.memory, left_s }
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
    fn references(&mut self, done: usize, all: usize) {
        if Instant::now() >= self.line_due || done == all {
            self.line_due = Instant::now() + LINE_EVERY;
            self.say(&format!("log-probabilities of {done} of {all} answers by the reference, the model before the first step"));
        }
    }

    fn starts(&mut self, step: u64) {
        self.first_step = step;
        self.started = Instant::now();
        self.bar.set_position(step);
    }

    fn step(&mut self, record: &StepRecord) {
        let due = Instant::now() >= self.line_due;
        if self.bar.is_hidden() && (due || record.step == self.steps) {
            self.line_due = Instant::now() + LINE_EVERY;
            note(&self.line(record).whole());
        }
        let width = stderr_width().unwrap_or(DEFAULT_WIDTH);
        self.bar.set_message(self.line(record).fit(width));
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

    fn without_targets(&mut self, step: u64) {
        self.say(&without_targets(step));
    }

    fn evaluation(&mut self, record: &EvaluationRecord) {
        self.val_loss = Some(record.val_loss);
        let EvaluationRecord { step, val_loss, windows, targets, .. } = record;
        let over = match record.accuracy {
            None if record.rewards.is_some() => {
                format!("(the mean over {targets} pairs){}", record.describe_rewards())
            }
            Some(_) => format!("(the mean over {windows} rows){}", record.describe_scores()),
            None => format!("(the mean over {targets} targets in {windows} windows)"),
        };
        self.say(&format!("step {step}: validation loss {val_loss:.4} {over}"));
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
