//! Processes of one host that another launcher has started: those of jobs with one name and other worlds, one too many, one that is
//! killed, and a launcher that is killed.
//!
//! A process is never a rank of a job that is not its own: jobs train to their own bits, and who finds none of his says so. When a
//! process or a rank is killed, all others end within two seconds and name the rank; when the launcher is, all of its processes end, which
//! it cannot tell them. Both resume with the same bits.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::launchers::{Job, Launcher, Process};
use super::{MORE, trained, trained_in, with_variables};
use crate::hostile::Random;
use crate::reliability::command::{Ended, Invocation, Running};
use crate::reliability::groups::hosts::nothing_left;
use crate::reliability::phase::{pause, reached};
use crate::reliability::processes;
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

/// Longest time from a kill to the end of all processes.
const END: Duration = Duration::from_secs(2);

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let launcher = Launcher::ALL[number / 6 % Launcher::ALL.len()];
    let (two, four) = of_one_name(launcher, number);
    let (fault, result) = match number % 6 {
        0 => (
            "a process of a world of four comes to one of two",
            with(world, |case| stray(case, &two, &four, random)),
        ),
        1 => (
            "two jobs of one name, of two and four processes",
            with(world, |case| both(case, &two, &four, random)),
        ),
        2 => ("a process is started twice", with(world, |case| twice(case, &two, random))),
        3 => ("SIGKILL of a process", with(world, |case| killed(case, &four, false, random))),
        4 => ("SIGKILL of a rank", with(world, |case| killed(case, &four, true, random))),
        _ => ("SIGKILL of the launcher", with(world, |case| launcher_killed(case, &two, random))),
    };
    Trial::new(fault, launcher.name().to_string(), result)
}

fn with(world: &World, run: impl FnOnce(&Case<'_>) -> Result<(), String>) -> Result<(), String> {
    world.case().and_then(|case| run(&case))
}

/// Jobs of two and of four processes on one host that their launcher gives the same name.
fn of_one_name(launcher: Launcher, number: usize) -> (Job, Job) {
    // The name is the first that a job draws.
    let of = |ranks: usize| {
        let mut random = Random::of_case(&format!("name/{}", std::process::id()), number);
        Job::new(launcher, &[ranks], false, &mut random)
    };
    (of(2), of(4))
}

/// Starts a process in the run folder `run`.
fn start(case: &Case<'_>, process: &Process, run: &str, more: &[&str]) -> Result<Running, String> {
    let words = [&["train", "small.toml", "--run", run, "--quiet"][..], more].concat();
    with_variables(case.phalanx(words), &process.variables).start()
}

fn finish(all: Vec<Running>) -> Vec<Ended> {
    all.into_iter().map(|running| running.finish_within(MORE)).collect()
}

/// Starts all processes, in a random order.
fn start_all(
    case: &Case<'_>,
    job: &Job,
    run: &str,
    more: &[&str],
    random: &mut Random,
) -> Result<Vec<Running>, String> {
    let mut order: Vec<&Process> = job.processes.iter().collect();
    random.shuffle(&mut order);
    order.into_iter().map(|process| start(case, process, run, more)).collect()
}

/// A job of two, and beside it a process that is rank 1 or higher of four; the job may lack its own rank 1.
fn stray(case: &Case<'_>, two: &Job, four: &Job, random: &mut Random) -> Result<(), String> {
    let lacks_one = random.chance(0.5);
    let number = if lacks_one { 1 } else { 1 + random.below(3) };
    let soon = ["--join-timeout", "2"];
    let mut started = vec![start(case, &four.processes[number], "r", &soon)?];
    pause(Duration::from_millis(random.below(200) as u64));
    for process in two.processes.iter().filter(|process| !lacks_one || process.number == 0) {
        started.push(start(case, process, "r", &soon)?);
    }
    let ends = finish(started);
    ends[0].refusal(&[&format!("rank {number} of 4"), "local rank 0"])?;
    if lacks_one {
        ends[1].refusal(&["1 of 2 processes of this host have come"])?;
        return match case.path("r").exists() {
            true => ends[1].wrong("made the run folder"),
            false => Ok(()),
        };
    }
    ends[1..].iter().try_for_each(Ended::success)?;
    trained(case, 2)
}

/// Two whole jobs: the second that comes is refused with all of its processes, or both, if they come together.
fn both(case: &Case<'_>, two: &Job, four: &Job, random: &mut Random) -> Result<(), String> {
    let soon = ["--join-timeout", "3"];
    let mut jobs = [(two, "r"), (four, "q")];
    random.shuffle(&mut jobs);
    let mut started = Vec::new();
    for (job, run) in jobs {
        started.push((job.world(), run, start_all(case, job, run, &soon, random)?));
        pause(Duration::from_millis(random.below(400) as u64));
    }
    let ends = started.into_iter().map(|(ranks, run, all)| (ranks, run, finish(all))).collect::<Vec<_>>();
    let mut refused = String::new();
    for (ranks, run, ends) in &ends {
        if ends.iter().all(|ended| ended.code == Some(0)) {
            ends.iter().try_for_each(Ended::success)?;
            trained_in(case, run, *ranks)?;
        } else {
            ends.iter().try_for_each(|ended| ended.refusal(&[]))?;
            refused.extend(ends.iter().map(|ended| ended.stderr.as_str()));
        }
    }
    match refused.is_empty() || refused.contains("another job of this user has the same name") {
        true => Ok(()),
        false => Err(format!("no process was refused for the name of its job: {refused}")),
    }
}

/// A job one process of which is started twice: one of the two is no rank of it.
fn twice(case: &Case<'_>, job: &Job, random: &mut Random) -> Result<(), String> {
    let number = random.below(2);
    let soon = ["--join-timeout", "3"];
    let mut started = vec![start(case, &job.processes[number], "r", &soon)?];
    pause(Duration::from_millis(random.below(100) as u64));
    started.extend(start_all(case, job, "r", &soon, random)?);
    let ends = finish(started);
    let (well, refused): (Vec<&Ended>, Vec<&Ended>) = ends.iter().partition(|ended| ended.code == Some(0));
    match (&well[..], &refused[..]) {
        ([_, _], [refused]) => refused.refusal(&[])?,
        _ => {
            return ends[0].wrong(&format!(
                "{} of 3 processes ended well; {:?}",
                well.len(),
                ends.iter().map(|ended| &ended.stderr).collect::<Vec<_>>()
            ));
        }
    }
    trained(case, 2)
}

/// A process, or the rank that it has started, is killed at a random step.
fn killed(case: &Case<'_>, job: &Job, is_rank: bool, random: &mut Random) -> Result<(), String> {
    let run = case.path("r");
    let mut started: Vec<Running> = Vec::new();
    for process in &job.processes {
        started.push(start(case, process, "r", &[])?);
    }
    let step = 1 + random.below(25) as u64;
    started[0].wait_for(MORE, || reached(&run, step));
    let all: Vec<u32> =
        started.iter().flat_map(|running| processes::tree(running.pid().unsigned_abs())).collect();
    let number = random.below(job.processes.len());
    let pid = started[number].pid();
    let victim = if is_rank { processes::rank_below(pid, number) } else { Some(pid) };
    let at = Instant::now();
    let hit = victim.is_some_and(|victim| processes::send(victim, Signal::KILL));
    let ends = finish(started);
    ends.iter().try_for_each(Ended::bounded)?;
    nothing_left(&all).or_else(|what| ends[0].wrong(&what))?;
    let survivors =
        || ends.iter().enumerate().filter(|(other, _)| is_rank || *other != number).map(|(_, ended)| ended);
    if hit && survivors().any(|ended| ended.code != Some(0)) {
        let words =
            [format!("rank {number} failed"), format!("the process with local rank {number} has ended")];
        for ended in survivors() {
            if ended.ended_at - at > END {
                ended.wrong(&format!("ended {} ms after the kill", (ended.ended_at - at).as_millis()))?;
            }
            if ended.code != Some(1) || ended.stderr.is_empty() {
                ended.wrong(&format!("ended with {:?}, and perhaps in silence", ended.code))?;
            }
        }
        if !survivors().any(|ended| words.iter().any(|words| ended.stderr.contains(words))) {
            ends[(number + 1) % ends.len()].wrong(&format!("and no other named rank {number}"))?;
        }
    }
    finish(start_all(case, job, "r", &["--resume"], random)?).iter().try_for_each(Ended::success)?;
    trained(case, job.world())
}

/// A script with the name of the launcher starts the processes, perhaps each by a script, and is killed.
fn launcher_killed(case: &Case<'_>, job: &Job, random: &mut Random) -> Result<(), String> {
    let name = match job.launcher {
        Launcher::Torchrun => "torchrun",
        Launcher::Slurm => "slurmstepd",
        Launcher::OpenMpi => *random.pick(&["mpirun", "orted", "prterun"]),
        Launcher::Hydra => *random.pick(&["mpiexec", "hydra_pmi_proxy"]),
    };
    let by_script = random.chance(0.5);
    let mut script = "#!/bin/sh\n".to_string();
    for process in &job.processes {
        let sets: String =
            process.variables.iter().map(|(name, value)| format!("{name}='{value}' ")).collect();
        let command = if by_script { "sh -c '\"$@\"; true' sh \"$@\"" } else { "\"$@\"" };
        script.push_str(&format!("{sets}{command} &\n"));
    }
    case.write_with(name, script + "wait\n", 0o755)?;
    let program = case.world.program().to_string_lossy().into_owned();
    let words = [&program, "train", "small.toml", "--run", "r", "--quiet"];
    let launcher = Invocation::new(&case.path(name), case.root(), words);
    let mut running = with_variables(launcher, &[]).start()?;
    let run = case.path("r");
    let step = 1 + random.below(20) as u64;
    running.wait_for(MORE, || reached(&run, step));
    let all = processes::tree(running.pid().unsigned_abs());
    let hit = processes::send(running.pid(), Signal::KILL);
    let ended = running.finish_within(MORE);
    ended.bounded()?;
    nothing_left(&all).or_else(|what| ended.wrong(&what))?;
    let said = format!("{name} (process {}), which has started this process, has ended", all[0]);
    let is_over = reached(&run, crate::reliability::mesh::STEPS);
    if hit && !is_over && !ended.stderr.contains(&said) {
        return ended.wrong(&format!("did not say {said:?}"));
    }
    finish(start_all(case, job, "r", &["--resume"], random)?).iter().try_for_each(Ended::success)?;
    trained(case, job.world())
}
