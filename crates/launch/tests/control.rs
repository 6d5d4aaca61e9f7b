//! Launchers of several hosts, as threads of this process: they meet, refuse strangers, and tell each other of failures.

use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use phalanx_collectives::HostJob;
use phalanx_collectives::secure::{Protection, Secret};
use phalanx_launch::{
    ControlPlane, Failure, Hooks, Introduction, Meeting, Message, Met, Parting, RankProcesses, connect,
    receive_program,
};

/// More than anything takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

const LONG: Duration = Duration::from_secs(300);

fn introduction(host: usize, hosts: usize, ranks: usize) -> Introduction {
    let (name, machine) = (format!("node{host}"), format!("m{host}"));
    Introduction { name, machine, host, hosts, ranks, about: String::new() }
}

/// The control planes of hosts with these numbers of ranks.
fn planes(sizes: &[usize]) -> Vec<ControlPlane> {
    let secret = Secret::generate().unwrap();
    let meeting = Meeting::listen("127.0.0.1", 0).unwrap();
    let port = meeting.port();
    let hosts = sizes.len();
    let mut planes = std::thread::scope(|scope| {
        let members: Vec<_> = (1..hosts)
            .map(|host| {
                let (own, secret) = (introduction(host, hosts, sizes[host]), &secret);
                scope.spawn(move || {
                    let known = || Ok(Some(secret.clone()));
                    connect(("127.0.0.1", port), &known, &own, Protection::Encrypted, LIMIT, &|_| ()).unwrap()
                })
            })
            .collect();
        let own = introduction(0, hosts, sizes[0]);
        let leader = meeting.gather(own, &secret, Protection::Encrypted, LIMIT, &|_| (), &|| None).unwrap();
        let members = members.into_iter().map(|member| member.join().unwrap());
        std::iter::once(leader).chain(members).map(|met| met.plane).collect::<Vec<_>>()
    });
    let infos = planes[0].hosts().to_vec();
    planes.iter_mut().for_each(|plane| plane.set_hosts(infos.clone()));
    planes
}

/// Starts shells as the ranks of each host, and waits for them on all hosts at once.
fn failures(planes: &mut [ControlPlane], scripts: &[&[&str]], timeout: Duration) -> Vec<Failure> {
    let hosts = planes[0].ranks();
    std::thread::scope(|scope| {
        let waits: Vec<_> = planes
            .iter_mut()
            .zip(scripts)
            .enumerate()
            .map(|(host, (plane, scripts))| {
                let job = HostJob::on_host(&hosts, host).unwrap();
                scope.spawn(move || {
                    let mut processes = RankProcesses::new(job, timeout);
                    for script in *scripts {
                        let mut command = Command::new("sh");
                        command.args(["-c", script]).stdin(Stdio::null());
                        processes.start(command).unwrap();
                    }
                    processes.wait_with(&(), plane).unwrap_err()
                })
            })
            .collect();
        waits.into_iter().map(|wait| wait.join().unwrap()).collect()
    })
}

#[test]
fn a_rank_that_dies_is_named_by_every_launcher() {
    let mut planes = planes(&[1, 2, 1]);
    let sleeps = "exec sleep 1000";
    let start = Instant::now();
    let scripts: [&[&str]; 3] = [&[sleeps], &[sleeps, "sleep 0.2; kill -9 $$"], &[sleeps]];
    let failures = failures(&mut planes, &scripts, LONG);
    // The others have a second to leave.
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    for failure in &failures {
        let text = failure.to_string();
        assert_eq!(failure.rank, 2, "{text}");
        assert!(text.starts_with("rank 2 on host 1 (node1) failed: process "), "{text}");
        assert!(text.contains("signal 9 (SIGKILL)"), "{text}");
    }
    // Only the launcher of its host saw the process.
    assert_eq!(failures.iter().filter(|failure| failure.status.is_some()).count(), 1);
}

#[test]
fn a_host_whose_launcher_is_gone_is_named_by_the_others() {
    for lost in [0, 1] {
        let mut planes = planes(&[1, 2, 1]);
        let gone = planes.remove(lost);
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            drop(gone);
        });
        let sleeps: &[&str] = &["exec sleep 1000"];
        let two: &[&str] = &["exec sleep 1000", "exec sleep 1000"];
        let left = if lost == 0 { [two, sleeps] } else { [sleeps, sleeps] };
        let hosts = planes[0].ranks();
        let start = Instant::now();
        let reasons = std::thread::scope(|scope| {
            let waits: Vec<_> = planes
                .iter_mut()
                .zip(left)
                .map(|(plane, scripts)| {
                    let job = HostJob::on_host(&hosts, plane.own_host()).unwrap();
                    scope.spawn(move || {
                        let mut processes = RankProcesses::new(job, LONG);
                        for script in scripts {
                            let mut command = Command::new("sh");
                            command.args(["-c", script]).stdin(Stdio::null());
                            processes.start(command).unwrap();
                        }
                        processes.wait_with(&(), plane).unwrap_err().to_string()
                    })
                })
                .collect();
            waits.into_iter().map(|wait| wait.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
        for reason in reasons {
            assert!(reason.starts_with(&format!("host {lost} (node{lost}) failed: ")), "{reason}");
            assert!(reason.contains("is lost, with rank"), "{reason}");
        }
    }
}

/// A launcher that holds its connection and says nothing, as one that is stopped.
#[test]
fn a_launcher_that_falls_silent_is_named_after_the_timeout() {
    let secret = Secret::generate().unwrap();
    let meeting = Meeting::listen("127.0.0.1", 0).unwrap();
    let port = meeting.port();
    let hello = serde_json::to_vec(&introduction(1, 2, 1)).unwrap();
    let (mut plane, silent) = std::thread::scope(|scope| {
        let member = scope.spawn(|| {
            use phalanx_collectives::secure::{Identity, connect};
            let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let identity = Identity { job: [0; 16], epoch: 0, purpose: "control" };
            connect(socket, &secret, &identity, &hello, Protection::Encrypted, Instant::now() + LIMIT)
                .unwrap()
        });
        let own = introduction(0, 2, 1);
        let Met { plane, .. } =
            meeting.gather(own, &secret, Protection::Encrypted, LIMIT, &|_| (), &|| None).unwrap();
        (plane, member.join().unwrap())
    });
    let start = Instant::now();
    let job = HostJob::on_host(&plane.ranks(), 0).unwrap();
    let mut processes = RankProcesses::new(job, Duration::from_secs(1));
    let mut command = Command::new("sh");
    // It moves, so it is not what stands still.
    command.args(["-c", "while :; do :; done"]).stdin(Stdio::null());
    processes.start(command).unwrap();
    let failure = processes.wait_with(&(), &mut plane).unwrap_err().to_string();
    assert!((1.0..10.0).contains(&start.elapsed().as_secs_f64()), "{:?}", start.elapsed());
    for words in ["host 1 (node1) failed", "has sent nothing for", "the timeout is 1s", "network is cut"] {
        assert!(failure.contains(words), "no {words:?} in: {failure}");
    }
    drop(silent);
}

#[test]
fn a_stop_on_one_host_reaches_the_ranks_of_all() {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    struct Stop(OwnedFd);
    impl Hooks for Stop {
        fn stop_event(&self) -> Option<BorrowedFd<'_>> {
            Some(self.0.as_fd())
        }
    }
    let stop = Stop(rustix::event::eventfd(1, rustix::event::EventfdFlags::CLOEXEC).unwrap());
    let mut planes = planes(&[1, 1, 1]);
    let hosts = planes[0].ranks();
    let script = "trap 'exit 7' TERM; while :; do sleep 0.01; done";
    let reasons = std::thread::scope(|scope| {
        let stop = &stop;
        let waits: Vec<_> = planes
            .iter_mut()
            .enumerate()
            .map(|(host, plane)| {
                let job = HostJob::on_host(&hosts, host).unwrap();
                scope.spawn(move || {
                    let mut processes = RankProcesses::new(job, LONG);
                    let mut command = Command::new("sh");
                    command.args(["-c", script]).stdin(Stdio::null());
                    processes.start(command).unwrap();
                    // The trap is set before the signal comes.
                    std::thread::sleep(Duration::from_millis(300));
                    let hooks: &dyn Hooks = if host == 1 { stop } else { &() };
                    processes.wait_with(hooks, plane).unwrap_err().to_string()
                })
            })
            .collect();
        waits.into_iter().map(|wait| wait.join().unwrap()).collect::<Vec<_>>()
    });
    for reason in reasons {
        // No shell reports that its work is done, so the first that ends has failed.
        assert!(reason.contains("ended with exit code 7"), "{reason}");
    }
}

#[test]
fn strangers_and_hosts_that_do_not_fit_are_refused() {
    let secret = Secret::generate().unwrap();
    let meeting = Meeting::listen("127.0.0.1", 0).unwrap();
    let port = meeting.port();
    let notes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let leader = scope.spawn(|| {
            let note = |line: &str| notes.lock().unwrap().push(line.to_string());
            let own = introduction(0, 2, 1);
            meeting.gather(own, &secret, Protection::Encrypted, LIMIT, &note, &|| None).unwrap()
        });
        let join = |secret: Secret, own: Introduction, protection| {
            let known = || Ok(Some(secret.clone()));
            connect(("127.0.0.1", port), &known, &own, protection, LIMIT, &|_| ())
        };
        let error = |met: Result<Met, String>| met.err().expect("a refusal");
        let stranger = join(Secret::generate().unwrap(), introduction(1, 2, 1), Protection::Encrypted);
        assert!(error(stranger).contains("do not trust each other"));
        let plain = join(secret.clone(), introduction(1, 2, 1), Protection::Plaintext);
        assert!(error(plain).contains("--plaintext differs"));
        for (own, words) in [
            (introduction(1, 3, 1), "--nnodes"),
            (introduction(2, 2, 1), "--node-rank"),
            (introduction(1, 2, 0), "no ranks"),
        ] {
            let mut met = join(secret.clone(), own, Protection::Encrypted).unwrap();
            let refused = receive_program(&mut met.plane, LIMIT, &|| false).unwrap_err().to_string();
            assert!(refused.contains(words), "{refused}");
        }
        let right = join(secret.clone(), introduction(1, 2, 3), Protection::Encrypted).unwrap();
        let leader = leader.join().unwrap();
        assert_eq!(leader.plane.ranks().world_size(), 4);
        // Messages of the program arrive in their order, also long ones.
        let long = vec![7; 3 << 20];
        for bytes in [vec![1], long.clone(), vec![2]] {
            leader.plane.send(1, &Message::Program(bytes));
        }
        let (mut plane, mut got) = (right.plane, Vec::new());
        while got.len() < 3 {
            got.extend(receive_program(&mut plane, LIMIT, &|| false).unwrap());
        }
        assert_eq!(got, [(0, vec![1]), (0, long), (0, vec![2])]);
    });
    let notes = notes.into_inner().unwrap();
    for words in
        ["a connection was refused: 127.0.0.1:", "it expects 3 hosts", "it is host 2", "it runs no ranks"]
    {
        assert_eq!(notes.iter().filter(|line| line.contains(words)).count(), 1, "{words}: {notes:?}");
    }
}

#[test]
fn hosts_that_do_not_come_are_named() {
    let secret = Secret::generate().unwrap();
    let meeting = Meeting::listen("127.0.0.1", 0).unwrap();
    let limit = Duration::from_millis(100);
    let met = meeting.gather(introduction(0, 3, 1), &secret, Protection::Encrypted, limit, &|_| (), &|| None);
    let error = met.err().unwrap().to_string();
    assert!(error.contains("hosts 1, 2 did not come"), "{error}");
    // A host that has come is told which one has not.
    let meeting = Meeting::listen("127.0.0.1", 0).unwrap();
    let port = meeting.port();
    std::thread::scope(|scope| {
        let leader = scope.spawn(|| {
            let own = introduction(0, 3, 1);
            meeting
                .gather(own, &secret, Protection::Encrypted, Duration::from_secs(2), &|_| (), &|| None)
                .map(drop)
        });
        let known = || Ok(Some(secret.clone()));
        let own = introduction(2, 3, 1);
        let met = connect(("127.0.0.1", port), &known, &own, Protection::Encrypted, LIMIT, &|_| ());
        let told = receive_program(&mut met.unwrap().plane, LIMIT, &|| false).unwrap_err().to_string();
        assert!(told.contains("host 0 has given up: host 1 did not come to the rendezvous"), "{told}");
        assert!(leader.join().unwrap().unwrap_err().to_string().contains("host 1 did not come"));
    });
    // Nobody listens there any more.
    let known = || Ok(Some(secret.clone()));
    let port = Meeting::listen("127.0.0.1", 0).unwrap().port();
    let own = introduction(1, 3, 1);
    let met = connect(("127.0.0.1", port), &known, &own, Protection::Encrypted, limit, &|_| ());
    let error = met.err().unwrap();
    assert!(error.contains("could not be reached") && error.contains("--node-rank 0"), "{error}");
}

/// Waits for host 1 at `name`, and lets it come by `by`.
fn meet_by(name: &str, by: &str) -> Result<(ControlPlane, ControlPlane), String> {
    let secret = Secret::generate().unwrap();
    // A port that is given, as by a user: the names of a port that the system chooses are told to all.
    let port = Meeting::listen("127.0.0.1", 0)?.port();
    let meeting = Meeting::listen(name, port)?;
    std::thread::scope(|scope| {
        let member = scope.spawn(|| {
            let known = || Ok(Some(secret.clone()));
            connect((by, port), &known, &introduction(1, 2, 1), Protection::Encrypted, LIMIT, &|_| ())
        });
        let own = introduction(0, 2, 1);
        let leader = meeting.gather(own, &secret, Protection::Encrypted, LIMIT, &|_| (), &|| None);
        Ok((leader.map_err(|parting| parting.to_string())?.plane, member.join().unwrap()?.plane))
    })
}

#[test]
fn hosts_that_name_the_rendezvous_differently_meet() {
    let has_ipv6 = std::net::TcpListener::bind("[::1]:0").is_ok();
    for (name, by) in [
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
        ("127.0.0.1", "127.0.1.1"),
        ("127.0.1.1", "127.0.0.1"),
        ("::1", "127.0.0.1"),
        ("127.0.0.1", "::1"),
        ("localhost", "::1"),
    ] {
        if has_ipv6 || (name != "::1" && by != "::1") {
            let (leader, member) = meet_by(name, by).unwrap_or_else(|why| panic!("{name} and {by}: {why}"));
            assert_eq!((leader.connected(), member.connected()), (vec![1], vec![0]), "{name} and {by}");
        }
    }
}

#[test]
fn host_0_says_where_it_listens_and_refuses_a_port_that_is_in_use() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = Meeting::listen("127.0.0.1", port).err().unwrap();
    assert!(error.contains("cannot listen") && error.contains("no other program uses"), "{error}");
    drop(taken);
    let everywhere = Meeting::listen("localhost", port).unwrap().describe();
    assert_eq!(everywhere, format!("all addresses of this host, port {port}"));
    let told = Meeting::listen("127.0.0.1", 0).unwrap();
    assert_eq!(told.describe(), format!("127.0.0.1:{}", told.port()));
    // TEST-NET-1 is nobody's.
    assert!(Meeting::listen("192.0.2.1", 7).err().unwrap().contains("address of host 0"));
}

#[test]
fn who_asks_to_stop_before_the_ranks_have_started_ends_the_job_on_all_hosts() {
    let mut planes = planes(&[1, 1, 1]);
    let parted = std::thread::scope(|scope| {
        let waits: Vec<_> = planes
            .drain(..)
            .map(|mut plane| {
                scope.spawn(move || {
                    let host = plane.own_id();
                    let parted = receive_program(&mut plane, LIMIT, &|| host == 1).unwrap_err();
                    if let (0, Parting::Stopped(who)) = (host, &parted) {
                        plane.broadcast(&Message::Stopped(who.clone()));
                    }
                    parted
                })
            })
            .collect();
        waits.into_iter().map(|wait| wait.join().unwrap()).collect::<Vec<_>>()
    });
    for parting in parted {
        assert_eq!(parting, Parting::Stopped("host 1 (node1) was asked to stop".to_string()));
    }
    // Host 0 still waits for another host.
    let secret = Secret::generate().unwrap();
    let meeting = Meeting::listen("127.0.0.1", 0).unwrap();
    let port = meeting.port();
    std::thread::scope(|scope| {
        let member = scope.spawn(|| {
            let known = || Ok(Some(secret.clone()));
            let own = introduction(1, 3, 1);
            let met = connect(("127.0.0.1", port), &known, &own, Protection::Encrypted, LIMIT, &|_| ());
            receive_program(&mut met.unwrap().plane, LIMIT, &|| true).unwrap_err()
        });
        let own = introduction(0, 3, 1);
        let met = meeting.gather(own, &secret, Protection::Encrypted, LIMIT, &|_| (), &|| None);
        assert!(matches!(met.err(), Some(Parting::Stopped(who)) if who.contains("host 1 (node1)")));
        assert!(matches!(member.join().unwrap(), Parting::Stopped(_)));
    });
    // Whoever has started it knows that a host will not come.
    let meeting = Meeting::listen("127.0.0.1", 0).unwrap();
    let lost = || Some(Parting::Failed("node1 cannot be reached".to_string()));
    let met = meeting.gather(introduction(0, 2, 1), &secret, Protection::Encrypted, LIMIT, &|_| (), &lost);
    assert_eq!(met.err(), Some(Parting::Failed("node1 cannot be reached".to_string())));
}
