//! The comparison as an SVG picture, to be opened in a browser or put into a page.
//!
//! Each strategy has a group of rows. On the left the memory of each rank: filled by category as it was measured, with an outline
//! around what was planned; on the right the step: the bar ends at the median, the mark is the shortest.

use phalanx_drawing::report::bytes;
use phalanx_drawing::svg::{BOLD, Svg, fill};
use phalanx_plan::Peak;
use phalanx_plan::trace::Category;

use super::report::step_time;
use super::run::{StrategyFigures, StrategyRun};

/// Pixels left of the memory, and of its widest bar; of the figure behind a bar; of the widest step.
const LEFT: f64 = 190.0;
const MEMORY: f64 = 430.0;
const FIGURE: f64 = 80.0;
const STEP: f64 = 200.0;
const RIGHT: f64 = 12.0;
/// Pixels above the first row and below the last.
const TOP: f64 = 84.0;
const BOTTOM: f64 = 28.0;
/// Pixels from rank to rank, of a bar, and between strategies.
const PITCH: f64 = 15.0;
const BAR: f64 = 11.0;
const GAP: f64 = 7.0;
/// Pixels of an entry of the legend, and of a letter of 11, on average at most.
const ENTRY: f64 = 118.0;
const LETTER: f64 = 6.5;
/// Largest number of ranks that are all drawn; of more, only those with the largest and the smallest peak.
const RANKS: usize = 8;

/// Left edge of the steps, and the whole width.
const STEPS_AT: f64 = LEFT + MEMORY + FIGURE + 20.0;
const WIDTH: f64 = STEPS_AT + STEP + FIGURE + RIGHT;

/// The colour of each category of memory.
const COLOURS: [&str; 6] = ["#4878b0", "#e08a3c", "#5fa55a", "#c9a9dd", "#c5504f", "#a8a8a8"];

/// Draws rows of `ranks` ranks; `heading` names what was run.
pub fn draw_svg(rows: &[StrategyRun], heading: &str) -> String {
    let of_row = |row: &StrategyRun| GAP + PITCH * row.ran.as_ref().map_or(1, |ran| shown(ran).len()) as f64;
    let height = TOP + rows.iter().map(of_row).sum::<f64>() + BOTTOM;
    let mut svg = Svg::new([WIDTH, height]);
    // Letters of 15 are half as wide again.
    let heading = cut(heading, (WIDTH - 24.0) / (1.5 * LETTER));
    svg.heading([12.0, 24.0], &heading);
    legend(&mut svg);
    let ran = || rows.iter().filter_map(|row| row.ran.as_ref().ok());
    let peaks = ran().flat_map(|ran| &ran.ranks).map(|rank| rank.planned.bytes.max(rank.measured.bytes));
    let memory = MEMORY / peaks.max().unwrap_or(1).max(1) as f64;
    let slowest = ran().map(|ran| ran.median_and_min().0).fold(0.0, f64::max);
    let step = STEP / slowest.max(f64::MIN_POSITIVE);
    axis(&mut svg, memory, height - BOTTOM);
    let mut y = TOP;
    for row in rows {
        svg.text([12.0, y + 10.0], "start", BOLD, row.strategy.name());
        match &row.ran {
            Ok(ran) => strategy(&mut svg, row, ran, y, [memory, step]),
            Err(reason) => {
                let reason = cut(&format!("does not run: {reason}"), (WIDTH - LEFT - RIGHT) / LETTER);
                svg.text([LEFT, y + 10.0], "start", " fill=\"#888\"", &reason);
            }
        }
        y += of_row(row);
    }
    svg.finish()
}

/// Numbers of the ranks that are drawn.
fn shown(ran: &StrategyFigures) -> Vec<usize> {
    match ran.ranks.len() {
        count if count <= RANKS => (0..count).collect(),
        _ => {
            let (largest, smallest) = ran.largest_and_smallest();
            vec![largest, smallest]
        }
    }
}

/// The bars of one strategy; `scales` are pixels of a byte and of a second.
fn strategy(svg: &mut Svg, row: &StrategyRun, ran: &StrategyFigures, top: f64, [memory, step]: [f64; 2]) {
    let what = if row.strategy.is_data_parallel() { "device" } else { "rank" };
    for (line, rank) in (0..).zip(shown(ran)) {
        let (y, figures) = (top + PITCH * f64::from(line), &ran.ranks[rank]);
        svg.text([LEFT - 8.0, y + 10.0], "end", "", &format!("{what} {rank}"));
        let end = filled(svg, &figures.measured, y, memory);
        let planned = figures.planned.bytes as f64 * memory;
        let outline = " fill=\"none\" stroke=\"#111\"";
        svg.rect([LEFT, y, planned, BAR], outline, &format!("planned: {} bytes", figures.planned.bytes));
        let figure = bytes(figures.measured.bytes);
        svg.text([end.max(LEFT + planned) + 6.0, y + 10.0], "start", "", &figure);
    }
    let (median, min) = ran.median_and_min();
    let width = median * step;
    svg.rect([STEPS_AT, top, width, BAR], &fill("#8fb3d9"), &format!("median {median} s"));
    let mark = STEPS_AT + min * step;
    svg.stroke([mark, top - 1.0], [mark, top + BAR + 1.0], "#111", "");
    svg.text([STEPS_AT + width + 6.0, top + 10.0], "start", "", &step_time(median));
}

/// A peak by category; where its bar ends.
fn filled(svg: &mut Svg, peak: &Peak, y: f64, scale: f64) -> f64 {
    let mut x = LEFT;
    for (category, colour) in Category::ALL.into_iter().zip(COLOURS) {
        let held = peak.categories.get(category);
        let width = held as f64 * scale;
        if held > 0 {
            svg.rect([x, y, width, BAR], &fill(colour), &format!("{}: {held} bytes", category.name()));
        }
        x += width;
    }
    x
}

fn legend(svg: &mut Svg) {
    let entries = Category::ALL.map(Category::name).into_iter().zip(COLOURS);
    for (number, (name, colour)) in (0..).zip(entries) {
        let x = 12.0 + ENTRY * f64::from(number);
        svg.rect([x, 38.0, 12.0, 12.0], &fill(colour), "");
        svg.text([x + 17.0, 48.0], "start", "", name);
    }
    let x = 12.0 + ENTRY * Category::ALL.len() as f64;
    svg.rect([x, 38.0, 12.0, 12.0], " fill=\"none\" stroke=\"#111\"", "");
    svg.text([x + 17.0, 48.0], "start", "", "planned");
    svg.text([LEFT, TOP - 12.0], "start", "", "memory of a rank, measured");
    svg.text([STEPS_AT, TOP - 12.0], "start", "", "step: median, mark at the shortest");
}

/// Lines at powers of two bytes, at most eight of them, `scale` pixels a byte.
fn axis(svg: &mut Svg, scale: f64, bottom: f64) {
    let mut tick = 1u64;
    while tick as f64 * scale < MEMORY / 4.0 {
        tick *= 2;
    }
    for number in 0..=(MEMORY / (tick as f64 * scale)) as u64 {
        let x = LEFT + (number * tick) as f64 * scale;
        svg.stroke([x, TOP - 6.0], [x, bottom], "#ddd", "");
        svg.text([x, bottom + 15.0], "middle", "", &bytes(number * tick));
    }
}

/// At most so many letters.
fn cut(content: &str, letters: f64) -> String {
    let letters = letters as usize;
    let line = content.lines().next().unwrap_or_default();
    match line.chars().count() <= letters {
        true => line.to_string(),
        false => line.chars().take(letters.saturating_sub(4)).collect::<String>() + " ...",
    }
}

#[cfg(test)]
mod tests {
    use super::super::compared::made_up;
    use super::super::strategy::Strategy;
    use super::*;

    fn attribute<'a>(line: &'a str, name: &str) -> &'a str {
        let (_, rest) = line.split_once(&format!(" {name}=\"")).unwrap_or_else(|| panic!("{name}: {line}"));
        rest.split_once('"').unwrap().0
    }

    fn number(line: &str, name: &str) -> f64 {
        attribute(line, name).parse().unwrap()
    }

    /// Left, right, top and bottom of a line of text, generously.
    fn extent(line: &str) -> [f64; 4] {
        let content = line.split_once('>').unwrap().1.split_once('<').unwrap().0;
        let large = line.contains("font-size=\"15\"");
        let size = if large { 15.0 } else { 11.0 };
        let letters = content.replace("&lt;", "<").replace("&gt;", ">").chars().count() as f64;
        let width = letters * LETTER * if large { 1.5 } else { 1.0 };
        let (x, y) = (number(line, "x"), number(line, "y"));
        let left = match attribute(line, "text-anchor") {
            "start" => x,
            "middle" => x - width / 2.0,
            _ => x - width,
        };
        [left, left + width, y - 0.8 * size, y + 0.2 * size]
    }

    #[test]
    fn nothing_overlaps_or_leaves_the_picture() {
        let mut many = made_up::rows();
        many[6] = made_up::row(Strategy::Zero3, &[1 << 20; 24], 5.25);
        for rows in [made_up::rows(), many] {
            let svg = draw_svg(&rows, &"a heading that does not end ".repeat(9));
            let texts: Vec<[f64; 4]> =
                svg.lines().filter(|line| line.starts_with("<text")).map(extent).collect();
            let (width, height) = (number(&svg, "width"), number(&svg, "height"));
            for (index, [left, right, top, bottom]) in texts.iter().enumerate() {
                assert!(
                    *left >= 0.0 && *right <= width && *top >= 0.0 && *bottom <= height,
                    "{index}: {svg}"
                );
                for [other_left, other_right, other_top, other_bottom] in &texts[..index] {
                    let apart = right <= other_left
                        || other_right <= left
                        || bottom <= other_top
                        || other_bottom <= top;
                    assert!(apart, "{index}: {svg}");
                }
            }
            for bar in svg.lines().filter(|line| line.starts_with("<rect x=")) {
                assert!(number(bar, "x") + number(bar, "width") <= width, "{bar}");
                assert!(number(bar, "y") + number(bar, "height") <= height, "{bar}");
            }
        }
    }

    #[test]
    fn bars_are_as_long_as_what_they_stand_for() {
        let svg = draw_svg(&[made_up::row(Strategy::Ddp, &[4 << 20, 2 << 20], 5.0)], "two ranks");
        let widths = |what: &str| -> Vec<f64> {
            svg.lines().filter(|line| line.contains(what)).map(|line| number(line, "width")).collect()
        };
        assert_eq!(widths("<title>planned:"), [MEMORY, MEMORY / 2.0]);
        assert_eq!(widths("<title>parameters:"), [MEMORY / 2.0, MEMORY / 4.0]);
        assert_eq!(widths("<title>activations:"), [MEMORY / 2.0, MEMORY / 4.0]);
        assert_eq!(widths("<title>median"), [STEP]);
    }
}
