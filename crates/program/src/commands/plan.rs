//! `phalanx plan`: what every rank will hold, compute and send. Writes nothing.

use anyhow::{Context, Result};
use serde_json::json;

use crate::args::PlanArgs;
use crate::fit::{self, Verdict};
use crate::planned::Planned;
use crate::resolve::{Purpose, estimate_data, resolve};
use crate::user_config::UserConfig;
use crate::{machine, output, plan_report};

/// Plans a configuration and prints the plan, whether it fits, and what would make it fit.
///
/// # Errors
/// A configuration that cannot work, missing data.
pub fn plan(args: &PlanArgs) -> Result<()> {
    let path = args.config.as_deref().context("give a configuration (TOML), as examples/quickstart.toml")?;
    let given = UserConfig::read(path)?.with(&args.overrides, &args.data)?;
    let (resolved, evaluated) = resolve(&given, Purpose::Plan, None, estimate_data)?;
    let planned = Planned::to_show(resolved, evaluated)?;
    let budget = fit::budget_for_plan(&planned, args.device_memory)?;
    let verdict = budget.as_ref().map(|budget| Verdict::of(&planned, budget));
    if args.json {
        let mut figures = plan_report::to_json(&planned);
        figures["available_bytes"] = json!(machine::available().map(|available| available.bytes));
        figures["verdict"] = json!(verdict.as_ref().map(Verdict::to_json));
        output::print_json(&figures)?;
    } else {
        let verdict = verdict.map_or(String::new(), |verdict| format!("\n{}", verdict.to_text()));
        output::print(&format!("{}{verdict}", plan_report::long(&planned, &path.display().to_string())))?;
    }
    if budget.is_none() {
        output::note(&format!(
            "{} ranks are more than one machine runs: give --device-memory, for example 80GiB, to see whether they fit",
            planned.plan.spec.world_size()
        ));
    }
    Ok(())
}
