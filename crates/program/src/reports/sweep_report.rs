//! `plan --sweep KEY=A,B,...`: peak and step of a run for several values of a key.

use serde_json::{Value, json};

use phalanx_drawing::report::{Table, bytes, percent, seconds};

/// Columns of a bar.
const BAR: usize = 24;

/// Figures of a plan.
pub struct Figures {
    /// Bytes that the largest rank needs of its device.
    pub needed: u64,
    /// Whether they fit, where that is known.
    pub fits: Option<bool>,
    /// Seconds of a step.
    pub step_s: Option<f64>,
    /// Utilisation by the model's operations.
    pub mfu: Option<f64>,
}

/// A value of the key, with its plan's figures, or why there is no plan.
pub struct Swept {
    /// The value.
    pub value: String,
    /// The figures, or the refusal.
    pub figures: Result<Figures, String>,
}

/// A table, and bars of peak and step.
pub fn to_text(key: &str, swept: &[Swept]) -> String {
    let figures = || swept.iter().filter_map(|swept| swept.figures.as_ref().ok());
    let max_bytes = figures().map(|figures| figures.needed).max().unwrap_or(1).max(1) as f64;
    let longest = figures().filter_map(|figures| figures.step_s).fold(0.0, f64::max);
    let has_step = longest > 0.0;
    let mut headings = vec![key, "needs", "", "fits"];
    if has_step {
        headings.extend(["step", "", "mfu"]);
    }
    let mut table = Table::new(&headings);
    for Swept { value, figures } in swept {
        match figures {
            Err(why) => {
                table.row([value.clone(), "-".into(), why.lines().next().unwrap_or_default().to_string()])
            }
            Ok(Figures { needed, fits, step_s, mfu }) => {
                let word = fits.map_or("-", |fits| if fits { "yes" } else { "no" });
                let mut cells =
                    vec![value.clone(), bytes(*needed), bar(*needed as f64 / max_bytes), word.to_string()];
                if has_step {
                    cells.push(step_s.map_or("-".into(), seconds));
                    cells.push(bar(step_s.unwrap_or(0.0) / longest));
                    cells.push(mfu.map_or("-".into(), percent));
                }
                table.row(cells);
            }
        }
    }
    table.to_string()
}

/// A bar for a share of the largest value, in eighths of a column.
fn bar(share: f64) -> String {
    let eighths = (share * (8 * BAR) as f64).round() as usize;
    let part =
        ["", "\u{258f}", "\u{258e}", "\u{258d}", "\u{258c}", "\u{258b}", "\u{258a}", "\u{2589}"][eighths % 8];
    let bar = format!("{}{part}", "\u{2588}".repeat(eighths / 8));
    format!("{bar:<BAR$}")
}

/// For scripts.
pub fn to_json(key: &str, swept: &[Swept]) -> Value {
    let one = |swept: &Swept| match &swept.figures {
        Ok(Figures { needed, fits, step_s, mfu }) => {
            json!({ "value": swept.value, "needed_bytes": needed, "fits": fits, "step_s": step_s, "mfu": mfu })
        }
        Err(why) => json!({ "value": swept.value, "refused": why }),
    };
    json!({ "key": key, "values": swept.iter().map(one).collect::<Vec<_>>() })
}
