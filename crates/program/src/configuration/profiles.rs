//! Machine profiles by name: those of the program, and files of the same form. The one reader of profiles.

use std::path::Path;

use anyhow::{Context, Result, bail};
use phalanx_plan::Machine;

use crate::arguments::limits::CONFIG_BYTES;
use crate::configuration::keys;

/// The word for this machine, whose rates are measured.
pub const HERE: &str = "here";

macro_rules! profiles {
    ($($name:literal)*) => { [$(($name, include_str!(concat!("../../machines/", $name, ".toml")))),*] };
}

/// The profiles that the program has, by name.
const KNOWN: [(&str, &str); 10] =
    profiles!["v100-32" "a100-40" "a100-80" "h100" "h200" "b200" "gh200" "mi300x" "rtx4090" "laptop"];

/// The names of the profiles that the program has.
pub fn names() -> String {
    KNOWN.map(|(name, _)| name).join(", ")
}

/// The profile called `name`: one of the program, as `h100`; the same with hosts of fewer devices, as `h100x4`; or a TOML file.
///
/// # Errors
/// An unknown name, with the nearest ones; a file that is not a profile, with the line and the key.
pub fn known(name: &str) -> Result<Machine> {
    if name.ends_with(".toml") {
        let text = phalanx_system::files::read_text(Path::new(name), CONFIG_BYTES)
            .map_err(anyhow::Error::from)
            .with_context(|| format!("--machine {name}"))?;
        return parse(name, &text);
    }
    if let Some(machine) = of_program(name) {
        return Ok(machine);
    }
    if let Some((of, devices)) = name.rsplit_once('x')
        && let Some(machine) = of_program(of)
    {
        return with_devices(name, machine, devices);
    }
    let of =
        name.rsplit_once('x').filter(|(_, count)| count.parse::<u64>().is_ok()).map_or(name, |(of, _)| of);
    let given = of.to_lowercase();
    let mut near: Vec<(usize, &str)> =
        KNOWN.iter().map(|(known, _)| (distance(&given, known), *known)).collect();
    near.sort_unstable();
    let near =
        near.iter().filter(|(edits, known)| *edits <= known.len() / 2).take(3).map(|(_, known)| *known);
    let near: Vec<&str> = near.collect();
    let meant = if near.is_empty() { String::new() } else { format!("did you mean {}? ", near.join(" or ")) };
    bail!(
        "--machine {name}: {meant}expected {HERE} (measured on this machine), {}, one of these with the devices of a host, as h100x4, \
         or a profile file ending in .toml",
        names()
    );
}

/// Letters in which a name differs from a known one; a beginning or a part of it is nearest.
fn distance(given: &str, known: &str) -> usize {
    let bare = |name: &str| name.replace(['-', '_', ' '], "");
    let (given, known) = (bare(given), bare(known));
    match given.len() >= 3 && (known.contains(&given) || given.contains(&known)) {
        true => 0,
        false => strsim::levenshtein(&given, &known),
    }
}

fn of_program(name: &str) -> Option<Machine> {
    let (_, text) = KNOWN.iter().find(|(known, _)| *known == name)?;
    Some(toml::from_str(text).expect("a unit test reads all profiles"))
}

/// The profile with hosts of so many devices.
fn with_devices(name: &str, machine: Machine, devices: &str) -> Result<Machine> {
    let max = machine.devices_per_host.unwrap_or(1);
    let count = devices.parse::<usize>().ok().filter(|count| (1..=max).contains(count));
    let Some(count) = count else {
        bail!(
            "--machine {name}: {devices:?} devices of a host; a host of {:?} has 1 to {max} (more ranks lie on further hosts)",
            machine.name
        );
    };
    let mut machine = machine;
    machine.devices_per_host = Some(count);
    // The links within a host join fewer devices.
    match machine.links.first_mut().filter(|link| link.devices == Some(max)) {
        Some(_) if count == 1 => drop(machine.links.remove(0)),
        Some(link) => link.devices = Some(count),
        None => {}
    }
    Ok(machine)
}

fn parse(name: &str, text: &str) -> Result<Machine> {
    let machine: Machine = toml::from_str(text).with_context(|| format!("{name}: not a machine profile"))?;
    if let Err(wrong) = machine.check() {
        let line = keys::line_of(text, &wrong.key).map_or(String::new(), |line| format!(":{line}"));
        bail!("{name}{line}: {wrong}");
    }
    Ok(machine)
}

#[cfg(test)]
mod tests {
    use phalanx_plan::trace::DType;

    use super::*;

    #[test]
    fn the_profiles_of_the_program_are_valid() {
        for (name, text) in KNOWN {
            let machine = parse(name, text).unwrap();
            assert!(!machine.sources.is_empty(), "{name}");
            let half = machine.flops_per_s(if name == "v100-32" { DType::F16 } else { DType::BF16 });
            assert!(half > machine.flops_per_s(DType::F32), "{name}");
            for (dtype, rates) in &machine.products {
                let peak = machine.tflops[dtype];
                assert!(
                    rates.linear.iter().all(|(_, rate)| *rate <= peak),
                    "{name}: above the peak of {peak}"
                );
            }
            assert_eq!(machine.joined_devices(), None, "{name}");
        }
    }

    #[test]
    fn wrong_rates_are_refused_with_line_and_key() {
        let (_, text) = KNOWN.iter().find(|(name, _)| *name == "h200").unwrap();
        let line = |words: &str| text.lines().position(|line| line.starts_with(words)).unwrap() + 1;
        for (from, to, key, at) in [
            ("gb_per_s = 55.6", "gb_per_s = 0.0", "copy: expected", line("copy =")),
            ("bf16 = 989.0", "bf16 = -1.0", "tflops.bf16: expected", line("bf16 = ")),
            (
                "memory_gb_per_s = 4800.0",
                "memory_gb_per_s = nan",
                "memory_gb_per_s: expected",
                line("memory_gb"),
            ),
            ("gb_per_s = 450", "gb_per_s = 0", "\"NVLink", line("[[links]]")),
            ("power_w = 1275.0", "power_w = 0", "power_w: expected", line("power_w")),
        ] {
            assert!(text.contains(from), "{from}");
            let error = parse("own.toml", &text.replace(from, to)).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("own.toml:{at}:")) && error.contains(key),
                "{at} {key}: {error}"
            );
        }
        let unknown = parse("own.toml", &format!("colour = 1\n{text}")).unwrap_err();
        assert!(format!("{unknown:#}").contains("line 1"), "{unknown:#}");
    }

    #[test]
    fn names_are_found_and_unknown_ones_are_told_the_nearest() {
        let of = |name: &str| known(name).unwrap();
        assert_eq!((of("h100").devices_per_host, of("h100").links.len()), (Some(8), 2));
        assert_eq!((of("h100x4").devices_per_host, of("h100x4").links[0].devices), (Some(4), Some(4)));
        assert_eq!((of("a100-80x1").devices_per_host, of("a100-80x1").links.len()), (Some(1), 1));
        for (name, words) in [
            ("h2000", "did you mean h200"),
            ("a100", "did you mean a100-40 or a100-80"),
            ("4090", "did you mean rtx4090"),
            ("H100x8", "did you mean h100"),
            ("h100x16", "has 1 to 8"),
            ("h100x0", "has 1 to 8"),
            ("toaster", "--machine toaster: expected here"),
        ] {
            let error = known(name).unwrap_err().to_string();
            assert!(error.contains(words), "{name}: {error}");
        }
    }
}
