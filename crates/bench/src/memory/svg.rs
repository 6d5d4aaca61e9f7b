//! Width, colours and ticks of all plots of the sweep.

use phalanx_drawing::svg::Svg;

/// Pixels left of a plot, of its width, and up to its right edge.
pub(super) const LEFT: f64 = 90.0;
pub(super) const WIDTH: f64 = 640.0;
pub(super) const RIGHT_EDGE: f64 = LEFT + WIDTH;

/// Ticks of an axis.
pub(super) const TICKS: usize = 4;

pub(super) const PLANNED: &str = "#e08a3c";
pub(super) const MEASURED: &str = "#4878b0";

/// Labelled ticks under a plot that ends at `bottom`.
pub(super) fn ticks(svg: &mut Svg, bottom: f64, x_max: f64, label: &dyn Fn(f64) -> String) {
    for tick in 0..=TICKS {
        let share = tick as f64 / TICKS as f64;
        let x = LEFT + WIDTH * share;
        svg.stroke([x, bottom], [x, bottom + 4.0], "#888", "");
        svg.text([x, bottom + 16.0], "middle", "", &label(share * x_max));
    }
}
