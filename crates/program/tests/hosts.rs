//! Several hosts on this machine: one launcher each, over loopback. They train to the bits of one host, and every failure has
//! a name on all of them.

use crate::rig;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::rig::{Ended, Home, lives, ranks, signal, wait};
use phalanx_simd::Isa;
use rustix::process::Signal;

/// A run that never reaches its end.
const ENDLESS: [&str; 6] =
    ["--set", "train.steps=1000000", "--set", "train.save_every=0", "--set", "run.stall_timeout_s=3"];

/// A second for ranks to leave, half of one for the report of another host, and what a busy machine adds.
const WITHIN: Duration = Duration::from_secs(8);

/// The launchers of hosts with two ranks each.
struct Launched {
    launchers: Vec<Child>,
}

/// A port that is free, and stays free for long enough: the system gives others first.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Launched {
    /// Starts a launcher for each host of `ranks` ranks.
    fn start(home: &Home, ranks: &[usize], more: &[&str]) -> Launched {
        Launched::start_with(home, ranks, more, &[])
    }

    /// The same where hosts have an instruction set each, as `PHALANX_ISA` plays it.
    fn start_with(home: &Home, ranks: &[usize], more: &[&str], sets: &[&str]) -> Launched {
        let rendezvous = format!("127.0.0.1:{}", free_port());
        let (hosts, secret) = (ranks.len().to_string(), home.path("secret"));
        let start = |(host, ranks): (usize, &usize)| {
            let (number, ranks) = (host.to_string(), ranks.to_string());
            let place = ["launch", "--nnodes", &hosts, "--node-rank", &number, "--rendezvous", &rendezvous];
            let own =
                ["--nproc", &ranks, "--secret-file", secret.to_str().unwrap(), "small.toml", "--run", "r"];
            let mut command = home.command(&[&place[..], &own, more].concat());
            if let Some(set) = sets.get(host) {
                command.env("PHALANX_ISA", set);
            }
            home.start_command(command)
        };
        Launched { launchers: ranks.iter().enumerate().map(start).collect() }
    }

    fn ends(self) -> Vec<Ended> {
        self.launchers.into_iter().map(rig::finish).collect()
    }

    /// All ranks with their processes.
    fn ranks(&self) -> Vec<(usize, i32)> {
        let mut all: Vec<_> = self.launchers.iter().flat_map(|launcher| ranks(launcher.id())).collect();
        all.sort();
        all
    }
}

/// Asserts that nothing of these processes is left within some seconds; a busy machine takes long to end what was killed.
#[track_caller]
fn nothing_left(pids: &[(usize, i32)]) {
    let start = Instant::now();
    while pids.iter().any(|(_, pid)| lives(*pid)) {
        assert!(start.elapsed() < Duration::from_secs(8), "a rank that lives on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn two_hosts_train_to_the_bits_of_one() {
    let home = Home::new();
    for (name, more) in
        [("zero", &["--set", "parallel.zero=3"][..]), ("mesh", &["--set", "parallel.tensor=2"])]
    {
        let one = format!("{name}-one");
        home.run(&[&["train", "small.toml", "--nproc", "4", "--run", &one, "--quiet"][..], more].concat())
            .ok();
        for (sizes, run) in [(&[2, 2][..], "a"), (&[1, 3], "b"), (&[1, 1, 2], "c")] {
            let _ = std::fs::remove_dir_all(home.path("r"));
            for ended in Launched::start(&home, sizes, more).ends() {
                ended.ok();
            }
            assert_eq!(home.losses(&one), home.losses("r"), "{name} {run}");
            let checkpoint = |run: &str| {
                let files = home.snapshot(&format!("{run}/checkpoints/step-8"));
                let tensors = files
                    .into_iter()
                    .filter(|(path, _)| path.extension().is_some_and(|e| e == "safetensors"));
                tensors.map(|(path, bytes)| (path.file_name().unwrap().to_owned(), bytes)).collect::<Vec<_>>()
            };
            assert!(checkpoint(&one) == checkpoint("r"), "{name} {run}: the checkpoints differ");
        }
    }
    // The hosts have met, and nobody needs the file any more.
    assert!(!home.path("secret").exists());
}

/// Ranks of different processors would have different bits: all compute with what every host has, and the launcher names those
/// that could do more.
#[test]
fn hosts_with_different_processors_compute_with_the_kernels_of_all() {
    let (best, weaker) = (Isa::fastest().name(), "portable");
    if Isa::fastest() == Isa::Portable {
        return;
    }
    let home = Home::new();
    let one = ["train", "small.toml", "--nproc", "2", "--run", "one", "--quiet"];
    home.run_with(("PHALANX_ISA", weaker), &one).ok();
    for sets in [[best, weaker], [weaker, best]] {
        let _ = std::fs::remove_dir_all(home.path("r"));
        let ends = Launched::start_with(&home, &[1, 1], &[], &sets).ends();
        let leader = ends.into_iter().map(Ended::ok).next().unwrap();
        let line = format!("all ranks compute with the kernels {weaker}, or those that the run has recorded");
        let ranks = if sets[0] == best { "rank 0 on" } else { "rank 1 on" };
        for words in [line.as_str(), ranks, &format!("({best})")] {
            assert!(leader.stderr.contains(words), "no {words:?} in: {}", leader.stderr);
        }
        assert_eq!(home.losses("one"), home.losses("r"), "{sets:?}");
        let config = String::from_utf8(home.read("r/config.toml")).unwrap();
        assert!(config.contains(&format!("kernels = \"{weaker}\"")), "{config}");
    }
}

#[test]
fn a_killed_rank_is_named_on_all_hosts_with_what_it_did() {
    let home = Home::new();
    let launched = Launched::start(&home, &[2, 2], &ENDLESS);
    home.wait_for_step("r", 3);
    let started = launched.ranks();
    assert_eq!(started.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [0, 1, 2, 3]);
    let victim = started[3].1;
    signal(victim, Signal::KILL);
    let killed = Instant::now();
    for (host, ended) in launched.ends().into_iter().enumerate() {
        let ended = ended.refused(&[
            "rank 3 on host 1",
            &format!("process {victim} was killed by signal 9"),
            "step ",
        ]);
        assert!(ended.stderr.contains(".rs:"), "host {host} names no call site: {}", ended.stderr);
        // Every survivor says it, too.
        for rank in if host == 0 { vec![1] } else { vec![2] } {
            let line = ended.stderr.lines().find(|line| line.starts_with(&format!("[rank {rank} on ")));
            assert!(line.is_some_and(|line| line.contains("rank 3")), "rank {rank}: {}", ended.stderr);
        }
    }
    assert!(killed.elapsed() < WITHIN, "{:?}", killed.elapsed());
    nothing_left(&started);
    // All ranks have left a record of what they did last, the dead one, too.
    let shown = home.run(&["inspect", "r/flight"]).ok().stdout;
    for rank in 0..4 {
        assert!(shown.contains(&format!("rank {rank}: its last")), "{shown}");
    }
    assert!(shown.contains("begin all_reduce") && shown.contains("step "), "{shown}");
    assert!(home.run(&["inspect", "r/flight/rank-3.json", "--json"]).ok().json()["ranks"][0]["rank"] == 3);
}

#[test]
fn a_host_whose_launcher_is_killed_is_named_by_the_others() {
    for lost in [1, 0] {
        let home = Home::new();
        let mut launched = Launched::start(&home, &[1, 2, 1], &ENDLESS);
        home.wait_for_step("r", 3);
        let started = launched.ranks();
        let mut killed = launched.launchers.remove(lost);
        killed.kill().unwrap();
        let at = Instant::now();
        killed.wait().unwrap();
        for ended in launched.ends() {
            ended.refused(&[&format!("host {lost} ("), "is lost, with rank"]);
        }
        assert!(at.elapsed() < WITHIN, "{:?}", at.elapsed());
        nothing_left(&started);
    }
}

#[test]
fn a_stopped_rank_is_named_on_all_hosts_after_the_timeout() {
    let home = Home::new();
    let launched = Launched::start(&home, &[2, 2], &ENDLESS);
    home.wait_for_step("r", 3);
    let started = launched.ranks();
    signal(started[2].1, Signal::STOP);
    let at = Instant::now();
    for ended in launched.ends() {
        ended.refused(&["rank 2 on host 1", "all_reduce", ".rs:", "is stopped, by a signal"]);
    }
    // The timeout and a second, and what a busy machine adds.
    assert!(at.elapsed() < Duration::from_secs(4) + WITHIN, "{:?}", at.elapsed());
    nothing_left(&started);
}

#[test]
fn ctrl_c_on_any_host_saves_on_all_and_the_run_resumes_on_one() {
    let home = Home::new();
    let launched = Launched::start(&home, &[1, 1], &ENDLESS);
    home.wait_for_step("r", 3);
    signal(launched.launchers[1].id() as i32, Signal::INT);
    for ended in launched.ends() {
        assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    }
    let saved = home.newest("r");
    assert!(saved >= 3);
    let steps = format!("train.steps={}", saved + 2);
    home.run(&["train", "--run", "r", "--resume", "--set", &steps, "--quiet"]).ok();
    assert_eq!(home.losses("r").len() as u64, saved + 2);
}

#[test]
fn a_launcher_with_another_secret_is_refused() {
    let home = Home::new();
    let port = free_port();
    let start = |host: &str, secret: &str| {
        let rendezvous = format!("127.0.0.1:{port}");
        let place =
            ["launch", "--nnodes", "2", "--node-rank", host, "--rendezvous", &rendezvous, "--nproc", "1"];
        home.start(
            &[&place[..], &["--secret-file", secret, "small.toml", "--run", "r", "--join-timeout", "8"]]
                .concat(),
        )
    };
    for secret in ["one", "two"] {
        home.write(secret, "7".repeat(64) + "\n");
        std::fs::set_permissions(home.path(secret), PermissionsExt::from_mode(0o600)).unwrap();
    }
    home.write("two", "8".repeat(64));
    let [leader, stranger] = [start("0", "one"), start("1", "two")];
    let ended = rig::finish;
    ended(stranger).refused(&["do not trust each other", "the secret"]);
    ended(leader).refused(&["host 1 did not come to the rendezvous", "a connection was refused"]);
    assert!(!home.path("r/metrics.jsonl").exists());
    std::fs::set_permissions(home.path("one"), PermissionsExt::from_mode(0o644)).unwrap();
    ended(start("0", "one")).refused(&["other users", "chmod 600"]);
}

#[test]
fn the_secret_is_in_no_argument_environment_log_or_file_of_the_run() {
    let home = Home::new();
    let secret: String = (0..64).map(|i| char::from_digit(i * i * 7 % 16, 16).unwrap()).collect();
    home.write("secret", &secret);
    std::fs::set_permissions(home.path("secret"), PermissionsExt::from_mode(0o600)).unwrap();
    let launched = Launched::start(&home, &[1, 1], &ENDLESS);
    home.wait_for_step("r", 3);
    let started = launched.ranks();
    let pids = launched
        .launchers
        .iter()
        .map(|launcher| launcher.id() as i32)
        .chain(started.iter().map(|(_, pid)| *pid));
    for pid in pids {
        for file in ["cmdline", "environ"] {
            let bytes = std::fs::read(format!("/proc/{pid}/{file}")).unwrap();
            assert!(!String::from_utf8_lossy(&bytes).contains(secret.trim()));
        }
    }
    signal(started[1].1, Signal::KILL);
    let bytes: Vec<u8> = secret
        .trim()
        .as_bytes()
        .chunks(2)
        .map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap())
        .collect();
    for ended in launched.ends() {
        assert!(!(ended.stdout + &ended.stderr).contains(secret.trim()));
    }
    for (path, content) in home.snapshot("r") {
        let holds = |part: &[u8]| content.windows(part.len()).any(|window| window == part);
        assert!(!holds(&bytes) && !holds(secret.trim().as_bytes()), "{}", path.display());
    }
}

#[test]
fn what_ends_a_run_before_its_ranks_start_is_said_on_all_hosts() {
    let home = Home::new();
    let launched = Launched::start(&home, &[1, 1], &["--set", "batch.global=7"]);
    let [leader, member] = launched.ends().try_into().ok().unwrap();
    leader.refused(&["batch.global"]);
    member.refused(&["host 0 has given up", "batch.global"]);
}

/// Before there is anything to save, a signal on one host ends the launchers of all: while host 0 prepares the run, and while it waits
/// for another host.
#[test]
fn a_signal_before_the_ranks_have_started_ends_the_launchers_of_all_hosts() {
    let home = Home::new();
    // Tokenised for longer than a signal takes.
    home.write("text.txt", "chunk rank shard gather reduce step plan arena\n".repeat(1_000_000));
    for (asked, hosts) in [(1, 2), (0, 2), (1, 3)] {
        let (rendezvous, hosts) = (format!("127.0.0.1:{}", free_port()), hosts.to_string());
        let mut launchers: Vec<Child> = ["0", "1"]
            .into_iter()
            .map(|host| {
                let place = ["launch", "--nnodes", &hosts, "--node-rank", host, "--rendezvous", &rendezvous];
                let own = ["--nproc", "1", "--secret-file", "secret", "small.toml", "--run", "r"];
                home.start(&[&place[..], &own].concat())
            })
            .collect();
        let mut said = BufReader::new(launchers[0].stderr.take().unwrap());
        let met = if hosts == "2" { "2 ranks on 2 hosts" } else { "waiting for host 2 to come" };
        let mut line = String::new();
        while !line.contains(met) {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0, "host 0 ended before {met:?}");
        }
        signal(launchers[asked].id() as i32, Signal::TERM);
        let at = Instant::now();
        let ends: Vec<Ended> = launchers.into_iter().map(rig::finish).collect();
        assert!(at.elapsed() < WITHIN, "{:?}", at.elapsed());
        let mut rest = String::new();
        said.read_to_string(&mut rest).unwrap();
        let who = format!("host {asked}");
        for (ended, said) in ends.iter().zip([&rest, &ends[1].stderr]) {
            assert_eq!(ended.code, Some(130), "{said}");
            assert!(
                said.contains("was asked to stop") && (said.contains(&who) || said.contains("this host")),
                "{said}"
            );
        }
        assert!(!home.path("r/metrics.jsonl").exists());
    }
}

/// An `ssh` that cannot reach a host, which is one of IPv6.
#[test]
fn a_host_that_ssh_cannot_reach_ends_the_job_and_is_named() {
    let home = Home::new();
    let ssh = "#!/bin/sh\necho \"$@\" >> asked\nwhile [ \"$1\" != -- ]; do shift; done\nshift\n\
               if [ \"$1\" = me@::1 ]; then sleep 0.5; echo 'ssh: No route to host' >&2; exit 255; fi\n\
               shift\nexec sh -c \"$*\"\n";
    std::fs::create_dir(home.path("bin")).unwrap();
    home.write("bin/ssh", ssh);
    std::fs::set_permissions(home.path("bin/ssh"), PermissionsExt::from_mode(0o755)).unwrap();
    home.write("hosts.txt", "127.0.0.1 slots=1\nme@[::1] slots=1\n");
    let path = format!("{}:{}", home.path("bin").display(), std::env::var("PATH").unwrap());
    let start = Instant::now();
    let ended =
        home.run_with(("PATH", &path), &["launch", "--hostfile", "hosts.txt", "small.toml", "--run", "r"]);
    assert!(start.elapsed() < WITHIN, "{:?}", start.elapsed());
    let ended =
        ended.refused(&["me@[::1] cannot be reached", "ssh ended with exit code 255", "No route to host"]);
    assert!(!ended.stderr.contains("did not end by itself"), "{}", ended.stderr);
    assert!(String::from_utf8(home.read("asked")).unwrap().contains("-- me@::1 cd "));
}

/// The protection that `--plaintext` gives up is named in the help and at the start, also under `--quiet`; the bits are the same.
#[test]
fn a_job_in_plaintext_says_that_nothing_protects_it() {
    let home = Home::new();
    let words = ["neither encrypted nor protected against changes on the way", "networks you trust"];
    let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    for command in [&["train", "--help"][..], &["launch", "--help"]] {
        let help = flat(&home.run(command).ok().stdout);
        assert!(words.iter().all(|word| help.contains(word)), "{command:?}: {help}");
    }
    let launch = |run: &str, more: &[&str]| {
        let args = ["launch", "--hosts", "2", "--nproc", "1", "small.toml", "--quiet", "--run", run];
        flat(&home.run(&[&args[..], more].concat()).ok().stderr)
    };
    let (plain, encrypted) = (launch("plain", &["--plaintext"]), launch("encrypted", &[]));
    for word in words {
        assert!(plain.matches(word).count() == 1 && !encrypted.contains(word), "{plain}\n{encrypted}");
    }
    assert_eq!(home.losses("plain"), home.losses("encrypted"));
}

/// One command plays several hosts, and starts their launchers itself.
#[test]
fn one_command_plays_hosts_here_or_starts_them_over_ssh() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--nproc", "4", "--run", "one", "--quiet"]).ok();
    let ended =
        home.run(&["launch", "--hosts", "2", "--nproc", "2", "small.toml", "--run", "played", "--json"]).ok();
    assert_eq!(
        ended.stdout.lines().count(),
        11,
        "8 steps, 2 evaluations and the last line: {}",
        ended.stdout
    );
    assert_eq!(home.losses("one"), home.losses("played"));
    // An `ssh` that runs the command here, and shows what it was asked for.
    let ssh = "#!/bin/sh\necho \"$@\" >> asked\nwhile [ \"$1\" != -- ]; do shift; done\nshift 2\nexec sh -c \"$*\"\n";
    std::fs::create_dir(home.path("bin")).unwrap();
    home.write("bin/ssh", ssh);
    std::fs::set_permissions(home.path("bin/ssh"), PermissionsExt::from_mode(0o755)).unwrap();
    home.write("hosts.txt", "127.0.0.1 slots=3 # this one\nlocalhost slots=2\nother slots=9\n");
    let path = format!("{}:{}", home.path("bin").display(), std::env::var("PATH").unwrap());
    let args = [
        "launch",
        "--hostfile",
        "hosts.txt",
        "--include",
        "127.0.0.1@localhost:1",
        "small.toml",
        "--run",
        "far",
    ];
    home.run_with(("PATH", &path), &args).ok();
    assert_eq!(home.losses("one"), home.losses("far"));
    let asked = String::from_utf8(home.read("asked")).unwrap();
    assert!(
        asked.contains("-- 127.0.0.1 cd ") && asked.contains("-- localhost cd ") && !asked.contains("other"),
        "{asked}"
    );
}

/// The launchers end when the connection over which they were started does.
#[test]
fn nothing_is_left_when_the_one_that_has_started_the_launchers_is_killed() {
    let home = Home::new();
    let args = ["launch", "--hosts", "2", "--nproc", "1", "small.toml", "--run", "r"];
    let mut child = home
        .command(&[&args[..], &ENDLESS].concat())
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    home.wait_for_step("r", 3);
    let launchers = phalanx_system::host::process::children(child.id());
    assert_eq!(launchers.len(), 2);
    let started: Vec<_> = launchers.iter().flat_map(|launcher| ranks(*launcher)).collect();
    assert_eq!(started.len(), 2);
    child.kill().unwrap();
    child.wait().unwrap();
    nothing_left(&launchers.iter().map(|pid| (0, *pid as i32)).chain(started).collect::<Vec<_>>());
}

#[test]
fn a_failed_run_starts_again_from_its_checkpoint() {
    let home = Home::new();
    home.run(&["train", "small.toml", "--nproc", "2", "--run", "one", "--set", "train.steps=250", "--quiet"])
        .ok();
    let steps = ["--set", "train.steps=250", "--max-restarts", "2"];
    let child = home.start(&[&["train", "small.toml", "--nproc", "2", "--run", "r"][..], &steps].concat());
    wait("a checkpoint", || home.newest("r") >= 4);
    let victim = ranks(child.id())[1].1;
    signal(victim, Signal::KILL);
    let ended = rig::finish(child).ok();
    assert!(ended.stderr.contains("was killed by signal 9"), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("restart 1 of 2: 2 rank(s) start again from the checkpoint of step"),
        "{}",
        ended.stderr
    );
    assert_eq!(home.losses("one"), home.losses("r"));
}

/// The launcher of a host that `phalanx launch --hosts` has started.
fn launcher_of(starter: &Child, host: usize) -> i32 {
    let number = host.to_string();
    let is_host = |pid: &u32| {
        let words = phalanx_system::host::process::arguments(*pid).unwrap_or_default();
        words.windows(2).any(|pair| pair[0] == "--node-rank" && pair[1] == number)
    };
    let launchers = phalanx_system::host::process::children(starter.id());
    launchers.into_iter().find(is_host).expect("the launcher of a host") as i32
}

/// One of four hosts of a rank is lost: two ranks are left that the batch allows, and the last host runs none. That one may be lost,
/// too, and then one that runs a rank; the launchers that still run, and the one that started them all, go on to the end.
#[test]
fn hosts_that_are_left_go_on_with_fewer_ranks() {
    let home = Home::new();
    let args = ["launch", "--hosts", "4", "--nproc", "1", "small.toml", "--run", "r"];
    let steps = ["--set", "train.steps=800", "--set", "train.eval_every=0", "--max-restarts", "2"];
    let child = home.start(&[&args[..], &steps, &["--min-nproc", "1"]].concat());
    let mut at = 4;
    for lost in [1, 3, 2] {
        wait("a checkpoint", || home.newest("r") >= at);
        if lost == 3 {
            wait("the ranks that are left", || ranks(launcher_of(&child, 2) as u32).len() == 1);
            assert!(ranks(launcher_of(&child, 3) as u32).is_empty());
        }
        signal(launcher_of(&child, lost), Signal::KILL);
        at = home.newest("r") + 60;
    }
    let ended = rig::finish(child).ok();
    for words in [
        "the launcher of host 1 was killed by signal 9",
        "restart 1 of 2: 2 rank(s) start again",
        "host 3 (",
        "is lost, and the job goes on, as it runs no ranks of it",
        "error: host 2 (",
        "restart 2 of 2: 1 rank(s) start again",
    ] {
        assert!(ended.stderr.contains(words), "no {words:?} in: {}", ended.stderr);
    }
    assert!(!ended.stderr.contains("did not end by itself"), "{}", ended.stderr);
    assert_eq!(home.losses("r").len(), 800);
}

/// A host that runs no ranks belongs to the job: Ctrl-C there saves and ends it on all.
#[test]
fn ctrl_c_on_a_host_without_ranks_saves_on_all() {
    let home = Home::new();
    // Three ranks, or one.
    let more = [
        "--set",
        "batch.global=3",
        "--set",
        "train.save_every=20",
        "--max-restarts",
        "1",
        "--min-nproc",
        "1",
    ];
    let mut launched = Launched::start(&home, &[1, 1, 1], &[&ENDLESS[..2], &more].concat());
    wait("a checkpoint", || home.newest("r") >= 20);
    let mut lost = launched.launchers.remove(1);
    lost.kill().unwrap();
    lost.wait().unwrap();
    let saved = home.newest("r");
    wait("more steps", || home.newest("r") > saved + 20);
    assert_eq!(launched.ranks().len(), 1);
    signal(launched.launchers[1].id() as i32, Signal::INT);
    for ended in launched.ends() {
        assert_eq!(ended.code, Some(130), "{}", ended.stderr);
    }
    assert!(home.newest("r") >= 3);
}

/// Host 0's own file is gone after any end that a signal asked for, and one that was there is named.
#[test]
fn the_secret_that_host_0_has_made_is_removed_when_a_signal_ends_it() {
    let home = Home::new();
    let rendezvous = format!("127.0.0.1:{}", free_port());
    let place = ["launch", "--nnodes", "2", "--node-rank", "0", "--rendezvous", &rendezvous, "--nproc", "1"];
    let own = ["--secret-file", "secret", "small.toml", "--run", "r"];
    for signals in [1, 2] {
        let child = home.start(&[&place[..], &own].concat());
        wait("the secret", || home.path("secret").exists());
        // The second leaves at once.
        (0..signals).for_each(|_| signal(child.id() as i32, Signal::INT));
        let ended = rig::finish(child);
        assert_eq!(ended.code, Some(130), "{}", ended.stderr);
        assert!(!home.path("secret").exists(), "after {signals} signals: {}", ended.stderr);
    }
    home.write("secret", "7".repeat(64));
    std::fs::set_permissions(home.path("secret"), PermissionsExt::from_mode(0o600)).unwrap();
    let ended = home.run(&[&place[..], &own, &["--join-timeout", "1"]].concat());
    ended.refused(&["the secret secret was there: it is used, and stays", "host 1 did not come"]);
    assert!(home.path("secret").exists());
}

/// A number of ranks that a host cannot run is refused on that host, and a peer that claims one by host 0 (`launch/tests/control.rs`).
#[test]
fn numbers_that_no_job_has_are_refused() {
    let home = Home::new();
    let place = ["launch", "--nnodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:1"];
    let own = ["--nproc", "1025", "--secret-file", "secret", "small.toml", "--run", "r"];
    home.run(&[&place[..], &own].concat()).refused(&["--nproc 1025", "at most 1024"]);
}

/// An `ssh` that hangs holds nobody up for longer than --join-timeout, and not beyond the first signal.
#[test]
fn an_ssh_that_hangs_ends_with_the_time_to_join_and_with_a_signal() {
    let home = Home::new();
    let ssh = "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\nshift\n\
               if [ \"$1\" = stuck ]; then echo $$ >> stuck; exec sleep 1000; fi\nshift\nexec sh -c \"$*\"\n";
    std::fs::create_dir(home.path("bin")).unwrap();
    home.write("bin/ssh", ssh);
    std::fs::set_permissions(home.path("bin/ssh"), PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", home.path("bin").display(), std::env::var("PATH").unwrap());
    let run = ["launch", "--hostfile", "hosts.txt", "small.toml", "--run", "r"];
    for (hosts, told) in [
        ("stuck slots=1\n127.0.0.1 slots=1\n", "the launcher of stuck has said nothing within 2 s"),
        ("127.0.0.1 slots=1\nstuck slots=1\n", "host 1 did not come to the rendezvous within 2 s"),
    ] {
        home.write("hosts.txt", hosts);
        let start = Instant::now();
        home.run_with(("PATH", &path), &[&run[..], &["--join-timeout", "2"]].concat())
            .refused(&[told, "--join-timeout"]);
        assert!(start.elapsed() < Duration::from_secs(12) + WITHIN, "{:?}", start.elapsed());
        for signals in [1, 2] {
            let _ = std::fs::remove_file(home.path("stuck"));
            let mut command = home.command(&run);
            command.env("PATH", &path);
            let child = home.start_command(command);
            wait("ssh", || home.path("stuck").exists());
            let at = Instant::now();
            (0..signals).for_each(|_| signal(child.id() as i32, Signal::INT));
            let ended = rig::finish(child);
            assert_eq!(ended.code, Some(130), "{}", ended.stderr);
            assert!(at.elapsed() < WITHIN, "{:?}", at.elapsed());
            let stuck = String::from_utf8(home.read("stuck")).unwrap().trim().parse().unwrap();
            nothing_left(&[(0, stuck)]);
        }
    }
}
