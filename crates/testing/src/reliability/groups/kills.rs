//! SIGKILL of a rank, or of the launcher, in every phase of a run on every small mesh.
//!
//! The job ends within 1.5 s, names the killed rank, leaves no process, and what it has saved resumes to the losses
//! and bytes of a run that nobody disturbed.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::hostile::Random;
use crate::reliability::command::Running;
use crate::reliability::mesh::{MESHES, Mesh};
use crate::reliability::phase::{Phase, await_moment};
use crate::reliability::processes;
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

/// Longest time from a kill to the end of the job.
const END: Duration = Duration::from_millis(1500);

/// Time within which a job starts its processes.
const PATIENCE: Duration = Duration::from_secs(5);

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let mesh = &MESHES[number % MESHES.len()];
    // Every mesh in every phase within 105 cases, and every phase within the first five.
    let phase = Phase::ALL[(number + number / MESHES.len()) % Phase::ALL.len()];
    // Of one rank there is only the process itself.
    let rank = (mesh.ranks > 1 && random.chance(0.75)).then(|| random.below(mesh.ranks));
    let who = rank.map_or("launcher".to_string(), |_| "rank".to_string());
    let detail = match rank {
        Some(rank) => format!("SIGKILL of rank {rank}, {}, in the phase {}", mesh.name, phase.name()),
        None => format!("SIGKILL of the launcher, {}, in the phase {}", mesh.name, phase.name()),
    };
    let result = world.case().and_then(|case| kill(&case, mesh, phase, rank, random));
    Trial::timed(format!("SIGKILL of a {who}: {}", phase.name()), detail, result)
}

fn kill(
    case: &Case<'_>,
    mesh: &Mesh,
    phase: Phase,
    rank: Option<usize>,
    random: &mut Random,
) -> Result<Option<Duration>, String> {
    let reference = case.world.reference(mesh)?;
    let run = case.path("r");
    let mut running = case.phalanx(mesh.train(&["--quiet"])).start()?;
    await_moment(&mut running, &run, phase, &reference, random);
    let target = match rank {
        Some(rank) => process_of(&mut running, rank)?,
        None => Some(running.pid()),
    };
    let killed = Instant::now();
    let hit = target.is_some_and(|pid| processes::send(pid, Signal::KILL));
    let ended = running.finish();
    ended.bounded()?;
    if hit && ended.code != Some(0) {
        let took = ended.ended_at - killed;
        if took > END {
            return ended.wrong(&format!("ended {} ms after the kill", took.as_millis()));
        }
    }
    match (rank, ended.code) {
        // The rank had done its work, or had not begun: nothing was lost.
        (_, Some(0)) => {}
        (Some(rank), _) if hit => named(&ended.stderr, rank, mesh).or_else(|what| ended.wrong(&what))?,
        (None, None) if ended.signal == Some(9) => {}
        _ => return ended.wrong(&format!("ended with {:?}, signal {:?}", ended.code, ended.signal)),
    }
    case.phalanx(mesh.resume()).run()?.success()?;
    reference.is_equal(&run)?;
    let said_at = rank.and_then(|rank| ended.said_at(|line| line.contains(&format!("rank {rank} failed"))));
    Ok(said_at.map(|at| at - killed))
}

/// The process of a rank, as soon as there is one; None when the job has ended before.
///
/// # Errors
/// When the job runs and no process of the rank is found: the case would try nothing.
pub(crate) fn process_of(running: &mut Running, rank: usize) -> Result<Option<i32>, String> {
    found(running, &format!("rank {rank}"), |launcher| processes::rank_below(launcher, rank))
}

/// Returns the process that `search` finds below the one that was started; None if that one ends before.
///
/// # Errors
/// When the process runs and `search` finds nothing: the case would try nothing.
pub(crate) fn found(
    running: &mut Running,
    what: &str,
    search: impl Fn(i32) -> Option<i32>,
) -> Result<Option<i32>, String> {
    let first = running.pid();
    let mut found = None;
    running.wait_for(PATIENCE, || {
        found = search(first);
        found.is_some()
    });
    match found.is_none() && !running.has_ended() {
        true => Err(format!("found no process of {what} within {} s", PATIENCE.as_secs())),
        false => Ok(found),
    }
}

/// Checks that a message names this rank as the one that failed, and no other.
pub(crate) fn named(stderr: &str, rank: usize, mesh: &Mesh) -> Result<(), String> {
    if let Some(other) =
        (0..mesh.ranks).find(|other| *other != rank && stderr.contains(&format!("rank {other} failed")))
    {
        return Err(format!("named rank {other} instead of rank {rank}"));
    }
    match stderr.contains(&format!("rank {rank} failed")) {
        true => Ok(()),
        false => Err(format!("did not name rank {rank}")),
    }
}
