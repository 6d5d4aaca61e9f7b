//! Proposals for a run that does not fit: changed commands, each of which was planned as it stands ([`search`]).

mod search;

use anyhow::Result;
use serde_json::{Value, json};

use crate::arguments::overrides::Overrides;
use crate::configuration::user_config::UserConfig;
use crate::folders::resume::shell_word;
use crate::plans::budgets::{self, Budget};
use crate::plans::placement_budget;
use crate::plans::planned::{IsHopeless, Planned};
use crate::plans::proposed_changes::{self, Changes};
use phalanx_drawing::report::{bytes, plural, seconds};
use search::{Point, Search};

/// Seconds of processor time that a search takes, unless a few plans of the run take longer.
pub const LONGEST_S: f64 = 4.0;

/// Plans a run again with changed options.
pub trait Replan {
    /// The plan of the run with `changes`; `None` where it `is_hopeless`, or where planning it takes long.
    ///
    /// # Errors
    /// A configuration that cannot work.
    fn plan(&self, changes: &Changes, is_hopeless: &IsHopeless) -> Result<Option<Planned>>;

    /// The memories within which a plan must stay.
    fn budgets(&self, planned: &Planned) -> Vec<Budget>;

    /// The predicted time of a step, where there is a machine for it.
    fn step_s(&self, planned: &Planned) -> Option<f64>;

    /// The command, or its options, with `changes`.
    fn words(&self, changes: &Changes) -> Vec<String>;
}

/// A run on this machine that is refused: its proposals are options to add.
pub struct OnThisMachine<'a>(pub &'a Planned);

impl Replan for OnThisMachine<'_> {
    fn plan(&self, changes: &Changes, is_hopeless: &IsHopeless) -> Result<Option<Planned>> {
        let own = self.0;
        let options = changes.applied_to(&Overrides::default());
        let mut config = UserConfig::of(&own.config)?.with(&options, &[])?.config()?;
        if options.nproc.is_some() && config.train.threads == Some(own.plan.spec.device.threads) {
            // It follows from the number of ranks.
            config.train.threads = None;
        }
        placement_budget::fill(&mut config, own.ranks_here());
        own.again_within(|changed| *changed = config, is_hopeless)
    }

    fn budgets(&self, planned: &Planned) -> Vec<Budget> {
        budgets::budgets(planned)
    }

    fn step_s(&self, _: &Planned) -> Option<f64> {
        None
    }

    fn words(&self, changes: &Changes) -> Vec<String> {
        changes.applied_to(&Overrides::default()).words()
    }
}

/// A changed command with the figures of its plan.
#[derive(Clone, Debug)]
struct Proposal {
    point: Point,
    changes: Changes,
    words: Vec<String>,
    ranks: usize,
    /// Bytes that the largest rank needs, or all ranks together, of what the run exceeded.
    needed: u64,
    /// Bytes that the largest rank holds in memory of its host beside a device of its own.
    host: u64,
    /// Bytes that all ranks send to each other in a step, and bytes that one copies between memories.
    sent: u64,
    copied: u64,
    step_s: Option<f64>,
    fits: bool,
}

/// Results of a search.
pub struct Proposals {
    /// True if `needed` counts all ranks together.
    of_all_ranks: bool,
    shown: Vec<Proposal>,
    /// Others that fit.
    more: usize,
    /// Seconds of the search, if they did not suffice for all changes.
    cut_s: Option<f64>,
    /// Bytes that a process takes beside its plan, if they alone exceed the memory.
    outside: Option<u64>,
}

impl Proposals {
    /// Searches for changes with which the run of `planned` fits the memories that it exceeds. Takes at most `longest_s` seconds of processor time, or as long as a few plans of the run as it is, whichever is longer.
    pub fn search(run: &dyn Replan, planned: &Planned, longest_s: f64) -> Proposals {
        let limits = run.budgets(planned);
        let Some(exceeded) = budgets::exceeded(planned, &limits) else { return Proposals::none(None) };
        let outside = exceeded.outside(planned);
        if outside > exceeded.bytes() {
            return Proposals::none(Some(outside));
        }
        let mut search = Search::new(run, planned, exceeded, longest_s);
        search.all();
        search.end()
    }

    fn none(outside: Option<u64>) -> Proposals {
        Proposals { of_all_ranks: false, shown: Vec::new(), more: 0, cut_s: None, outside }
    }

    fn any_fits(&self) -> bool {
        self.shown.iter().any(|proposal| proposal.fits)
    }

    /// For people.
    pub fn to_text(&self) -> String {
        if let Some(outside) = self.outside {
            return format!(
                "No change would make it fit: {} lie beside what is planned, and stay\n",
                bytes(outside)
            );
        }
        let mut text = match (self.any_fits(), self.shown.is_empty()) {
            (true, _) => {
                "What would make it fit: each of these commands was planned as it stands\n".to_string()
            }
            (false, true) => {
                "Nothing that was tried needs less: make the model, model.seq or the batch smaller\n"
                    .to_string()
            }
            (false, false) => {
                "These need less, and still too much; make the model or model.seq smaller\n".to_string()
            }
        };
        for proposal in &self.shown {
            let words: Vec<String> = proposal.words.iter().map(|word| shell_word(word)).collect();
            text.push_str(&format!("  {}\n      {}\n", words.join(" "), self.figures(proposal)));
        }
        if self.more > 0 {
            text.push_str(&format!("  {} fit, too\n", plural(self.more, "other change")));
        }
        if self.shown.iter().any(|proposal| proposal.changes.assumes_folder()) {
            text.push_str(&format!(
                "  {} stands for a folder on a local disk of yours\n",
                proposed_changes::FOLDER
            ));
        }
        if let Some(longest_s) = self.cut_s {
            text.push_str(&format!(
                "  the search takes at most {longest_s:.0} s: not all changes were tried\n"
            ));
        }
        text
    }

    fn figures(&self, proposal: &Proposal) -> String {
        let Proposal { ranks, needed, host, sent, copied, .. } = *proposal;
        let need = match (ranks, self.of_all_ranks) {
            (1, _) => "needs",
            (_, true) => "together need",
            (_, false) => "each needs",
        };
        let host =
            if host >= 1 << 20 { format!(" and {} of host memory", bytes(host)) } else { String::new() };
        let sent =
            if ranks > 1 { format!("sends {} between ranks and ", bytes(sent)) } else { String::new() };
        let time = proposal.step_s.map_or(String::new(), |step_s| format!(", in {}", seconds(step_s)));
        let (ranks, needed, copied) = (plural(ranks, "rank"), bytes(needed), bytes(copied));
        format!("{ranks}, {need} {needed}{host}; a step {sent}copies {copied} between memories{time}")
    }

    /// For scripts.
    pub fn to_json(&self) -> Value {
        let one = |proposal: &Proposal| {
            json!({
                "command": proposal.words, "fits": proposal.fits, "ranks": proposal.ranks, "needed_bytes": proposal.needed,
                "host_bytes_per_rank": proposal.host, "sent_bytes_per_step": proposal.sent,
                "copied_bytes_per_step": proposal.copied, "step_s": proposal.step_s,
            })
        };
        self.shown.iter().map(one).collect()
    }

    /// The first change that fits, or else those that need less, for a refusal.
    pub fn advice(&self) -> String {
        let one = |proposal: &Proposal| {
            let words: Vec<String> = proposal.words.iter().map(|word| shell_word(word)).collect();
            let folder = match proposal.changes.assumes_folder() {
                true => format!(" ({} stands for a folder on a local disk)", proposed_changes::FOLDER),
                false => String::new(),
            };
            format!("{}{folder} needs {}", words.join(" "), bytes(proposal.needed))
        };
        match self.shown.first() {
            None if self.outside.is_some() => {
                let outside = bytes(self.outside.unwrap_or(0));
                format!("no change would make it fit: {outside} lie beside what is planned, and stay")
            }
            None => "make the model, model.seq or the batch smaller".to_string(),
            Some(first) if first.fits => format!("change the configuration: {}", one(first)),
            Some(_) => {
                let all: Vec<String> = self.shown.iter().map(one).collect();
                format!("not even these fit: {}; make the model or model.seq smaller", all.join(", "))
            }
        }
    }
}
