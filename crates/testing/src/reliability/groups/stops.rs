//! Ranks that stand still (SIGSTOP), and runs that are asked to stop (SIGINT, SIGTERM and others).
//!
//! A rank that stands still is named within `run.stall_timeout_s` and one second, and another second on a machine that
//! does other work beside; all ranks that stand still end the job, too. A run that is asked to stop saves and resumes
//! to the same bits.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::hostile::Random;
use crate::reliability::command::Running;
use crate::reliability::groups::kills::{named, process_of};
use crate::reliability::mesh::{MESHES, Mesh};
use crate::reliability::phase::{Phase, await_moment, pause, reached};
use crate::reliability::processes;
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

/// Time beyond `run.stall_timeout_s` until a job has ended: one second by its promise, one for a busy machine.
const GRACE: Duration = Duration::from_secs(2);

/// Longest time from the second request to stop to the end of the job.
const AT_ONCE: Duration = Duration::from_millis(1500);

/// The signals that ask a run to save and end.
const SIGNALS: [(&str, Signal); 6] = [
    ("SIGINT", Signal::INT),
    ("SIGTERM", Signal::TERM),
    ("SIGHUP", Signal::HUP),
    ("SIGUSR1", Signal::USR1),
    ("SIGUSR2", Signal::USR2),
    ("SIGXCPU", Signal::XCPU),
];

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let several = MESHES.iter().filter(|mesh| mesh.ranks > 1).collect::<Vec<_>>();
    let mesh = *random.pick(&several);
    // Standing still takes seconds of waiting, being asked takes none.
    let (fault, detail, result) = match number % 8 {
        0 => {
            let rank = random.below(mesh.ranks);
            let detail = format!("SIGSTOP of rank {rank}, {}", mesh.name);
            (
                "SIGSTOP of a rank",
                detail,
                world.case().and_then(|case| stand_still(&case, mesh, Some(rank), random)),
            )
        }
        1 => {
            let detail = format!("SIGSTOP of all ranks, {}", mesh.name);
            (
                "SIGSTOP of all ranks",
                detail,
                world.case().and_then(|case| stand_still(&case, mesh, None, random)),
            )
        }
        2 => {
            let detail = format!("SIGSTOP of all ranks, then SIGTERM twice to the launcher, {}", mesh.name);
            (
                "SIGSTOP of all ranks, then SIGTERM twice",
                detail,
                world.case().and_then(|case| leave(&case, mesh, random)),
            )
        }
        _ => {
            let mesh = random.pick(&MESHES);
            let (name, signal) = *random.pick(&SIGNALS);
            let phase = *random.pick(&Phase::ALL);
            let detail = format!("{name} to the launcher, {}, in the phase {}", mesh.name, phase.name());
            let fault = match phase {
                Phase::Start => "signals to stop: start",
                Phase::Exit => "signals to stop: exit",
                _ => "signals to stop: steps, evaluations, saves",
            };
            (fault, detail, world.case().and_then(|case| ask(&case, mesh, phase, signal, random)))
        }
    };
    Trial::new(fault, detail, result)
}

fn stand_still(case: &Case<'_>, mesh: &Mesh, rank: Option<usize>, random: &mut Random) -> Result<(), String> {
    let reference = case.world.reference(mesh)?;
    let timeout = Duration::from_secs(1 + random.below(2) as u64);
    let set = format!("run.stall_timeout_s={}", timeout.as_secs());
    let run = case.path("r");
    let mut running = case.phalanx(mesh.train(&["--quiet", "--set", &set])).start()?;
    let step = 1 + random.below(20) as u64;
    running.wait_for(Duration::from_secs(8), || reached(&run, step));
    let targets: Vec<i32> = match rank {
        Some(rank) => process_of(&mut running, rank)?.into_iter().collect(),
        None => all_ranks(&mut running, mesh)?,
    };
    let stopped = Instant::now();
    let hit = !targets.is_empty() && targets.iter().all(|pid| processes::send(*pid, Signal::STOP));
    let ended = running.finish();
    ended.bounded()?;
    if !hit && ended.code == Some(0) {
        return reference.is_equal(&run);
    }
    let took = ended.ended_at - stopped;
    if took > timeout + GRACE {
        return ended.wrong(&format!("ended {} ms after ranks stood still", took.as_millis()));
    }
    if ended.code != Some(1) {
        return ended.wrong(&format!("ended with {:?}, signal {:?}", ended.code, ended.signal));
    }
    match rank {
        Some(rank) => named(&ended.stderr, rank, mesh).or_else(|what| ended.wrong(&what))?,
        None if ended.stderr.contains("rank ") => {}
        None => return ended.wrong("named no rank"),
    }
    case.phalanx(mesh.resume()).run()?.success()?;
    reference.is_equal(&run)
}

/// The processes of all ranks; of fewer when the job ends.
///
/// # Errors
/// When the job runs without one of them.
fn all_ranks(running: &mut Running, mesh: &Mesh) -> Result<Vec<i32>, String> {
    let ranks = (0..mesh.ranks).map(|rank| process_of(running, rank));
    Ok(ranks.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
}

/// All ranks stand still, long before any timeout; the second request to stop ends the job at once.
fn leave(case: &Case<'_>, mesh: &Mesh, random: &mut Random) -> Result<(), String> {
    let reference = case.world.reference(mesh)?;
    let run = case.path("r");
    let mut running = case.phalanx(mesh.train(&["--quiet"])).start()?;
    let step = 1 + random.below(20) as u64;
    running.wait_for(Duration::from_secs(8), || reached(&run, step));
    let launcher = running.pid();
    for pid in all_ranks(&mut running, mesh)? {
        processes::send(pid, Signal::STOP);
    }
    for _ in 0..2 {
        processes::send(launcher, Signal::TERM);
        pause(Duration::from_millis(100));
    }
    let asked = Instant::now();
    let ended = running.finish();
    ended.orderly()?;
    let took = ended.ended_at - asked;
    if took > AT_ONCE || !matches!(ended.code, Some(0 | 130)) {
        let after = format!("ended with {:?} {} ms after the second SIGTERM", ended.code, took.as_millis());
        return ended.wrong(&after);
    }
    case.phalanx(mesh.resume()).run()?.success()?;
    reference.is_equal(&run)
}

fn ask(
    case: &Case<'_>,
    mesh: &Mesh,
    phase: Phase,
    signal: Signal,
    random: &mut Random,
) -> Result<(), String> {
    let reference = case.world.reference(mesh)?;
    let run = case.path("r");
    let mut running = case.phalanx(mesh.train(&["--quiet"])).start()?;
    if phase == Phase::Start {
        // Before `main` has taken the signals over, they end the program as they end any other.
        pause(Duration::from_millis(5));
    }
    await_moment(&mut running, &run, phase, &reference, random);
    processes::send(running.pid(), signal);
    let ended = running.finish();
    ended.orderly()?;
    if !matches!(ended.code, Some(0 | 130)) {
        return ended.wrong(&format!("ended with {:?}, not 130", ended.code));
    }
    case.phalanx(mesh.resume()).run()?.success()?;
    reference.is_equal(&run)
}
