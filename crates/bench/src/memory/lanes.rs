//! When each stream works over a step, as lanes of an SVG plot: by plan at the machine's rates, and measured.

use phalanx_drawing::svg::{BOLD, Svg, fill};
use phalanx_plan::trace::Stream;
use phalanx_plan::{LANES, Lanes};

use super::MemoryRan;
use super::svg::{LEFT, MEASURED, PLANNED, RIGHT_EDGE, ticks};

/// Pixels of a lane, and of one of its two rows.
const LANE: f64 = 30.0;
const ROW: f64 = 11.0;

/// Stretches of a lane, planned and measured.
type Rows<'a> = [&'a [(f64, f64)]; 2];

/// Seconds of a step, planned or measured, whichever is longer.
fn x_max(ran: &MemoryRan) -> f64 {
    let ends = ran.planned_lanes.iter().flatten().filter_map(|lane| lane.last());
    ends.map(|(_, end)| *end).fold(ran.ranks[0].recorded_s, f64::max)
}

/// The lanes in which anything works, with their planned and measured stretches.
fn used(ran: &MemoryRan) -> Vec<(usize, Rows<'_>)> {
    let of = |lanes: Option<&'_ Lanes>, lane: usize| lanes.map_or(0, |lanes| lanes[lane].len());
    let all = 0..LANES.len();
    let is_used =
        |lane: &usize| of(ran.planned_lanes.as_ref(), *lane) + of(Some(&ran.ranks[0].lanes), *lane) > 0;
    let stretches = |lane: usize| {
        let planned = ran.planned_lanes.as_ref().map_or(&[][..], |lanes| &lanes[lane]);
        (lane, [planned, &ran.ranks[0].lanes[lane][..]])
    };
    all.filter(is_used).map(stretches).collect()
}

fn name(stream: Stream) -> &'static str {
    match stream {
        Stream::Compute => "compute",
        Stream::Communication => "collectives",
        Stream::ToDevice => "to device",
        Stream::ToHost => "to host",
        Stream::Disk => "disk",
        Stream::Host => "host updates",
    }
}

/// Pixels that the lanes of a run take.
pub(super) fn height(ran: &MemoryRan) -> f64 {
    LANE * used(ran).len() as f64 + 60.0
}

/// Draws the lanes below `top`.
pub(super) fn draw(svg: &mut Svg, top: f64, ran: &MemoryRan) {
    let (lanes, x_max) = (used(ran), x_max(ran).max(f64::MIN_POSITIVE));
    let x = |seconds: f64| LEFT + (RIGHT_EDGE - LEFT) * seconds / x_max;
    svg.text([LEFT, top - 10.0], "start", BOLD, "what each stream does over a step");
    for (number, (lane, rows)) in lanes.iter().enumerate() {
        let y = top + LANE * number as f64;
        svg.text([LEFT - 6.0, y + LANE / 2.0], "end", "", name(LANES[*lane]));
        for (row, (stretches, colour)) in rows.iter().zip([PLANNED, MEASURED]).enumerate() {
            let y = y + 2.0 + row as f64 * (ROW + 2.0);
            for (start, end) in *stretches {
                let (start, width) = (x(*start), (x(*end) - x(*start)).max(0.3));
                let style = fill(colour) + " class=\"lane\"";
                svg.rect([start, y, width, ROW], &style, "");
            }
            let busy: f64 = stretches.iter().map(|(start, end)| end - start).sum();
            if busy > 0.0 {
                let words = format!("{:.1} ms", 1e3 * busy);
                svg.text([RIGHT_EDGE + 6.0, y + ROW - 2.0], "start", &fill(colour), &words);
            }
        }
    }
    ticks(svg, top + LANE * lanes.len() as f64, x_max, &|value| format!("{:.0} ms", 1e3 * value));
}
