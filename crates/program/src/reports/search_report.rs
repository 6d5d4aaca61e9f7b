//! The result of a search, for people.

use std::path::Path;

use phalanx_drawing::report::{Table, bytes, count, percent, plural, seconds};

use crate::plans::search::Search;
use crate::plans::search::candidate::Candidate;

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

/// A row for each configuration that is proposed. Keys with which all agree are in a line of their own, so that rows have 80 letters at most.
fn table(search: &Search, has_batches: bool) -> String {
    let shown = search.shown();
    let columns: [Column; 9] = [
        ("p x d x t", &|of| format!("{}x{}x{}", of.pipeline, of.data, of.tensor)),
        ("zero", &|of| of.zero.to_string()),
        ("micro", &|of| of.micro.to_string()),
        ("recompute", &|of| search.checkpointing(of).to_string()),
        ("schedule", &|of| {
            if of.pipeline > 1 {
                search.schedule(of).replace("interleaved", "inter")
            } else {
                "-".to_string()
            }
        }),
        ("reduce", &|of| reduce(of)),
        ("sent", &|of| search.on_the_wire(of)),
        ("states", &|of| of.placed.word().to_string()),
        ("batch", &|of| of.global.to_string()),
    ];
    let agree =
        |(_, cell): &&Column| shown.iter().all(|found| cell(&found.candidate) == cell(&shown[0].candidate));
    let (same, several): (Vec<&Column>, Vec<&Column>) = columns.iter().partition(agree);
    let rate = if has_batches { vec!["tok/s"] } else { Vec::new() };
    let headings = ["", "step"].into_iter().chain(rate).chain(["mfu", "GiB"]);
    let mut table =
        Table::new(&headings.chain(several.iter().map(|(heading, _)| *heading)).collect::<Vec<_>>());
    for (number, found) in shown.iter().enumerate() {
        let rate = has_batches.then(|| count(found.time.tokens_per_s().unwrap_or(0.0)));
        let figures = [(number + 1).to_string(), seconds(found.seconds())].into_iter().chain(rate);
        let mfu = found.time.mfu().map_or("-".to_string(), percent);
        let gib = format!("{:.1}", found.need.0 as f64 / f64::from(1 << 30));
        let keys = several.iter().map(|(_, cell)| cell(&found.candidate));
        table.row(figures.chain([mfu, gib]).chain(keys));
    }
    let same = same.iter().map(|(heading, cell)| format!("{heading} {}", cell(&shown[0].candidate)));
    let same = same.collect::<Vec<_>>().join(", ");
    let same = if same.is_empty() { same } else { format!("All have {same}.\n") };
    let bytes_there = shown.iter().map(|found| found.need.1).min().unwrap_or(0);
    format!("The next, of {} each (p, d, t: pipeline, data, tensor ranks)\n{same}{table}", bytes(bytes_there))
}

/// A heading, and the cell of a candidate.
type Column<'a> = (&'static str, &'a dyn Fn(&Candidate) -> String);

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
