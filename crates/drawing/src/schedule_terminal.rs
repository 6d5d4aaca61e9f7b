//! Draws a pipeline schedule in plain text: one row per rank, one cell per unit of time.
//!
//! ```text
//! 1f1b: 2 ranks, 2 stages, 2 micro-batches; bubble 33.3 % of 9 time units
//! time    0
//! rank 0  F0 F1 .  .  B0--- .  B1---
//! rank 1  .  F0 B0--- F1 B1--- .  .
//! ```
//!
//! The unit is the shortest action; longer actions are filled with dashes. A drawing that is wider than the terminal
//! continues in further blocks, each headed by the time at which it begins.

use std::fmt::Write;

use phalanx_plan::{PipelineSchedule, Span, Timeline};

/// Maximum number of cells of a row. If actions differ by more, the shortest are not visible.
const MAX_CELLS: f64 = 8192.0;

/// Draws a schedule in lines of at most `width` letters (or more, if a single cell does not fit).
pub fn draw_terminal(schedule: &PipelineSchedule, timeline: &Timeline, width: usize) -> String {
    let unit = unit(timeline);
    let cells = (timeline.makespan / unit).round() as usize;
    let with_stage = schedule.has_chunks();
    let labels = timeline.ranks.iter().flatten().map(|span| span.action.label(with_stage).len());
    let cell_width = labels.max().unwrap_or(1) + 1;
    let rows: Vec<String> =
        timeline.ranks.iter().map(|spans| row(spans, unit, cells, cell_width, with_stage)).collect();

    let head = format!("rank {}  ", schedule.ranks.len() - 1).len();
    let per_block = (width.saturating_sub(head) / cell_width).max(1);
    let mut drawing = title(schedule, timeline);
    for first in (0..cells).step_by(per_block) {
        let letters = first * cell_width..cells.min(first + per_block) * cell_width;
        let _ = writeln!(drawing, "{:head$}{}", "time", number(first as f64 * unit));
        for (rank, row) in rows.iter().enumerate() {
            let line = format!("{:head$}{}", format!("rank {rank}"), &row[letters.clone()]);
            let _ = writeln!(drawing, "{}", line.trim_end());
        }
    }
    drawing
}

/// The title of a drawing: name, sizes and bubble.
pub(crate) fn title(schedule: &PipelineSchedule, timeline: &Timeline) -> String {
    format!(
        "{}: {} ranks, {} stages, {} micro-batches; bubble {:.1} % of {} time units\n",
        schedule.name,
        schedule.ranks.len(),
        schedule.stages(),
        schedule.micro_batches,
        100.0 * timeline.bubble_fraction(),
        number(timeline.makespan),
    )
}

/// A time with up to three decimals, without trailing zeros.
pub(crate) fn number(time: f64) -> String {
    let text = format!("{time:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

/// Time units per cell: the shortest action that takes time, or more if the row would be too long.
pub(crate) fn unit(timeline: &Timeline) -> f64 {
    let durations = timeline.ranks.iter().flatten().map(|span| span.end - span.start);
    let shortest = durations.filter(|&time| time > 0.0).fold(f64::INFINITY, f64::min);
    let unit = shortest.min(timeline.makespan).max(timeline.makespan / MAX_CELLS);
    if unit > 0.0 { unit } else { 1.0 }
}

/// One rank's cells, each of `cell_width` letters with a blank at its end.
fn row(spans: &[Span], unit: f64, cells: usize, cell_width: usize, with_stage: bool) -> String {
    let mut row = String::new();
    let idle = format!("{:cell_width$}", ".");
    let mut at = 0;
    for span in spans {
        let [start, end] = [span.start, span.end].map(|time| (time / unit).round() as usize);
        if start >= end {
            continue;
        }
        row.push_str(&idle.repeat(start.saturating_sub(at)));
        let letters = (end - start) * cell_width - 1;
        let label = span.action.label(with_stage);
        let fill = if end - start == 1 { ' ' } else { '-' };
        row.push_str(&label);
        row.extend(std::iter::repeat_n(fill, letters - label.len()));
        row.push(' ');
        at = end;
    }
    row.push_str(&idle.repeat(cells.saturating_sub(at)));
    row
}
