//! A translation as a table: their key, ours, the same or not, and why.

use serde_json::{Value, json};

use super::{Outcome, Row, Translation};

impl Outcome {
    /// The word in tables.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Same => "same",
            Outcome::Differs => "differs",
            Outcome::Default => "default",
            Outcome::Unneeded => "not needed",
            Outcome::Refused => "refused",
        }
    }
}

impl Translation {
    /// The table.
    pub fn to_text(&self) -> String {
        let theirs = |row: &Row| match row.line {
            Some(line) => format!("{line}: {} = {}", row.name, row.value),
            None => format!("(not given) {}", row.name),
        };
        let ours =
            |row: &Row| row.ours.as_ref().map_or("-".to_string(), |(key, value)| format!("{key} = {value}"));
        let cells = |row: &Row| [theirs(row), ours(row), row.outcome.name().to_string(), row.why.clone()];
        let headings = [format!("{}, by line", self.program), "here".into(), "".into(), "why".into()];
        let rows: Vec<[String; 4]> = std::iter::once(headings).chain(self.rows.iter().map(cells)).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths = [width(0), width(1), width(2)];
        let line = |[theirs, ours, same, why]: &[String; 4]| {
            let [a, b, c] = widths;
            format!("  {theirs:<a$}  {ours:<b$}  {same:<c$}  {why}").trim_end().to_string()
        };
        let lines: Vec<String> = rows.iter().map(line).collect();
        format!("{}, {}:\n{}", self.path, self.counts(), lines.join("\n"))
    }

    /// Numbers of rows by what has become of them.
    fn counts(&self) -> String {
        let all = [Outcome::Same, Outcome::Differs, Outcome::Default, Outcome::Unneeded, Outcome::Refused];
        let count = |outcome: Outcome| self.rows.iter().filter(|row| row.outcome == outcome).count();
        let said = all.iter().filter(|outcome| count(**outcome) > 0);
        said.map(|outcome| format!("{} {}", count(*outcome), outcome.name())).collect::<Vec<_>>().join(", ")
    }

    /// The table as JSON.
    pub fn to_json(&self) -> Value {
        let row = |row: &Row| {
            let (key, value) =
                row.ours.as_ref().map_or((None, None), |(key, value)| (Some(key), Some(value)));
            json!({
                "line": row.line, "theirs": row.name, "value": row.value, "key": key, "ours": value,
                "outcome": row.outcome.name(), "why": row.why,
            })
        };
        json!({ "program": self.program, "file": self.path, "rows": self.rows.iter().map(row).collect::<Vec<_>>() })
    }
}
