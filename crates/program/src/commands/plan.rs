//! `phalanx plan`: what every rank will hold, compute and send. Writes nothing.

use anyhow::{Context, Result};
use serde_json::json;

use crate::args::PlanArgs;
use crate::planned::Planned;
use crate::resolve::{Purpose, estimate_data, resolve};
use crate::user_config::UserConfig;
use crate::{machine, output, plan_report};

/// Plans a configuration, prints the plan, and refuses what does not fit.
///
/// # Errors
/// A configuration that cannot work, missing data, more memory than there is.
pub fn plan(args: &PlanArgs) -> Result<()> {
    let path = args.config.as_deref().context("give a configuration (TOML), as examples/quickstart.toml")?;
    let given = UserConfig::read(path)?.with(&args.overrides, &args.data)?;
    let (resolved, evaluated) = resolve(&given, Purpose::Plan, None, estimate_data)?;
    let planned = Planned::of(resolved, evaluated)?;
    if args.json {
        let mut figures = plan_report::to_json(&planned);
        figures["available_bytes"] = json!(machine::available().map(|available| available.bytes));
        output::print_json(&figures)?;
    } else {
        output::print(&plan_report::long(&planned, &path.display().to_string()))?;
    }
    if planned.is_for_elsewhere() {
        output::note(&format!(
            "{} ranks are more than one machine runs: the plan above says what each needs; set memory.limit_mb to check it",
            planned.plan.spec.world_size()
        ));
        return planned.check_limit();
    }
    planned.check_memory()
}
