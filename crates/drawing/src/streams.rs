//! Draws when the streams of ranks work: as text for terminals, as an SVG picture, and as events for Perfetto and Chrome's tracing
//! (`chrome://tracing`).
//!
//! ```text
//! rank 0  compute    ▇▇▇▇▇▇▇█▇▇▇ 97 %
//!         data       ▂ ▂▄▂▂▂ ▂▂▇ 31 %
//! ```
//!
//! A lane is a stream; collectives have one for each group. A letter, or half a pixel, stands for all work in its time.

use std::collections::BTreeMap;
use std::fmt::Write;

use phalanx_plan::Stretch;
use phalanx_plan::trace::Stream;
use serde_json::{Value, json};

use crate::report::{bytes, percent, seconds};
use crate::svg::{BOLD, Svg, fill};

/// Work of a rank, with its name for people.
pub type Row<'a> = (String, &'a [Stretch]);

/// Shares of a letter's time, from none to all.
const SHARES: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Pixels of the picture: left of the lanes, of the lanes, of a lane and between ranks.
const LEFT: f64 = 130.0;
const WIDTH: f64 = 1200.0;
const LANE: f64 = 14.0;
const GAP: f64 = 10.0;

/// Pieces of work that a file of events holds at most: viewers become slow.
const MAX_EVENTS: usize = 400_000;

/// The lanes of a rank, in the order of streams and groups.
fn lanes(stretches: &[Stretch]) -> BTreeMap<(usize, &'static str), Vec<&Stretch>> {
    let mut lanes: BTreeMap<_, Vec<&Stretch>> = BTreeMap::new();
    for one in stretches {
        lanes.entry((one.stream as usize, one.group)).or_default().push(one);
    }
    lanes.values_mut().for_each(|lane| lane.sort_by(|a, b| a.start.total_cmp(&b.start)));
    lanes
}

fn lane_name(of: &Stretch) -> &'static str {
    match of.stream {
        Stream::Compute => "compute",
        Stream::Communication => of.group,
        Stream::ToDevice => "to device",
        Stream::ToHost => "to host",
        Stream::Disk => "disk",
        Stream::Host => "host updates",
    }
}

/// The end of the last piece of work.
fn end(rows: &[Row]) -> f64 {
    rows.iter().flat_map(|(_, all)| *all).map(|one| one.end).fold(f64::MIN_POSITIVE, f64::max)
}

/// For each of `cells` equal parts of the time until `end`: the share in which a lane works.
fn shares(lane: &[&Stretch], cells: usize, end: f64) -> Vec<f64> {
    let mut busy = vec![0.0; cells];
    let scale = cells as f64 / end;
    for one in lane {
        let (from, to) = (one.start * scale, one.end * scale);
        let last = (to.ceil() as usize).min(cells);
        for (cell, busy) in busy.iter_mut().enumerate().take(last).skip(from as usize) {
            *busy += (to.min(cell as f64 + 1.0) - from.max(cell as f64)).max(0.0);
        }
    }
    busy
}

/// Lines of at most `width` letters: for each lane, how much of the time of each letter it works.
pub fn draw_streams_terminal(rows: &[Row], width: usize) -> String {
    let end = end(rows);
    let label = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0) + 2;
    let cells = width.saturating_sub(label + 18).max(10);
    let mut text = String::new();
    for (name, stretches) in rows {
        for (number, lane) in lanes(stretches).values().enumerate() {
            let shares = shares(lane, cells, end);
            let letter = |share: &f64| SHARES[(share * 8.0).ceil().clamp(0.0, 8.0) as usize];
            let letters: String = shares.iter().map(letter).collect();
            let name = if number == 0 { name } else { "" };
            let busy = percent(shares.iter().sum::<f64>() / cells as f64);
            let _ = writeln!(text, "{name:label$}{:13}{letters} {busy}", lane_name(lane[0]));
        }
    }
    let (zero, end) = (label + 13, seconds(end));
    let _ = writeln!(text, "{:zero$}0{end:>rest$}", "", rest = cells.saturating_sub(1));
    text
}

/// What a piece of work is, with its colour.
fn kind(of: &Stretch) -> (&'static str, &'static str) {
    match (of.stream, of.name) {
        (Stream::Compute, name) if name.starts_with("attention") => ("attention", "#8e5ea2"),
        (Stream::Compute, name) if name.starts_with("linear") || name.contains("head") => {
            ("products", "#3b6fb6")
        }
        (Stream::Compute, name) if name.starts_with("update") || name.starts_with("adam") => {
            ("updates", "#4d9a57")
        }
        (Stream::Compute, _) => ("other kernels", "#7fb2d9"),
        (Stream::Communication, "all_gather" | "broadcast") => ("gathers", "#e0a030"),
        (Stream::Communication, "send" | "recv") => ("messages", "#999999"),
        (Stream::Communication, _) => ("sums", "#cf4f3f"),
        (Stream::Host, _) => ("updates", "#4d9a57"),
        _ => ("copies", "#2f9e9e"),
    }
}

/// Works of a lane that lie within half a pixel become one box, of the kind that takes most of it.
struct Bar<'a> {
    from: f64,
    to: f64,
    longest: &'a Stretch,
    count: usize,
}

fn bars<'a>(lane: &[&'a Stretch], scale: f64) -> Vec<Bar<'a>> {
    let mut bars: Vec<Bar> = Vec::new();
    for one in lane {
        let (from, to) = (one.start * scale, one.end * scale);
        let length = |of: &Stretch| of.end - of.start;
        match bars.last_mut() {
            Some(last) if to - last.from < 0.5 || (from - last.to < 0.5 && to - last.to < 0.25) => {
                last.to = last.to.max(to);
                last.count += 1;
                last.longest = if length(one) > length(last.longest) { one } else { last.longest };
            }
            _ => bars.push(Bar { from, to, longest: one, count: 1 }),
        }
    }
    bars
}

/// A picture: for each rank its lanes, with a box for each piece of work that can be seen.
pub fn draw_streams_svg(title: &str, rows: &[Row]) -> String {
    let end = end(rows);
    let all: Vec<_> = rows.iter().map(|(name, stretches)| (name, lanes(stretches))).collect();
    let lanes: usize = all.iter().map(|(_, lanes)| lanes.len()).sum();
    let height = 70.0 + LANE * lanes as f64 + GAP * all.len() as f64 + 40.0;
    let mut svg = Svg::new([LEFT + WIDTH + 70.0, height]);
    svg.title(title);
    svg.heading([10.0, 22.0], title);
    let (mut y, mut kinds) = (60.0, BTreeMap::new());
    for (name, lanes) in &all {
        svg.text([10.0, y + LANE - 3.0], "start", BOLD, name);
        for lane in lanes.values() {
            svg.text([LEFT - 6.0, y + LANE - 3.0], "end", "", lane_name(lane[0]));
            for Bar { from, to, longest, count } in bars(lane, WIDTH / end) {
                let (kind, colour) = kind(longest);
                kinds.insert(kind, colour);
                let of = longest;
                let words = format!(
                    "{} {}, {} from {}",
                    of.name,
                    bytes(of.bytes),
                    seconds(of.end - of.start),
                    seconds(of.start)
                );
                let words = if count > 1 { format!("{count} works; the longest: {words}") } else { words };
                svg.rect([LEFT + from, y + 1.0, (to - from).max(0.2), LANE - 2.0], &fill(colour), &words);
            }
            let busy: f64 = lane.iter().map(|one| one.end - one.start).sum();
            svg.text([LEFT + WIDTH + 6.0, y + LANE - 3.0], "start", "", &percent(busy / end));
            y += LANE;
        }
        y += GAP;
    }
    for tenth in 0..=10 {
        let x = LEFT + WIDTH * f64::from(tenth) / 10.0;
        svg.stroke([x, 55.0], [x, y], "#bbb", " stroke-dasharray=\"2 3\"");
        svg.text([x, y + 12.0], "middle", "", &seconds(end * f64::from(tenth) / 10.0));
    }
    let mut x = LEFT;
    for (kind, colour) in kinds {
        svg.rect([x, 36.0, 10.0, 10.0], &fill(colour), "");
        svg.text([x + 14.0, 45.0], "start", "", kind);
        x += 34.0 + 6.5 * kind.len() as f64;
    }
    svg.finish()
}

/// Events in the form that Perfetto and Chrome's tracing read: a process for each rank, a thread for each lane. Where there are too many, the
/// first of all ranks, and the time until which they are.
pub fn stream_events(rows: &[Row]) -> (Value, Option<f64>) {
    let mut starts: Vec<f64> = rows.iter().flat_map(|(_, all)| *all).map(|one| one.start).collect();
    starts.sort_by(f64::total_cmp);
    let until = starts.get(MAX_EVENTS).copied();
    let mut events = Vec::new();
    for (process, (name, stretches)) in rows.iter().enumerate() {
        events.push(json!({ "ph": "M", "name": "process_name", "pid": process, "args": { "name": name } }));
        for (thread, lane) in lanes(stretches).values().enumerate() {
            let name = lane_name(lane[0]);
            let about = json!({ "ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": { "name": name } });
            events.push(about);
            let shown = lane.iter().take_while(|one| until.is_none_or(|until| one.start < until));
            events.extend(shown.map(|one| {
                json!({
                    "ph": "X", "name": one.name, "cat": kind(one).0, "pid": process, "tid": thread,
                    "ts": 1e6 * one.start, "dur": 1e6 * (one.end - one.start), "args": { "bytes": one.bytes },
                })
            }));
        }
    }
    (json!({ "displayTimeUnit": "ms", "traceEvents": events }), until)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(stream: Stream, name: &'static str, group: &'static str, [start, end]: [f64; 2]) -> Stretch {
        Stretch { stream, group, name, bytes: 8, start, end }
    }

    fn rank() -> Vec<Stretch> {
        vec![
            one(Stream::Communication, "all_gather", "data", [0.0, 5.0]),
            one(Stream::Compute, "linear", "", [5.0, 7.5]),
            one(Stream::Compute, "norm", "", [7.5, 10.0]),
        ]
    }

    #[test]
    fn letters_show_how_much_of_their_time_a_stream_works() {
        let rank = rank();
        let text = draw_streams_terminal(&[("rank 0".into(), &rank)], 36);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "rank 0  compute           █████ 50.0%");
        assert_eq!(lines[1], "        data         █████      50.0%");
        assert!(lines[2].ends_with("10.0 s"), "{text}");
    }

    #[test]
    fn pictures_have_a_box_for_each_piece_that_can_be_seen() {
        let mut rank = rank();
        let svg = draw_streams_svg("step", &[("rank 0".into(), &rank)]);
        assert_eq!(svg.matches("<title>").count(), 1 + 3, "{svg}");
        // A thousand short ones are a few bars.
        rank.extend(
            (0..1000).map(|n| one(Stream::Disk, "fetch", "", [1e-4 * f64::from(n), 1e-4 * f64::from(n + 1)])),
        );
        let svg = draw_streams_svg("step", &[("rank 0".into(), &rank)]);
        assert!((5..60).contains(&svg.matches("<title>").count()), "{svg}");
    }

    #[test]
    fn events_have_processes_threads_and_microseconds() {
        let (rank, other) = (rank(), rank());
        let (events, until) = stream_events(&[("rank 0".into(), &rank), ("rank 1".into(), &other)]);
        let all = events["traceEvents"].as_array().unwrap();
        assert_eq!((all.len(), until), (2 * (1 + 2 + 3), None));
        let linear = all.iter().find(|event| event["name"] == "linear").unwrap();
        assert_eq!((linear["ts"].as_f64(), linear["dur"].as_f64()), (Some(5e6), Some(2.5e6)));
    }
}
