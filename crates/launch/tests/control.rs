//! Launchers of several hosts, as threads of this process: they meet, refuse strangers, and tell each other of failures.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use phalanx_collectives::secure::{self, Connection, Identity, Protection, Secret};
use phalanx_collectives::{Blame, HostJob};
use phalanx_launch::{
    ControlPlane, Event, Failure, FailureReport, Hooks, Introduction, Meeting, Message, Met, Parting,
    RankProcesses, connect, receive_program,
};

/// More than anything takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

const LONG: Duration = Duration::from_secs(300);

fn introduction(host: usize, hosts: usize, ranks: usize) -> Introduction {
    let (name, machine) = (format!("node{host}"), format!("m{host}"));
    let (job, about) = ("/runs/r".to_string(), String::new());
    Introduction { name, machine, host, hosts, ranks, build: "test", job, about }
}

/// Receives the messages for the program of a member's launcher.
fn hears(plane: &mut ControlPlane) -> Result<Vec<(usize, Vec<u8>)>, Parting> {
    receive_program(plane, LIMIT, &|| false, &|_| ())
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

/// A connection of a program that knows the secret, and says what it wants.
fn raw(port: u16, secret: &Secret, own: &Introduction) -> Connection {
    prove(TcpStream::connect(("127.0.0.1", port)).unwrap(), secret, own).unwrap()
}

fn prove(socket: TcpStream, secret: &Secret, own: &Introduction) -> std::io::Result<Connection> {
    let identity = Identity { build: "test", job: [0; 16], epoch: 0, purpose: "control" };
    let hello = serde_json::to_vec(own).unwrap();
    let until = Instant::now() + LIMIT;
    secure::connect(socket, secret, &identity, &hello, Protection::Encrypted, until)
}

/// A peer that lives and is busy reads late: what is under way when a launcher ends reaches it all the same.
#[test]
fn the_last_word_reaches_a_peer_that_is_busy() {
    let secret = Secret::generate().unwrap();
    let meeting = Meeting::listen("127.0.0.1", 0).unwrap();
    let port = meeting.port();
    std::thread::scope(|scope| {
        let member = scope.spawn(|| raw(port, &secret, &introduction(1, 2, 1)));
        let own = introduction(0, 2, 1);
        let met = meeting.gather(own, &secret, Protection::Encrypted, LIMIT, &|_| (), &|| None).unwrap();
        let (mut sender, mut receiver) = member.join().unwrap().split();
        // More than the buffers of both sockets hold.
        let long = vec![7; 16 << 20];
        met.plane.send(1, &Message::Program(long.clone()));
        met.plane.send(1, &Message::Program(b"finish".to_vec()));
        let ends = scope.spawn(move || drop(met));
        // It reads late, and is heard meanwhile.
        let reads = scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(800));
            let messages = std::iter::repeat_with(|| Message::decode(&receiver.receive(64 << 20).unwrap()));
            let programs = messages.filter(|message| matches!(message, Some(Message::Program(_)))).take(2);
            let heard: Vec<Message> = programs.flatten().collect();
            assert!(heard == [Message::Program(long), Message::Program(b"finish".to_vec())]);
        });
        while !reads.is_finished() {
            let _ = sender.send(&Message::Alive.encode());
            std::thread::sleep(Duration::from_millis(100));
        }
        drop((reads.join().unwrap(), sender));
        ends.join().unwrap();
    });
}

/// The launchers of three hosts of a rank each know a job in which the last runs none. Its end is a line; that of the other ends the job.
#[test]
fn a_host_without_ranks_may_be_lost() {
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    struct Noted(Mutex<Vec<String>>, OwnedFd);
    impl Hooks for Noted {
        fn note(&self, line: &str) {
            self.0.lock().unwrap().push(line.to_string());
        }
        fn stop_event(&self) -> Option<BorrowedFd<'_>> {
            Some(self.1.as_fd())
        }
    }
    // Of the hosts 0, 1, 2 and 3, number 1 was lost before, so that numbers are not ids.
    for (lost, words) in [(3, None), (2, Some("host 2 (node2) is lost, with rank 1"))] {
        let mut planes = planes(&[1, 1, 1, 1]);
        let used: Vec<_> = [0, 2].map(|id| planes[0].hosts()[id].clone()).to_vec();
        planes.remove(1);
        planes.iter_mut().for_each(|plane| plane.set_hosts(used.clone()));
        let mut leader = planes.remove(0);
        let noted =
            Noted(Mutex::default(), rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap());
        std::thread::scope(|scope| {
            let ends = scope.spawn(|| {
                let mut processes = RankProcesses::new(HostJob::on_host(&leader.ranks(), 0).unwrap(), LONG);
                let mut command = Command::new("sh");
                command.args(["-c", "trap 'exit 7' TERM; while :; do sleep 0.01; done"]).stdin(Stdio::null());
                processes.start(command).unwrap();
                processes.wait_with(&noted, &mut leader).unwrap_err().to_string()
            });
            let lines = |count: usize| {
                let start = Instant::now();
                while noted.0.lock().unwrap().len() < count {
                    assert!(start.elapsed() < LIMIT, "no line about a lost host");
                    std::thread::sleep(Duration::from_millis(5));
                }
            };
            lines(1);
            planes.retain(|plane| plane.own_id() != lost);
            if words.is_none() {
                lines(2);
                // The trap is set before the signal comes.
                std::thread::sleep(Duration::from_millis(300));
                rustix::io::write(&noted.1, &1u64.to_ne_bytes()).unwrap();
            }
            let failure = ends.join().unwrap();
            assert!(failure.contains(words.unwrap_or("ended with exit code 7")), "{failure}");
        });
        let said = noted.0.into_inner().unwrap();
        for (line, id) in said.iter().zip([1, 3]) {
            assert!(line.contains(&format!("host {id} (node{id}) is lost, and the job goes on")), "{said:?}");
        }
    }
}

/// A program that knows the secret says anything. Host 0 names a failure, or goes on; it does not panic, and nothing of what concerns
/// others is believed.
#[test]
fn what_a_hostile_launcher_says_harms_no_other() {
    use phalanx_testing::hostile::{Random, mutate};
    let report = |reporter, rank| {
        let (reason, activity) = ("it says so".to_string(), String::new());
        FailureReport { reporter, rank, reason, activity, host_lost: true, blame: Blame::Disagreement }
    };
    let wrong = [
        Message::Failed(report(2, 2)),
        Message::Failed(report(0, 0)),
        Message::Failed(report(usize::MAX, 1)),
        Message::Failed(report(1, usize::MAX)),
        Message::RanksEnded(0, true),
        Message::RanksEnded(2, true),
        Message::RanksEnded(u32::MAX as usize, true),
        Message::Activity(vec![
            (0, vec![1; 64]),
            (2, vec![1; 64]),
            (usize::MAX, vec![]),
            (1, vec![255; 300]),
        ]),
        Message::GivenUp("it says so".into()),
        Message::Stopped("it says so".into()),
        Message::Refused("it says so".into()),
        Message::Program(b"nothing".to_vec()),
    ];
    let mut random = Random::of_case("launchers", 0);
    let mut said: Vec<Vec<u8>> = wrong.iter().map(Message::encode).collect();
    let altered = (0..200).map(|number| mutate(&mut random, &wrong[number % wrong.len()].encode()));
    // What is no message ends the connection, and a launcher may say that its own host has failed.
    said.extend(altered.filter(|bytes| match Message::decode(bytes) {
        None | Some(Message::Stop) => false,
        Some(Message::Failed(report)) => report.reporter != 1,
        Some(_) => true,
    }));
    let secret = Secret::generate().unwrap();
    let meeting = Meeting::listen("127.0.0.1", 0).unwrap();
    let port = meeting.port();
    std::thread::scope(|scope| {
        let honest = scope.spawn(|| {
            let known = || Ok(Some(secret.clone()));
            connect(
                ("127.0.0.1", port),
                &known,
                &introduction(2, 3, 1),
                Protection::Encrypted,
                LIMIT,
                &|_| (),
            )
        });
        let hostile = scope.spawn(|| raw(port, &secret, &introduction(1, 3, 1)));
        let own = introduction(0, 3, 1);
        let met = meeting.gather(own, &secret, Protection::Encrypted, LIMIT, &|_| (), &|| None).unwrap();
        let (mut plane, (mut sender, _receiver)) = (met.plane, hostile.join().unwrap().split());
        let mut honest = honest.join().unwrap().unwrap().plane;
        honest.set_hosts(plane.hosts().to_vec());
        let waits = scope.spawn(move || {
            let mut processes = RankProcesses::new(HostJob::on_host(&plane.ranks(), 0).unwrap(), LONG);
            let mut command = Command::new("sh");
            command.args(["-c", "exec sleep 1000"]).stdin(Stdio::null());
            processes.start(command).unwrap();
            (processes.wait_with(&(), &mut plane).unwrap_err().to_string(), plane)
        });
        for bytes in &said {
            sender.send(bytes).unwrap();
        }
        sender.send(&[77]).unwrap();
        let (failure, _plane) = waits.join().unwrap();
        assert!(failure.contains("host 1 (node1) is lost") && failure.contains("no message"), "{failure}");
        for event in honest.events() {
            let Event::Message(0, message) = event else { panic!("host 0 is there") };
            let is_fair = match &message {
                Message::Activity(states) => states.iter().all(|(rank, _)| *rank < 2),
                Message::Failed(report) => report.reporter == 0,
                Message::RanksEnded(host, _) => *host < 2,
                _ => false,
            };
            assert!(is_fair, "passed on: {message:?}");
        }
    });
}

/// A launcher that holds its connection and says nothing, as one that is stopped.
#[test]
fn a_launcher_that_falls_silent_is_named_after_the_timeout() {
    let secret = Secret::generate().unwrap();
    let meeting = Meeting::listen("127.0.0.1", 0).unwrap();
    let port = meeting.port();
    let (mut plane, silent) = std::thread::scope(|scope| {
        let member = scope.spawn(|| raw(port, &secret, &introduction(1, 2, 1)));
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
        let built = Introduction { build: "another", ..introduction(1, 2, 1) };
        assert!(error(join(secret.clone(), built, Protection::Encrypted)).contains("the build of phalanx"));
        for (own, words) in [
            (introduction(1, 3, 1), "--nnodes"),
            (introduction(2, 2, 1), "--node-rank"),
            (introduction(1, 2, 0), "no ranks"),
            (introduction(1, 2, usize::MAX), "a job has at most 1024"),
            (introduction(1, 2, 1024), "a job has at most 1024"),
            (
                Introduction { job: "/runs/other".into(), ..introduction(1, 2, 1) },
                "\"/runs/other\", and host 0 is that of \"/runs/r\"",
            ),
        ] {
            let mut met = join(secret.clone(), own, Protection::Encrypted).unwrap();
            let refused = hears(&mut met.plane).unwrap_err().to_string();
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
            got.extend(hears(&mut plane).unwrap());
        }
        assert_eq!(got, [(0, vec![1]), (0, long), (0, vec![2])]);
    });
    let notes = notes.into_inner().unwrap();
    assert!(notes.iter().any(|line| line.contains("a connection was refused: 127.0.0.1:")), "{notes:?}");
    for words in ["it expects 3 hosts", "it is host 2", "it runs no ranks", "1024 ranks, and", "/runs/other"]
    {
        assert_eq!(notes.iter().filter(|line| line.contains(words)).count(), 1, "{words}: {notes:?}");
    }
}

/// Connections that say nothing are many, and more come all the time: each host gets in all the same, and one that comes late is told
/// that its place is taken.
#[test]
fn a_flood_of_strangers_keeps_no_host_out() {
    use std::io::Write;
    let secret = Secret::generate().unwrap();
    let meeting = Meeting::listen("127.0.0.1", 0).unwrap();
    let (port, over) = (meeting.port(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        // Silent ones, and ones whose first message never ends.
        scope.spawn(|| {
            let mut held = VecDeque::new();
            while !over.load(Ordering::Relaxed) {
                let Ok(mut socket) = TcpStream::connect(("127.0.0.1", port)) else { return };
                if held.len() % 2 == 0 {
                    let _ = socket.write_all(&[100, 0, 1]);
                }
                held.push_back(socket);
                if held.len() > 500 {
                    held.pop_front();
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let join = |host: usize| {
            let known = || Ok(Some(secret.clone()));
            connect(
                ("127.0.0.1", port),
                &known,
                &introduction(host, 3, 1),
                Protection::Encrypted,
                LIMIT,
                &|_| (),
            )
        };
        std::thread::sleep(Duration::from_millis(500));
        let leader = scope.spawn(|| {
            let own = introduction(0, 3, 1);
            meeting.gather(own, &secret, Protection::Encrypted, LIMIT, &|_| (), &|| None).map(drop)
        });
        let first = join(1).unwrap();
        let refused = hears(&mut join(1).unwrap().plane).unwrap_err().to_string();
        assert!(refused.contains("there is a host 1 already (node1)"), "{refused}");
        let second = join(2).unwrap();
        leader.join().unwrap().unwrap();
        over.store(true, Ordering::Relaxed);
        drop((first, second));
    });
}

/// Who asks for a place while the last host takes it hears why there is none, not that host 0 is gone.
#[test]
fn hosts_that_come_together_with_the_last_one_are_refused() {
    let secret = Secret::generate().unwrap();
    for _ in 0..10 {
        let meeting = Meeting::listen("127.0.0.1", 0).unwrap();
        let port = meeting.port();
        let together = Barrier::new(4);
        std::thread::scope(|scope| {
            let leader = scope.spawn(|| {
                let own = introduction(0, 2, 1);
                meeting.gather(own, &secret, Protection::Encrypted, LIMIT, &|_| (), &|| None).unwrap()
            });
            let come = || {
                let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
                together.wait();
                prove(socket, &secret, &introduction(1, 2, 1))
            };
            let comers: Vec<_> = (0..4).map(|_| scope.spawn(come)).collect();
            let comers: Vec<_> = comers.into_iter().map(|comer| comer.join().unwrap()).collect();
            let _leader = leader.join().unwrap();
            let told = comers.into_iter().flatten().map(|comer| {
                let (_sender, mut receiver) = comer.split();
                receiver.set_timeout(Some(LIMIT)).unwrap();
                let first = receiver.receive(1000).map(|bytes| Message::decode(&bytes));
                match first.unwrap_or_else(|error| panic!("the connection ended without a word: {error}")) {
                    Some(Message::Refused(why)) => why,
                    _ => "taken".to_string(),
                }
            });
            let told: Vec<String> = told.collect();
            assert_eq!(told.iter().filter(|told| *told == "taken").count(), 1, "{told:?}");
            let refused = told.iter().filter(|told| told.contains("a host 1 already")).count();
            assert_eq!(refused + 1, told.len(), "{told:?}");
        });
    }
}

/// Host 0 is slow, or flooded: handshakes are not answered, twice in a row. A host waits on, as long as --join-timeout says.
#[test]
fn handshakes_that_are_not_answered_are_tried_again() {
    let secret = Secret::generate().unwrap();
    let slow = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = slow.local_addr().unwrap().port();
    std::thread::scope(|scope| {
        let member = scope.spawn(|| {
            let known = || Ok(Some(secret.clone()));
            connect(
                ("127.0.0.1", port),
                &known,
                &introduction(1, 2, 1),
                Protection::Encrypted,
                LIMIT,
                &|_| (),
            )
        });
        let held = [(); 2].map(|()| slow.accept().unwrap().0);
        drop((slow, held));
        let meeting = Meeting::listen("127.0.0.1", port).unwrap();
        let own = introduction(0, 2, 1);
        meeting.gather(own, &secret, Protection::Encrypted, LIMIT, &|_| (), &|| None).unwrap();
        member.join().unwrap().unwrap();
    });
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
        let told = hears(&mut met.unwrap().plane).unwrap_err().to_string();
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
                    let parted = receive_program(&mut plane, LIMIT, &|| host == 1, &|_| ()).unwrap_err();
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
            receive_program(&mut met.unwrap().plane, LIMIT, &|| true, &|_| ()).unwrap_err()
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
