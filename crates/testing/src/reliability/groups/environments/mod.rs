//! Environments of other launchers: complete, left over in a shell, in part, contradicting, of several launchers, of batch scripts and
//! terminals; with every command that a process may be started with.
//!
//! A command runs as the variables mean: each process has the rank that is known here, and the run has the losses of an undisturbed
//! one. Or the variables are refused by name, or said. Whoever waits says so within a second, and for whom; nothing waits in silence,
//! and no process is left.

mod jobs;
mod launchers;

use std::time::Duration;

use serde_json::Value;

pub(crate) use self::jobs::case as jobs_case;
pub(crate) use self::launchers::free_port;
use self::launchers::{Job, Launcher, NAMES, Process, Set};
use crate::hostile::Random;
use crate::reliability::command::{Ended, Invocation, Running};
use crate::reliability::mesh::{ALONE, MESHES, Mesh};
use crate::reliability::processes;
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

/// Longest time from the start of a process to the line of its wait, which comes 0.3 s after the wait begins.
const SAID_WITHIN: Duration = Duration::from_secs(1);

/// Elapsed time and limit in the first line of a wait.
const AT_ONCE: &str = "(0 s of 2 s, --join-timeout)";

/// `train`, the waits of which end soon.
const TRAIN: [&str; 7] = ["train", "small.toml", "--run", "r", "--quiet", "--join-timeout", "2"];

/// More time than other commands have, for jobs of several processes.
const MORE: Duration = Duration::from_secs(20);

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let launcher = *random.pick(&Launcher::ALL);
    let (fault, detail, result) = match number % 12 {
        0..=2 => complete(world, random),
        3 | 4 => left_over(world, launcher, random),
        5 | 6 => in_part(world, launcher, random),
        7 | 8 => contradicting(world, launcher, random),
        9 => two_launchers(world, random),
        10 => without_step(world, random),
        _ => other_commands(world, launcher, random),
    };
    Trial::new(fault, detail, result)
}

type Tried = (&'static str, String, Result<(), String>);

/// A command with these variables, and no others of launchers.
fn with_variables(command: Invocation, variables: &[Set]) -> Invocation {
    let outer = NAMES.into_iter().filter(|name| std::env::var_os(name).is_some());
    let command = outer.fold(command, |command, name| command.environment(name, None));
    variables.iter().fold(command, |command, (name, value)| command.environment(name, Some(value)))
}

fn run(case: &Case<'_>, words: &[&str], variables: &[Set]) -> Result<Ended, String> {
    with_variables(case.phalanx(words.iter().copied()), variables).run()
}

/// The mesh of the default configuration on so many ranks.
fn mesh(ranks: usize) -> &'static Mesh {
    let replicas = |mesh: &&Mesh| mesh.ranks == ranks && (ranks == 1 || mesh.name.starts_with("data"));
    MESHES.iter().find(replicas).unwrap_or(&ALONE)
}

/// Checks that the run of a case has the losses of an undisturbed run on this number of ranks.
fn trained(case: &Case<'_>, ranks: usize) -> Result<(), String> {
    trained_in(case, "r", ranks)
}

fn trained_in(case: &Case<'_>, run: &str, ranks: usize) -> Result<(), String> {
    let reference = case.world.reference(mesh(ranks))?;
    let losses = crate::reliability::folder::losses(&case.path(run));
    if losses != reference.losses {
        return Err(format!("the losses are not those of {ranks} rank(s)"));
    }
    let memory =
        std::fs::read(case.path(run).join("memory.json")).map_err(|error| format!("memory.json: {error}"))?;
    let memory: Value = serde_json::from_slice(&memory).map_err(|error| format!("memory.json: {error}"))?;
    match memory["ranks"].as_array().map_or(0, Vec::len) {
        found if found == ranks => Ok(()),
        found => Err(format!("{found} ranks trained, not {ranks}")),
    }
}

/// Checks that one line has all `words`, and came within the limit after the start, if there is one.
fn said(ended: &Ended, words: &[&str], limit: Option<Duration>) -> Result<(), String> {
    let is = |line: &str| words.iter().all(|word| line.contains(word));
    match (ended.said_at(is), limit) {
        (None, _) => ended.wrong(&format!("did not say {words:?} in one line")),
        (Some(at), Some(limit)) if at - ended.started > limit => {
            ended.wrong(&format!("said {words:?} after {} ms", (at - ended.started).as_millis()))
        }
        _ => Ok(()),
    }
}

/// All processes of a job, at random moments.
fn complete(world: &World, random: &mut Random) -> Tried {
    let launcher = *random.pick(&Launcher::ALL);
    let job = Job::random(launcher, random);
    let result = world.case().and_then(|case| all_together(&case, &job, random));
    ("complete: every process is its rank", job.describe(), result)
}

fn all_together(case: &Case<'_>, job: &Job, random: &mut Random) -> Result<(), String> {
    let mut order: Vec<&Process> = job.processes.iter().collect();
    random.shuffle(&mut order);
    let nproc = random.chance(0.3).then(|| job.world().to_string());
    let mut words = vec!["train", "small.toml", "--run", "r", "--quiet"];
    nproc.iter().for_each(|ranks| words.extend(["--nproc", ranks]));
    let mut started: Vec<(&Process, Running)> = Vec::new();
    for process in order {
        let command = with_variables(case.phalanx(words.iter().copied()), &process.variables);
        started.push((process, command.start()?));
    }
    let mut ranks = Vec::new();
    for (process, running) in &mut started {
        let (pid, mut found) = (running.pid(), None);
        running.wait_for(MORE, || {
            found = processes::own_rank(pid);
            found.is_some()
        });
        ranks.push((process.rank, found));
    }
    let ends: Vec<(&Process, Ended)> =
        started.into_iter().map(|(process, running)| (process, running.finish_within(MORE))).collect();
    for (process, ended) in &ends {
        ended.success()?;
        let first = job.sizes[..process.host].iter().sum::<usize>();
        if process.local == 0 && process.number != first {
            let words = format!("process {} of slurm is rank {first}", process.number);
            said(ended, &[&words], None)?;
        }
    }
    if let Some((expected, found)) = ranks.iter().find(|(expected, found)| Some(*expected) != *found) {
        return Err(format!("the process of rank {expected} has started rank {found:?}"));
    }
    trained(case, job.world())
}

/// The variables of one process of a job, as they are left in a shell: nobody else comes.
fn left_over(world: &World, launcher: Launcher, random: &mut Random) -> Tried {
    let job = Job::random(launcher, random);
    let process = random.pick(&job.processes).clone();
    let in_terminal = launcher == Launcher::Slurm && random.chance(0.5);
    let detail = format!("only process {} of {}", process.number, job.describe());
    let result = world.case().and_then(|case| {
        let mut variables = process.variables.clone();
        if in_terminal {
            variables.push(("SLURM_PTY_PORT", "1234".to_string()));
        }
        let ended = run(&case, &TRAIN, &variables)?;
        ended.refusal(&[])?;
        let set = format!("{}={}", launcher.rank(), process.number);
        let awaited = awaited(&job, &process);
        let mut words = vec![set.as_str(), awaited.as_str(), AT_ONCE, "PHALANX_LAUNCHER=none"];
        if in_terminal {
            words.push("srun --pty");
        }
        match process.local == 0 && job.sizes[process.host] == 1 && process.host == 0 {
            // Where it listens and for whom it waits are two lines.
            true => {
                said(&ended, &[&set, "host 0 of", "listens at", "PHALANX_LAUNCHER=none"], Some(SAID_WITHIN))?;
                said(&ended, &[&awaited, AT_ONCE], Some(SAID_WITHIN))
            }
            false => said(&ended, &words, Some(SAID_WITHIN)),
        }
    });
    let fault =
        if in_terminal { "left over: a terminal of srun --pty" } else { "left over: one process of a job" };
    (fault, detail, result)
}

/// For whom a process waits, in the words of its first line.
fn awaited(job: &Job, process: &Process) -> String {
    let first = job.sizes[..process.host].iter().sum::<usize>();
    match (process.local, job.sizes[process.host], process.host) {
        (0, 1, 0) => {
            let hosts: Vec<String> = (1..job.sizes.len()).map(|host| host.to_string()).collect();
            format!("waiting for host{} {}", if hosts.len() == 1 { "" } else { "s" }, hosts.join(", "))
        }
        (0, 1, _) => "waiting for host 0 at ".to_string(),
        (0, here, _) => {
            let ranks: Vec<String> = (first + 1..first + here).map(|rank| rank.to_string()).collect();
            format!("with rank{} {}", if ranks.len() == 1 { "" } else { "s" }, ranks.join(", "))
        }
        _ => format!("local rank 0, rank {first}"),
    }
}

/// One variable is missing or empty.
fn in_part(world: &World, launcher: Launcher, random: &mut Random) -> Tried {
    // Rank 3 is the second of its host: no missing variable could be guessed.
    let job = Job::new(launcher, &[2, 2], false, random);
    let process = &job.processes[3];
    let without_rank = random.chance(0.4);
    let name = if without_rank { launcher.rank() } else { *random.pick(launcher.needed()) };
    let is_empty = random.chance(0.5);
    let mut variables = process.variables.clone();
    variables.retain(|(other, _)| *other != name && *other != "SLURM_GTIDS");
    if is_empty {
        variables.push((name, String::new()));
    }
    let absence = if is_empty { "empty" } else { "not set" };
    let detail = format!("{name} is {absence}, {}", job.describe());
    let result = world.case().and_then(|case| {
        if !without_rank {
            return run(&case, &TRAIN, &variables)?.refusal(&[name, absence]);
        }
        // Without a rank it is none, and says so; a step of Slurm cannot lack it.
        let ended = run(&case, &TRAIN, &variables)?;
        ended.success()?;
        match launcher {
            Launcher::Slurm => said(&ended, &["SLURM_NTASKS=4", "no task"], None)?,
            _ => said(&ended, &[launcher.size(), &format!("{name} is {absence}"), "no rank"], None)?,
        }
        trained(&case, 1)
    });
    let fault = if without_rank { "in part: no rank" } else { "in part: a rank without the rest" };
    (fault, detail, result)
}

/// Variables of one launcher that contradict each other, or are no numbers.
fn contradicting(world: &World, launcher: Launcher, random: &mut Random) -> Tried {
    let job = Job::new(launcher, &[2, 2], false, random);
    let mut variables = job.processes[3].variables.clone();
    let (name, value, words) = wrong_value(launcher, random);
    // With MASTER_ADDR, its port counts; the tasks of a node only where they are what is wrong.
    variables.retain(|(other, _)| ![name, "MASTER_ADDR", "SLURM_GTIDS"].contains(other));
    variables.extend([(name, value.clone()), ("MASTER_ADDR", "127.0.0.1".to_string())]);
    let detail = format!("{name}={value}: {words:?}, {}", job.describe());
    let result = world.case().and_then(|case| {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        run(&case, &TRAIN, &variables)?.refusal(&words)
    });
    ("contradicting: one launcher", detail, result)
}

/// A value that cannot be that of a variable of rank 3, the second of the second of two hosts of two; and what the error names.
fn wrong_value(launcher: Launcher, random: &mut Random) -> (&'static str, String, Vec<String>) {
    let [rank, size] = [launcher.rank(), launcher.size()];
    let numbers = match launcher {
        Launcher::Slurm => {
            vec![rank, size, "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "MASTER_PORT"]
        }
        other => [&[rank, "MASTER_PORT"], other.needed()].concat(),
    };
    if random.chance(0.5) {
        let name = *random.pick(&numbers);
        let value = *random.pick(&["x", "-1", "1.5", "99999999999", "0x2", "1 2"]);
        return (name, value.to_string(), vec![format!("{name}={value}"), "expected".to_string()]);
    }
    let wrong: Vec<(&'static str, &str, &str)> = match launcher {
        Launcher::Slurm => vec![
            (rank, "4", "SLURM_PROCID=4"),
            ("SLURM_LOCALID", "2", "node 1 runs 2 tasks"),
            ("SLURM_NODEID", "2", "the step has 2 nodes"),
            (size, "5", "SLURM_STEP_TASKS_PER_NODE=2,2"),
            ("SLURM_STEP_TASKS_PER_NODE", "2,3", "SLURM_STEP_TASKS_PER_NODE=2,3"),
            ("SLURM_STEP_NODELIST", "node[1-", "SLURM_STEP_NODELIST=node[1-"),
            ("SLURM_GTIDS", "0,1", "SLURM_GTIDS=0,1"),
            ("SLURM_GTIDS", "3", "SLURM_GTIDS=3"),
        ],
        other => {
            let [_, local, local_size] = [other.needed()[0], other.needed()[1], other.needed()[2]];
            vec![
                (rank, "4", "rank 4 of 4 ranks"),
                (rank, "2", "consecutively"),
                (size, "1", "rank 3 of 1 ranks"),
                (size, "0", "a world of no ranks"),
                (local, "2", "local rank 2 of 2 ranks"),
                (local, "0", "consecutively"),
                (local_size, "9", "of 9 ranks of this host"),
                (local_size, "1", "local rank 1 of 1 ranks"),
            ]
        }
    };
    let (name, value, words) = *random.pick(&wrong);
    (name, value.to_string(), vec![words.to_string()])
}

/// The variables of two launchers: they agree, or not.
fn two_launchers(world: &World, random: &mut Random) -> Tried {
    let first = *random.pick(&Launcher::ALL);
    let others: Vec<Launcher> = Launcher::ALL.into_iter().filter(|other| *other != first).collect();
    let second = *random.pick(&others);
    let agree = random.chance(0.5);
    let sizes: &[usize] = if random.chance(0.5) { &[2] } else { &[4] };
    let mut job = Job::new(first, sizes, false, random);
    let other = Job::new(second, sizes, false, random);
    let detail = format!(
        "{} and {}, {}",
        first.name(),
        second.name(),
        if agree { "agreeing" } else { "not agreeing" }
    );
    if agree {
        job.processes
            .iter_mut()
            .zip(&other.processes)
            .for_each(|(one, two)| one.variables.extend(two.variables.clone()));
        let result = world.case().and_then(|case| all_together(&case, &job, random));
        return ("two launchers that agree", detail, result);
    }
    let mut variables = job.processes[0].variables.clone();
    // Without what is needed beside rank and size, the other still contradicts.
    let is_whole = second == Launcher::Slurm || random.chance(0.5);
    let more = other.processes[1].variables.iter();
    let kept = more.filter(|(name, _)| is_whole || [second.rank(), second.size()].contains(name));
    variables.extend(kept.cloned());
    let result = world.case().and_then(|case| {
        run(&case, &TRAIN, &variables)?.refusal(&[first.name(), second.name(), "PHALANX_LAUNCHER="])
    });
    ("two launchers that do not agree", detail, result)
}

/// A batch script, a shell of an allocation, or the ranks of a launcher whose variables are not read.
fn without_step(world: &World, random: &mut Random) -> Tried {
    let tasks = (2 + random.below(6)).to_string();
    let text = |name: &'static str, value: &str| (name, value.to_string());
    let batch = vec![
        text("SLURM_JOB_ID", "77"),
        text("SLURM_NTASKS", &tasks),
        text("SLURM_PROCID", "0"),
        text("SLURM_LOCALID", "0"),
        text("SLURM_NODEID", "0"),
        text("SLURM_GTIDS", "0"),
    ];
    let set = format!("SLURM_NTASKS={tasks}");
    let (detail, variables, words) = match random.below(3) {
        0 => ("a batch script", batch, vec![set.as_str(), "srun phalanx train"]),
        1 => {
            let shell = [
                text("SLURM_STEP_NODELIST", "localhost"),
                text("SLURM_STEP_NUM_TASKS", "1"),
                text("SLURM_STEP_TASKS_PER_NODE", "1"),
            ];
            (
                "a shell of an allocation",
                [batch, shell.to_vec()].concat(),
                vec![set.as_str(), "srun phalanx train"],
            )
        }
        _ => ("a rank that is not read", vec![text("PMIX_RANK", "1")], vec!["PMIX_RANK=1", "not read"]),
    };
    let result = world.case().and_then(|case| {
        let nproc = random.chance(0.5).then_some("2");
        let words_of_train: Vec<&str> =
            TRAIN.into_iter().chain(nproc.iter().flat_map(|ranks| ["--nproc", ranks])).collect();
        let ended = run(&case, &words_of_train, &variables)?;
        ended.success()?;
        said(&ended, &words, None)?;
        trained(&case, if nproc.is_some() { 2 } else { 1 })
    });
    ("no task of a step", format!("{detail}, {tasks} tasks"), result)
}

/// Commands to which the variables mean nothing, or that are told so.
fn other_commands(world: &World, launcher: Launcher, random: &mut Random) -> Tried {
    let job = Job::random(launcher, random);
    let mut variables = random.pick(&job.processes).variables.clone();
    let which = random.below(5);
    let detail = format!(
        "{}: {}",
        ["plan", "sample", "launch", "PHALANX_LAUNCHER=none", "--nproc"][which],
        job.describe()
    );
    let result = world.case().and_then(|case| match which {
        0 => run(&case, &["plan", "small.toml", "--json"], &variables)?.success(),
        1 => {
            run(&case, &["train", "small.toml", "--run", "r", "--quiet"], &[])?.success()?;
            run(&case, &["sample", "r", "--prompt", "rank", "--tokens", "8"], &variables)?.success()
        }
        2 => {
            let words = ["launch", "--hosts", "2", "--nproc", "1", "small.toml", "--run", "r", "--quiet"];
            let ended = with_variables(case.phalanx(words), &variables).start()?.finish_within(MORE);
            ended.success()?;
            said(&ended, &["not followed", launcher.rank()], Some(SAID_WITHIN))?;
            trained(&case, 2)
        }
        3 => {
            variables.push(("PHALANX_LAUNCHER", "none".to_string()));
            run(&case, &TRAIN, &variables)?.success()?;
            trained(&case, 1)
        }
        _ => {
            let words: Vec<&str> = TRAIN.into_iter().chain(["--nproc", "8"]).collect();
            run(&case, &words, &variables)?.refusal(&["--nproc 8", launcher.name()])
        }
    });
    ("other commands and options", detail, result)
}
