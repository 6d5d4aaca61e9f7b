//! Bounds of the numbers on the command line. Each exceeds what real use needs by a large factor.
//!
//! Memory, processes and loops follow from these numbers. One that is mistyped or hostile is refused here, with its option
//! and its bounds, before anything is made of it, and no sum or product of them leaves 64 bits. Numbers of the
//! configuration have bounds of their own.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// Ranks of a plan.
pub const RANKS: u64 = 1 << 20;

/// Ranks that a command starts, and hosts.
pub const JOB_RANKS: u64 = phalanx_collectives::MAX_WORLD as u64;

/// Steps, rounds, and restarts.
pub const TIMES: u64 = 1 << 20;

/// Tokens of a text.
pub const TOKENS: u64 = 1 << 24;

/// Threads of a process.
pub const THREADS: u64 = 4096;

/// Connections between two ranks.
pub const STREAMS: u64 = 64;

/// Milliseconds of a measurement: an hour.
pub const MILLISECONDS: u64 = 3_600_000;

/// Seconds of a wait: a day.
pub const DAY_S: u64 = 86_400;

/// Bytes of a buffer.
pub const BYTES: u64 = 1 << 48;

/// Micro-batches of a step, and stages of a rank.
pub const PARTS: u64 = 1 << 24;

/// Temperature: the divisor of logits.
pub const TEMPERATURE: f32 = 1e6;

/// Percent of the memory that is needed.
pub const PERCENT: f64 = 1e4;

/// Time of an action of a schedule, in any unit.
pub const TIME: f64 = 1e15;

/// Parses a whole number of a range.
pub fn whole<T: TryFrom<u64> + Clone + Send + Sync + 'static>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse::<u64>().ok().filter(|number| range.contains(number));
        let number = number.and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| format!("expected a whole number from {} to {}", range.start(), range.end()))
    }
}

/// Parses a number of a range, which may have a fraction.
pub fn real<T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static>(
    range: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse::<T>().ok().filter(|number| range.contains(number));
        number.ok_or_else(|| format!("expected a number from {} to {}", range.start(), range.end()))
    }
}

#[cfg(test)]
mod tests {
    use std::any::TypeId;

    use clap::{Arg, Command, CommandFactory};

    use crate::arguments::args::Cli;

    /// Sizes with a unit, which have an error of their own (`byte_size.rs`).
    const SIZES: [&str; 2] = ["device_memory", "size"];

    /// The options of all commands that users see, with their commands.
    fn options(command: &Command) -> Vec<(String, Arg)> {
        let name = command.get_name();
        let own =
            command.get_arguments().map(|option| (format!("{name} --{}", option.get_id()), option.clone()));
        let seen = command.get_subcommands().filter(|command| !command.is_hide_set());
        own.chain(seen.flat_map(options)).collect()
    }

    /// Parses one option; the error is what the user sees.
    fn parsed(option: &Arg, value: &str) -> Result<(), String> {
        let long = option.get_long().expect("an option with a name").to_string().leak();
        let given = format!("--{long}={value}");
        let alone = Arg::new("n").long(&*long).value_parser(option.get_value_parser().clone());
        let alone = Command::new("alone").arg(alone).try_get_matches_from(["alone", &given]);
        alone.map(drop).map_err(|error| error.to_string())
    }

    /// Returns whether the values of an option have one of these types.
    fn is_of(option: &Arg, types: &[TypeId]) -> bool {
        types.iter().any(|known| option.get_value_parser().type_id() == *known)
    }

    /// The bounds of an option, from its error for a text that is no number.
    fn bounds<T: std::str::FromStr>(option: &Arg, of: &str) -> [T; 2] {
        let error = parsed(option, "many").expect_err(of);
        let said = error.split_once(" from ").and_then(|(_, range)| range.lines().next()?.split_once(" to "));
        let (min, max) = said.unwrap_or_else(|| panic!("{of} names no bounds: {error}"));
        [min, max].map(|bound| bound.trim().parse().unwrap_or_else(|_| panic!("{of}: {error}")))
    }

    /// Asserts that a value is refused, with the option, the value and the bounds.
    fn assert_refused(option: &Arg, of: &str, value: &str, bounds: [&dyn std::fmt::Display; 2]) {
        let error = parsed(option, value).expect_err(&format!("{of} accepts {value}"));
        let range = format!("from {} to {}", bounds[0], bounds[1]);
        for word in [&format!("--{}", option.get_long().unwrap()), &format!("'{value}'"), &range] {
            assert!(error.contains(word.as_str()), "{of} {value}: no {word} in: {error}");
        }
    }

    #[test]
    fn every_whole_number_has_bounds_which_its_error_names() {
        let types = [
            TypeId::of::<usize>(),
            TypeId::of::<u64>(),
            TypeId::of::<u32>(),
            TypeId::of::<u16>(),
            TypeId::of::<u8>(),
            TypeId::of::<isize>(),
            TypeId::of::<i64>(),
            TypeId::of::<i32>(),
        ];
        let all = options(&Cli::command());
        let whole = all.iter().filter(|(_, option)| is_of(option, &types));
        let mut count = 0;
        for (of, option) in whole.filter(|(_, option)| !SIZES.contains(&option.get_id().as_str())) {
            let [min, max] = bounds::<u64>(option, of);
            count += 1;
            for value in [min, max] {
                parsed(option, &value.to_string()).unwrap_or_else(|error| panic!("{of} {value}: {error}"));
            }
            let outside = [0, max.saturating_add(1), 1 << 32, i64::MAX as u64, u64::MAX];
            let outside = outside.iter().filter(|value| !(min..=max).contains(value)).map(u64::to_string);
            let senseless = [
                "-1",
                "1.5",
                "1e3",
                "nan",
                "",
                " 1",
                "18446744073709551616",
                "many",
                "9".repeat(99).as_str(),
            ]
            .map(String::from);
            for value in outside.chain(senseless) {
                assert_refused(option, of, &value, [&min, &max]);
            }
        }
        assert!(count >= 35, "{count} options");
    }

    #[test]
    fn every_number_with_a_fraction_has_bounds_which_its_error_names() {
        let all = options(&Cli::command());
        let mut count = 0;
        for (of, option) in
            all.iter().filter(|(_, option)| is_of(option, &[TypeId::of::<f32>(), TypeId::of::<f64>()]))
        {
            let [min, max] = bounds::<f64>(option, of);
            count += 1;
            assert!(min >= 0.0 && max <= 1e15, "{of}: {min} to {max}");
            for value in [min, max] {
                parsed(option, &value.to_string()).unwrap_or_else(|error| panic!("{of} {value}: {error}"));
            }
            for value in ["-1", "nan", "inf", "-inf", "1e308", "18446744073709551615", "many", ""] {
                assert_refused(option, of, value, [&min, &max]);
            }
        }
        assert!(count >= 8, "{count} options");
    }

    #[test]
    fn every_size_has_bounds_which_its_error_names() {
        let all = options(&Cli::command());
        let sizes: Vec<_> =
            all.iter().filter(|(_, option)| SIZES.contains(&option.get_id().as_str())).collect();
        assert_eq!(sizes.len(), 2);
        for (of, option) in sizes {
            for value in
                ["0", "-1", "nan", "inf", "1e308", "18446744073709551615", "1000000000GiB", "many", ""]
            {
                assert_refused(option, of, value, [&1, &"below 10^18"]);
            }
        }
    }
}
