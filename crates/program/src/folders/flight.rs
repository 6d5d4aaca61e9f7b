//! Flight records in a run folder: what each rank did last before a run failed, in `flight/rank-N.json`.

use std::path::Path;

use anyhow::{Context, Result};
use phalanx_collectives::FlightEvent;
use serde::{Deserialize, Serialize};

use crate::folders::ownership::check_folders;
use crate::folders::run_names::FLIGHT;
use phalanx_drawing::report::Table;

/// Largest file that is read: a thousand events of some hundred bytes, with much to spare.
const BYTES: u64 = 16 << 20;

/// The record of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFlight {
    /// The rank.
    pub rank: usize,
    /// Its last events, the oldest first.
    pub events: Vec<FlightEvent>,
}

/// Writes the records of ranks into the run folder `run`.
///
/// # Errors
/// A folder that is full or cannot be written.
pub fn write(run: &Path, flights: &[(usize, Vec<FlightEvent>)]) -> Result<()> {
    if flights.is_empty() || !run.is_dir() {
        return Ok(());
    }
    check_folders(run)?;
    let folder = run.join(FLIGHT);
    phalanx_system::files::create_folders(&folder).with_context(|| folder.display().to_string())?;
    for (rank, events) in flights {
        let path = folder.join(format!("rank-{rank}.json"));
        let flight = RankFlight { rank: *rank, events: events.clone() };
        phalanx_system::files::write(&path, serde_json::to_string(&flight)? + "\n")
            .with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Returns whether `path` is a folder of flight records, or one of them.
pub fn is_flight(path: &Path) -> bool {
    let is_record = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let number = name.strip_prefix("rank-").and_then(|name| name.strip_suffix(".json"));
        number.is_some_and(|number| number.parse::<usize>().is_ok()) && path.is_file()
    };
    is_record(path)
        || std::fs::read_dir(path)
            .is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(|entry| is_record(&entry.path()))))
}

/// The records in a folder, or the one in a file, by rank.
///
/// # Errors
/// A file that cannot be read or is no flight record.
pub fn read(path: &Path) -> Result<Vec<RankFlight>> {
    let mut paths = Vec::new();
    if path.is_dir() {
        for entry in std::fs::read_dir(path).with_context(|| path.display().to_string())? {
            let path = entry?.path();
            if is_flight(&path) {
                paths.push(path);
            }
        }
    } else {
        paths.push(path.to_path_buf());
    }
    let record = |path: &std::path::PathBuf| -> Result<RankFlight> {
        let text =
            phalanx_system::files::read_text(path, BYTES).with_context(|| path.display().to_string())?;
        serde_json::from_str(&text).with_context(|| format!("{} is no flight record", path.display()))
    };
    let mut flights = paths.iter().map(record).collect::<Result<Vec<_>>>()?;
    flights.sort_by_key(|flight| flight.rank);
    Ok(flights)
}

/// The records in words: every event with the time before the rank's last one.
pub fn describe(flights: &[RankFlight], shown: usize) -> String {
    let mut text = String::new();
    for RankFlight { rank, events } in flights {
        let Some(last) = events.last() else {
            text.push_str(&format!("rank {rank}: no events\n\n"));
            continue;
        };
        let left_out = events.len().saturating_sub(shown);
        let before =
            if left_out > 0 { format!("; the {left_out} before are in the file") } else { String::new() };
        text.push_str(&format!("rank {rank}: its last {} events{before}\n", events.len() - left_out));
        let mut table = Table::new(&["seconds before its last", "event"]);
        for event in &events[left_out..] {
            let before_s = last.at_us.saturating_sub(event.at_us) as f64 / 1e6;
            table.row(vec![format!("{before_s:.6}"), event.event.clone()]);
        }
        text.push_str(&table.to_string());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let event = |at_us, event: &str| FlightEvent { at_us, event: event.to_string() };
        let flights = [(3, vec![event(5, "step 1"), event(2_000_005, "begin all_reduce")]), (0, vec![])];
        write(folder.path(), &flights).unwrap();
        let path = folder.path().join(FLIGHT);
        assert!(is_flight(&path) && is_flight(&path.join("rank-3.json")) && !is_flight(folder.path()));
        let read = read(&path).unwrap();
        assert_eq!(read.iter().map(|flight| flight.rank).collect::<Vec<_>>(), [0, 3]);
        assert_eq!(read[1].events, flights[0].1);
        let text = describe(&read, 1);
        assert!(text.contains("rank 0: no events") && text.contains("begin all_reduce"), "{text}");
        assert!(!text.contains("step 1") && text.contains("the 1 before"), "{text}");
        std::fs::write(path.join("rank-3.json"), "{").unwrap();
        assert!(super::read(&path).unwrap_err().to_string().contains("is no flight record"));
    }
}
