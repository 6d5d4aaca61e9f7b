//! Links that fail: hosts are network namespaces, each with a launcher of its own, and the link of one of them goes down at a
//! random point. Its packets vanish without a word, its interface loses the carrier, or is set down.
//!
//! Or two hosts alone do not reach each other, which is no rank's fault: the network between them is named. Or a link is down for a time
//! that is shorter than `run.stall_timeout_s` by more than a second, and the run goes on as if nothing had been.
//!
//! Within `run.stall_timeout_s` and a second, and another second on a machine that does other work beside, every launcher names
//! the host that it does not hear any more; the cut host names one of the others. The job ends on all hosts, no process and no
//! socket is left two seconds later, and when the link is up again the run resumes, on these hosts or on one, to the losses and
//! bytes of a run that nobody disturbed. It needs network namespaces, which the system gives to root alone.

use std::time::{Duration, Instant};

use crate::hostile::Random;
use crate::namespaces::{Cut, Network, address};

use crate::reliability::command::{Ended, Running};
use crate::reliability::groups::hosts::{is_error, nothing_left};
use crate::reliability::mesh::{MESHES, Mesh};
use crate::reliability::phase::{Phase, await_moment, pause};
use crate::reliability::processes;
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

/// `run.stall_timeout_s` of the cases.
const STALL: Duration = Duration::from_secs(1);

/// Silence after which a launcher gives up another one before it knows `run.stall_timeout_s`: the default of that.
const SILENCE: Duration = Duration::from_secs(10);

/// `--join-timeout`: the time in which launchers have to meet.
const JOIN: Duration = Duration::from_secs(4);

/// Time beyond the timeout until a launcher has named who is silent: one second by its promise, one for a busy machine.
const GRACE: Duration = Duration::from_secs(2);

/// Time from there to the end of the job: a second for ranks to leave, and what it takes to write flight records.
const LEAVE: Duration = Duration::from_millis(1500);

/// The port of the rendezvous; in a network of its own, nothing else uses it.
const PORT: u16 = 29400;

/// Longest time for which a socket may live on.
const LEFT: Duration = Duration::from_secs(2);

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    if let Err(cause) = world.namespaces() {
        return Trial::skipped(cause);
    }
    match number % 5 {
        3 => return parted(world, random, number),
        4 => return outage(world, random, number),
        _ => {}
    }
    let several = MESHES.iter().filter(|mesh| mesh.ranks > 1).collect::<Vec<_>>();
    let mesh = several[number % several.len()];
    // Meshes of two ranks have two hosts; those of four have two hosts of two ranks, or four of one.
    let hosts = if mesh.ranks == 4 && random.chance(0.5) { 4 } else { 2 };
    let phase = *random.pick(&Phase::ALL);
    let fault = Fault { host: random.below(hosts), cut: Cut::ALL[number % Cut::ALL.len()], phase };
    let name = match fault.cut {
        Cut::Silent => "packets of a host vanish",
        Cut::Carrier => "a host's interface loses its carrier",
        Cut::Interface => "a host's interface is set down",
    };
    let detail = format!("{fault:?} on {hosts} hosts, {}", mesh.name);
    let result = world.case().and_then(|case| strike(&case, (mesh, hosts), fault, random));
    Trial::timed(format!("{name}: {}", phase.name()), detail, result)
}

/// Two hosts do not reach each other; both reach host 0 and the fourth.
fn parted(world: &World, random: &mut Random, number: usize) -> Trial {
    let of_four = MESHES.iter().filter(|mesh| mesh.ranks == 4).collect::<Vec<_>>();
    let mesh = of_four[number / 5 % of_four.len()];
    let (one, other) = *random.pick(&[(1, 2), (1, 3), (2, 3)]);
    let phase = *random.pick(&[Phase::Step, Phase::Evaluation, Phase::Save]);
    let mut strike = |case: &Case<'_>| {
        let reference = case.world.reference(mesh)?;
        let network = Network::new(4)?;
        let run = case.path("r");
        let mut launchers = launch(case, (mesh, 4), &network, STALL, &[])?;
        await_moment(&mut launchers[0], &run, phase, &reference, random);
        let tree = |launcher: &Running| processes::tree(launcher.pid().unsigned_abs());
        let started: Vec<u32> = launchers.iter().flat_map(tree).collect();
        network.part(one, other)?;
        let until = Instant::now() + STALL + GRACE;
        let ends = finish(launchers, STALL + GRACE + LEAVE);
        let mut longest = None;
        for ended in &ends {
            ended.bounded()?;
            // These two may have nothing to say to each other any more.
            if ended.code == Some(0) {
                continue;
            }
            let named = |line: &str| {
                is_error(line)
                    && line.contains(&format!("the network between host {one} ("))
                    && mentions(line, other)
            };
            let accused = ended.stderr.lines().filter(|line| is_error(line) && line.contains(" failed: "));
            match (ended.said_at(named), accused.into_iter().find(|line| !named(line))) {
                (_, Some(line)) => ended.wrong(&format!("another was named: {line:?}"))?,
                (None, None) => ended.wrong("did not name the network between the two hosts")?,
                (Some(at), None) if at > until => {
                    ended.wrong(&format!("named it {} ms too late", (at - until).as_millis()))?;
                }
                (Some(at), None) => longest = longest.max(Some(at + STALL + GRACE - until)),
            }
        }
        nothing_left(&started).or_else(|what| ends[0].wrong(&what))?;
        network.join(one, other)?;
        let launchers = launch(case, (mesh, 4), &network, STALL, &["--resume"])?;
        finish(launchers, Duration::ZERO).iter().try_for_each(Ended::success)?;
        reference.is_equal(&run)?;
        Ok(longest)
    };
    let detail = format!("hosts {one} and {other} of 4, {}, in the phase {}", mesh.name, phase.name());
    let result = world.case().and_then(|case| strike(&case));
    Trial::timed("two hosts do not reach each other".to_string(), detail, result)
}

/// The packets of a host vanish for a while.
fn outage(world: &World, random: &mut Random, number: usize) -> Trial {
    const STALL: Duration = Duration::from_secs(3);
    let several = MESHES.iter().filter(|mesh| mesh.ranks > 1).collect::<Vec<_>>();
    let mesh = several[number / 5 % several.len()];
    let hosts = if mesh.ranks == 4 && random.chance(0.5) { 4 } else { 2 };
    let host = random.below(hosts);
    let phase = *random.pick(&[Phase::Step, Phase::Evaluation, Phase::Save]);
    let time = Duration::from_millis(200 + random.below(1400) as u64);
    let detail = format!(
        "host {host} of {hosts} for {} ms, {}, in the phase {}",
        time.as_millis(),
        mesh.name,
        phase.name()
    );
    let mut strike = |case: &Case<'_>| {
        let reference = case.world.reference(mesh)?;
        let network = Network::new(hosts)?;
        let run = case.path("r");
        let mut launchers = launch(case, (mesh, hosts), &network, STALL, &[])?;
        await_moment(&mut launchers[0], &run, phase, &reference, random);
        network.cut(host, Cut::Silent)?;
        pause(time);
        network.mend(host, Cut::Silent)?;
        finish(launchers, STALL).iter().try_for_each(Ended::success)?;
        reference.is_equal(&run)
    };
    let result = world.case().and_then(|case| strike(&case));
    Trial::new("packets of a host vanish for a while", detail, result)
}

/// A cut of a host's cable: the host, the kind of cut, and the phase.
#[derive(Clone, Copy, Debug)]
struct Fault {
    host: usize,
    cut: Cut,
    phase: Phase,
}

/// Returns the time from the fault until the last launcher had named the cause, where ranks were at work.
fn strike(
    case: &Case<'_>,
    (mesh, hosts): (&Mesh, usize),
    fault: Fault,
    random: &mut Random,
) -> Result<Option<Duration>, String> {
    let reference = case.world.reference(mesh)?;
    let network = Network::new(hosts)?;
    let run = case.path("r");
    let mut launchers = launch(case, (mesh, hosts), &network, STALL, &[])?;
    await_moment(&mut launchers[0], &run, fault.phase, &reference, random);
    let tree = |launcher: &Running| processes::tree(launcher.pid().unsigned_abs());
    let started: Vec<u32> = launchers.iter().flat_map(tree).collect();
    let struck = Instant::now();
    network.cut(fault.host, fault.cut)?;
    let timeout = if fault.phase == Phase::Start { SILENCE.max(JOIN) } else { STALL };
    let ends = finish(launchers, timeout + GRACE + LEAVE);
    let mut longest = None;
    for (host, ended) in ends.iter().enumerate() {
        let named = judge(ended, fault, (host, hosts), struck + timeout + GRACE)
            .or_else(|what| ended.wrong(&format!("(host {host}) {what}")))?;
        longest = longest.max(named.map(|at| at - struck));
    }
    // Later, a run may have had all that it needs of the other hosts.
    if fault.phase == Phase::Start && longest.is_none() {
        ends[0].wrong("no host has noticed that the link is down")?;
    }
    nothing_left(&started).or_else(|what| ends[0].wrong(&what))?;
    no_sockets(&network, fault.phase).or_else(|what| ends[0].wrong(&what))?;
    network.mend(fault.host, fault.cut)?;
    if random.chance(0.5) {
        case.phalanx(mesh.resume()).run()?.success()?;
    } else {
        let launchers = launch(case, (mesh, hosts), &network, STALL, &["--resume"])?;
        finish(launchers, Duration::ZERO).iter().try_for_each(Ended::success)?;
    }
    reference.is_equal(&run)?;
    Ok(longest.filter(|_| fault.phase != Phase::Start))
}

/// Starts the launcher of every host in its namespace.
fn launch(
    case: &Case<'_>,
    (mesh, hosts): (&Mesh, usize),
    network: &Network,
    stall: Duration,
    more: &[&str],
) -> Result<Vec<Running>, String> {
    let (rendezvous, join) = (format!("{}:{PORT}", address(0)), JOIN.as_secs().to_string());
    let stall = format!("run.stall_timeout_s={}", stall.as_secs());
    let own =
        ["--rendezvous", &rendezvous, "--join-timeout", &join, "--secret-file", "secret", "--set", &stall];
    let start = |host: usize| {
        let words = mesh.launch_host((host, hosts), &[&own[..], &["--quiet"], more].concat());
        let enter = network.host(host).enter().join(" ");
        case.phalanx(words).in_shell(&format!("exec {enter}"), "").start()
    };
    (0..hosts).map(start).collect()
}

/// Waits for all launchers at the same time, `more` longer than for other commands.
fn finish(launchers: Vec<Running>, more: Duration) -> Vec<Ended> {
    std::thread::scope(|scope| {
        let wait = |launcher: Running| scope.spawn(move || launcher.finish_within(more));
        let waits: Vec<_> = launchers.into_iter().map(wait).collect();
        waits.into_iter().map(|wait| wait.join().expect("waiting does not panic")).collect()
    })
}

/// Judges how the launcher of `host` ended: with success, because all was done, or with the name of a host that it cannot hear,
/// said until `until`. Returns when it was said.
fn judge(
    ended: &Ended,
    fault: Fault,
    (host, hosts): (usize, usize),
    until: Instant,
) -> Result<Option<Instant>, String> {
    ended.bounded()?;
    match ended.code {
        Some(0) => return Ok(None),
        Some(1) => {}
        _ => return Err(format!("ended with {:?}, signal {:?}", ended.code, ended.signal)),
    }
    let silent: Vec<usize> = match host == fault.host {
        true => (0..hosts).filter(|other| *other != host).collect(),
        false => vec![fault.host],
    };
    let names = |line: &str| is_error(line) && silent.iter().any(|silent| mentions(line, *silent));
    let Some(named) = ended.said_at(names) else {
        return Err(format!("named none of the silent hosts {silent:?}"));
    };
    if named > until {
        return Err(format!("named a silent host {} ms too late", (named - until).as_millis()));
    }
    if ended.ended_at > until + LEAVE {
        return Err(format!("ended {} ms too late", (ended.ended_at - until - LEAVE).as_millis()));
    }
    let accused = ended.stderr.lines().filter(|line| is_error(line) && line.contains(" failed: "));
    match accused.into_iter().find(|line| !names(line)) {
        Some(line) => Err(format!("another was named: {line:?}")),
        None => Ok(Some(named)),
    }
}

/// Returns whether a line names a host: `host 1`, or `hosts 1, 2`.
fn mentions(line: &str, host: usize) -> bool {
    line.split("host").skip(1).any(|rest| {
        let list = rest.trim_start_matches('s').trim_start();
        let numbers =
            list.split(|c: char| !c.is_ascii_digit() && c != ',' && c != ' ').next().unwrap_or_default();
        numbers.split([',', ' ']).any(|number| number.parse() == Ok(host))
    })
}

/// Checks that soon no host has an open socket. Sockets in TIME_WAIT are ignored: they hold no data. So are closing
/// sockets of ranks that had ended well before the cut: the system still tries to deliver their last data.
fn no_sockets(network: &Network, phase: Phase) -> Result<(), String> {
    const TIME_WAIT: &str = "06";
    // FIN_WAIT1, LAST_ACK, CLOSING: this side has closed, and the peer has not acknowledged it.
    const CLOSING: [&str; 3] = ["04", "09", "0B"];
    let start = Instant::now();
    loop {
        let lines = network.hosts().iter().enumerate().flat_map(|(host, namespace)| {
            let table = std::fs::read_to_string(format!("/proc/{}/net/tcp", namespace.pid()));
            // A table that cannot be read counts as a socket that is left.
            let table = table.unwrap_or_else(|error| format!("\n{error}"));
            table.lines().skip(1).map(|line| format!("host {host}: {}", line.trim())).collect::<Vec<_>>()
        });
        // The host's two words, then number, local address, remote address, state.
        let left = lines.filter(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let state = words.get(5).copied().unwrap_or_default();
            state != TIME_WAIT && !(phase == Phase::Exit && CLOSING.contains(&state))
        });
        let left: Vec<String> = left.collect();
        match left.first() {
            None => return Ok(()),
            Some(first) if start.elapsed() > LEFT => {
                return Err(format!("left {} socket(s), first {first}", left.len()));
            }
            Some(_) => pause(Duration::from_millis(5)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_hosts() {
        for (line, hosts) in [
            ("error: host 1 (a) failed: host 1 (a) is lost, with rank 1: it is stopped", &[1][..]),
            ("error: rank 3 on host 2 (node10) failed: the launcher of host 12 is gone", &[2, 12]),
            ("error: hosts 1, 3 did not come to the rendezvous within 4 s", &[1, 3]),
            ("error: host 0 could not be reached at 10.77.0.1:29400 within 4 s", &[0]),
            ("error: rank 1 failed", &[]),
        ] {
            let named: Vec<usize> = (0..20).filter(|host| mentions(line, *host)).collect();
            assert_eq!(named, hosts, "{line}");
        }
    }
}
