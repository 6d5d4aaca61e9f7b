//! The sweep as SVG: step time and bytes moved against the budget, and what each memory holds over a step.

use phalanx_drawing::report::bytes;
use phalanx_drawing::svg::{BOLD, Svg, fill};
use phalanx_plan::trace::Memory;

use super::svg::{LEFT, MEASURED, PLANNED, RIGHT_EDGE, TICKS, WIDTH, ticks};
use super::{MemoryRan, MemoryRun, lanes};

/// Pixels of a plot and around it.
const HEIGHT: f64 = 200.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 56.0;
const GAP: f64 = 64.0;

/// Largest number of points of a line: more are thinned, with the smallest and the largest of each part kept.
const POINTS: usize = 4000;

/// The area of a plot.
struct Plot {
    top: f64,
    x_max: f64,
    y_max: f64,
}

impl Plot {
    fn x(&self, value: f64) -> f64 {
        LEFT + WIDTH * value / self.x_max.max(f64::MIN_POSITIVE)
    }

    fn y(&self, value: f64) -> f64 {
        self.top + HEIGHT * (1.0 - value / self.y_max.max(f64::MIN_POSITIVE))
    }

    /// Frame, ticks and title.
    fn frame(
        &self,
        svg: &mut Svg,
        title: &str,
        x_label: &dyn Fn(f64) -> String,
        y_label: &dyn Fn(f64) -> String,
    ) {
        svg.text([LEFT, self.top - 10.0], "start", BOLD, title);
        for tick in 0..=TICKS {
            let share = tick as f64 / TICKS as f64;
            let y = self.y(share * self.y_max);
            svg.stroke([LEFT, y], [RIGHT_EDGE, y], "#ddd", "");
            svg.text([LEFT - 6.0, y + 4.0], "end", "", &y_label(share * self.y_max));
        }
        ticks(svg, self.top + HEIGHT, self.x_max, x_label);
    }
}

fn begin(height: f64, heading: &str) -> Svg {
    let mut svg = Svg::new([LEFT + WIDTH + RIGHT, height]);
    svg.heading([12.0, 22.0], heading);
    svg
}

/// Step time and bytes moved against the budget of device memory: `auto` as a line, the other placements at what they
/// need.
pub fn budgets(runs: &[MemoryRun], heading: &str) -> String {
    let mut svg = begin(TOP + 2.0 * (HEIGHT + GAP), heading);
    let ran = || runs.iter().filter_map(|run| Some((run, run.ran.as_ref().ok()?)));
    let at =
        |run: &MemoryRun, ran: &MemoryRan| run.budget.map_or(ran.device_bytes, |(_, bytes)| bytes) as f64;
    let x_max = ran().map(|(run, ran)| at(run, ran)).fold(0.0, f64::max) * 1.05;
    let seconds = |ran: &MemoryRan| ran.step_s();
    let moved = |ran: &MemoryRan| ran.moved_bytes() as f64;
    type Value<'a> = &'a dyn Fn(&MemoryRan) -> f64;
    type Label<'a> = &'a dyn Fn(f64) -> String;
    let ms = |value: f64| format!("{:.0} ms", 1e3 * value);
    let size = |value: f64| bytes(value as u64);
    let plots: [(&str, Value, Label); 2] =
        [("step time against device memory", &seconds, &ms), ("bytes moved by a step", &moved, &size)];
    for (number, (title, value, label)) in (0..).zip(plots) {
        let y_max = ran().map(|(_, ran)| value(ran)).fold(0.0, f64::max) * 1.1;
        let plot = Plot { top: TOP + f64::from(number) * (HEIGHT + GAP), x_max, y_max };
        plot.frame(&mut svg, title, &size, label);
        let mut line: Vec<[f64; 2]> = Vec::new();
        for (run, ran) in ran() {
            let point = [plot.x(at(run, ran)), plot.y(value(ran))];
            let is_auto = run.placement == "auto";
            let colour = if is_auto { MEASURED } else { PLANNED };
            let [x, y] = point;
            svg.circle(point, 4.0, &fill(colour), &format!("{}: {}", run.name(), label(value(ran))));
            if is_auto {
                line.push(point);
            } else {
                svg.text([x + 7.0, y + 4.0], "start", "", run.placement);
            }
        }
        line.sort_by(|a, b| a[0].total_cmp(&b[0]));
        svg.polyline(&line, MEASURED, "");
    }
    svg.finish()
}

/// Plots the contents of each memory of rank 0 over a step, measured and as planned event by event, and the busy times
/// of each stream, measured and as planned at the machine's rates.
pub fn timeline(run: &MemoryRun, ran: &MemoryRan, heading: &str) -> String {
    let rank = &ran.ranks[0];
    let used: Vec<usize> = (0..3).filter(|memory| rank.planned[*memory].bytes > 0).collect();
    let lanes_top = TOP + used.len() as f64 * (HEIGHT + GAP);
    let mut svg = begin(lanes_top + lanes::height(ran), heading);
    for (number, memory) in (0..).zip(&used) {
        let budget = run.budget.filter(|_| *memory == 0).map(|(_, bytes)| bytes);
        let top = TOP + f64::from(number) * (HEIGHT + GAP);
        let peak = rank.planned[*memory].bytes.max(budget.unwrap_or(0));
        let plot = Plot { top, x_max: rank.recorded_s, y_max: 1.05 * peak as f64 };
        let name = Memory::ALL[*memory].name();
        let seconds = |value: f64| format!("{:.0} ms", 1e3 * value);
        plot.frame(&mut svg, &format!("{name} memory over a step"), &seconds, &|value| bytes(value as u64));
        let measured = &rank.lines[*memory];
        // The n-th planned event is the n-th measured one; the plan begins with what lives before the step.
        let planned =
            ran.planned_lines[*memory].iter().skip(1).zip(measured).map(|(bytes, (at, _))| (*at, *bytes));
        let planned: Vec<(f64, u64)> = planned.collect();
        for (line, colour, style) in
            [(&planned, PLANNED, " stroke-width=\"4\" stroke-opacity=\"0.6\""), (measured, MEASURED, "")]
        {
            let points: Vec<[f64; 2]> =
                thinned(line).into_iter().map(|(at, bytes)| [plot.x(at), plot.y(bytes as f64)]).collect();
            svg.polyline(&steps(&points), colour, style);
        }
        let right = LEFT + WIDTH;
        let mut limit = |bytes: u64, colour: &str, words: &str| {
            let y = plot.y(bytes as f64);
            svg.stroke([LEFT, y], [right, y], colour, " stroke-dasharray=\"4 3\"");
            svg.text([right + 6.0, y + 4.0], "start", &fill(colour), words);
        };
        limit(rank.planned[*memory].bytes, PLANNED, &format!("peak {}", bytes(rank.planned[*memory].bytes)));
        if let Some(budget) = budget {
            limit(budget, "#c5504f", "budget");
        }
        for (line, (colour, words)) in (1..).zip([(PLANNED, "planned"), (MEASURED, "measured")]) {
            let y = top + 14.0 * f64::from(line) + 60.0;
            svg.text([right + 6.0, y], "start", &fill(colour), words);
        }
    }
    lanes::draw(&mut svg, lanes_top, ran);
    svg.finish()
}

/// At most [`POINTS`] points, with the smallest and the largest of each part.
fn thinned(line: &[(f64, u64)]) -> Vec<(f64, u64)> {
    let part = (2 * line.len()).div_ceil(POINTS).max(1);
    if part == 1 {
        return line.to_vec();
    }
    let both = |part: &[(f64, u64)]| {
        let low = part.iter().copied().min_by_key(|(_, bytes)| *bytes);
        let high = part.iter().copied().max_by_key(|(_, bytes)| *bytes);
        let mut ends: Vec<(f64, u64)> = low.into_iter().chain(high).collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        ends
    };
    line.chunks(part).flat_map(both).collect()
}

/// A line that keeps its height up to the next point.
fn steps(points: &[[f64; 2]]) -> Vec<[f64; 2]> {
    let mut line = Vec::with_capacity(2 * points.len());
    for (number, [x, y]) in points.iter().enumerate() {
        if number > 0 {
            line.push([*x, points[number - 1][1]]);
        }
        line.push([*x, *y]);
    }
    line
}

#[cfg(test)]
mod tests {
    use phalanx_plan::Peak;

    use super::super::MemoryFigures;
    use super::*;

    fn run(placement: &'static str, budget: Option<(f64, u64)>, step_s: f64) -> MemoryRun {
        let peak = |bytes| Peak { bytes, ..Peak::default() };
        let line = vec![(0.0, 600), (0.5 * step_s, 1000), (step_s, 500)];
        let rank = MemoryFigures {
            step_s: vec![step_s],
            losses: vec![1.0],
            waited_s: 0.0,
            planned: [peak(1000), peak(0), peak(0)],
            measured: [peak(1000), peak(0), peak(0)],
            lines: [line, Vec::new(), Vec::new()],
            lanes: [vec![(0.0, step_s)], vec![], vec![(0.0, 0.1 * step_s)], vec![], vec![], vec![]],
            recorded_s: step_s,
            resident_bytes_peak: 0,
        };
        let copies = vec![(Memory::Host, Memory::Device, 64)];
        let planned_lines = [vec![500, 600, 1000, 500], Vec::new(), Vec::new()];
        let planned_lanes =
            Some([vec![(0.0, 0.4 * step_s), (0.6 * step_s, step_s)], vec![], vec![], vec![], vec![], vec![]]);
        let ran = MemoryRan {
            ranks: vec![rank],
            device_bytes: 1000,
            copies,
            planned_lines,
            planned_lanes,
            exposed_s: None,
        };
        MemoryRun { placement, budget, ran: Ok(ran) }
    }

    #[test]
    fn a_plot_has_a_point_for_each_run_and_stays_inside() {
        let mut runs = vec![run("device", None, 0.1), run("host", None, 0.2)];
        runs.extend(
            [1.0, 0.5].map(|share| run("auto", Some((share, (share * 1000.0) as u64)), 0.3 - share / 10.0)),
        );
        runs.push(MemoryRun { placement: "nvme", budget: None, ran: Err("no folder".into()) });
        let svg = budgets(&runs, "a model");
        assert_eq!(svg.matches("<circle").count(), 2 * 4);
        let number = |line: &str, name: &str| -> f64 {
            line.split_once(&format!("{name}=\"")).unwrap().1.split_once('"').unwrap().0.parse().unwrap()
        };
        for circle in svg.lines().filter(|line| line.starts_with("<circle")) {
            assert!((LEFT..=LEFT + WIDTH).contains(&number(circle, "cx")), "{circle}");
            assert!(number(circle, "cy") >= TOP, "{circle}");
        }
    }

    #[test]
    fn planned_and_measured_lines_lie_on_each_other_where_the_run_follows_its_plan() {
        let run = run("auto", Some((0.5, 1200)), 0.2);
        let svg = timeline(&run, run.ran.as_ref().unwrap(), "a model");
        let lines: Vec<&str> = svg.lines().filter(|line| line.starts_with("<polyline")).collect();
        let points = |line: &str| line.split_once('"').unwrap().1.split_once('"').unwrap().0.to_string();
        assert_eq!(lines.len(), 2);
        assert_eq!(points(lines[0]), points(lines[1]));
        assert!(svg.contains(">budget<") && svg.contains("device memory over a step"), "{svg}");
    }

    #[test]
    fn lanes_show_planned_and_measured_work_of_the_streams_that_have_some() {
        let run = run("host", None, 0.2);
        let svg = timeline(&run, run.ran.as_ref().unwrap(), "a model");
        let lanes: Vec<&str> = svg.lines().filter(|line| line.contains("class=\"lane\"")).collect();
        let of = |colour: &str| lanes.iter().filter(|lane| lane.contains(colour)).count();
        assert_eq!([of(PLANNED), of(MEASURED)], [2, 2], "{svg}");
        assert!(svg.contains(">compute<") && svg.contains(">to device<") && !svg.contains(">disk<"), "{svg}");
        assert!(lanes[0].contains(&format!("width=\"{:.1}\"", 0.4 * WIDTH)), "{}", lanes[0]);
    }

    #[test]
    fn long_lines_are_thinned_and_keep_their_extremes() {
        let line: Vec<(f64, u64)> =
            (0..50_000u64).map(|at| (at as f64, if at == 33_333 { 9000 } else { at % 7 })).collect();
        let short = thinned(&line);
        assert!(short.len() <= POINTS + 2 && short.iter().any(|(_, bytes)| *bytes == 9000));
    }
}
