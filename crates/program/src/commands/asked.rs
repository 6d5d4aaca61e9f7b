//! The command line of `phalanx plan` and its plan. A proposal is such a command line with changes: its words are parsed and planned by the
//! same function, so its figures are those that the command prints.

use std::cell::OnceCell;

use anyhow::{Context, Result, bail};
use clap::Parser;
use phalanx_plan::Machine;
use phalanx_train::config::PlacementPolicy;
use phalanx_train::{Dataset, RunConfig, RunPlan};

use crate::arguments::args::{Cli, Command, PlanArgs};
use crate::arguments::byte_size;
use crate::arguments::overrides::Overrides;
use crate::arguments::sized_args::Gpus;
use crate::configuration::profiles;
use crate::configuration::translation::{self, Translation};
use crate::configuration::user_config::UserConfig;
use crate::host::elsewhere::Elsewhere;
use crate::host::environment::Environment;
use crate::host::output::note;
use crate::jobs::machine_profile;
use crate::plans::budgets::{self, Budget};
use crate::plans::data_report::DataReport;
use crate::plans::estimate::{Estimate, estimate_data};
use crate::plans::planned::{IsHopeless, Planned};
use crate::plans::proposals::Replan;
use crate::plans::proposed_changes::Changes;
use crate::plans::resolve::{Initial, Purpose, Resolved, Vocabulary, resolve};
use crate::plans::step_time::StepTime;
use crate::plans::{assumed, kept_budget, micro_choice};

/// A command, with what it has read once.
pub struct Asked<'a> {
    args: &'a PlanArgs,
    environment: Environment,
    file: UserConfig,
    /// The translation of what `--deepspeed` gives.
    pub theirs: Option<Translation>,
    /// The profile of `--machine`; measured rates of this machine once there is a plan.
    machine: OnceCell<Machine>,
    /// The machine that is planned for, if it is another one.
    pub elsewhere: Option<Elsewhere>,
    /// The vocabulary and the estimate of the data, which are read once: no proposal changes them, and what was found is said once.
    data: OnceCell<(Vocabulary, Estimate)>,
}

/// Bytes of each rank's device, where the command gives them.
fn device_bytes(args: &PlanArgs) -> Option<u64> {
    args.device_memory.or(args.sized.gpus.as_ref().and_then(Gpus::bytes))
}

impl<'a> Asked<'a> {
    /// Reads the configuration and the profile of a command.
    ///
    /// # Errors
    /// A file that is missing or wrong.
    pub fn new(args: &'a PlanArgs, environment: Environment) -> Result<Asked<'a>> {
        if args.sized.size.is_some() && args.overrides.deepspeed.is_some() {
            bail!("--deepspeed adds to a configuration: give CONFIG, and no --size");
        }
        let (file, theirs) = match (args.sized.config()?, &args.config) {
            (Some(file), _) => (file, None),
            (None, Some(path)) => translation::read_both(path, &args.overrides)?,
            (None, None) => bail!("give a configuration (TOML), as examples/quickstart.toml, or --size"),
        };
        let of_gpus = args.sized.gpus.as_ref().and_then(Gpus::machine);
        let named = args.machine.as_deref().or(of_gpus).filter(|name| *name != profiles::HERE);
        let profile = named.map(profiles::known).transpose()?;
        let elsewhere = Elsewhere::of(device_bytes(args), profile.as_ref());
        let hosts = args.search.hosts.filter(|_| !args.search.search);
        let file = match (hosts, &profile) {
            (None, _) => file,
            (Some(hosts), Some(machine)) => {
                let ranks = hosts * machine.devices_per_host.unwrap_or(1);
                file.with(&Overrides { nproc: Some(ranks), ..Overrides::default() }, &[])?
            }
            (Some(_), None) => bail!("--hosts counts the hosts of --machine: give one, as --machine h100"),
        };
        let machine = profile.map_or_else(OnceCell::new, OnceCell::from);
        Ok(Asked { args, environment, file, theirs, machine, elsewhere, data: OnceCell::new() })
    }

    /// The configuration as the command gives it.
    ///
    /// # Errors
    /// Options that cannot be applied.
    pub fn given(&self) -> Result<UserConfig> {
        self.file.clone().with(&self.args.overrides, &self.args.data)
    }

    /// The plan of the command with its data, and the line that says on what it computes, if that was decided.
    ///
    /// # Errors
    /// A configuration that cannot work, missing data.
    pub fn planned(&self) -> Result<(Planned, Option<DataReport>, Option<String>)> {
        let (resolved, Estimate { evaluated, data, .. }) = self.resolved(self.args)?;
        let (mut resolved, chosen) =
            micro_choice::choose(resolved, (evaluated, None), &|planned| self.budgets(planned))?;
        if let Some(line) = chosen.filter(|_| !self.args.json) {
            note(&line);
        }
        let device = resolved.device.take();
        Ok((self.kept(Planned::to_show(resolved, evaluated)?)?, data, device))
    }

    fn resolved(&self, args: &PlanArgs) -> Result<(Resolved, Estimate)> {
        let given = self.file.clone().with(&args.overrides, &args.data)?;
        let purpose = self.elsewhere.map_or(Purpose::Plan, Purpose::Elsewhere);
        let (resolved, found) =
            resolve(&given, purpose, None, |config, initial| self.estimated(config, initial))?;
        Ok((resolved.counting_steps(found.data.as_ref())?, found))
    }

    /// The configuration `given` with its plan's data.
    ///
    /// # Errors
    /// A configuration that cannot work, missing data.
    pub fn resolved_of(&self, given: &UserConfig) -> Result<(Resolved, usize)> {
        let purpose = self.elsewhere.map_or(Purpose::Plan, Purpose::Elsewhere);
        let (resolved, found) =
            resolve(given, purpose, None, |config, initial| self.estimated(config, initial))?;
        Ok((resolved.counting_steps(found.data.as_ref())?, found.evaluated))
    }

    fn estimated(&self, config: &RunConfig, initial: Initial) -> Result<(Vocabulary, Estimate)> {
        let (vocabulary, estimate) = match self.data.get() {
            Some(known) => known.clone(),
            None => {
                let read = estimate_data(config, initial)?;
                self.data.get_or_init(|| read).clone()
            }
        };
        let (tokens, held_out) = estimate.tokens;
        let evaluated = Dataset::evaluated_of(tokens, held_out, config);
        Ok((vocabulary, Estimate { evaluated, ..estimate }))
    }

    /// The plan within budgets that were filled in.
    fn kept(&self, planned: Planned) -> Result<Planned> {
        kept_budget::keep(planned, |planned| self.budgets(planned), RunPlan::without_offsets)
    }

    /// The profile of `--machine`; `None` where this machine is to be measured.
    pub fn profile(&self) -> Option<&Machine> {
        self.machine.get()
    }

    /// The machine whose rates predict the step of a plan; `None` without `--machine`.
    ///
    /// # Errors
    /// A machine that cannot be measured.
    pub fn machine(&self, planned: &Planned) -> Result<Option<&Machine>> {
        if self.machine.get().is_none() && (self.args.machine.is_some() || self.args.search.search) {
            let measured = machine_profile::measured(planned, &[], self.environment)?;
            return Ok(Some(self.machine.get_or_init(|| measured)));
        }
        Ok(self.machine.get())
    }

    /// The rates of this machine, measured for the configuration as it is.
    ///
    /// # Errors
    /// As for [`Asked::planned`] and [`Asked::machine`].
    pub fn measured(&self) -> Result<&Machine> {
        let (planned, _, _) = self.planned()?;
        self.machine(&planned)?.context("the search asks for a machine")
    }

    /// The line that says what was assumed of another machine.
    ///
    /// # Errors
    /// A profile that does not say what the ranks need.
    pub fn assumed(&self, planned: &Planned) -> Result<Option<String>> {
        let line = |elsewhere: &Elsewhere| {
            let line = assumed::line(elsewhere, planned, self.machine.get())?;
            let replaces = device_bytes(self.args).is_some()
                && planned.config.memory.placement == Some(PlacementPolicy::Auto)
                && self.given()?.has("memory.device_budget_mb");
            let budget = "; --device-memory replaces memory.device_budget_mb";
            Ok(if replaces { line + budget } else { line })
        };
        self.elsewhere.as_ref().map(line).transpose()
    }
}

impl Replan for Asked<'_> {
    fn plan(&self, changes: &Changes, is_hopeless: &IsHopeless) -> Result<Option<Planned>> {
        let Command::Plan(args) = Cli::try_parse_from(self.words(changes))?.command else { return Ok(None) };
        let (resolved, Estimate { evaluated, .. }) = self.resolved(&args)?;
        let (resolved, _) =
            micro_choice::choose(resolved, (evaluated, None), &|planned| self.budgets(planned))?;
        let Resolved { config, model, .. } = resolved;
        Planned::within(config, model, evaluated, is_hopeless)?.map(|planned| self.kept(planned)).transpose()
    }

    fn budgets(&self, planned: &Planned) -> Vec<Budget> {
        budgets::budgets_of_plan(planned, self.elsewhere.as_ref())
    }

    fn step_s(&self, planned: &Planned) -> Option<f64> {
        StepTime::of(planned, self.machine.get()?).seconds()
    }

    fn words(&self, changes: &Changes) -> Vec<String> {
        let args = self.args;
        let path = args.config.iter().map(|path| path.display().to_string());
        let options = changes.applied_to(&args.overrides).words();
        let memory = args.device_memory.map(byte_size::exact);
        let memory = memory.into_iter().flat_map(|size| ["--device-memory".to_string(), size]);
        let machine = args.machine.iter().flat_map(|name| ["--machine".to_string(), name.clone()]);
        let data = args.data.iter().map(|path| path.display().to_string());
        let data = args.data.first().map(|_| "--data".to_string()).into_iter().chain(data);
        let command = ["phalanx", "plan"].map(String::from).into_iter();
        command
            .chain(path)
            .chain(args.sized.words())
            .chain(options)
            .chain(memory)
            .chain(machine)
            .chain(data)
            .collect()
    }
}
