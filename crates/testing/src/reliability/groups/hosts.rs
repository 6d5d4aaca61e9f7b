//! Faults of ranks and hosts where ranks speak over TCP, or over shared memory and TCP: SIGKILL and SIGSTOP of a rank,
//! SIGKILL of a host's launcher, or of the process that has started them.
//!
//! One machine plays the hosts (`phalanx launch --hosts`). The job ends in time on all of them, every launcher that lives
//! names the cause, nothing is left behind, and what was saved resumes, also on one host, to the losses and bytes of a run
//! on one host that nobody disturbed.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::hostile::Random;
use crate::reliability::command::Ended;
use crate::reliability::groups::kills::found;
use crate::reliability::mesh::{MESHES, Mesh};
use crate::reliability::phase::{Phase, await_moment, pause};
use crate::reliability::processes;
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

/// Longest time from a kill to the end of the job on all hosts.
const END: Duration = Duration::from_millis(2000);

/// Time added if a launcher was killed: others that still wait for it at the rendezvous are given two seconds.
const MEETING: Duration = Duration::from_millis(2500);

/// Longest time for which a process may live on.
const LEFT: Duration = Duration::from_secs(2);

/// `run.stall_timeout_s` of the cases in which a rank stands still.
const STALL: Duration = Duration::from_secs(1);

/// Who is struck.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Killed(usize),
    Stopped(usize),
    /// The launcher of a host.
    Launcher(usize),
    /// The process that has started all launchers.
    Starter,
}

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let several = MESHES.iter().filter(|mesh| mesh.ranks > 1).collect::<Vec<_>>();
    let mesh = several[number % several.len()];
    // Meshes of two ranks have two hosts; those of four have two hosts of two ranks, or four of one.
    let hosts = if mesh.ranks == 4 && random.chance(0.5) { 4 } else { 2 };
    let phase = *random.pick(&Phase::ALL);
    let rank = random.below(mesh.ranks);
    let victim = match number % 5 {
        0 => Victim::Stopped(rank),
        1 if random.chance(0.25) => Victim::Starter,
        1 => Victim::Launcher(random.below(hosts)),
        _ => Victim::Killed(rank),
    };
    let fault = match victim {
        Victim::Killed(_) => format!("SIGKILL of a rank: {}", phase.name()),
        Victim::Stopped(_) => "SIGSTOP of a rank".to_string(),
        Victim::Launcher(_) => "SIGKILL of a host's launcher".to_string(),
        Victim::Starter => "SIGKILL of what started the launchers".to_string(),
    };
    let detail = format!("{victim:?} on {hosts} hosts, {}, in the phase {}", mesh.name, phase.name());
    let result = world.case().and_then(|case| strike(&case, (mesh, hosts), victim, phase, random));
    Trial::timed(fault, detail, result)
}

fn strike(
    case: &Case<'_>,
    (mesh, hosts): (&Mesh, usize),
    victim: Victim,
    phase: Phase,
    random: &mut Random,
) -> Result<Option<Duration>, String> {
    let reference = case.world.reference(mesh)?;
    let run = case.path("r");
    let stall = format!("run.stall_timeout_s={}", STALL.as_secs());
    let mut running = case.phalanx(mesh.launch(hosts, &["--quiet", "--set", &stall])).start()?;
    await_moment(&mut running, &run, phase, &reference, random);
    let first = running.pid();
    let target = found(&mut running, &format!("{victim:?}"), |first| match victim {
        Victim::Killed(rank) | Victim::Stopped(rank) => processes::rank_below(first, rank),
        Victim::Launcher(host) => processes::launcher_of(first, host),
        Victim::Starter => Some(first),
    })?;
    let started = processes::tree(first.unsigned_abs());
    let struck = Instant::now();
    let signal = if matches!(victim, Victim::Stopped(_)) { Signal::STOP } else { Signal::KILL };
    let hit = target.is_some_and(|pid| processes::send(pid, signal));
    let ended = running.finish();
    ended.bounded()?;
    nothing_left(&started).or_else(|what| ended.wrong(&what))?;
    if hit && ended.code != Some(0) {
        let took = ended.ended_at - struck;
        let limit = match victim {
            Victim::Stopped(_) => STALL + END,
            Victim::Launcher(_) => END + MEETING,
            Victim::Killed(_) | Victim::Starter => END,
        };
        if took > limit {
            return ended.wrong(&format!("ended {} ms after {victim:?}", took.as_millis()));
        }
        named(&ended, victim, phase, hosts).or_else(|what| ended.wrong(&what))?;
    } else if ended.code != Some(0) {
        return ended.wrong(&format!("ended with {:?}, signal {:?}", ended.code, ended.signal));
    }
    // A run of several hosts goes on where it was, or on one.
    let resume =
        if random.chance(0.5) { mesh.resume() } else { mesh.launch(hosts, &["--resume", "--quiet"]) };
    case.phalanx(resume).run()?.success()?;
    reference.is_equal(&run)?;
    let names = matches!(victim, Victim::Killed(_) | Victim::Launcher(_));
    Ok(ended.said_at(is_error).filter(|_| names && hit).map(|at| at - struck))
}

/// Checks that none of these processes lives two seconds after the one that started them has ended.
pub(crate) fn nothing_left(started: &[u32]) -> Result<(), String> {
    let end = Instant::now();
    while let Some(pid) = started.iter().find(|pid| processes::lives(**pid as i32)) {
        if end.elapsed() > LEFT {
            return Err(format!("left process {pid} behind"));
        }
        pause(Duration::from_millis(5));
    }
    Ok(())
}

/// Checks that every surviving launcher names the victim, and no other.
fn named(ended: &Ended, victim: Victim, phase: Phase, hosts: usize) -> Result<(), String> {
    let (who, expected) = match victim {
        Victim::Killed(rank) | Victim::Stopped(rank) => (format!("rank {rank} on host "), hosts),
        // Nobody shows what the launchers say.
        Victim::Starter => return Ok(()),
        // What started the launchers names it, and all others that have met it.
        Victim::Launcher(host) if phase == Phase::Start => (format!("host {host} "), 1),
        Victim::Launcher(host) => (format!("host {host} "), hosts),
    };
    let errors = ended.stderr.lines().filter(|line| is_error(line)).collect::<Vec<_>>();
    let right = errors.iter().filter(|line| line.contains(&who)).count();
    if right < expected {
        return Err(format!("{right} of {expected} launchers named {who:?}"));
    }
    match errors.iter().find(|line| line.contains(" failed: ") && !line.contains(&who)) {
        Some(line) => Err(format!("another was named: {line:?}")),
        None => Ok(()),
    }
}

/// Returns whether a launcher wrote this line as the reason for its end.
pub(crate) fn is_error(line: &str) -> bool {
    let line = match line.strip_prefix("[host ").and_then(|rest| rest.split_once("] ")) {
        Some((_, line)) => line,
        None => line,
    };
    line.starts_with("error: ")
}
