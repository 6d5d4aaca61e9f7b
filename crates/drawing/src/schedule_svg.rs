//! Draws a pipeline schedule as an SVG picture, to be opened in a browser or put into a page.
//!
//! Each rank is a row and each action a box: the colour shows the kind, the shade the chunk, the text the micro-batch. The
//! column on the right shows the largest number of micro-batches whose activations the rank holds, until I and until W.

use phalanx_plan::{Kind, PipelineSchedule, Timeline, in_flight};

use crate::schedule_terminal::{number, title, unit};
use crate::svg::{Svg, fill};

/// Pixels of the frame around the rows.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 180.0;
const TOP: f64 = 78.0;
const BOTTOM: f64 = 44.0;
/// Pixels from row to row, and of a box.
const PITCH: f64 = 28.0;
const BOX: f64 = 22.0;
/// Pixels of the shortest action, unless the picture would get wider than [`WIDEST`].
const UNIT: f64 = 26.0;
const WIDEST: f64 = 16_000.0;
/// Upper bound for the average pixels of a letter, at the font sizes of the title (15) and of a box (10).
const TITLE_LETTER: f64 = 9.0;
const BOX_LETTER: f64 = 6.5;
/// Minimum pixels between ticks of the axis.
const TICK: f64 = 60.0;
/// Pixels of an entry of the legend.
const ENTRY: f64 = 200.0;

/// Draws a schedule with its times.
pub fn draw_svg(schedule: &PipelineSchedule, timeline: &Timeline) -> String {
    let chart = (timeline.makespan / unit(timeline) * UNIT).clamp(UNIT, WIDEST);
    let scale = if timeline.makespan > 0.0 { chart / timeline.makespan } else { 0.0 };
    let heading = title(schedule, timeline);
    let heading = heading.trim_end();
    let entries = legend_entries(schedule);
    let width = (LEFT + chart + RIGHT)
        .max(2.0 * 12.0 + TITLE_LETTER * heading.chars().count() as f64)
        .max(LEFT + ENTRY * entries.len() as f64);
    let height = TOP + PITCH * schedule.ranks.len() as f64 + BOTTOM;
    let mut svg = Svg::new([width, height]);
    svg.title(heading);
    svg.heading([12.0, 24.0], heading);
    legend(&mut svg, &entries);
    axis(&mut svg, schedule, timeline, scale);
    rows(&mut svg, schedule, timeline, scale);
    held(&mut svg, schedule, LEFT + chart);
    svg.finish()
}

/// The colour of a box. All shades are light enough for dark text; the first chunk has the strongest.
fn colour(kind: Kind, chunk: usize) -> String {
    let base: [f64; 3] = match kind {
        Kind::Forward => [102.0, 163.0, 224.0],
        Kind::Backward => [116.0, 190.0, 122.0],
        Kind::Input => [238.0, 170.0, 78.0],
        Kind::Weight => [186.0, 148.0, 214.0],
    };
    let towards_white = 1.0 - 0.65_f64.powi(chunk.min(4) as i32);
    let [red, green, blue] = base.map(|part| (part + (255.0 - part) * towards_white).round() as u8);
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// Kind and chunk of every colour that occurs.
fn legend_entries(schedule: &PipelineSchedule) -> Vec<(Kind, usize)> {
    let chunks: Vec<usize> = (0..schedule.stages()).map(|stage| schedule.chunk(stage)).collect();
    let mut entries: Vec<(Kind, usize)> =
        schedule.ranks.iter().flatten().flatten().map(|action| (action.kind, chunks[action.stage])).collect();
    entries.sort_unstable();
    entries.dedup();
    entries
}

fn legend(svg: &mut Svg, entries: &[(Kind, usize)]) {
    let chunks = entries.iter().any(|&(_, chunk)| chunk > 0);
    for (number, &(kind, chunk)) in (0..).zip(entries) {
        let x = LEFT + ENTRY * f64::from(number);
        let what = match kind {
            Kind::Forward => "F forward",
            Kind::Backward => "B backward",
            Kind::Input => "I input gradient",
            Kind::Weight => "W weight gradient",
        };
        let label = if chunks { format!("{what}, chunk {chunk}") } else { what.to_string() };
        svg.rect([x, 38.0, 12.0, 12.0], &fill(&colour(kind, chunk)), "");
        svg.text([x + 17.0, 48.0], "start", "", &label);
    }
}

/// The time axis under the rows, with a line through them at each tick.
fn axis(svg: &mut Svg, schedule: &PipelineSchedule, timeline: &Timeline, scale: f64) {
    let bottom = TOP + PITCH * schedule.ranks.len() as f64;
    if scale == 0.0 {
        return;
    }
    let step = tick(TICK / scale);
    let ticks = (timeline.makespan / step).floor() as usize;
    for number_of_tick in 0..=ticks {
        let time = number_of_tick as f64 * step;
        let x = LEFT + time * scale;
        svg.stroke([x, TOP - 4.0], [x, bottom + 2.0], "#ddd", "");
        svg.text([x, bottom + 15.0], "middle", "", &number(time));
    }
    svg.text([LEFT, bottom + 32.0], "start", "", "time");
}

/// The smallest of ..., 0.5, 1, 2, 5, 10, 20, ... that is at least `min`.
fn tick(min: f64) -> f64 {
    let power = 10_f64.powf(min.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|digit| digit * power)
        .into_iter()
        .find(|&step| step >= min)
        .unwrap_or(power * 10.0)
}

fn rows(svg: &mut Svg, schedule: &PipelineSchedule, timeline: &Timeline, scale: f64) {
    let chunks: Vec<usize> = (0..schedule.stages()).map(|stage| schedule.chunk(stage)).collect();
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        let y = TOP + PITCH * rank as f64;
        svg.text([LEFT - 8.0, y + 15.0], "end", "", &format!("rank {rank}"));
        for span in spans {
            let (x, width) = (LEFT + span.start * scale, (span.end - span.start) * scale);
            let style = fill(&colour(span.action.kind, chunks[span.action.stage])) + " stroke=\"#fff\"";
            let times = format!("{}: {} to {}", span.action, number(span.start), number(span.end));
            svg.rect([x, y, width, BOX], &style, &times);
            let labels = [span.action.label(false), span.action.micro_batch.to_string()];
            let fits = |label: &&String| BOX_LETTER * label.len() as f64 + 2.0 <= width;
            if let Some(label) = labels.iter().find(fits) {
                svg.text([x + width / 2.0, y + 15.0], "middle", " font-size=\"10\"", label);
            }
        }
    }
}

/// Micro-batches in flight, right of the rows.
fn held(svg: &mut Svg, schedule: &PipelineSchedule, right: f64) {
    let x = right + 14.0;
    let split = schedule.splits_backward();
    let heading = if split { "held until I / until W" } else { "held until B" };
    svg.text([x, TOP - 8.0], "start", "", heading);
    for (rank, held) in in_flight(schedule).ranks.iter().enumerate() {
        let numbers = match split {
            true => format!("{} / {}", held.to_input, held.to_weight),
            false => held.to_input.to_string(),
        };
        svg.text([x, TOP + PITCH * rank as f64 + 15.0], "start", "", &numbers);
    }
}
