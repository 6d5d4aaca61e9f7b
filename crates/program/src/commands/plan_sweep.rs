//! `phalanx plan --sweep KEY=A,B,...`: plans for several values of a key, side by side.

use anyhow::{Result, bail};

use crate::arguments::args::PlanArgs;
use crate::arguments::overrides::Overrides;
use crate::commands::asked::Asked;
use crate::configuration::keys;
use crate::host::output;
use crate::plans::budgets::{self, budgets_of_plan};
use crate::plans::planned::{self, Planned};
use crate::plans::step_time::StepTime;
use crate::reports::sweep_report::{self, Figures, Swept};

/// Values of a sweep at most.
const MAX_VALUES: usize = 64;

/// Plans for each value and prints the figures.
///
/// # Errors
/// A key that there is not, no values or too many.
pub fn run(args: &PlanArgs, asked: &Asked, sweep: &str) -> Result<()> {
    let Some((key, values)) = sweep.split_once('=').map(|(key, values)| (key.trim(), values)) else {
        bail!("--sweep {sweep}: expected a key and its values, as batch.micro=1,2,4,8");
    };
    if keys::find(key).is_none() {
        bail!("--sweep: {}", keys::unknown(key));
    }
    let values: Vec<&str> = values.split(',').map(str::trim).filter(|value| !value.is_empty()).collect();
    if values.is_empty() || values.len() > MAX_VALUES {
        bail!("--sweep {sweep}: expected 1 to {MAX_VALUES} values, as batch.micro=1,2,4,8");
    }
    let one = |value: &str| Swept {
        value: value.to_string(),
        figures: figures(asked, &format!("{key}={value}")).map_err(|error| format!("{error:#}")),
    };
    let swept: Vec<Swept> = values.into_iter().map(one).collect();
    if args.json {
        return output::print_json(&sweep_report::to_json(key, &swept));
    }
    Ok(output::print(&sweep_report::to_text(key, &swept))?)
}

/// Bytes, whether they fit, seconds and utilisation with one assignment.
fn figures(asked: &Asked, assignment: &str) -> Result<Figures> {
    let set = vec![assignment.to_string()];
    let given = asked.given()?.with(&Overrides { set, ..Overrides::default() }, &[])?;
    let (resolved, evaluated) = asked.resolved_of(&given)?;
    let planned = Planned::to_show(resolved.with_known_micro()?, evaluated)?;
    let limits = budgets_of_plan(&planned, asked.elsewhere.as_ref());
    let fits = (!limits.is_empty()).then(|| budgets::exceeded(&planned, &limits).is_none());
    let time = asked.machine(&planned)?.map(|machine| StepTime::of(&planned, machine));
    let (step_s, mfu) = (time.as_ref().and_then(StepTime::seconds), time.as_ref().and_then(StepTime::mfu));
    Ok(Figures { needed: planned.needed_by_one(planned::needed_on_device), fits, step_s, mfu })
}
