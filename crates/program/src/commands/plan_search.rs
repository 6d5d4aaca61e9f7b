//! `phalanx plan --search`: the fastest configuration that fits, the next, and why others lost.

use std::path::Path;

use anyhow::{Context, Result, bail};
use phalanx_train::RunConfig;
use serde_json::{Value as Json, json};
use toml::Value;

use crate::arguments::args::PlanArgs;
use crate::arguments::overrides::{Overrides, RANKS};
use crate::commands::asked::Asked;
use crate::configuration::user_config::UserConfig;
use crate::host::{machine, output};
use crate::plans::budgets::{self, Budget};
use crate::plans::planned::Planned;
use crate::plans::resolve::Resolved;
use crate::plans::search::limits::Limits;
use crate::plans::search::{Search, Subject, search};
use crate::reports::search_report;

/// The command, whose keys are searched.
pub struct Searched<'a, 'b> {
    asked: &'a Asked<'b>,
    given: UserConfig,
    defaults: UserConfig,
}

impl<'a, 'b> Searched<'a, 'b> {
    /// The command with the configuration that it searches.
    ///
    /// # Errors
    /// Defaults that are no configuration, which they are.
    pub fn new(asked: &'a Asked<'b>, given: UserConfig) -> Result<Searched<'a, 'b>> {
        Ok(Searched { asked, given, defaults: UserConfig::of(&RunConfig::default())? })
    }
}

/// Keys that say in another way what a search sets.
const OTHER_WAYS: [&str; 2] = [RANKS, "parallel.micro_batches"];

impl Searched<'_, '_> {
    fn with(&self, settings: &[(&'static str, Value)]) -> UserConfig {
        let mut given = self.given.clone();
        OTHER_WAYS.iter().for_each(|key| given.leave_out(key));
        for (key, value) in settings {
            // Nobody needs to read that it is as always.
            if given.has(key) || self.defaults.value(key) != Some(value) {
                given.set(key, value.clone());
            }
        }
        given
    }
}

impl Subject for Searched<'_, '_> {
    fn resolved(&self, settings: &[(&'static str, Value)]) -> Result<(Resolved, usize)> {
        self.asked.resolved_of(&self.with(settings))
    }

    fn budgets(&self, planned: &Planned) -> Vec<Budget> {
        budgets::budgets_of_plan(planned, self.asked.elsewhere.as_ref())
    }

    fn device_bytes(&self, config: &RunConfig, ranks: usize) -> u64 {
        let here = || machine::available().map_or(u64::MAX, |available| available.bytes / ranks as u64);
        self.asked.elsewhere.as_ref().map_or_else(here, |elsewhere| elsewhere.device_bytes(config).0)
    }

    fn text(&self, settings: &[(&'static str, Value)]) -> Result<String> {
        let head = "# Found by `phalanx plan --search`.\n";
        Ok(self.with(settings).retext(head)?.text().to_string())
    }

    fn planned(&self, text: &str) -> Result<Planned> {
        let given = UserConfig::parse(text.to_string(), "the configuration that was found")?;
        let (resolved, evaluated) = self.asked.resolved_of(&given)?;
        Planned::to_show(resolved, evaluated)
    }
}

/// Searches and prints what is found.
///
/// # Errors
/// A configuration that cannot work, limits that nothing meets, a model that does not fit.
pub fn run(args: &PlanArgs, asked: &Asked) -> Result<()> {
    let (limits, others) = Limits::of(&args.search)?;
    let given = asked.given()?.with(&Overrides { set: others, ..Overrides::default() }, &[])?;
    let config = given.config()?;
    let subject = Searched::new(asked, given)?;
    let ranks = ranks(args, asked, &config)?;
    let machine = match asked.profile() {
        Some(machine) => machine,
        None => asked.measured()?,
    };
    let search = search(&subject, &config, (machine, ranks), &limits)?;
    if let Some(path) = &args.search.write {
        write(path, &search.text)?;
    }
    let path = args.search.write.as_deref();
    if args.json {
        return output::print_json(&to_json(&search));
    }
    Ok(output::print(&search_report::to_text(&search, path, limits.has_global_range()))?)
}

/// The devices: those of `--hosts`, of the configuration, or of a host.
fn ranks(args: &PlanArgs, asked: &Asked, config: &RunConfig) -> Result<usize> {
    let of_host = asked.profile().and_then(|machine| machine.devices_per_host);
    let given = asked.given()?;
    let says = ["parallel.ranks", "parallel.data", "parallel.pipeline", "parallel.tensor"];
    Ok(match (args.search.hosts, of_host) {
        (Some(hosts), Some(devices)) => hosts * devices,
        (Some(_), None) => {
            bail!("--hosts counts the hosts of --machine, and that has no devices_per_host: give --nproc")
        }
        (None, Some(devices)) if !says.iter().any(|key| given.has(key)) => devices,
        (None, _) => config.world_size(),
    })
}

/// Writes the configuration that was found.
///
/// # Errors
/// A file that cannot be written.
pub fn write(path: &Path, text: &str) -> Result<()> {
    phalanx_system::files::write(path, text).with_context(|| format!("--write {}", path.display()))
}

fn to_json(search: &Search) -> Json {
    let one = |found: &crate::plans::search::Found| {
        let keys: serde_json::Map<String, Json> =
            found.settings.iter().map(|(key, value)| (key.to_string(), json!(value))).collect();
        json!({
            "keys": keys, "step_s": found.seconds(), "time": found.time.to_json(),
            "needed_bytes": found.need.0, "available_bytes": found.need.1,
        })
    };
    let lost = search.lost().into_iter();
    json!({
        "machine": search.machine().name, "ranks": search.ranks(), "candidates": search.candidates(), "planned": search.planned(),
        "configuration": search.text, "found": search.shown().iter().map(one).collect::<Vec<_>>(),
        "lost": lost.map(|lost| json!({ "key": lost.key, "values": lost.values, "why": lost.why })).collect::<Vec<_>>(),
    })
}
