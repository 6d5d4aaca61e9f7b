//! Results of opening a corpus: how much was read, and everything that was not read, each with its reason.
//!
//! Things with the same reason are one [`Group`], with their number and the first of them, so that a million skipped
//! files are one line.

use serde::Serialize;

use crate::{DataError, Result};

/// Things of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Group {
    /// Description of each of them: `not valid JSON`.
    pub what: String,
    /// Number of them.
    pub count: u64,
    /// Bytes of all of them, where they are files.
    pub bytes: u64,
    /// The names of the first.
    pub first: Vec<String>,
}

/// Names that a group shows.
const SHOWN: usize = 3;

impl Group {
    /// `4 x a gzip file: a.gz, b.gz, c.gz, ...`.
    fn describe(&self) -> String {
        let more = if self.count > self.first.len() as u64 { ", ..." } else { "" };
        format!("{} x {}: {}{more}", self.count, self.what, self.first.join(", "))
    }
}

/// Groups in the order in which they were found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Groups(Vec<Group>);

impl Groups {
    /// Adds a thing.
    pub(crate) fn add(&mut self, what: &str, bytes: u64, name: impl FnOnce() -> String) {
        self.add_some(what, 1, bytes, name);
    }

    /// Adds so many things, of which the first has a name.
    pub(crate) fn add_some(&mut self, what: &str, count: u64, bytes: u64, name: impl FnOnce() -> String) {
        if count == 0 {
            return;
        }
        let place = self.0.iter().position(|group| group.what == what).unwrap_or_else(|| {
            self.0.push(Group { what: what.to_string(), ..Group::default() });
            self.0.len() - 1
        });
        let group = &mut self.0[place];
        (group.count, group.bytes) = (group.count + count, group.bytes + bytes);
        if group.first.len() < SHOWN {
            group.first.push(name());
        }
    }

    /// Adds all things of `others`.
    pub(crate) fn join(&mut self, others: Groups) {
        for Group { what, count, bytes, first } in others.0 {
            match self.0.iter_mut().find(|group| group.what == what) {
                None => self.0.push(Group { what, count, bytes, first }),
                Some(group) => {
                    (group.count, group.bytes) = (group.count + count, group.bytes + bytes);
                    group.first.extend(first.into_iter().take(SHOWN - group.first.len()));
                }
            }
        }
    }

    /// All groups.
    pub fn iter(&self) -> impl Iterator<Item = &Group> {
        self.0.iter()
    }

    /// Things of all groups.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|group| group.count).sum()
    }

    /// Bytes of all groups.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|group| group.bytes).sum()
    }

    /// All groups in words.
    pub(crate) fn describe(&self) -> String {
        self.0.iter().map(Group::describe).collect::<Vec<_>>().join("; ")
    }
}

/// Files and records that were read, and those that were not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// Files that were read.
    pub files: u64,
    /// Bytes of their text.
    pub bytes: u64,
    /// Their documents.
    pub documents: u64,
    /// Lines, or records of another layout, in JSON files, blank ones aside.
    pub lines: u64,
    /// Those of them that have no text.
    pub skipped_lines: Groups,
    /// Files in folders that were to be read and cannot be.
    pub skipped_files: Groups,
    /// Contents of folders that were not to be read.
    pub left_out: Groups,
    /// Contents that were read in a way that may not be expected.
    pub remarks: Groups,
}

impl Findings {
    /// Everything that was not read, or not as it is, in words: a line for each kind.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.skipped_files.count() > 0 {
            let files = self.skipped_files.count();
            notes.push(format!(
                "data: skipped {} of {} files: {}",
                files,
                files + self.files,
                self.skipped_files.describe()
            ));
        }
        if self.skipped_lines.count() > 0 {
            notes.push(format!(
                "data: skipped {} of {} lines: {}",
                self.skipped_lines.count(),
                self.lines,
                self.skipped_lines.describe()
            ));
        }
        if self.left_out.count() > 0 {
            notes.push(format!("data: left out {}", self.left_out.describe()));
        }
        notes.extend(self.remarks.iter().map(|remark| format!("data: {}", remark.describe())));
        notes
    }

    /// Refuses a corpus of which more was skipped than `max_skipped`, a fraction of all lines and of the bytes of all
    /// files. When left out, 1 % of the lines and half of the bytes may be skipped.
    pub(crate) fn check(&self, max_skipped: Option<f64>) -> Result<()> {
        let (lines, all_lines) = (self.skipped_lines.count(), self.lines);
        let (bytes, all_bytes) = (self.skipped_files.bytes(), self.skipped_files.bytes() + self.bytes);
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        let refuse = |part, whole, what: &str, limit: f64| {
            let part_of = share(part, whole);
            // Rounded up to a thousandth, so that it suffices.
            let suffices = (part_of * 1000.0).ceil() / 1000.0;
            Err(DataError::TooMuchSkipped {
                what: format!("{part} of {whole} {what} ({})", percent(part_of)),
                limit: percent(limit),
                notes: self.notes().join("\n"),
                suffices,
            })
        };
        let (limit_of_lines, limit_of_bytes) = (max_skipped.unwrap_or(0.01), max_skipped.unwrap_or(0.5));
        if share(lines, all_lines) > limit_of_lines {
            return refuse(lines, all_lines, "lines", limit_of_lines);
        }
        if share(bytes, all_bytes) > limit_of_bytes {
            return refuse(bytes, all_bytes, "bytes", limit_of_bytes);
        }
        Ok(())
    }
}

/// A fraction in per cent, with two digits.
fn percent(fraction: f64) -> String {
    let text = format!("{:.2}", fraction * 100.0);
    format!("{} %", text.trim_end_matches('0').trim_end_matches('.'))
}
