//! Command line of `cargo xtask hosts`.

use std::path::PathBuf;
use std::time::Duration;

/// The help of `cargo xtask hosts`.
pub const HELP: &str = "\
Trains over several hosts, which are network namespaces of this machine, and compares the result with one host.

Usage: cargo xtask hosts [OPTIONS] CONFIG [-- OPTIONS OF TRAIN]

Options:
  --hosts N       hosts, 2 by default
  --nproc N       ranks of each host, 1 by default
  --ssh           host 0 starts the launchers of all hosts over ssh, from a hostfile; needs OpenSSH
  --mpirun        mpirun of Open MPI starts the ranks over ssh, and MPI connects them; builds with --features mpi
  --binary FILE   the program to try; cargo xtask hosts builds it (--release)
  --delay MS      each packet is late by so many milliseconds
  --rate RATE     of what each host sends: 1gbit, 100mbit
  --loss PERCENT  of packets are lost
  --cut H@S       the cable of host H is cut S seconds after the start; the run has to end with its name
  --kill H@S      the launcher of host H gets SIGKILL S seconds after the start; likewise
  --timeout S     the trial has failed after so many seconds, 300 by default

Needs root, and `ip` (iproute2), `unshare`, `nsenter` and `setpriv` (util-linux). Delays, rates and losses are made
by a program between the hosts, and need a kernel with VXLAN, and `ethtool`.

Examples:
  cargo xtask hosts --hosts 2 examples/quickstart.toml -- --set train.steps=20
  cargo xtask hosts --hosts 4 --delay 1 --rate 1gbit --loss 1 examples/quickstart.toml -- --set train.steps=20
  cargo xtask hosts --hosts 3 --cut 2@5 examples/quickstart.toml -- --set batch.global=6
  cargo xtask hosts --hosts 2 --nproc 2 --mpirun examples/quickstart.toml -- --set train.steps=20

Exit code: 0 when the runs ended as they should, with the same checkpoints; 1 when not; 2 when the trial could not run.
";

/// A fault that happens to a host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// Its cable is cut.
    Cut,
    /// Its launcher gets SIGKILL.
    Kill,
}

/// The quality of every host's link.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// Milliseconds from one host to another.
    pub delay_ms: f64,
    /// Bits a second that a host can send.
    pub rate_bits: f64,
    /// Share of the packets that do not arrive.
    pub loss_percent: f64,
}

impl Default for Link {
    /// A link without limits.
    fn default() -> Link {
        Link { delay_ms: 0.0, rate_bits: f64::INFINITY, loss_percent: 0.0 }
    }
}

/// Options of a trial over several hosts.
#[derive(Debug, PartialEq)]
pub struct Arguments {
    pub hosts: usize,
    /// Ranks of each host.
    pub nproc: usize,
    pub binary: Option<PathBuf>,
    /// True if one launcher starts the others over ssh.
    pub ssh: bool,
    /// True if Open MPI's mpirun starts the ranks, over ssh.
    pub mpirun: bool,
    pub link: Link,
    /// The fault, its host, and the time of it after the start.
    pub fault: Option<(Fault, usize, Duration)>,
    pub timeout: Duration,
    pub config: PathBuf,
    /// Options that `train` gets, too.
    pub more: Vec<String>,
}

impl Arguments {
    /// Reads the arguments.
    ///
    /// # Errors
    /// The first one that is unknown or has no valid value.
    pub fn parse(args: &[&str]) -> Result<Arguments, String> {
        let (own, more) = match args.iter().position(|arg| *arg == "--") {
            Some(at) => (&args[..at], &args[at + 1..]),
            None => (args, &[][..]),
        };
        let mut arguments = Arguments {
            hosts: 2,
            nproc: 1,
            binary: None,
            ssh: false,
            mpirun: false,
            link: Link::default(),
            fault: None,
            timeout: Duration::from_secs(300),
            config: PathBuf::new(),
            more: more.iter().map(|arg| arg.to_string()).collect(),
        };
        let mut rest = own.iter();
        while let Some(arg) = rest.next() {
            match *arg {
                "--ssh" => arguments.ssh = true,
                "--mpirun" => arguments.mpirun = true,
                _ => {}
            }
            if matches!(*arg, "--ssh" | "--mpirun") {
                continue;
            }
            if !arg.starts_with("--") {
                arguments.config = PathBuf::from(arg);
                continue;
            }
            let value = rest.next().ok_or_else(|| format!("{arg} needs a value"))?;
            arguments.set(arg, value)?;
        }
        match () {
            () if arguments.config.as_os_str().is_empty() => Err("no CONFIG is given".to_string()),
            () if !(2..=200).contains(&arguments.hosts) => {
                Err(format!("--hosts {}: expected 2 to 200", arguments.hosts))
            }
            () if arguments.nproc == 0 => Err("--nproc 0: expected at least 1".to_string()),
            () if arguments.fault.is_some_and(|(_, host, _)| host >= arguments.hosts) => Err(format!(
                "the fault is on a host that there is not: hosts are 0 to {}",
                arguments.hosts - 1
            )),
            () if arguments.ssh && arguments.mpirun => {
                Err("--ssh and --mpirun: one of them starts the ranks".to_string())
            }
            () if (arguments.ssh || arguments.mpirun)
                && matches!(arguments.fault, Some((Fault::Kill, ..))) =>
            {
                Err("--kill with --ssh or --mpirun: the launchers are no processes of this trial".to_string())
            }
            () => Ok(arguments),
        }
    }

    fn set(&mut self, option: &str, value: &str) -> Result<(), String> {
        let number = || positive(option, value);
        match option {
            "--hosts" => self.hosts = number()? as usize,
            "--nproc" => self.nproc = number()? as usize,
            "--binary" => self.binary = Some(PathBuf::from(value)),
            "--delay" => self.link.delay_ms = number()?,
            "--rate" => self.link.rate_bits = rate(value)?,
            "--loss" => self.link.loss_percent = number()?,
            "--timeout" => self.timeout = Duration::from_secs_f64(number()?),
            "--cut" => self.fault = Some(fault(Fault::Cut, option, value)?),
            "--kill" => self.fault = Some(fault(Fault::Kill, option, value)?),
            _ => return Err(format!("unknown option {option}")),
        }
        Ok(())
    }
}

fn positive(option: &str, value: &str) -> Result<f64, String> {
    let number = value.parse::<f64>().ok().filter(|number| (0.0..1e6).contains(number));
    number.ok_or_else(|| format!("{option} {value}: expected a number from 0 to 1,000,000"))
}

/// Bits a second.
fn rate(value: &str) -> Result<f64, String> {
    let units = [("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)];
    let bits = units.iter().find_map(|(unit, factor)| {
        let number = value.strip_suffix(unit)?.parse::<f64>().ok()?;
        (number > 0.0 && number < 1e6).then_some(number * factor)
    });
    bits.ok_or_else(|| {
        format!("--rate {value}: expected a number with its unit, as in 1gbit, 100mbit or 500kbit")
    })
}

fn fault(kind: Fault, option: &str, value: &str) -> Result<(Fault, usize, Duration), String> {
    let wrong = || format!("{option} {value}: expected HOST@SECONDS, as in 1@5");
    let (host, seconds) = value.split_once('@').ok_or_else(wrong)?;
    let host = host.parse().map_err(|_| wrong())?;
    Ok((kind, host, Duration::from_secs_f64(positive(option, seconds)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_whole_command_line() {
        let args =
            "--hosts 3 --nproc 2 --delay 1 --rate 1gbit --loss 0.5 --cut 2@1.5 --ssh c.toml -- --set a=1";
        let args = Arguments::parse(&Vec::from_iter(args.split(' '))).unwrap();
        assert_eq!((args.hosts, args.nproc, args.config), (3, 2, PathBuf::from("c.toml")));
        let link = Link { delay_ms: 1.0, rate_bits: 1e9, loss_percent: 0.5 };
        assert_eq!((args.link, args.fault), (link, Some((Fault::Cut, 2, Duration::from_millis(1500)))));
        assert_eq!((args.ssh, args.more), (true, vec!["--set".to_string(), "a=1".to_string()]));
    }

    #[test]
    fn says_what_is_wrong() {
        for (args, words) in [
            ("", "no CONFIG"),
            ("--hosts 1 c", "expected 2 to 200"),
            ("--hosts x c", "expected a number"),
            ("--hosts", "needs a value"),
            ("--nproc 0 c", "at least 1"),
            ("--rate fast c", "as in 1gbit"),
            ("--cut 2@1 c", "hosts are 0 to 1"),
            ("--cut 1 c", "HOST@SECONDS"),
            ("--ssh --kill 1@1 c", "no processes of this trial"),
            ("--mpirun --kill 0@1 c", "no processes of this trial"),
            ("--mpirun --ssh c", "one of them"),
            ("--colour 1 c", "unknown option --colour"),
        ] {
            let args = Vec::from_iter(args.split(' ').filter(|arg| !arg.is_empty()));
            let error = Arguments::parse(&args).unwrap_err();
            assert!(error.contains(words), "{args:?}: {error}");
        }
    }
}
