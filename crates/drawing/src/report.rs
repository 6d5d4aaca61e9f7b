//! Numbers and tables for people.

/// Bytes in the unit that fits: `812 B`, `13.4 MiB`, `1.25 GiB`.
pub fn bytes(bytes: u64) -> String {
    const KIB: f64 = 1024.0;
    let value = bytes as f64;
    match value {
        v if v < KIB => format!("{bytes} B"),
        v if v < KIB * KIB => format!("{:.1} KiB", v / KIB),
        v if v < KIB * KIB * KIB => format!("{:.1} MiB", v / KIB / KIB),
        v => format!("{:.2} GiB", v / KIB / KIB / KIB),
    }
}

/// A number with a unit prefix: `950`, `12.3k`, `3.45M`, `1.20G`.
pub fn count(value: f64) -> String {
    match value {
        v if v < 1e3 => format!("{v:.0}"),
        v if v < 1e6 => format!("{:.1}k", v / 1e3),
        v if v < 1e9 => format!("{:.2}M", v / 1e6),
        v if v < 1e12 => format!("{:.2}G", v / 1e9),
        v => format!("{:.2}T", v / 1e12),
    }
}

/// Seconds: `850 ms`, `12.3 s`, `4 min 05 s`, `3 h 10 min`.
pub fn seconds(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match seconds {
        s if s < 1e-3 => format!("{:.0} us", s * 1e6),
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 10.0 => format!("{s:.2} s"),
        s if s < 60.0 => format!("{s:.1} s"),
        s if s < 3600.0 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole / 60 % 60),
    }
}

/// `1 rank`, `2 ranks`, `3 batches`.
pub fn plural(count: usize, word: &str) -> String {
    let ending = match (count, word.ends_with("ch")) {
        (1, _) => "",
        (_, true) => "es",
        (_, false) => "s",
    };
    format!("{count} {word}{ending}")
}

/// A share of 1: `87.4%`.
pub fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// A table of texts, as text or as Markdown. As text, the first column is aligned to the left, the others to the right.
#[derive(Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

/// A column of a table: its heading, and what it says of an item.
pub type Column<'a, T> = (&'a str, &'a dyn Fn(&T) -> String);

impl Table {
    /// A table with a row for each item.
    pub fn of<T>(items: impl IntoIterator<Item = T>, columns: &[Column<T>]) -> Table {
        let mut table = Table::new(&columns.iter().map(|(heading, _)| *heading).collect::<Vec<_>>());
        items.into_iter().for_each(|item| table.row(columns.iter().map(|(_, text)| text(&item))));
        table
    }

    /// A table with a row of headings.
    pub fn new(headings: &[&str]) -> Table {
        let mut table = Table::default();
        table.row(headings.iter().map(|h| h.to_string()));
        table
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// As Markdown, the first row as headings.
    pub fn to_markdown(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let mut lines: Vec<String> = Vec::new();
        for row in &self.rows {
            let rest = std::iter::repeat_n("", columns - row.len());
            let cells: Vec<&str> = row.iter().map(String::as_str).chain(rest).collect();
            lines.push(format!("| {} |\n", cells.join(" | ")));
        }
        lines.insert(1, format!("|{}\n", "---|".repeat(columns)));
        lines.concat()
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::from("  ");
            for (column, cell) in row.iter().enumerate() {
                let width = widths[column];
                match column {
                    0 => line.push_str(&format!("{cell:<width$}")),
                    _ => line.push_str(&format!("  {cell:>width$}")),
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// A count as JSON: exact up to 2^64, the limit of most JSON readers, and rounded beyond.
pub fn whole(count: u128) -> serde_json::Value {
    u64::try_from(count).map_or_else(|_| (count as f64).into(), Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_fit_the_size() {
        assert_eq!([bytes(812), bytes(1536), bytes(13 << 20)], ["812 B", "1.5 KiB", "13.0 MiB"]);
        assert_eq!(bytes(5 << 30), "5.00 GiB");
        assert_eq!([count(950.0), count(12_345.0), count(3.45e6)], ["950", "12.3k", "3.45M"]);
        assert_eq!([seconds(0.0123), seconds(75.0), seconds(3700.0)], ["12 ms", "1 min 15 s", "1 h 01 min"]);
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["rank", "bytes"]);
        table.row(["0".to_string(), "12345".to_string()]);
        assert_eq!(table.to_string(), "  rank  bytes\n  0     12345\n");
        table.row(["1".to_string()]);
        assert_eq!(table.to_markdown(), "| rank | bytes |\n|---|---|\n| 0 | 12345 |\n| 1 |  |\n");
    }
}
