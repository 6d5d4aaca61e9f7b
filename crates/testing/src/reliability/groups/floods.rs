//! A rendezvous under floods: strangers connect without end, say nothing, too little, too much or something else; and hosts come that
//! do not belong to the job: with another secret, for another run, with a number that is taken.
//!
//! The hosts of the job meet all the same, whichever of them comes first, and train to the bits of an undisturbed run. A host that does
//! not belong is refused in words that say why.

use std::collections::VecDeque;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::hostile::Random;
use crate::reliability::command::{Ended, Running};
use crate::reliability::mesh::{MESHES, Mesh};
use crate::reliability::phase::pause;
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

/// Bytes that strangers send after connecting.
const STRANGERS: [(&str, &[u8]); 6] = [
    ("say nothing", b""),
    ("begin a handshake", &[100, 0, 1]),
    ("announce the longest message", &[255, 255, 7]),
    ("ask for a page", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    ("send zeros", &[0; 4096]),
    ("leave at once", b""),
];

/// A host that does not belong to the job, and words of its refusal.
const GUESTS: [(&str, &[&str]); 4] = [
    ("nobody else", &[]),
    ("a host with another secret", &["do not trust each other", "the secret"]),
    ("a host of another run", &["it comes for the run", "--rendezvous"]),
    ("a second host 1", &["there is a host 1 already", "--node-rank"]),
];

/// Connections that are held at a time: more than host 0 waits for.
const HELD: [usize; 3] = [20, 140, 400];

/// More time than other commands have, on a machine that is busy with strangers.
const MORE: Duration = Duration::from_secs(20);

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let strangers = STRANGERS[number % STRANGERS.len()];
    let guest = GUESTS[number / STRANGERS.len() % GUESTS.len()];
    let several: Vec<&Mesh> =
        MESHES.iter().filter(|mesh| mesh.ranks > 1 && mesh.name.starts_with("data")).collect();
    let mesh = *random.pick(&several);
    let held = *random.pick(&HELD);
    let detail = format!("{held} strangers {} and {}, {}", strangers.0, guest.0, mesh.name);
    let result = world.case().and_then(|case| meet(&case, mesh, (strangers, held), guest, random));
    Trial::new(format!("strangers that {}", strangers.0), detail, result)
}

fn meet(
    case: &Case<'_>,
    mesh: &Mesh,
    (strangers, held): ((&str, &[u8]), usize),
    guest: (&str, &[&str]),
    random: &mut Random,
) -> Result<(), String> {
    let reference = case.world.reference(mesh)?;
    for (name, digit) in [("secret", "7"), ("other", "8")] {
        case.write_with(name, digit.repeat(64), 0o600)?;
    }
    let port = port(random).ok_or("no port is free")?;
    let (over, came) = (AtomicBool::new(false), AtomicUsize::new(0));
    let ends = std::thread::scope(|scope| {
        scope.spawn(|| flood(port, strangers, held, (&over, &came)));
        let ends = together(case, mesh, port, guest.0, &came, random);
        over.store(true, Ordering::Relaxed);
        ends
    });
    let (mut ends, mut guest_ended) = ends?;
    // Where two hosts have one number, the first that comes belongs to the job.
    if let Some(guest) = guest_ended.as_mut().filter(|guest| guest.code == Some(0))
        && let Some(refused) = ends.iter_mut().find(|ended| ended.code != Some(0))
    {
        std::mem::swap(guest, refused);
    }
    ends.iter().try_for_each(Ended::success)?;
    reference.is_equal(&case.path("r"))?;
    match guest_ended {
        None => Ok(()),
        // It came when the hosts had met, and nobody listened.
        Some(ended) if ended.stderr.contains("could not be reached") => ended.refusal(&[]),
        Some(ended) => ended.refusal(guest.1),
    }
}

/// Starts the hosts in a random order, and the guest among them; how they ended.
fn together(
    case: &Case<'_>,
    mesh: &Mesh,
    port: u16,
    guest: &str,
    came: &AtomicUsize,
    random: &mut Random,
) -> Result<(Vec<Ended>, Option<Ended>), String> {
    let rendezvous = format!("127.0.0.1:{port}");
    let hosts = mesh.ranks;
    let launch = |host: usize, secret: &str, run: &str| -> Result<Running, String> {
        let own = ["--rendezvous", &rendezvous, "--secret-file", secret, "--quiet", "--join-timeout", "8"];
        let words = mesh.launch_host((host, hosts), &own).into_iter();
        case.phalanx(words.map(|word| if word == "r" { run.to_string() } else { word })).start()
    };
    let mut order: Vec<usize> = (0..hosts).collect();
    random.shuffle(&mut order);
    // The last host of the job waits until its own and the guest's place are known.
    let (last, first) = (order[hosts - 1], &order[..hosts - 1]);
    let mut started = Vec::new();
    for host in first {
        started.push(launch(*host, "secret", "r")?);
        pause(Duration::from_millis(random.below(100) as u64));
    }
    let mut guest = match guest {
        "a host with another secret" => Some(launch(1, "other", "r")?),
        "a host of another run" => Some(launch(1, "secret", "q")?),
        "a second host 1" if first.contains(&1) => Some(launch(1, "secret", "r")?),
        _ => None,
    };
    // Where host 0 is among the first, strangers have come, and the guest was heard, before the last host is started.
    if first.contains(&0) {
        started[0].wait_for(Duration::from_secs(3), || came.load(Ordering::Relaxed) > 150);
        if let Some(guest) = &mut guest {
            guest.wait_for(Duration::from_secs(6), || false);
        }
    }
    started.push(launch(last, "secret", "r")?);
    let ends = started.into_iter().map(|launcher| launcher.finish_within(MORE)).collect();
    Ok((ends, guest.map(|guest| guest.finish_within(MORE))))
}

/// A free port that the system gives to no connection by itself: a stranger that connects to its own port would take it from host 0.
fn port(random: &mut Random) -> Option<u16> {
    let mut ports = (0..100).map(|_| 20_000 + random.below(12_000) as u16);
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
}

/// Connects again and again, and keeps so many connections, until it is over.
fn flood(port: u16, (what, bytes): (&str, &[u8]), held: usize, (over, came): (&AtomicBool, &AtomicUsize)) {
    let mut kept = VecDeque::new();
    while !over.load(Ordering::Relaxed) {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(mut socket) => {
                let _ = socket.set_nonblocking(true);
                // It may be refused already.
                let _ = socket.write(bytes);
                came.fetch_add(1, Ordering::Relaxed);
                if what != "leave at once" {
                    kept.push_back(socket);
                }
            }
            Err(_) => pause_a_moment(),
        }
        if kept.len() > held {
            kept.pop_front();
        }
        if kept.len() == held || what == "leave at once" {
            pause_a_moment();
        }
    }
}

fn pause_a_moment() {
    std::thread::sleep(Duration::from_millis(2));
}
