//! The memories within which a run must stay.

use phalanx_train::Spec;
use phalanx_train::config::DeviceKind;

use crate::host::card_needs::CardNeeds;
use crate::host::cards;
use crate::host::elsewhere::Elsewhere;
use crate::host::machine::{self, Available};
use crate::plans::planned::{self, Need, Planned};

/// The memory that a run may use.
#[derive(Clone, Debug, PartialEq)]
pub enum Budget {
    /// Each rank has a device with so many bytes of memory, by this option or key.
    Device(u64, &'static str),
    /// Each rank may take so many bytes of its card: `device.memory_mb`, or its share.
    Card(u64),
    /// Each rank may use so many bytes in all (`memory.limit_mb`).
    Rank(u64),
    /// Each rank may use so many bytes of host memory beside those of its device (the profile of `--machine`).
    Host(u64),
    /// All ranks share the memory of this machine.
    Machine(Available),
}

impl Budget {
    /// Returns whether the run of a plan fits.
    pub fn fits(&self, planned: &Planned) -> bool {
        self.needed(planned) <= self.bytes()
    }

    /// Bytes that the largest rank needs, or all ranks together.
    pub fn needed(&self, planned: &Planned) -> u64 {
        match self.need() {
            Some(need) => planned.needed_by_one(need) + self.between_hosts(planned),
            None => planned.needed_bytes(),
        }
    }

    /// Bytes of the budget that the largest rank keeps to exchange data with other hosts.
    fn between_hosts(&self, planned: &Planned) -> u64 {
        let is_of_host = match self {
            Budget::Device(..) | Budget::Card(_) => planned.plan.spec.device.host_addressable,
            Budget::Rank(_) | Budget::Host(_) | Budget::Machine(_) => true,
        };
        planned.between_hosts_bytes().filter(|_| is_of_host).unwrap_or(0)
    }

    /// The bytes of a rank that count; `None` where those of all ranks do.
    pub fn need(&self) -> Option<Need> {
        match self {
            Budget::Device(..) | Budget::Card(_) => Some(planned::needed_on_device),
            Budget::Rank(_) => Some(planned::needed_by),
            Budget::Host(_) => Some(planned::needed_of_host),
            Budget::Machine(_) => None,
        }
    }

    /// Bytes of it that lie beside what is planned, which no change makes less: of the process, or of a card's driver.
    pub fn outside(&self, planned: &Planned) -> u64 {
        let spec = &planned.plan.spec;
        match self {
            Budget::Device(..) | Budget::Card(_) if !spec.device.host_addressable => {
                spec.device.beside_plan.map_or(0, |_| CardNeeds::NONE.bytes())
            }
            Budget::Machine(_) => 0,
            _ => planned::min_outside_bytes(spec),
        }
    }

    /// The option or key that gives it.
    pub fn given(&self) -> &'static str {
        match self {
            Budget::Device(_, given) => given,
            Budget::Card(_) => "its share of the card (device.memory_mb)",
            Budget::Rank(_) => "memory.limit_mb",
            Budget::Host(_) => "host memory, by the profile of --machine",
            Budget::Machine(_) => "this machine",
        }
    }

    /// Bytes that there are.
    pub fn bytes(&self) -> u64 {
        match self {
            Budget::Device(bytes, _)
            | Budget::Card(bytes)
            | Budget::Rank(bytes)
            | Budget::Host(bytes)
            | Budget::Machine(Available { bytes, .. }) => *bytes,
        }
    }

    /// Bytes that each rank may use; ranks of one machine share its memory as they need it.
    pub fn each(&self) -> Option<u64> {
        self.need().map(|_| self.bytes())
    }

    /// Returns whether the states on the devices, `states` bytes per rank, exceed the budget by themselves.
    pub fn is_below_states(&self, spec: &Spec, states: u64) -> bool {
        let is_on_card = spec.device.beside_plan.is_some();
        match self {
            Budget::Device(bytes, _) | Budget::Card(bytes) => states > *bytes,
            Budget::Rank(bytes) => !is_on_card && states > *bytes,
            Budget::Host(_) => false,
            Budget::Machine(all) => {
                !is_on_card && states.saturating_mul(spec.world_size() as u64) > all.bytes
            }
        }
    }
}

/// The memories within which a run on this machine must stay.
pub fn budgets(planned: &Planned) -> Vec<Budget> {
    let machine = machine::available().map(Budget::Machine);
    [card(planned), limit(planned), machine].into_iter().flatten().collect()
}

/// The memories with which a plan is compared: of the machine that it is for, or of this one. Empty for a run of more ranks than one
/// machine runs, and where none is known.
pub fn budgets_of_plan(planned: &Planned, elsewhere: Option<&Elsewhere>) -> Vec<Budget> {
    let Some(elsewhere) = elsewhere else {
        let runs_here =
            |budget: &Budget| !matches!(budget, Budget::Machine(_)) || !planned.is_for_elsewhere();
        let here = budgets(planned).into_iter().filter(runs_here).collect();
        // Of ranks on cards, nothing is known without a card.
        let is_known = planned.config.device.kind != DeviceKind::Cuda || card(planned).is_some();
        return if is_known { here } else { limit(planned).into_iter().collect() };
    };
    let (device, given) = elsewhere.device_bytes(&planned.config);
    let host = elsewhere.host_bytes.filter(|_| !planned.plan.spec.device.host_addressable).map(Budget::Host);
    [Some(Budget::Device(device, given)), limit(planned), host].into_iter().flatten().collect()
}

/// The first budget that a plan exceeds.
pub fn exceeded<'a>(planned: &Planned, budgets: &'a [Budget]) -> Option<&'a Budget> {
    budgets.iter().find(|budget| !budget.fits(planned))
}

/// Memory that a rank may take of its card; `None` without a card, or if its memory is not known.
fn card(planned: &Planned) -> Option<Budget> {
    let has_card = planned.config.device.kind == DeviceKind::Cuda;
    has_card
        .then(|| cards::share_bytes(&planned.config, planned.ranks_here()).ok().map(Budget::Card))
        .flatten()
}

/// The memory that `memory.limit_mb` gives a rank, if it is set.
pub fn limit(planned: &Planned) -> Option<Budget> {
    let bytes = (planned.config.memory.limit_mb? * f64::from(1 << 20)) as u64;
    Some(Budget::Rank(bytes))
}
