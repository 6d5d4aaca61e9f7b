//! Upper bounds of the numbers on the command line. Each exceeds what real use needs by a large factor.
//!
//! Memory, processes and loops follow from these numbers. One that is mistyped or hostile is refused here, by its option, before anything
//! is made of it, and no sum or product of them leaves 64 bits. Numbers of the configuration have bounds of their own.

/// Ranks and hosts of a plan.
pub const RANKS: u64 = 1 << 20;

/// Ranks that a command starts.
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

/// Bytes of a buffer.
pub const BYTES: u64 = 1 << 48;

/// Micro-batches of a step, and stages of a rank.
pub const PARTS: u64 = 1 << 24;

/// Parses a whole number from 0 to `max`.
pub fn up_to<T: TryFrom<u64>>(
    max: u64,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse::<u64>().ok().filter(|number| *number <= max);
        let number = number.and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| format!("expected a whole number from 0 to {max}"))
    }
}

#[cfg(test)]
mod tests {
    use std::any::TypeId;

    use clap::{Arg, Command, CommandFactory};

    use crate::args::Cli;

    /// Options of which any number means something: it is only compared, or seeds random numbers.
    const ANY: [&str; 2] = ["seed", "step"];

    /// Options in bytes, of which 2^32 are not many.
    const IN_BYTES: [&str; 3] = ["bytes", "device_memory", "size"];

    /// Options that are no whole numbers: the commands check them (`tests/bad_input.rs`).
    const REAL: [&str; 8] =
        ["temperature", "top_p", "max_skipped", "budgets", "forward", "input", "weight", "message"];

    /// The options of all commands that users see.
    fn options(command: &Command) -> Vec<Arg> {
        let own = command.get_arguments().cloned();
        let seen = command.get_subcommands().filter(|command| !command.is_hide_set());
        own.chain(seen.flat_map(options)).collect()
    }

    fn accepts(option: &Arg, value: &str) -> bool {
        let alone = Arg::new("n").long("n").value_parser(option.get_value_parser().clone());
        Command::new("alone")
            .arg(alone)
            .try_get_matches_from([format!("alone"), format!("--n={value}")])
            .is_ok()
    }

    #[test]
    fn every_number_on_the_command_line_has_a_bound() {
        let whole = [TypeId::of::<usize>(), TypeId::of::<u64>(), TypeId::of::<u32>(), TypeId::of::<u16>()];
        let real = [TypeId::of::<f32>(), TypeId::of::<f64>()];
        let is_one_of = |option: &Arg, types: &[TypeId]| {
            let own = option.get_value_parser().type_id();
            types.iter().any(|known| own == *known)
        };
        let all = options(&Cli::command());
        let mut found = 0;
        for option in all.iter().filter(|option| is_one_of(option, &whole)) {
            let name = option.get_id().as_str();
            found += 1;
            assert!(accepts(option, "1") && !accepts(option, "-1") && !accepts(option, "nan"), "{name}");
            let too_large = ["4294967296", "9223372036854775807", "18446744073709551615"];
            let too_large = if IN_BYTES.contains(&name) { &too_large[1..] } else { &too_large };
            for value in too_large.iter().filter(|_| !ANY.contains(&name)) {
                assert!(!accepts(option, value), "{name} accepts {value}");
            }
        }
        assert!(found >= 30, "{found} options");
        for option in all.iter().filter(|option| is_one_of(option, &real)) {
            assert!(REAL.contains(&option.get_id().as_str()), "{}: add it to the table", option.get_id());
        }
    }
}
