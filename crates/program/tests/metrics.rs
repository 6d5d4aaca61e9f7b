//! The files of metrics beside `metrics.jsonl`.

use std::fs;

use serde_json::Value;

use crate::rig::Home;

const ALL: &[&str] = &[
    "train",
    "small.toml",
    "--run",
    "r",
    "--quiet",
    "--set",
    "metrics.sinks=[\"jsonl\", \"csv\", \"tensorboard\"]",
];

/// The rows of `metrics.csv` as records, without empty cells.
fn rows(home: &Home) -> Vec<Vec<(String, f64)>> {
    let text = String::from_utf8(home.read("r/metrics.csv")).unwrap();
    let mut lines = text.lines();
    let names: Vec<String> = lines.next().unwrap().split(',').map(String::from).collect();
    let row = |line: &str| {
        let cells = names.iter().cloned().zip(line.split(','));
        cells.filter(|(_, cell)| !cell.is_empty()).map(|(name, cell)| (name, cell.parse().unwrap())).collect()
    };
    lines.map(row).collect()
}

/// The event files of the run: names and bytes.
fn events(home: &Home) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(home.path("r/tensorboard")).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.display().to_string(), fs::read(&path).unwrap())).collect()
}

/// The payloads of the records of an event file, by their lengths.
fn records(bytes: &[u8]) -> Vec<&[u8]> {
    let (mut records, mut rest) = (Vec::new(), bytes);
    while !rest.is_empty() {
        let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        records.push(&rest[12..12 + length]);
        rest = &rest[length + 16..];
    }
    records
}

/// Every line is a row, a record of the event file, and has the same numbers: also after a resume that drops lines, and in files that were
/// lost meanwhile. `tools/check_events.py` reads event files with TensorBoard.
#[test]
fn csv_and_events_have_what_the_lines_have() {
    let home = Home::new();
    home.run(ALL).ok();
    let mut first = Vec::new();
    for round in 0..2 {
        let lines = home.metrics("r");
        let rows = rows(&home);
        assert_eq!((lines.len(), rows.len()), ([10, 17][round], [10, 17][round]));
        for (line, row) in lines.iter().zip(&rows) {
            let is_evaluation = line.get("val_loss").is_some();
            for (name, value) in row {
                let there = name.strip_prefix("val_").filter(|name| is_evaluation && *name != "loss");
                let stated = &line[there.unwrap_or(name)];
                assert_eq!(stated.as_f64(), Some(*value), "{name} of {line}");
            }
            let counted = ["windows", "targets"].iter().filter(|name| line.get(**name).is_some()).count();
            assert_eq!(row.len(), line.as_object().unwrap().len() - counted, "{line}");
        }
        let elapsed: Vec<f64> = lines.iter().filter_map(|line| line["elapsed_s"].as_f64()).collect();
        assert!(elapsed.is_sorted() && elapsed.len() == lines.len(), "{elapsed:?}");
        let events = events(&home);
        let [(name, bytes)] = &events[..] else { panic!("{events:?}") };
        let records = records(bytes);
        assert_eq!(records.len(), 2 + lines.len(), "version, configuration, a record for each line");
        for (record, line) in records[2..].iter().zip(&lines) {
            let time = f64::from_le_bytes(record[1..9].try_into().unwrap());
            assert_eq!(
                (Some(time), Some(u64::from(record[10]))),
                (line["time_s"].as_f64(), line["step"].as_u64())
            );
            let loss = line.get("loss").or(line.get("val_loss")).and_then(Value::as_f64).unwrap() as f32;
            assert!(record.windows(5).any(|five| five[0] == 2 << 3 | 5 && five[1..] == loss.to_le_bytes()));
        }
        assert!(String::from_utf8_lossy(records[1]).contains("    steps = "), "the configuration");
        match round {
            0 => {
                first = lines;
                // What a killed run leaves: steps after its checkpoint, and a row that was cut off.
                let csv = home.read("r/metrics.csv");
                home.write("r/metrics.csv", &csv[..csv.len() - 7]);
                fs::remove_file(name).unwrap();
                home.write("r/tensorboard/events.out.tfevents.0000000001.phalanx", b"cut off");
                home.write("r/tensorboard/events.out.tfevents.of-others", b"theirs");
                fs::remove_dir_all(home.path("r/checkpoints/step-8")).unwrap();
                home.run(&["train", "--run", "r", "--resume", "--quiet", "--set", "train.steps=13"]).ok();
                assert_eq!(home.read("r/tensorboard/events.out.tfevents.of-others"), b"theirs");
                fs::remove_file(home.path("r/tensorboard/events.out.tfevents.of-others")).unwrap();
            }
            _ => assert_eq!(lines[..5], first[..5], "the lines before the checkpoint stay"),
        }
    }
}

/// What cannot be written is refused before a step is made, and files of others stay.
#[test]
fn files_of_metrics_that_cannot_be_written_are_named() {
    let home = Home::new();
    fs::create_dir(home.path("r")).unwrap();
    home.write("r/tensorboard", "mine");
    home.run(ALL).refused(&["r/tensorboard", "no run has written"]);
    fs::remove_file(home.path("r/tensorboard")).unwrap();
    home.run(&["train", "small.toml", "--run", "r", "--quiet"]).ok();
    let resumed = &["train", "--run", "r", "--resume", "--quiet", "--set", "train.steps=12", "--set"];
    home.write("r/metrics.csv", "a,b\n1,2\n");
    home.run(&[resumed, &["metrics.sinks=csv"][..]].concat()).refused(&["r/metrics.csv", "move it away"]);
    home.write("r/tensorboard", "mine");
    home.run(&[resumed, &["metrics.sinks=tensorboard"][..]].concat()).refused(&["r/tensorboard"]);
    assert_eq!(
        (home.read("r/metrics.csv"), home.read("r/tensorboard")),
        (b"a,b\n1,2\n".to_vec(), b"mine".to_vec())
    );
    assert_eq!(home.metrics("r").len(), 10);
    home.run(&["train", "small.toml", "--run", "s", "--set", "metrics.sinks=wandb"])
        .refused(&["metrics.sinks", "\"tensorboard\""]);
}
