//! Hosts that are lost from a job that may go on without them (`--max-restarts`, `--min-nproc`): peers of host 0 with and without
//! ranks, several after each other, host 0. One command plays the hosts here or starts them over an `ssh` that runs commands here, or
//! every launcher is started by hand.
//!
//! While host 0 lives, the job goes on to its end with the ranks that are left, every lost host is named, and every launcher that lives
//! ends well. Without host 0, or when more is lost than `--max-restarts` allows, the job ends on all hosts and says why; the run
//! resumes. Steps before the first loss have the bits of an undisturbed run, and each step is in the metrics once.

use std::time::Duration;

use rustix::process::Signal;

use crate::hostile::Random;
use crate::reliability::command::{Ended, Running};
use crate::reliability::folder;
use crate::reliability::groups::environments::free_port;
use crate::reliability::groups::hosts::{is_error, nothing_left};
use crate::reliability::phase::pause;
use crate::reliability::processes;
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

/// Steps of every run, and those between two saves.
const STEPS: u64 = 120;
const EVERY: u64 = 5;

/// Names of this machine, under which `--hostfile` knows four hosts.
const NAMES: [&str; 4] = ["127.0.0.1", "localhost", "127.0.0.2", "127.0.0.3"];

/// An `ssh` that runs the command here.
const SSH: &str = "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\nshift 2\nexec sh -c \"$*\"\n";

/// More time than other commands have, for jobs that start several times.
const MORE: Duration = Duration::from_secs(30);

/// Who starts the launchers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Starter {
    /// `launch --hosts`.
    Played,
    /// `launch --hostfile`.
    Ssh,
    /// Nobody: each by hand.
    None,
}

/// Hosts that are lost, and whether the job continues without them.
const FAULTS: [(&str, bool); 6] = [
    ("a peer of host 0", true),
    ("a host without ranks", true),
    ("peers and hosts without ranks, one after the other", true),
    ("two peers of host 0, one after the other", true),
    ("host 0", false),
    ("more hosts than restarts are allowed", false),
];

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let (fault, goes_on) = FAULTS[number % FAULTS.len()];
    let starter = [Starter::Played, Starter::Ssh, Starter::None][number / FAULTS.len() % 3];
    // After the first loss two ranks are left that the batch allows, on the first two hosts that live.
    let first = 1 + random.below(3);
    let [second, third] = [1, 2, 3].into_iter().filter(|host| *host != first).collect::<Vec<_>>()[..] else {
        return Trial::new(fault, String::new(), Err("no three peers".to_string()));
    };
    let (lost, restarts) = match number % FAULTS.len() {
        0 => (vec![first], "3"),
        1 => (vec![first, third], "3"),
        2 => (vec![first, third, second], "3"),
        3 => (vec![first, second], "3"),
        4 if random.chance(0.5) => (vec![first, 0], "3"),
        4 => (vec![0], "3"),
        _ => (vec![first, second], "1"),
    };
    let detail = format!("hosts {lost:?} of 4, launchers started by {starter:?}, --max-restarts {restarts}");
    let result = world.case().and_then(|case| strike(&case, starter, (&lost, goes_on), restarts, random));
    Trial::new(fault, detail, result)
}

fn strike(
    case: &Case<'_>,
    starter: Starter,
    (lost, goes_on): (&[usize], bool),
    restarts: &str,
    random: &mut Random,
) -> Result<(), String> {
    let expected = undisturbed(case.world)?;
    let run = case.path("r");
    let mut started = start(case, starter, restarts)?;
    let mut awaited = EVERY;
    let mut all = Vec::new();
    for host in lost {
        let first = &mut started[0];
        if !first.wait_for(MORE, || newest(&run) >= awaited) {
            return Err(format!("no checkpoint behind step {awaited} before host {host} is lost"));
        }
        pause(Duration::from_micros(random.below(20_000) as u64));
        all.extend(started.iter().flat_map(|launcher| processes::tree(launcher.pid().unsigned_abs())));
        let pid = match starter {
            Starter::None => Some(started[*host].pid()),
            _ => processes::launcher_of(started[0].pid(), *host),
        };
        if !pid.is_some_and(|pid| processes::send(pid, Signal::KILL)) {
            return Err(format!("no launcher of host {host} to kill"));
        }
        awaited = newest(&run) + 3 * EVERY;
    }
    let ends: Vec<Ended> = started.into_iter().map(|launcher| launcher.finish_within(MORE)).collect();
    ends.iter().try_for_each(Ended::bounded)?;
    nothing_left(&all).or_else(|what| ends[0].wrong(&what))?;
    for (host, ended) in
        ends.iter().enumerate().filter(|(host, _)| starter != Starter::None || !lost.contains(host))
    {
        match goes_on {
            true => ended.success()?,
            false if ended.code == Some(0) => ended.wrong("ended well without what it needs")?,
            false => ended.orderly().or_else(|what| ended.wrong(&format!("(launcher {host}) {what}")))?,
        }
    }
    // Host 0's launcher says which hosts were lost; another one, or what has started it, that host 0 was.
    let teller =
        if starter == Starter::None && lost.contains(&0) { &ends[first_left(lost)] } else { &ends[0] };
    let names = |host: usize| {
        let (name, with_colon) = (format!("host {host} ("), format!("host {host}:"));
        teller.stderr.lines().any(|line| {
            (is_error(line) || line.contains("is lost, and the job goes on"))
                && (line.contains(&name) || line.contains(&with_colon) || line.contains(NAMES[host]))
        })
    };
    if let Some(host) = lost.iter().find(|host| !names(**host)) {
        return teller.wrong(&format!("did not name host {host}"));
    }
    if !goes_on {
        let set = format!("train.steps={STEPS}");
        case.phalanx(["train", "--run", "r", "--resume", "--quiet", "--nproc", "4", "--set", &set])
            .run()?
            .success()?;
    }
    judge(&expected, &folder::losses(&run)).or_else(|what| ends[0].wrong(&what))
}

/// The lowest number of a host that was not lost.
fn first_left(lost: &[usize]) -> usize {
    (0..NAMES.len()).find(|host| !lost.contains(host)).unwrap_or(0)
}

/// Checks that there are figures of every step, and that those before any loss are `expected`.
fn judge(expected: &[(u64, String)], found: &[(u64, String)]) -> Result<(), String> {
    let steps = |figures: &[(u64, String)]| figures.iter().map(|(step, _)| *step).collect::<Vec<_>>();
    if steps(found) != steps(expected) {
        return Err(format!("the metrics have {} lines, not each of {STEPS} steps once", found.len()));
    }
    // Other numbers of ranks add in another order.
    let before = EVERY as usize;
    match (0..before).find(|at| expected.get(*at) != found.get(*at)) {
        Some(at) => Err(format!("step {} is {:?}, expected {:?}", at + 1, found.get(at), expected.get(at))),
        None => Ok(()),
    }
}

/// Options of every run.
fn options() -> Vec<String> {
    let sets = [
        format!("train.steps={STEPS}"),
        format!("train.save_every={EVERY}"),
        "train.eval_every=0".to_string(),
    ];
    let sets = sets.into_iter().flat_map(|set| ["--set".to_string(), set]);
    sets.chain(["--quiet".to_string()]).collect()
}

/// Starts four hosts of a rank: the process that starts all, or the launchers.
fn start(case: &Case<'_>, starter: Starter, restarts: &str) -> Result<Vec<Running>, String> {
    let run = ["small.toml", "--run", "r"].map(str::to_string).to_vec();
    let launch = |words: &[&str]| {
        let place = words.iter().map(|word| word.to_string()).collect::<Vec<_>>();
        let more = ["--max-restarts", restarts, "--min-nproc", "1"].map(str::to_string).to_vec();
        case.phalanx([place, run.clone(), options(), more].concat())
    };
    match starter {
        Starter::Played => Ok(vec![launch(&["launch", "--hosts", "4", "--nproc", "1"]).start()?]),
        Starter::Ssh => {
            std::fs::create_dir(case.path("bin")).map_err(|error| error.to_string())?;
            case.write_with("bin/ssh", SSH, 0o755)?;
            case.write("hosts.txt", NAMES.map(|name| format!("{name} slots=1\n")).concat())?;
            let path =
                format!("{}:{}", case.path("bin").display(), std::env::var("PATH").unwrap_or_default());
            Ok(vec![launch(&["launch", "--hostfile", "hosts.txt"]).environment("PATH", Some(&path)).start()?])
        }
        Starter::None => {
            let rendezvous = format!("127.0.0.1:{}", free_port());
            let one = |host: usize| {
                let number = host.to_string();
                let place = ["launch", "--nnodes", "4", "--node-rank", &number, "--rendezvous", &rendezvous];
                launch(&[&place[..], &["--nproc", "1", "--secret-file", "secret"]].concat()).start()
            };
            (0..4).map(one).collect()
        }
    }
}

/// The figures of a run on four ranks that loses nothing.
fn undisturbed(world: &World) -> Result<Vec<(u64, String)>, String> {
    let kept = world.prepared("lost-hosts", |folder| {
        let words = ["train", "small.toml", "--run", "r", "--nproc", "4"].map(str::to_string).to_vec();
        let words = [words, options()].concat();
        crate::reliability::command::Invocation::new(world.program(), folder, words)
            .start()?
            .finish_within(MORE)
            .success()
    })?;
    Ok(folder::losses(&kept.join("r")))
}

/// The step of the newest checkpoint; 0 without one.
fn newest(run: &std::path::Path) -> u64 {
    let names = std::fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
    let steps = names.filter_map(|name| name.file_name().to_str()?.strip_prefix("step-")?.parse().ok());
    steps.max().unwrap_or(0)
}
