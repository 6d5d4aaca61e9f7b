//! Comparison of a plan with the available memory; if it does not fit, [`crate::plans::proposals`] names changes that would make it fit.

use std::ops::Range;

use anyhow::{Result, bail};
use serde_json::{Value, json};

use crate::plans::budgets::{Budget, budgets, exceeded};
use crate::plans::micro_choice;
use crate::plans::planned::{self, Planned};
use crate::plans::proposals::{LONGEST_S, OnThisMachine, Proposals, Replan};
use crate::reports::mesh_report;
use phalanx_drawing::report::{Table, bytes};

/// Refuses a run that needs more memory than this machine has, or more than `memory.limit_mb` on a rank.
///
/// # Errors
/// The bytes needed and available, and changes that need less.
pub fn check_memory(planned: &Planned) -> Result<()> {
    check_memory_within(planned, LONGEST_S)
}

/// The same with a limit for the search, in seconds of processor time.
///
/// # Errors
/// See [`check_memory`].
pub fn check_memory_within(planned: &Planned, longest_s: f64) -> Result<()> {
    let budgets = budgets(planned);
    let Some(budget) = exceeded(planned, &budgets) else { return Ok(()) };
    let needed = budget.needed(planned);
    let kept = micro_choice::advice(&planned.config);
    let advice = Proposals::search(&OnThisMachine(planned), planned, longest_s).advice();
    match budget {
        Budget::Machine(available) => bail!(
            "{} rank(s) need {needed} bytes ({}), and {available}{kept}; {advice}",
            planned.plan.spec.world_size(),
            bytes(needed)
        ),
        _ => bail!(
            "a rank needs {needed} bytes ({}), and {} allows {} ({}){kept}; {advice}",
            bytes(needed),
            budget.given(),
            budget.bytes(),
            bytes(budget.bytes())
        ),
    }
}

/// Verdict on a plan: whether each rank fits.
pub struct Verdict<'a> {
    budget: &'a Budget,
    fits: bool,
    needed: u64,
    /// Neighbouring ranks that need the same bytes.
    ranks: Vec<(Range<usize>, u64)>,
    proposals: Option<Proposals>,
}

impl<'a> Verdict<'a> {
    /// Judges a plan by the first of `budgets` that it exceeds, or by the first; where it does not fit, plans what might. `None` without a
    /// budget.
    pub fn of(planned: &Planned, budgets: &'a [Budget], run: &dyn Replan) -> Option<Verdict<'a>> {
        let exceeded = exceeded(planned, budgets);
        let budget = exceeded.or(budgets.first())?;
        let mut ranks: Vec<(Range<usize>, u64)> = Vec::new();
        let need = budget.need().unwrap_or(planned::needed_by);
        for (range, plan) in mesh_report::rows(planned) {
            let needed = need(&planned.plan.spec, plan);
            match ranks.last_mut() {
                Some((last, same)) if *same == needed => last.end = range.end,
                _ => ranks.push((range, needed)),
            }
        }
        let proposals = exceeded.map(|_| Proposals::search(run, planned, LONGEST_S));
        Some(Verdict { budget, fits: exceeded.is_none(), needed: budget.needed(planned), ranks, proposals })
    }

    /// For people.
    pub fn to_text(&self) -> String {
        let head = match self.budget {
            Budget::Machine(available) => {
                format!("Does it fit? All ranks together need {}, and {available}", bytes(self.needed))
            }
            each => format!("Does it fit? Each rank has {} ({})", bytes(each.bytes()), each.given()),
        };
        let mut table = Table::default();
        for (range, needed) in &self.ranks {
            let verdict = match self.budget.each().map(|each| (each.checked_sub(*needed), each)) {
                None => String::new(),
                Some((Some(left), _)) => format!("fits, {} left", bytes(left)),
                Some((None, each)) => format!("does not fit: {} too much", bytes(needed - each)),
            };
            table.row([mesh_report::rank_names(range), format!("needs {}", bytes(*needed)), verdict]);
        }
        let whole = match (self.fits, self.budget) {
            (true, _) => "  yes\n".to_string(),
            (false, Budget::Machine(_)) => "  no: `train` would refuse it on this machine\n".to_string(),
            (false, _) => "  no\n".to_string(),
        };
        let proposals = self.proposals.as_ref().map_or(String::new(), Proposals::to_text);
        format!("{head}\n{table}{whole}{proposals}")
    }

    /// For scripts.
    pub fn to_json(&self) -> Value {
        let each = self.budget.each();
        let rank = |(range, needed): &(Range<usize>, u64)| {
            let fits = each.map(|each| *needed <= each);
            json!({ "first": range.start, "last": range.end - 1, "needed_bytes": needed, "fits": fits })
        };
        json!({
            "fits": self.fits,
            "device_memory_bytes": each,
            "available_bytes": self.budget.bytes(),
            "needed_bytes": self.needed,
            "ranks": self.ranks.iter().map(rank).collect::<Vec<_>>(),
            "budget": self.budget.given(),
            "proposals": self.proposals.as_ref().map_or(json!([]), Proposals::to_json),
        })
    }
}
