//! What all plots of the sweep share: their width, their colours, lines of text and ticks.

use std::fmt::Write;

/// Pixels left of a plot, of its width, and up to its right edge.
pub(super) const LEFT: f64 = 90.0;
pub(super) const WIDTH: f64 = 640.0;
pub(super) const RIGHT_EDGE: f64 = LEFT + WIDTH;

/// Ticks of an axis.
pub(super) const TICKS: usize = 4;

pub(super) const PLANNED: &str = "#e08a3c";
pub(super) const MEASURED: &str = "#4878b0";

/// Labelled ticks under a plot that ends at `bottom`.
pub(super) fn ticks(svg: &mut String, bottom: f64, x_max: f64, label: &dyn Fn(f64) -> String) {
    for tick in 0..=TICKS {
        let share = tick as f64 / TICKS as f64;
        let x = LEFT + WIDTH * share;
        let _ = writeln!(svg, "<path d=\"M{x:.1} {bottom:.1}v4\" stroke=\"#888\" fill=\"none\"/>");
        text(svg, [x, bottom + 16.0], "middle", "", &label(share * x_max));
    }
}

/// A line of text; `style` is further attributes, each after a blank.
pub(super) fn text(svg: &mut String, [x, y]: [f64; 2], anchor: &str, style: &str, content: &str) {
    let content = content.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\"{style}>{content}</text>");
}
