//! The text format of a schedule: one line per rank, cells separated by commas, an empty cell is empty text.
//!
//! This is PyTorch's `compute_only` format, as `_PipelineScheduleRuntime._dump_csv` and `_load_csv` in
//! `torch.distributed.pipelining.schedules` write and read it. PyTorch accepts a cell whose
//! beginning it understands (`1F0x`) and drops the rest; this parser refuses it.

use std::collections::BTreeMap;
use std::fmt;

use super::action::{Action, Kind};
use super::error::ScheduleError;
use super::schedule::PipelineSchedule;
use super::{MAX_CELLS, MAX_RANKS};

/// The name of a schedule that was read from a file.
const NAME: &str = "custom";

impl PipelineSchedule {
    /// Reads a schedule; which rank has which stage follows from the cells. Its name is `custom`.
    ///
    /// # Errors
    /// A cell that is not an action, with its line and column from 1; a rank without actions; a stage on two ranks or
    /// on none. [`super::check()`] tells whether the schedule can run.
    pub fn parse(text: &str) -> Result<PipelineSchedule, ScheduleError> {
        let (mut ranks, mut length) = (Vec::new(), 0);
        for (number, line) in (1..).zip(text.trim_end().lines()) {
            let cells = read_line(number, line)?;
            length += cells.len();
            if number > MAX_RANKS || length > MAX_CELLS {
                return Err(ScheduleError::TooLong { line: number });
            }
            if cells.iter().all(Option::is_none) {
                return Err(ScheduleError::EmptyRank { rank: ranks.len() });
            }
            ranks.push(cells);
        }
        let micro_batches = ranks.iter().flatten().flatten().map(|action| action.micro_batch).max();
        let Some(last) = micro_batches else { return Err(ScheduleError::Empty) };
        let placement = place(&ranks)?;
        // Larger than any schedule, and far below overflow.
        let micro_batches = last.saturating_add(1);
        Ok(PipelineSchedule { name: NAME.to_string(), ranks, placement, micro_batches })
    }
}

impl fmt::Display for PipelineSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for cells in &self.ranks {
            for (number, cell) in cells.iter().enumerate() {
                let comma = if number == 0 { "" } else { "," };
                match cell {
                    Some(action) => write!(f, "{comma}{action}")?,
                    None => f.write_str(comma)?,
                }
            }
            f.write_str("\n")?;
        }
        Ok(())
    }
}

/// The cells of a line.
fn read_line(line_number: usize, line: &str) -> Result<Vec<Option<Action>>, ScheduleError> {
    let mut cells = Vec::new();
    let mut column = 1;
    for cell in line.split(',') {
        let blank = cell.chars().take_while(|letter| letter.is_whitespace()).count();
        let content = unquoted(cell.trim());
        let read = if content.is_empty() { Ok(None) } else { read_action(content).map(Some) };
        let action = read.map_err(|problem| ScheduleError::Cell {
            line: line_number,
            column: column + blank,
            cell: content.to_string(),
            problem,
        })?;
        cells.push(action);
        column += cell.chars().count() + 1;
    }
    Ok(cells)
}

/// Writers of comma-separated values put an empty cell that stands alone in quotes.
fn unquoted(cell: &str) -> &str {
    let inner = cell.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    inner.map_or(cell, str::trim)
}

/// `2F0`: stage, letter, micro-batch.
fn read_action(cell: &str) -> Result<Action, String> {
    let after_stage = cell.trim_start_matches(|letter: char| letter.is_ascii_digit());
    let after_word = after_stage.trim_start_matches(|letter: char| !letter.is_ascii_digit());
    let stage = &cell[..cell.len() - after_stage.len()];
    let word = &after_stage[..after_stage.len() - after_word.len()];
    if stage.is_empty() {
        return Err("it does not begin with a stage number".to_string());
    }
    let mut letters = word.chars();
    let kind = match (letters.next().and_then(Kind::of_letter), letters.as_str()) {
        (Some(kind), "") => kind,
        _ if word.contains('_') || word.contains("SHARD") => {
            let problem = "is not a computation: write the schedule in PyTorch's `compute_only` form";
            return Err(format!("`{word}` {problem}"));
        }
        _ => return Err(format!("`{word}` is none of the actions F, B, I, W")),
    };
    let number = |digits: &str, what| {
        digits.parse::<usize>().map_err(|_| format!("`{digits}` is not the number of a {what}"))
    };
    Ok(Action { stage: number(stage, "stage")?, kind, micro_batch: number(after_word, "micro-batch")? })
}

/// For each stage: its rank.
fn place(ranks: &[Vec<Option<Action>>]) -> Result<Vec<usize>, ScheduleError> {
    let mut placed: BTreeMap<usize, usize> = BTreeMap::new();
    for (rank, cells) in ranks.iter().enumerate() {
        for (cell, action) in cells.iter().enumerate() {
            let Some(action) = *action else { continue };
            let home = *placed.entry(action.stage).or_insert(rank);
            if home != rank {
                return Err(ScheduleError::Elsewhere { rank, cell, action, home });
            }
        }
    }
    let stages = placed.len();
    match placed.keys().zip(0..).find(|&(&stage, number)| stage != number) {
        Some((&stage, missing)) => Err(ScheduleError::NoSuchStage { missing, stage }),
        None => {
            debug_assert_eq!(placed.keys().last(), Some(&(stages - 1)));
            Ok(placed.into_values().collect())
        }
    }
}
