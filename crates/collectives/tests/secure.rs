//! Authenticated connections: peers that are refused, and peers that misbehave afterwards.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use phalanx_collectives::secure::{
    Connection, HANDSHAKE_MAX, HELLO_MAX, Identity, Protection, Secret, accept, connect,
};
use phalanx_testing::hostile::{Random, mutate, peak_bytes, survive};

const BOTH: [Protection; 2] = [Protection::Encrypted, Protection::Plaintext];

fn secret() -> Secret {
    Secret::from_bytes([7; 32])
}

fn identity() -> Identity {
    Identity { build: "0.1.0", job: [3; 16], epoch: 4, purpose: "data" }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Two ends of a TCP connection: of the connecting and of the accepting side.
fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (ours, listener.accept().unwrap().0)
}

type Accepted = std::io::Result<(Connection, Vec<u8>)>;

/// A handshake between two sides that believe in different things.
fn handshake(
    connecting: (&Secret, &Identity, Protection),
    accepting: (&Secret, &Identity, Protection),
) -> (std::io::Result<Connection>, Accepted) {
    let (ours, theirs) = sockets();
    std::thread::scope(|scope| {
        let (secret, identity, protection) = connecting;
        let side = scope.spawn(move || connect(ours, secret, identity, b"rank 3", protection, soon()));
        let (secret, identity, protection) = accepting;
        let accepted = accept(theirs, secret, identity, protection, soon());
        (side.join().unwrap(), accepted)
    })
}

fn connected(protection: Protection) -> (Connection, Connection) {
    let (secret, identity) = (secret(), identity());
    let (ours, theirs) = handshake((&secret, &identity, protection), (&secret, &identity, protection));
    let (theirs, hello) = theirs.unwrap();
    assert_eq!(hello, b"rank 3");
    (ours.unwrap(), theirs)
}

#[test]
fn messages_of_any_length_arrive_in_both_directions() {
    for protection in BOTH {
        let (ours, theirs) = connected(protection);
        let ((mut to_them, mut from_them), (mut to_us, mut from_us)) = (ours.split(), theirs.split());
        let mut random = Random::of_case("messages", 0);
        for length in [0, 1, 4096, 65_519, 65_520, 300_000] {
            let message = random.bytes(length);
            std::thread::scope(|scope| {
                scope.spawn(|| to_them.send(&message).unwrap());
                assert_eq!(from_us.receive(length).unwrap(), message);
            });
            to_us.send(&message[..length.min(9)]).unwrap();
            assert_eq!(from_them.receive(9).unwrap(), &message[..length.min(9)]);
        }
        to_us.close();
        assert_eq!(from_them.receive(9).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}

/// A receive that timed out in the middle of a message goes on where it stopped.
#[test]
fn a_message_may_come_in_pieces() {
    let (ours, theirs) = connected(Protection::Encrypted);
    let ((mut sender, _keep), (_keep_too, mut receiver)) = (ours.split(), theirs.split());
    receiver.set_timeout(Some(Duration::from_millis(20))).unwrap();
    assert_eq!(receiver.receive(10).unwrap_err().kind(), ErrorKind::WouldBlock);
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(60));
        sender.send(&[5; 200_000]).unwrap();
    });
    let message = loop {
        match receiver.receive(200_000) {
            Ok(message) => break message,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
    };
    assert_eq!(message, [5; 200_000]);
    late.join().unwrap();
}

#[test]
fn a_peer_of_another_job_start_purpose_secret_or_protection_is_refused() {
    let (secret, identity, encrypted) = (secret(), identity(), Protection::Encrypted);
    let others = [
        (Secret::from_bytes([8; 32]), identity.clone(), encrypted),
        (secret.clone(), Identity { job: [4; 16], ..identity.clone() }, encrypted),
        (secret.clone(), Identity { epoch: 5, ..identity.clone() }, encrypted),
        (secret.clone(), Identity { purpose: "control", ..identity.clone() }, encrypted),
        (secret.clone(), identity.clone(), Protection::Plaintext),
    ];
    for (other_secret, other_identity, protection) in &others {
        let (ours, theirs) =
            handshake((other_secret, other_identity, *protection), (&secret, &identity, encrypted));
        let told = theirs.err().expect("another peer").to_string();
        assert!(told.contains("another secret, or is of another job"), "{told}");
        let told = ours.err().expect("another peer").to_string();
        assert!(told.contains("closed the connection during the handshake"), "{told}");
    }
}

/// The bytes that a connecting side sends in a handshake, as somebody on the way sees them.
fn recorded() -> Vec<u8> {
    let (ours, mut middle_out) = sockets();
    let (mut middle_in, theirs) = sockets();
    let (secret, identity) = (secret(), identity());
    let mut seen = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| connect(ours, &secret, &identity, b"rank 3", Protection::Encrypted, soon()).unwrap());
        scope.spawn(|| accept(theirs, &secret, &identity, Protection::Encrypted, soon()).unwrap());
        let mut answer = [0; 50];
        let first = 2 + 32 + 6 + 16;
        seen.resize(first, 0);
        middle_out.read_exact(&mut seen).unwrap();
        middle_in.write_all(&seen).unwrap();
        middle_in.read_exact(&mut answer).unwrap();
        middle_out.write_all(&answer).unwrap();
        seen.resize(first + 18, 0);
        middle_out.read_exact(&mut seen[first..]).unwrap();
        middle_in.write_all(&seen[first..]).unwrap();
    });
    seen
}

/// Accepts a connection whose other end sends `bytes` and closes.
fn accept_of(bytes: &[u8]) -> Accepted {
    let (mut ours, theirs) = sockets();
    // The peer may close before it has read everything.
    let _ = ours.write_all(bytes);
    let _ = ours.shutdown(std::net::Shutdown::Write);
    accept(theirs, &secret(), &identity(), Protection::Encrypted, soon())
}

/// The first message is the right one, but who repeats it cannot say the third.
#[test]
fn a_replayed_handshake_is_refused() {
    let seen = recorded();
    let error = accept_of(&seen).err().expect("a replay");
    assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
    let error = accept_of(&seen[..seen.len() - 18]).err().expect("the first message alone");
    assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{error}");
}

#[test]
fn a_peer_that_sends_nothing_or_too_slowly_is_refused_in_time() {
    let (mut ours, theirs) = sockets();
    let start = Instant::now();
    let slow = std::thread::spawn(move || {
        while ours.write_all(&[0]).is_ok() && start.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(150));
        }
    });
    let deadline = start + Duration::from_millis(400);
    let refused = accept(theirs, &secret(), &identity(), Protection::Encrypted, deadline);
    assert!(refused.is_err());
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    slow.join().unwrap();
}

/// A long hello is refused before it is read.
#[test]
fn an_oversized_first_message_is_refused_at_its_length() {
    let (mut ours, theirs) = sockets();
    ours.write_all(&[0xff, 0xff]).unwrap();
    let (refused, peak) =
        peak_bytes(|| accept(theirs, &secret(), &identity(), Protection::Encrypted, soon()));
    let error = refused.err().expect("64 KiB of hello");
    assert!(error.to_string().contains("a message of 65535 bytes"), "{error}");
    assert!(peak < 4 * HANDSHAKE_MAX, "{peak}");
    const { assert!(HELLO_MAX < HANDSHAKE_MAX) };
}

#[test]
fn garbage_is_refused_without_memory_or_panics() {
    let seen = recorded();
    let make = |random: &mut Random| {
        if random.chance(0.3) {
            let length = random.below(8000);
            random.bytes(length)
        } else {
            mutate(random, &seen)
        }
    };
    let accepted = survive("handshakes", 1500, 4 * HANDSHAKE_MAX, make, |bytes| accept_of(bytes).is_ok());
    assert_eq!(accepted, 0);
}

/// An authenticated peer announces 4 GiB.
#[test]
fn absurd_lengths_are_refused_before_memory_is_taken() {
    for protection in BOTH {
        let (ours, theirs) = connected(protection);
        let ((mut sender, _keep), (_keep_too, mut receiver)) = (ours.split(), theirs.split());
        sender.send(&[1; 100_000]).unwrap();
        let (refused, peak) = peak_bytes(|| receiver.receive(99_999));
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        assert!(error.to_string().contains("a message of 100000 bytes; the maximum is 99999"), "{error}");
        assert!(peak < 300_000, "{peak}");
    }
}

/// A bit that changes on the way is noticed, wherever it is in a record: its length, its content, its tag. Launchers speak in records also
/// where the ranks of the job do not.
#[test]
fn a_record_that_was_changed_is_refused() {
    for at in [0, 1, 2, 5, 6, 21, 22, 37] {
        changed_record((identity(), Protection::Encrypted), at);
        let control = Identity { purpose: "control", ..identity() };
        changed_record((control, Protection::Plaintext), at);
    }
}

/// Changes the byte `at` of the first record on its way.
fn changed_record((identity, protection): (Identity, Protection), at: usize) {
    let (ours, middle_out) = sockets();
    let (middle_in, theirs) = sockets();
    let secret = secret();
    let forward = |mut from: TcpStream, mut to: TcpStream, changed: Option<usize>| {
        std::thread::spawn(move || {
            let (mut buffer, mut seen) = ([0; 4096], 0);
            while let Ok(bytes @ 1..) = from.read(&mut buffer) {
                if let Some(at) = changed.filter(|at| (seen..seen + bytes).contains(at)) {
                    buffer[at - seen] ^= 4;
                }
                seen += bytes;
                if to.write_all(&buffer[..bytes]).is_err() {
                    break;
                }
            }
            // It may have ended.
            let _ = to.shutdown(Shutdown::Write);
        })
    };
    let back = forward(middle_in.try_clone().unwrap(), middle_out.try_clone().unwrap(), None);
    // After both messages of the handshake.
    let there = forward(middle_out, middle_in, Some(56 + 18 + at));
    std::thread::scope(|scope| {
        let (secret, identity) = (&secret, &identity);
        let side = scope.spawn(move || connect(ours, secret, identity, b"rank 3", protection, soon()));
        let (connection, _) = accept(theirs, secret, identity, protection, soon()).unwrap();
        let (mut sender, _keep_too) = side.join().unwrap().unwrap().split();
        sender.send(b"the loss is 3.25").unwrap();
        // A record that seems longer is waited for until the sender ends.
        let waits = at < 2;
        if waits {
            sender.close();
        }
        let (_keep, mut receiver) = connection.split();
        receiver.set_timeout(Some(Duration::from_secs(20))).unwrap();
        let error = receiver.receive(100).unwrap_err();
        let expected: &[ErrorKind] = match waits {
            true => &[ErrorKind::InvalidData, ErrorKind::UnexpectedEof],
            false => &[ErrorKind::InvalidData],
        };
        assert!(expected.contains(&error.kind()), "{identity:?}, byte {at}: {error}");
        sender.close();
    });
    there.join().unwrap();
    back.join().unwrap();
}

#[test]
fn a_secret_does_not_print_itself() {
    let secret = Secret::from_bytes([0xab; 32]);
    let text = format!("{secret:?} {:?}", Secret::generate().unwrap());
    assert_eq!(text, "Secret(..) Secret(..)");
    assert_ne!(Secret::generate().unwrap(), Secret::generate().unwrap());
    let json = serde_json::to_string(&secret).unwrap();
    assert_eq!(serde_json::from_str::<Secret>(&json).unwrap(), secret);
}
