//! One process for each rank, as srun, mpirun and torchrun start them: here they are started with these launchers' variables.

use crate::rig;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::rig::{Ended, Home, lives, ranks, signal, wait};
use rustix::process::Signal;

const ENDLESS: [&str; 6] =
    ["--set", "train.steps=1000000", "--set", "train.save_every=0", "--set", "run.stall_timeout_s=5"];

/// A second for ranks to leave, and what a busy machine adds.
const WITHIN: Duration = Duration::from_secs(8);

type Variables = Vec<(&'static str, String)>;

/// The variables of torchrun for each rank of hosts that run `local` ranks each.
fn torchrun(world: usize, local: usize) -> Vec<Variables> {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let of = |rank: usize| {
        vec![
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", (rank % local).to_string()),
            ("WORLD_SIZE", world.to_string()),
            ("LOCAL_WORLD_SIZE", local.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_string()),
            ("MASTER_PORT", port.to_string()),
            ("PHALANX_SECRET_FILE", "secret".to_string()),
        ]
    };
    (0..world).map(of).collect()
}

/// The variables of Open MPI for each rank of one host. Every job has a name of its own, as tests run at the same time.
fn open_mpi(world: usize) -> Vec<Variables> {
    static JOBS: AtomicUsize = AtomicUsize::new(0);
    let job = format!("{}-{}", std::process::id(), JOBS.fetch_add(1, Ordering::Relaxed));
    let of = |rank: usize| {
        let [rank, world] = [rank, world].map(|number| number.to_string());
        vec![
            ("OMPI_COMM_WORLD_RANK", rank.clone()),
            ("OMPI_COMM_WORLD_SIZE", world.clone()),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", world),
            ("PMIX_NAMESPACE", job.clone()),
        ]
    };
    (0..world).map(of).collect()
}

/// The variables of Slurm for a step whose tasks are dealt out to the hosts in turn, in the order of their ranks.
fn slurm_cyclic(hosts: usize, local: usize) -> Vec<Variables> {
    let job = format!("{}{}", std::process::id(), std::time::UNIX_EPOCH.elapsed().unwrap().subsec_nanos());
    let of = |(host, place): (usize, usize)| {
        let together: Vec<String> = (0..local).map(|place| (place * hosts + host).to_string()).collect();
        vec![
            ("SLURM_PROCID", (place * hosts + host).to_string()),
            ("SLURM_LOCALID", place.to_string()),
            ("SLURM_NODEID", host.to_string()),
            ("SLURM_GTIDS", together.join(",")),
            ("SLURM_STEP_NUM_TASKS", (hosts * local).to_string()),
            ("SLURM_STEP_NODELIST", format!("localhost,node[1-{}]", hosts - 1)),
            ("SLURM_STEP_TASKS_PER_NODE", format!("{local}(x{hosts})")),
            ("SLURM_JOB_ID", job.clone()),
            ("SLURM_STEP_ID", "0".to_string()),
            ("PHALANX_SECRET_FILE", "secret".to_string()),
        ]
    };
    (0..hosts).flat_map(|host| (0..local).map(move |place| (host, place))).map(of).collect()
}

/// Starts a process for each rank.
fn start(home: &Home, variables: &[Variables], args: &[&str]) -> Vec<Child> {
    let start = |variables: &Variables| {
        let mut command = home.command(args);
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    variables.iter().map(start).collect()
}

fn ends(children: Vec<Child>) -> Vec<Ended> {
    children.into_iter().map(rig::finish).collect()
}

#[test]
fn processes_of_other_launchers_train_to_the_bits_of_one_that_starts_its_ranks() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--nproc", "4", "--run", "one", "--quiet"]).ok();
    for (name, variables) in [
        ("mpi", open_mpi(4)),
        ("torchrun", torchrun(4, 4)),
        ("two-hosts", torchrun(4, 2)),
        ("cyclic", slurm_cyclic(2, 2)),
    ] {
        let children = start(&home, &variables, &["train", "small.toml", "--run", name]);
        let ended: Vec<Ended> = ends(children).into_iter().map(Ended::ok).collect();
        let between = if ["two-hosts", "cyclic"].contains(&name) {
            "2 host(s); between hosts: TCP"
        } else {
            "they share memory"
        };
        assert!(ended[0].stderr.contains(between), "{name}: {}", ended[0].stderr);
        assert_eq!(home.losses("one"), home.losses(name), "{name}");
        let other = ended[2].stderr.contains("process 1 of slurm is rank 2, on host 1 of 2");
        assert_eq!(other, name == "cyclic", "{}", ended[2].stderr);
    }
    assert!(!home.path("secret").exists());
}

#[test]
fn each_process_runs_its_own_rank_and_a_killed_one_is_named() {
    for victim in ["rank", "process"] {
        let home = Home::new();
        let children = start(
            &home,
            &open_mpi(3),
            &[&["train", "small.toml", "--run", "r", "--set", "batch.global=6"], &ENDLESS[..]].concat(),
        );
        home.wait_for_step("r", 3);
        let own: Vec<(usize, i32)> = children
            .iter()
            .map(|child| {
                let own = ranks(child.id());
                assert_eq!(own.len(), 1);
                own[0]
            })
            .collect();
        assert_eq!(own.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [0, 1, 2]);
        signal(if victim == "rank" { own[2].1 } else { children[2].id() as i32 }, Signal::KILL);
        let at = Instant::now();
        let ended = ends(children);
        assert!(at.elapsed() < WITHIN, "{:?}", at.elapsed());
        assert!(ended.iter().all(|ended| ended.code != Some(0)));
        assert!(ended[0].stderr.contains("rank 2 failed: "), "{victim}: {}", ended[0].stderr);
        assert!(ended[0].stderr.contains("it was at: step "), "{}", ended[0].stderr);
        let start = Instant::now();
        while own.iter().any(|(_, pid)| lives(*pid)) {
            assert!(start.elapsed() < Duration::from_secs(2), "a rank that lives on");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Two jobs that a launcher gives one name: processes of different worlds do not take each other for theirs.
#[test]
fn a_process_of_another_world_is_no_rank_of_this_one() {
    let home = Home::new();
    let mut variables = vec![open_mpi(2).remove(0), open_mpi(4).remove(1)];
    let name = ("PMIX_NAMESPACE", format!("same-{}", std::process::id()));
    for set in &mut variables {
        set.retain(|(known, _)| *known != name.0);
        set.push(name.clone());
    }
    let children = start(&home, &variables, &["train", "small.toml", "--run", "r", "--join-timeout", "2"]);
    let [first, other] = ends(children).try_into().ok().unwrap();
    first.refused(&["it is rank 1 of ranks 0 to 3 of 4", "1 of 2 processes of this host have come"]);
    other.refused(&["local rank 0 has not come", "this host's part is ranks 0 to 1 of 2"]);
    assert!(!home.path("r").exists());
}

/// An `mpirun` that starts two processes, each by a script, and is killed: nobody passes that on, and they end all the same.
#[test]
fn the_processes_end_when_the_launcher_that_has_started_them_is_killed() {
    let home = Home::new();
    let script = "#!/bin/sh\nfor rank in 0 1; do\n\
                  OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 \\\n\
                  sh -c '\"$@\"; true' sh \"$@\" &\ndone\nwait\n";
    home.write("mpirun", script);
    std::fs::set_permissions(home.path("mpirun"), PermissionsExt::from_mode(0o755)).unwrap();
    let program = env!("CARGO_BIN_EXE_phalanx");
    let mut command = std::process::Command::new(home.path("mpirun"));
    command.args([&[program, "train", "small.toml", "--run", "r"][..], &ENDLESS].concat());
    command.current_dir(home.path("")).env("CUDA_VISIBLE_DEVICES", "").stdin(Stdio::null());
    let mut child = home.start_command(command);
    home.wait_for_step("r", 3);
    let below = |pid: u32| phalanx_system::host::process::children(pid);
    let scripts = below(child.id());
    let processes: Vec<u32> = scripts.iter().flat_map(|script| below(*script)).collect();
    let all: Vec<u32> =
        processes.iter().flat_map(|process| below(*process)).chain(processes.clone()).collect();
    assert_eq!((scripts.len(), processes.len(), all.len()), (2, 2, 4), "two processes with a rank each");
    let pid = child.id();
    child.kill().unwrap();
    let at = Instant::now();
    // Its output ends with the last of them.
    let ended = rig::finish(child);
    assert!(at.elapsed() < WITHIN, "{:?}", at.elapsed());
    let words = format!("mpirun (process {pid}), which has started this process, has ended");
    assert_eq!(ended.stderr.matches(&words).count(), 2, "{}", ended.stderr);
    // A process closes its files a moment before it is over.
    wait("their ends", || !all.iter().any(|pid| lives(*pid as i32)));
}

/// Variables left over in a shell make a process wait: it says for whom, why, and how it would not.
#[test]
fn a_wait_is_said_at_once_with_the_variables_that_cause_it() {
    let home = Home::new();
    let terminal = |mut variables: Variables| {
        variables.push(("SLURM_PTY_PORT", "7".to_string()));
        variables
    };
    let cases: [(Variables, &[&str]); 5] = [
        (torchrun(4, 4).remove(1), &["rank 1 of 4", "local rank 0, rank 0", "RANK=1", "WORLD_SIZE=4"]),
        (torchrun(4, 4).remove(0), &["rank 0 of 4", "with ranks 1, 2, 3", "RANK=0"]),
        (torchrun(2, 1).remove(1), &["waiting for host 0 at 127.0.0.1:", "RANK=1 WORLD_SIZE=2"]),
        (open_mpi(2).remove(1), &["local rank 0", "OMPI_COMM_WORLD_RANK=1", "openmpi"]),
        (terminal(slurm_cyclic(2, 2).remove(0)), &["with rank 1 ", "SLURM_PROCID=0", "srun --pty"]),
    ];
    for (variables, words) in cases {
        let args = ["train", "small.toml", "--run", "r", "--quiet", "--join-timeout", "1"];
        let ended = ends(start(&home, &[variables], &args)).remove(0).refused(&[]);
        let line = ended.stderr.lines().find(|line| line.contains("waiting for")).unwrap_or_default();
        for word in words.iter().chain(&["(0 s of 1 s, --join-timeout)", "PHALANX_LAUNCHER=none"]) {
            assert!(line.contains(word), "no {word:?} in: {}", ended.stderr);
        }
    }
    // Where nothing makes the process a rank, the run goes on without, and says what it did not follow.
    let batch = [("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "7"), ("SLURM_PROCID", "0")];
    let batch = batch.map(|(name, value)| (name, value.to_string())).to_vec();
    let ended =
        ends(start(&home, &[batch], &["train", "small.toml", "--run", "batch", "--quiet"])).remove(0).ok();
    assert!(ended.stderr.contains("SLURM_NTASKS=4, but this process is no task"), "{}", ended.stderr);
    let launch = ["launch", "--hosts", "2", "--nproc", "1", "small.toml", "--run", "launched", "--quiet"];
    let ended = ends(start(&home, &[torchrun(4, 4).remove(1)], &launch)).remove(0).ok();
    let lines = ended.stderr.lines().filter(|line| line.contains("are not followed: RANK=1"));
    assert_eq!(lines.count(), 1, "{}", ended.stderr);
}

#[test]
fn what_contradicts_itself_or_is_missing_is_said() {
    let home = Home::new();
    let refused = |variables: Variables, args: &[&str], words: &[&str]| {
        let args = [&["train", "small.toml", "--run", "r"], args].concat();
        let ended = ends(start(&home, &[variables], &args)).remove(0);
        ended.refused(words);
    };
    let mut missing = torchrun(2, 2).remove(0);
    missing.retain(|(name, _)| *name != "LOCAL_WORLD_SIZE");
    missing.push(("LOCAL_RANK", "1".to_string()));
    refused(missing, &[], &["LOCAL_WORLD_SIZE"]);
    refused(open_mpi(2).remove(0), &["--nproc", "3"], &["--nproc 3", "openmpi has started 2 ranks"]);
    // Where nobody says how processes of MPI find each other, there is no MPI, whatever the build has.
    refused(torchrun(2, 1).remove(0), &["--transport", "mpi"], &["--transport mpi: "]);
    refused(Vec::new(), &["--transport", "mpi"], &["--transport mpi: "]);
    refused(open_mpi(2).remove(1), &["--join-timeout", "1"], &["local rank 0 has not come"]);
    refused(open_mpi(2).remove(0), &["--join-timeout", "1"], &["1 of 2 processes of this host"]);
    let mut nowhere = torchrun(2, 1).remove(0);
    nowhere.retain(|(name, _)| *name != "MASTER_ADDR");
    refused(nowhere, &[], &["MASTER_ADDR and MASTER_PORT"]);
    let mut open = torchrun(2, 1).remove(0);
    open.retain(|(name, _)| *name != "PHALANX_SECRET_FILE");
    refused(open, &[], &["--secret-file FILE", "PHALANX_SECRET_FILE"]);
    // mpirun says nothing about other hosts: the command is named that does.
    let mut other_hosts = open_mpi(2).remove(0);
    other_hosts
        .iter_mut()
        .filter(|(name, _)| name.ends_with("LOCAL_SIZE"))
        .for_each(|(_, size)| *size = "1".into());
    let needed = "give mpirun -x PHALANX_RENDEZVOUS=NODE:PORT -x PHALANX_SECRET_FILE=FILE";
    refused(other_hosts, &[], &["several hosts", needed, "host 0 makes the secret"]);
    assert!(!home.path("r").exists());
    // With the variable that says so, the others mean nothing.
    let mut alone = open_mpi(2).remove(1);
    alone.push(("PHALANX_LAUNCHER", "none".to_string()));
    ends(start(&home, &[alone], &["train", "small.toml", "--run", "r"])).remove(0).ok();
}
