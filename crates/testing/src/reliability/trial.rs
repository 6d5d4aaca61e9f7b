//! A case with its outcome, and the table of all outcomes.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

/// The line before the table in a document.
const BEGIN: &str = "<!-- table of faults: begin -->";

/// The line after it.
const END: &str = "<!-- table of faults: end -->";

/// One case that was tried.
pub(crate) struct Trial {
    /// The row of the table.
    pub(crate) fault: String,
    /// Details of this case.
    pub(crate) detail: String,
    /// Error: how the case broke the rule.
    pub(crate) result: Result<(), String>,
    /// Time from the fault until all who live had named it, where that is measured.
    pub(crate) named_after: Option<Duration>,
    /// Why the case was not tried, if it was not.
    pub(crate) skipped: Option<String>,
}

impl Trial {
    pub(crate) fn new(fault: impl Into<String>, detail: String, result: Result<(), String>) -> Trial {
        Trial { fault: fault.into(), detail, result, named_after: None, skipped: None }
    }

    /// A case in which the time is measured until a fault is named, if it strikes.
    pub(crate) fn timed(fault: String, detail: String, result: Result<Option<Duration>, String>) -> Trial {
        let named_after = result.as_ref().ok().copied().flatten();
        Trial { fault, detail, result: result.map(drop), named_after, skipped: None }
    }

    /// A case that this machine cannot try.
    pub(crate) fn skipped(cause: &str) -> Trial {
        Trial { skipped: Some(cause.to_string()), ..Trial::new("", String::new(), Ok(())) }
    }
}

/// Parts of the message of a case that ended, or named its fault, later than the rule allows.
const LATE: [&str; 3] = [" did not end within ", " ms too late", " ms after "];

/// A case that failed.
#[derive(Clone, Debug)]
pub struct Failed {
    /// Group of the case.
    pub group: &'static str,
    /// Its number in the group.
    pub case: usize,
    /// The row of the table.
    pub fault: String,
    /// Details of the case.
    pub detail: String,
    /// Description of the failure.
    pub what: String,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Cases tried.
    pub trials: usize,
    /// Cases that kept the rule.
    pub passed: usize,
}

/// Results of a campaign.
#[derive(Debug, Default)]
pub struct Report {
    /// The seed of all cases.
    pub seed: u64,
    /// Group and fault, with their trials.
    pub rows: BTreeMap<(&'static str, String), Tally>,
    /// By group and number.
    pub failed: Vec<Failed>,
    /// Group and fault, with the milliseconds until it was named, in the cases in which that is measured.
    pub named_after_ms: BTreeMap<(&'static str, String), Vec<f64>>,
    /// Those that were late beside other cases and kept the rule when they were tried again alone.
    pub late: Vec<Failed>,
    /// Groups of which cases were not tried, with the reason.
    pub skipped: BTreeMap<&'static str, String>,
    /// Total time of the cases, by group.
    pub seconds: BTreeMap<&'static str, f64>,
}

impl Report {
    pub(crate) fn add(&mut self, group: &'static str, case: usize, trial: Trial, seconds: f64) {
        let Trial { fault, detail, result, named_after, skipped } = trial;
        if let Some(cause) = skipped {
            self.skipped.insert(group, cause);
            return;
        }
        if let Some(time) = named_after {
            self.named_after_ms.entry((group, fault.clone())).or_default().push(time.as_secs_f64() * 1e3);
        }
        let tally = self.rows.entry((group, fault.clone())).or_default();
        tally.trials += 1;
        tally.passed += usize::from(result.is_ok());
        *self.seconds.entry(group).or_default() += seconds;
        if let Err(what) = result {
            self.failed.push(Failed { group, case, fault, detail, what });
        }
    }

    /// Returns whether a case failed by its time.
    pub(crate) fn was_late(&self, group: &str, case: usize) -> bool {
        let is_it = |failed: &&Failed| (failed.group, failed.case) == (group, case);
        let failed = self.failed.iter().find(is_it);
        failed.is_some_and(|failed| LATE.iter().any(|late| failed.what.contains(late)))
    }

    /// Replaces the outcome of a case that was late by that of another trial.
    pub(crate) fn try_again(&mut self, group: &'static str, case: usize, trial: Trial, seconds: f64) {
        let at = self.failed.iter().position(|failed| (failed.group, failed.case) == (group, case));
        let before = self.failed.remove(at.expect("a case that failed"));
        self.rows.get_mut(&(group, before.fault.clone())).expect("a fault that was tried").trials -= 1;
        if trial.result.is_ok() {
            self.late.push(before);
        }
        self.add(group, case, trial, seconds);
    }

    /// Cases tried.
    pub fn trials(&self) -> usize {
        self.rows.values().map(|tally| tally.trials).sum()
    }

    /// The command that repeats a case.
    pub fn repeats(&self, failed: &Failed) -> String {
        format!("cargo xtask reliability --only {} --case {} --seed {}", failed.group, failed.case, self.seed)
    }

    /// `document` with the table between the lines `BEGIN` and `END`; the table alone when it has no such lines.
    pub fn written_into(&self, document: &str) -> String {
        let table = self.markdown();
        let parts =
            document.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
        match parts {
            Some((before, after)) => format!("{before}{BEGIN}\n{table}{END}{after}"),
            None => table,
        }
    }

    /// The table, as Markdown, with the command that repeats each row.
    pub fn markdown(&self) -> String {
        let mut text = String::from(
            "| group | fault | trials | passed | failed | repeat |\n|---|---|---:|---:|---:|---|\n",
        );
        for ((group, fault), Tally { trials, passed }) in &self.rows {
            let failed = trials - passed;
            writeln!(text, "| {group} | {fault} | {trials} | {passed} | {failed} | `cargo xtask reliability --only {group}` |")
                .expect("text grows");
        }
        let passed: usize = self.rows.values().map(|tally| tally.passed).sum();
        let trials = self.trials();
        writeln!(text, "| **all** | | **{trials}** | **{passed}** | **{}** | |", trials - passed)
            .expect("text grows");
        text
    }

    /// The times until faults were named, as Markdown; empty when none was measured.
    pub fn times(&self) -> String {
        if self.named_after_ms.is_empty() {
            return String::new();
        }
        let mut text = String::from(
            "| group | fault | cases | named after: median | 99 of 100 | longest |\n|---|---|---:|---:|---:|---:|\n",
        );
        let mut row = |group: &str, fault: &str, times: &[f64]| {
            let mut times = times.to_vec();
            times.sort_by(f64::total_cmp);
            // The smallest time that this part of the cases does not exceed.
            let of = |part: f64| times[((times.len() as f64 * part).ceil() as usize).max(1) - 1];
            writeln!(
                text,
                "| {group} | {fault} | {} | {:.0} ms | {:.0} ms | {:.0} ms |",
                times.len(),
                of(0.5),
                of(0.99),
                of(1.0)
            )
            .expect("text grows");
        };
        for ((group, fault), times) in &self.named_after_ms {
            row(group, fault, times);
        }
        let kills = self.named_after_ms.iter().filter(|((_, fault), _)| fault.starts_with("SIGKILL"));
        let kills: Vec<f64> = kills.flat_map(|(_, times)| times).copied().collect();
        if !kills.is_empty() {
            row("**all**", "**SIGKILL**", &kills);
        }
        text
    }

    /// The failures with the commands that repeat them.
    pub fn failures(&self) -> String {
        let mut text = String::new();
        for failed in &self.failed {
            let Failed { group, case, detail, what, .. } = failed;
            let repeat = self.repeats(failed);
            writeln!(text, "{group} {case}: {detail}\n  {what}\n  repeat: {repeat}").expect("text grows");
        }
        text
    }

    /// A line for each case that was late beside others.
    pub fn late(&self) -> String {
        let line = |Failed { group, case, what, .. }: &Failed| {
            let what = what.lines().next().unwrap_or_default();
            format!("{group} {case}: late beside other cases, in time alone: {what}\n")
        };
        self.late.iter().map(line).collect()
    }

    /// Everything, for programs.
    pub fn json(&self) -> Value {
        let rows = self.rows.iter().map(|((group, fault), tally)| {
            json!({ "group": group, "fault": fault, "trials": tally.trials, "passed": tally.passed })
        });
        let failed = self.failed.iter().map(|failed| {
            json!({ "group": failed.group, "case": failed.case, "detail": failed.detail, "what": failed.what,
                    "repeat": self.repeats(failed) })
        });
        let late =
            self.late.iter().map(|late| json!({ "group": late.group, "case": late.case, "what": late.what }));
        let times = self.named_after_ms.iter().map(
            |((group, fault), times)| json!({ "group": group, "fault": fault, "named_after_ms": times }),
        );
        json!({ "seed": self.seed, "rows": rows.collect::<Vec<_>>(), "failed": failed.collect::<Vec<_>>(),
                "late": late.collect::<Vec<_>>(), "named": times.collect::<Vec<_>>(), "skipped": self.skipped, "seconds": self.seconds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_counts_and_the_failures_say_how_to_repeat_them() {
        let mut report = Report { seed: 7, ..Report::default() };
        let trial = |result| Trial::new("cut", "cut at 3".into(), result);
        report.add("damage", 0, trial(Ok(())), 0.1);
        assert_eq!(report.times(), "");
        report.add("damage", 1, trial(Err("hung".into())), 0.1);
        assert!(
            report
                .markdown()
                .contains("| damage | cut | 2 | 1 | 1 | `cargo xtask reliability --only damage` |"),
            "{}",
            report.markdown()
        );
        assert!(report.markdown().contains("| **all** | | **2** | **1** | **1** | |"));
        let document = format!("Above.\n{BEGIN}\nold\n{END}\nBelow.\n");
        let written = report.written_into(&document);
        assert!(written.starts_with("Above.\n") && written.ends_with("\nBelow.\n"), "{written}");
        assert!(written.contains("| damage | cut |") && !written.contains("old"), "{written}");
        assert_eq!(report.written_into(""), report.markdown());
        let failures = report.failures();
        assert!(failures.contains("cargo xtask reliability --only damage --case 1 --seed 7"), "{failures}");
        assert_eq!(report.json()["failed"][0]["what"], "hung");
        assert!(!report.was_late("damage", 1) && !report.was_late("damage", 0));
        report.add("damage", 2, trial(Err("`phalanx` did not end within 10 s; stderr: ".into())), 0.1);
        assert!(report.was_late("damage", 2));
        report.try_again("damage", 2, trial(Ok(())), 0.1);
        assert_eq!((report.failed.len(), report.late.len(), report.trials()), (1, 1, 3));
        assert!(
            report.late().starts_with("damage 2: late beside other cases, in time alone: "),
            "{}",
            report.late()
        );
        report.add("links", 0, Trial::skipped("no root"), 0.1);
        assert_eq!((report.trials(), &*report.skipped["links"]), (3, "no root"));
    }

    #[test]
    fn times_are_shown_by_rank_among_all_cases() {
        let mut report = Report::default();
        for ms in 1..=200 {
            let result = Ok(Some(Duration::from_millis(ms)));
            report.add("kills", 0, Trial::timed("SIGKILL".into(), String::new(), result), 0.1);
        }
        let row = "| kills | SIGKILL | 200 | 100 ms | 198 ms | 200 ms |\n";
        assert!(report.times().contains(row), "{}", report.times());
    }
}
