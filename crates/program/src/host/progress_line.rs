//! The text of one step, as much of it as a line has room for.

use phalanx_drawing::report;
use phalanx_train::metrics::{Staleness, Stamp, StepRecord};

/// Columns of the bar.
const BAR: usize = 24;

/// Data about a step, for its progress line.
pub struct Line<'a> {
    /// The step's measurements.
    pub record: &'a StepRecord,
    /// Last step of the run.
    pub steps: u64,
    /// The last validation loss.
    pub val_loss: Option<f32>,
    /// Memory of all ranks.
    pub memory: &'a str,
    /// Seconds until the last step.
    pub left_s: Option<f64>,
}

/// A part of the line. The larger number is left out first; 0 always stays.
struct Field {
    left_out: u8,
    text: String,
}

impl Line<'_> {
    /// The line in at most `width` columns, but always step and loss. Left out in this order: the bar, hfu, mfu, tokens
    /// per second, validation loss, memory, time left.
    pub fn fit(&self, width: usize) -> String {
        let parts = self.parts();
        let limit = (0..=7).rev().find(|limit| length(&parts, *limit) <= width).unwrap_or(0);
        let texts = parts.iter().filter(|part| part.left_out <= limit).map(|part| part.text.as_str());
        texts.collect::<Vec<_>>().join("  ")
    }

    /// The line without a bar, for a file, behind the time of day (UTC) and the time of the run so far.
    pub fn whole(&self) -> String {
        let Stamp { time_s, elapsed_s } = self.record.at;
        let mut texts = vec![format!("{}Z", clock(time_s as u64 % 86_400)), clock(elapsed_s as u64)];
        texts.extend(self.parts().into_iter().filter(|part| part.left_out < 7).map(|part| part.text));
        texts.join("  ")
    }

    fn parts(&self) -> Vec<Field> {
        let Line { record, steps, .. } = self;
        let percent =
            |name: &str, share: Option<f64>| share.map(|share| format!("{name} {:.0}%", 100.0 * share));
        let parts = [
            (0, Some(format!("step {}/{steps}", record.step))),
            (7, Some(bar(record.step, *steps))),
            (0, Some(format!("loss {:.4}", record.loss))),
            (1, record.rewards.as_ref().map(|of| format!("margin {:.4}", of.reward_margin))),
            (2, record.rewards.as_ref().map(|of| format!("accuracy {:.2}", of.reward_accuracy))),
            (3, self.val_loss.map(|loss| format!("val {loss:.4}"))),
            (4, record.staleness.as_ref().map(staleness)),
            (4, Some(format!("{} tokens/s", report::count(record.tokens_per_s)))),
            (5, percent("mfu", record.mfu)),
            (6, percent("hfu", record.hfu)),
            (2, Some(self.memory.to_string())),
            (1, self.left_s.map(|left| format!("{} left", report::seconds(left)))),
        ];
        parts.into_iter().filter_map(|(left_out, text)| Some(Field { left_out, text: text? })).collect()
    }
}

/// `13:05:12`
fn clock(seconds: u64) -> String {
    format!("{:02}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// Describes how many updates old the parameters of asynchronous workers were.
fn staleness(of: &Staleness) -> String {
    format!("staleness {:.1} (max {})", of.staleness, of.staleness_max)
}

/// Columns of the parts that stay, with two spaces between them.
fn length(parts: &[Field], limit: u8) -> usize {
    let stay = parts.iter().filter(|part| part.left_out <= limit);
    stay.map(|part| part.text.chars().count() + 2).sum::<usize>().saturating_sub(2)
}

/// Progress bar of the run, in eighths of a column.
fn bar(step: u64, steps: u64) -> String {
    const EIGHTHS: [char; 8] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉'];
    let eighths = (8 * BAR) as u64 * step.min(steps) / steps.max(1);
    let (full, rest) = ((eighths / 8) as usize, EIGHTHS[(eighths % 8) as usize]);
    let mut bar = "█".repeat(full);
    if full < BAR {
        bar.push(rest);
    }
    format!("{bar:BAR$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> StepRecord {
        let json = serde_json::json!({
            "step": 600, "loss": 3.56664, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 3012.0, "step_s": 0.7,
            "mfu": 0.13, "hfu": 0.17, "tokens": 1, "comm_bytes": 0, "exposed_comm_s": 0.0,
            "time_s": 1_795_903_530.25, "elapsed_s": 3725.5,
        });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn unimportant_parts_are_left_out_first() {
        let record = record();
        let line = Line {
            record: &record,
            steps: 1200,
            val_loss: Some(3.20771),
            memory: "2 x 106.4 MiB",
            left_s: Some(434.0),
        };
        let left = report::seconds(434.0);
        for (width, expected) in [
            (
                120,
                format!(
                    "step 600/1200  loss 3.5666  val 3.2077  3.0k tokens/s  mfu 13%  hfu 17%  2 x 106.4 MiB  {left} left"
                ),
            ),
            (80, format!("step 600/1200  loss 3.5666  val 3.2077  2 x 106.4 MiB  {left} left")),
            (60, format!("step 600/1200  loss 3.5666  2 x 106.4 MiB  {left} left")),
            (43, format!("step 600/1200  loss 3.5666  {left} left")),
            (40, "step 600/1200  loss 3.5666".to_string()),
            (10, "step 600/1200  loss 3.5666".to_string()),
        ] {
            assert_eq!(line.fit(width), expected, "{width}");
        }
        let wide = line.fit(150);
        assert!(wide.contains(&format!("  {}{}  loss", "█".repeat(12), " ".repeat(12))), "{wide}");
        assert_eq!(line.whole(), format!("22:05:30Z  01:02:05  {}", line.fit(120)));
        for width in 26..200 {
            assert!(line.fit(width).chars().count() <= width, "{width}");
        }
    }

    #[test]
    fn the_bar_fills() {
        assert_eq!(bar(0, 10), " ".repeat(24));
        assert_eq!(bar(10, 10), "█".repeat(24));
        assert_eq!(bar(1, 16), format!("█▌{}", " ".repeat(22)));
        for step in 0..=1000 {
            assert_eq!(bar(step, 1000).chars().count(), 24);
        }
    }
}
