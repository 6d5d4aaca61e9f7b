//! The result of a search, for people.

use std::path::Path;

use phalanx_drawing::report::{Table, bytes, count, percent, plural, seconds};

use crate::plans::search::Search;
use crate::plans::search::candidate::{Candidate, Placed};

/// The winner, the next, and why others lost. `has_batches`: several batches were compared.
pub fn to_text(search: &Search, written: Option<&Path>, has_batches: bool) -> String {
    let winner = &search.shown()[0];
    let of = format!(
        "{} on {} of {}: {} of {} that may fit {} planned{}",
        winner.planned.plan.spec.model.definition.architecture().map_or("model", |arch| arch.title),
        plural(search.ranks(), "device"),
        search.machine().name,
        search.planned(),
        search.candidates(),
        if search.planned() == 1 { "was" } else { "were" },
        if search.is_cut() { ", until the time was over" } else { "" }
    );
    let kept = match written {
        Some(path) => {
            format!("written to {}; train it with `phalanx train {}`", path.display(), path.display())
        }
        None => "--write FILE writes it".to_string(),
    };
    let text: String = search.text.lines().map(|line| format!("  {line}\n")).collect();
    format!(
        "{of}\n\nThe fastest that fits ({kept}):\n{text}\n{}\n{}\nWhy others lost\n{}",
        winner.time.to_text(),
        table(search, has_batches),
        lost(search)
    )
}

/// A row for each configuration that is proposed.
fn table(search: &Search, has_batches: bool) -> String {
    let several = |of: &dyn Fn(&Candidate) -> bool| search.shown().iter().any(|found| of(&found.candidate));
    let has_pipeline = several(&|of| of.pipeline > 1);
    let has_reduce = several(&|of| of.data > 1 && of.micro_batches() > 1);
    let has_wire = several(&|of| of.sends_half);
    let has_placed = several(&|of| of.placed != Placed::Device);
    let mut headings = vec!["", "step", "tok/s", "mfu", "needs", "p x d x t", "zero", "micro", "recompute"];
    let columns: [(bool, &str); 5] = [
        (has_pipeline, "schedule"),
        (has_reduce, "reduce"),
        (has_wire, "sent"),
        (has_placed, "memory"),
        (has_batches, "batch"),
    ];
    headings.extend(columns.iter().filter(|(shown, _)| *shown).map(|(_, heading)| *heading));
    let mut table = Table::new(&headings);
    for (number, found) in search.shown().iter().enumerate() {
        let of = &found.candidate;
        let cells = [
            (true, (number + 1).to_string()),
            (true, seconds(found.seconds())),
            (true, count(found.time.tokens_per_s().unwrap_or(0.0))),
            (true, found.time.mfu().map_or("-".to_string(), percent)),
            (true, bytes(found.need.0)),
            (true, format!("{} x {} x {}", of.pipeline, of.data, of.tensor)),
            (true, of.zero.to_string()),
            (true, of.micro.to_string()),
            (true, search.checkpointing(of).to_string()),
            (has_pipeline, if of.pipeline > 1 { search.schedule(of) } else { "-".to_string() }),
            (has_reduce, reduce(of)),
            (has_wire, search.on_the_wire(of)),
            (has_placed, of.placed.word().to_string()),
            (has_batches, of.global.to_string()),
        ];
        table.row(cells.into_iter().filter(|(shown, _)| *shown).map(|(_, cell)| cell));
    }
    let bytes_there = search.shown().iter().map(|found| found.need.1).min().unwrap_or(0);
    format!("The next, of {} each (mesh: pipeline x data x tensor)\n{table}", bytes(bytes_there))
}

fn reduce(of: &Candidate) -> String {
    let has_choice = of.data > 1 && of.micro_batches() > 1;
    match (has_choice, of.defers) {
        (false, _) => "-",
        (true, true) => "defer",
        (true, false) => "each",
    }
    .to_string()
}

/// A line for each class that lost.
fn lost(search: &Search) -> String {
    let line = |lost: crate::plans::search::lost::Lost| {
        format!("  {} = {}: {}\n", lost.key, lost.values.join(", "), lost.why)
    };
    search.lost().into_iter().map(line).collect()
}
