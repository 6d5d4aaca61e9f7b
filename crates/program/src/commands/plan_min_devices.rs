//! `phalanx plan --min-devices`: how many devices of a machine a run needs at least.
//!
//! Numbers of devices of one host are tried one by one, then whole hosts: twice as many until a run fits, and those between. Once with all
//! in the memory of the devices, once with states in host memory. A batch that is not given has a sequence for each device.

use anyhow::{Context, Result, bail};
use phalanx_drawing::report::{Table, bytes, plural, seconds};
use phalanx_plan::Machine;
use serde_json::json;
use toml::Value;

use crate::arguments::args::PlanArgs;
use crate::arguments::counts;
use crate::arguments::overrides::Overrides;
use crate::commands::asked::Asked;
use crate::commands::plan_search::{Searched, write};
use crate::configuration::user_config::UserConfig;
use crate::host::output;
use crate::plans::search::Found;
use crate::plans::search::limits::Limits;
use crate::plans::search::smallest::{Smallest, smallest};

/// Hosts that are tried at most.
const MAX_HOSTS: usize = 1 << 12;

/// A run that fits.
struct Fitting {
    ranks: usize,
    found: Box<Found>,
    text: String,
}

/// What was found under limits.
struct Answer {
    words: &'static str,
    fitting: Option<Fitting>,
    /// The largest number of devices that does not suffice, and the bytes that are missing on each.
    below: Option<(usize, u64)>,
}

/// Finds the numbers and prints them.
///
/// # Errors
/// Limits that nothing meets, a model that fits nowhere.
pub fn run(args: &PlanArgs, asked: &Asked) -> Result<()> {
    let machine =
        asked.profile().context("--min-devices needs --machine, as --machine h100, or --gpus 1xh100")?;
    let (limits, others) = Limits::of(&args.search)?;
    let given = asked.given()?.with(&Overrides { set: others, ..Overrides::default() }, &[])?;
    // With --size, the batch follows the devices.
    let sets_batch = args.overrides.set.iter().any(|set| set.starts_with("batch.global"));
    let has_batch = given.has("batch.global") && (args.sized.size.is_none() || sets_batch);
    let on_device = ["memory.optimizer", "memory.gradients", "memory.parameters"];
    let mut answers = Vec::new();
    for (words, limits) in [
        ("all in device memory", limits.clone().keeping(&on_device, "device")),
        ("states in host memory", limits),
    ] {
        answers.push(answer(asked, (&given, has_batch), machine, (words, &limits))?);
    }
    let Some(fewest) =
        answers.iter().filter_map(|answer| answer.fitting.as_ref()).min_by_key(|fitting| fitting.ranks)
    else {
        let missing = answers
            .iter()
            .filter_map(|answer| answer.below)
            .map(|(ranks, missing)| format!("each of {} lacks {}", plural(ranks, "device"), bytes(missing)));
        bail!(
            "no number of devices of {} was found that holds the run: {}",
            machine.name,
            missing.collect::<Vec<_>>().join("; ")
        );
    };
    if let Some(path) = &args.search.write {
        write(path, &fewest.text)?;
    }
    if args.json {
        let one = |answer: &Answer| {
            json!({
                "memory": answer.words, "devices": answer.fitting.as_ref().map(|of| of.ranks),
                "configuration": answer.fitting.as_ref().map(|of| &of.text),
                "step_s": answer.fitting.as_ref().map(|of| of.found.seconds()),
                "too_few": answer.below.map(|(ranks, _)| ranks), "missing_bytes": answer.below.map(|(_, missing)| missing),
            })
        };
        return output::print_json(
            &json!({ "machine": machine.name, "answers": answers.iter().map(one).collect::<Vec<_>>() }),
        );
    }
    Ok(output::print(&to_text(machine, &answers, fewest))?)
}

fn answer(
    asked: &Asked,
    (given, has_batch): (&UserConfig, bool),
    machine: &Machine,
    (words, limits): (&'static str, &Limits),
) -> Result<Answer> {
    let mut below: Option<(usize, u64)> = None;
    let mut last = None;
    let mut tried = |ranks: usize, below: &mut Option<(usize, u64)>| -> Result<Option<Fitting>> {
        let mut given = given.clone();
        if !has_batch {
            given.set("batch.global", Value::Integer(ranks as i64));
        }
        let config = given.config()?;
        match smallest(&Searched::new(asked, given)?, &config, (machine, ranks), limits) {
            Ok(Smallest::Fits(found, text)) => Ok(Some(Fitting { ranks, found, text })),
            Ok(Smallest::TooLarge(missing)) => {
                if below.is_none_or(|(known, _)| known < ranks) {
                    *below = Some((ranks, missing));
                }
                Ok(None)
            }
            // So many cannot divide the model or the batch.
            Err(error) => {
                last = Some(error);
                Ok(None)
            }
        }
    };
    let of_host = machine.devices_per_host.unwrap_or(1);
    for ranks in 1..=of_host {
        if let Some(fitting) = tried(ranks, &mut below)? {
            return Ok(Answer { words, fitting: Some(fitting), below });
        }
    }
    let hosts_max =
        if machine.joined_devices().is_some() { 1 } else { MAX_HOSTS.min(counts::RANKS as usize / of_host) };
    let (mut too_few, mut hosts, mut fitting) = (1, 2, None);
    while hosts <= hosts_max {
        fitting = tried(hosts * of_host, &mut below)?;
        if fitting.is_some() {
            break;
        }
        (too_few, hosts) = (hosts, 2 * hosts);
    }
    let mut enough = hosts;
    while fitting.is_some() && enough - too_few > 1 {
        let middle = (too_few + enough) / 2;
        match tried(middle * of_host, &mut below)? {
            Some(fewer) => (enough, fitting) = (middle, Some(fewer)),
            None => too_few = middle,
        }
    }
    if let (None, None, Some(error)) = (&fitting, &below, last) {
        return Err(error);
    }
    let fewer = |(ranks, _): &(usize, u64)| fitting.as_ref().is_none_or(|fitting| *ranks < fitting.ranks);
    Ok(Answer { words, below: below.filter(fewer), fitting })
}

fn to_text(machine: &Machine, answers: &[Answer], fewest: &Fitting) -> String {
    let mut table = Table::new(&["", "devices", "needs", "of", "step", "fewer"]);
    for Answer { words, fitting, below } in answers {
        let below =
            below.map_or(String::new(), |(ranks, missing)| format!("{ranks} lack {}", bytes(missing)));
        let of = |show: &dyn Fn(&Fitting) -> String| fitting.as_ref().map_or("-".to_string(), show);
        table.row([
            words.to_string(),
            of(&|fitting| fitting.ranks.to_string()),
            of(&|fitting| bytes(fitting.found.need.0)),
            of(&|fitting| bytes(fitting.found.need.1)),
            of(&|fitting| seconds(fitting.found.seconds())),
            below,
        ]);
    }
    let text: String = fewest.text.lines().map(|line| format!("  {line}\n")).collect();
    format!(
        "At least so many devices of {} hold the run (--search finds its fastest configuration):\n{table}\nThe configuration with fewest \
         (--write FILE writes it):\n{text}",
        machine.name
    )
}
