//! Line charts for a page: small pictures that scale with it, whose colours are those of its style sheet (`.grid`, `.line`, `.s0` to `.s5`).

use std::fmt::Write;

use crate::svg::escaped;

/// Width and height of a chart.
const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 220.0;

/// Its margins.
const LEFT: f64 = 52.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 24.0;

/// Largest number of points of a line; of more, neighbours are averaged.
const MAX_POINTS: usize = 400;

/// Number of colours of the style sheet.
const COLOURS: usize = 6;

/// A line of a chart.
pub struct Series<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its points `[x, y]`, by ascending x; those that are not finite are left out.
    pub points: Vec<[f64; 2]>,
}

/// A chart of lines over steps, as SVG; `None` where no line has a point.
pub fn chart(name: &str, series: &[Series]) -> Option<String> {
    let lines: Vec<Vec<[f64; 2]>> = series.iter().map(|series| thinned(&series.points)).collect();
    let range = |at: usize| {
        let all = lines.iter().flatten().map(|point| point[at]);
        all.fold([f64::INFINITY, f64::NEG_INFINITY], |[min, max], y| [min.min(y), max.max(y)])
    };
    let ([x_min, x_max], [y_min, y_max]) = (range(0), range(1));
    if x_min > x_max {
        return None;
    }
    let (x_ticks, y_ticks) = (ticks(x_min, x_max, 5), ticks(y_min, y_max, 4));
    let wide = |[min, max]: [f64; 2], ticks: &[f64]| {
        let (min, max) = (min.min(ticks[0]), max.max(ticks[ticks.len() - 1]));
        if min < max { [min, max] } else { [min - 0.5, max + 0.5] }
    };
    let ([x0, x1], [y0, y1]) = (wide([x_min, x_max], &[x_min]), wide([y_min, y_max], &y_ticks));
    let x = |value: f64| LEFT + (value - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - (value - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM);
    let mut svg =
        format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n", escaped(name));
    for tick in y_ticks {
        let at = y(tick);
        let _ = writeln!(svg, "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{}\"/>", WIDTH - RIGHT);
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 5.0,
            at + 4.0,
            number(tick)
        );
    }
    for tick in x_ticks.into_iter().filter(|tick| (x0..=x1).contains(tick)) {
        let anchor = if x(tick) > WIDTH - 30.0 { "end" } else { "middle" };
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"{anchor}\">{}</text>",
            x(tick),
            HEIGHT - 6.0,
            number(tick)
        );
    }
    for (at, (line, series)) in lines.iter().zip(series).enumerate() {
        let class = format!("s{}", at % COLOURS);
        let points: Vec<String> = line.iter().map(|[a, b]| format!("{:.1},{:.1}", x(*a), y(*b))).collect();
        let title = escaped(series.name);
        let _ = match &line[..] {
            // A line of one point shows nothing.
            [[a, b]] => writeln!(
                svg,
                "<circle class=\"dot {class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"><title>{title}</title></circle>",
                x(*a),
                y(*b)
            ),
            _ => writeln!(
                svg,
                "<polyline class=\"line {class}\" points=\"{}\"><title>{title}</title></polyline>",
                points.join(" ")
            ),
        };
    }
    Some(svg + "</svg>\n")
}

/// At most [`MAX_POINTS`] points: means of neighbours.
fn thinned(points: &[[f64; 2]]) -> Vec<[f64; 2]> {
    let finite: Vec<[f64; 2]> =
        points.iter().copied().filter(|point| point.iter().all(|of| of.is_finite())).collect();
    let each = finite.len().div_ceil(MAX_POINTS).max(1);
    let mean = |part: &[[f64; 2]]| {
        [0, 1].map(|at| part.iter().map(|point| point[at]).sum::<f64>() / part.len() as f64)
    };
    finite.chunks(each).map(mean).collect()
}

/// About `count` round numbers that span `min` to `max`.
fn ticks(min: f64, max: f64, count: usize) -> Vec<f64> {
    let span = if max > min { max - min } else { min.abs().max(1e-12) };
    let raw = span / count as f64;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|of| of * power)
        .find(|step| *step >= raw)
        .unwrap_or(10.0 * power);
    let (first, last) = ((min / step).floor() as i64, (max / step).ceil() as i64);
    (first..=last).map(|at| at as f64 * step).collect()
}

/// A number of an axis: `1.5k`, `0.0006`, `3e-7`.
fn number(value: f64) -> String {
    let short = |value: f64| format!("{value:.3}").trim_end_matches('0').trim_end_matches('.').to_string();
    match value.abs() {
        0.0 => "0".to_string(),
        size if size >= 1e9 => format!("{value:.0e}"),
        size if size >= 1e6 => short(value / 1e6) + "M",
        size if size >= 1e3 => short(value / 1e3) + "k",
        size if size >= 1e-2 => short(value),
        _ => {
            let text = format!("{value:.1e}");
            text.replace(".0e", "e")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_have_round_numbers_that_span_all_points() {
        for (min, max, expected) in [
            (0.0, 10.0, vec!["0", "5", "10"]),
            (3.2, 4.1, vec!["3", "3.5", "4", "4.5"]),
            (0.0, 6e-4, vec!["0", "2e-4", "4e-4", "6e-4"]),
            (1.0, 1.0, vec!["1"]),
            (1200.0, 5300.0, vec!["0", "2k", "4k", "6k"]),
        ] {
            let found: Vec<String> = ticks(min, max, 4).into_iter().map(number).collect();
            assert_eq!(found, expected, "{min} to {max}");
        }
    }

    #[test]
    fn a_chart_has_a_line_of_each_series_and_none_without_points() {
        let of = |points: Vec<[f64; 2]>| Series { name: "a<b", points };
        assert_eq!(chart("loss", &[of(vec![])]), None);
        assert_eq!(chart("loss", &[of(vec![[1.0, f64::NAN]])]), None);
        let many = (0..1000).map(|at| [f64::from(at), 1.0]).collect();
        let svg =
            chart("loss", &[of(vec![[0.0, 2.0], [10.0, 1.0]]), of(many), of(vec![[3.0, 1.5]])]).unwrap();
        let counted = ["<polyline", "<circle", "a&lt;b"].map(|words| svg.matches(words).count());
        assert_eq!(counted, [2, 1, 3], "{svg}");
        assert!(svg.len() < 12_000, "{} bytes", svg.len());
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
