//! The groups of faults, each with its share of the cases.

mod damage;
mod data;
mod environments;
mod floods;
mod full_disk;
mod hostile;
mod hosts;
mod kills;
mod links;
mod lost_hosts;
mod own_files;
mod pipes;
mod read_errors;
mod refused_starts;
mod settings;
mod stops;
mod token_files;
mod tokenizers;
mod two_runs;

use crate::hostile::Random;
use crate::reliability::trial::Trial;
use crate::reliability::world::World;

/// A family of faults.
pub(crate) struct Group {
    pub(crate) name: &'static str,
    /// Cases of the whole campaign.
    pub(crate) cases: usize,
    /// Cases of the short selection.
    pub(crate) short: usize,
    /// Tries case `number`.
    pub(crate) case: fn(&World, &mut Random, usize) -> Trial,
}

pub(crate) const GROUPS: [Group; 20] = [
    Group { name: "kills", cases: 630, short: 10, case: kills::case },
    Group { name: "stops", cases: 240, short: 8, case: stops::case },
    Group { name: "hosts", cases: 300, short: 10, case: hosts::case },
    Group { name: "links", cases: 100, short: 6, case: links::case },
    Group { name: "lost-hosts", cases: 108, short: 3, case: lost_hosts::case },
    Group { name: "floods", cases: 120, short: 3, case: floods::case },
    Group { name: "damage", cases: 2112, short: 44, case: damage::case },
    Group { name: "own-files", cases: 900, short: 30, case: own_files::case },
    Group { name: "refused-starts", cases: 240, short: 8, case: refused_starts::case },
    Group { name: "read-errors", cases: 1200, short: 14, case: read_errors::case },
    Group { name: "data", cases: 720, short: 24, case: data::case },
    Group { name: "hostile", cases: 2400, short: 48, case: hostile::case },
    Group { name: "tokenizers", cases: 512, short: 16, case: tokenizers::case },
    Group { name: "token-files", cases: 600, short: 20, case: token_files::case },
    Group { name: "full-disk", cases: 240, short: 6, case: full_disk::case },
    Group { name: "two-runs", cases: 200, short: 6, case: two_runs::case },
    Group { name: "pipes", cases: 420, short: 14, case: pipes::case },
    Group { name: "settings", cases: 400, short: 16, case: settings::case },
    Group { name: "environments", cases: 600, short: 12, case: environments::case },
    Group { name: "foreign-processes", cases: 120, short: 6, case: environments::jobs_case },
];
