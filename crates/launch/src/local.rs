//! Processes of one host that another launcher has started, one for each rank: they find each other at an abstract Unix
//! socket, which has no name in a file system. The one with local rank 0 leads. It makes the memory of the job and hands the
//! descriptors to the others, each of which starts its own rank. Both sides check that the other is a process of the same
//! user.

use std::io::{BufRead, BufReader, Error, ErrorKind, IoSlice, IoSliceMut, Read, Result, Write};
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use crate::waiting::{named, so_far, tell_while};

/// Largest message.
const BYTES: usize = 64 << 10;

/// Descriptors that the system passes in one message.
const DESCRIPTORS: usize = 253;

/// Time between two attempts to connect.
const RETRY: Duration = Duration::from_millis(50);

/// What names the socket of a host's processes.
pub struct LocalGroup {
    name: String,
    /// The ranks of the processes.
    ranks: Range<usize>,
}

/// What a process says to the one that leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalHello {
    /// Its rank.
    pub rank: usize,
    /// The cores that it may use.
    pub cores: Vec<usize>,
}

/// A process that has come, with its connection.
type Member = (LocalHello, UnixStream);

/// The process that leads, with its connections to the others.
pub struct LocalLeader {
    members: Vec<Member>,
}

/// A process that follows the one that leads.
pub struct LocalMember {
    stream: UnixStream,
}

impl LocalGroup {
    /// The processes of the job `job` of this user on this host, with these ranks.
    pub fn new(job: &str, ranks: Range<usize>) -> LocalGroup {
        let user = rustix::process::geteuid().as_raw();
        // Names of sockets have at most 107 bytes.
        let job: String = job.chars().filter(|c| c.is_ascii_graphic()).take(80).collect();
        LocalGroup { name: format!("phalanx-{user}-{job}"), ranks }
    }

    fn address(&self) -> Result<SocketAddr> {
        SocketAddr::from_abstract_name(&self.name)
    }

    /// Waits for the other processes, within `limit`; `note` gets lines for the user.
    ///
    /// # Errors
    /// A name that is in use, processes that do not come.
    pub fn lead(&self, limit: Duration, note: &(dyn Fn(&str) + Sync)) -> Result<LocalLeader> {
        let members = Mutex::new(Vec::new());
        let describe = |waited: Duration| {
            let missing = self.missing(&members.lock().unwrap_or_else(PoisonError::into_inner));
            format!(
                "waiting for the processes of this host with {}{}",
                named("rank", &missing),
                so_far(waited, limit)
            )
        };
        tell_while(note, &describe, || self.gather(limit, &members))?;
        Ok(LocalLeader { members: members.into_inner().unwrap_or_else(PoisonError::into_inner) })
    }

    /// The ranks of the processes that have not come.
    fn missing(&self, members: &[Member]) -> Vec<usize> {
        let has_come = |rank: &usize| members.iter().any(|(hello, _)| hello.rank == *rank);
        self.ranks.clone().skip(1).filter(|rank| !has_come(rank)).collect()
    }

    fn gather(&self, limit: Duration, members: &Mutex<Vec<Member>>) -> Result<()> {
        let members = || members.lock().unwrap_or_else(PoisonError::into_inner);
        let listener = UnixListener::bind_addr(&self.address()?).map_err(|error| {
            let text = format!("another job of this user has the same name, {}: {error}", self.name);
            Error::new(error.kind(), text)
        })?;
        listener.set_nonblocking(true)?;
        let until = Instant::now() + limit;
        while members().len() + 1 < self.ranks.len() {
            match listener.accept() {
                Ok((stream, _)) => {
                    // A stranger is turned away.
                    let Ok(hello) = greet(&stream) else { continue };
                    let mut members = members();
                    if self.missing(&members).contains(&hello.rank) {
                        members.push((hello, stream));
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if Instant::now() >= until {
                        let (missing, all) = (self.missing(&members()), self.ranks.len());
                        let text = format!(
                            "{} of {all} processes of this host have come within {} s, not those with {}",
                            all - missing.len(),
                            limit.as_secs(),
                            named("rank", &missing)
                        );
                        return Err(Error::new(ErrorKind::TimedOut, text));
                    }
                    std::thread::sleep(RETRY / 10);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Connects with the process that leads, which may start later, within `limit`; `note` gets lines for the user.
    ///
    /// # Errors
    /// When it does not come, or is a process of another user.
    pub fn follow(
        &self,
        hello: &LocalHello,
        limit: Duration,
        note: &(dyn Fn(&str) + Sync),
    ) -> Result<LocalMember> {
        let describe = |waited: Duration| {
            let first = self.ranks.start;
            format!(
                "waiting for the process of this host with local rank 0, rank {first}{}",
                so_far(waited, limit)
            )
        };
        tell_while(note, &describe, || self.connect(hello, limit))
    }

    fn connect(&self, hello: &LocalHello, limit: Duration) -> Result<LocalMember> {
        let until = Instant::now() + limit;
        let mut stream = loop {
            match UnixStream::connect_addr(&self.address()?) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() >= until => {
                    let text = format!(
                        "the process with local rank 0 has not come within {} s: {error}",
                        limit.as_secs()
                    );
                    return Err(Error::new(ErrorKind::TimedOut, text));
                }
                Err(_) => std::thread::sleep(RETRY),
            }
        };
        check_user(&stream)?;
        stream.write_all(format!("{}\n", serde_json::to_string(hello)?).as_bytes())?;
        Ok(LocalMember { stream })
    }
}

/// Refuses a peer of another user.
fn check_user(stream: &UnixStream) -> Result<()> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    if peer.uid != rustix::process::geteuid() {
        return Err(Error::new(
            ErrorKind::PermissionDenied,
            "a process of another user is at the job's socket",
        ));
    }
    Ok(())
}

fn greet(stream: &UnixStream) -> Result<LocalHello> {
    check_user(stream)?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut line = String::new();
    BufReader::new(stream.take(BYTES as u64)).read_line(&mut line)?;
    stream.set_read_timeout(None)?;
    Ok(serde_json::from_str(&line)?)
}

impl LocalLeader {
    /// What the other processes have said.
    pub fn hellos(&self) -> impl Iterator<Item = &LocalHello> {
        self.members.iter().map(|(hello, _)| hello)
    }

    /// Sends bytes with descriptors to the process of a rank.
    ///
    /// # Errors
    /// A process that is gone, or more descriptors than the system passes.
    pub fn send(&self, rank: usize, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let Some((_, stream)) = self.members.iter().find(|(hello, _)| hello.rank == rank) else {
            return Err(Error::new(ErrorKind::NotFound, format!("no process of this host has rank {rank}")));
        };
        if fds.len() > DESCRIPTORS || bytes.len() > BYTES {
            let text = format!("{} descriptors for one rank; the system passes {DESCRIPTORS}", fds.len());
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let framed = [&(bytes.len() as u32).to_le_bytes()[..], bytes].concat();
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let sent = sendmsg(stream, &[IoSlice::new(&framed)], &mut control, SendFlags::NOSIGNAL)?;
        (&*stream).write_all(&framed[sent..])
    }

    /// The ranks whose processes have ended.
    pub fn lost(&self) -> Vec<usize> {
        let gone = |stream: &UnixStream| {
            // Nothing comes from a process but its end.
            let peeked = rustix::net::recv(stream, &mut [0u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT);
            !matches!(peeked, Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR))
        };
        self.members.iter().filter(|(_, stream)| gone(stream)).map(|(hello, _)| hello.rank).collect()
    }
}

impl LocalMember {
    /// The next message of the process that leads, with its descriptors, which are closed on exec.
    ///
    /// # Errors
    /// `UnexpectedEof` when that process has ended.
    pub fn receive(&mut self) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
        let mut length = [0; 4];
        let mut fds = Vec::new();
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let read = recvmsg(&self.stream, &mut [IoSliceMut::new(&mut length)], &mut control, flags)?.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if read == 0 {
            return Err(Error::new(ErrorKind::UnexpectedEof, "the process with local rank 0 has ended"));
        }
        self.stream.read_exact(&mut length[read..])?;
        let length = u32::from_le_bytes(length) as usize;
        if length > BYTES {
            return Err(Error::new(ErrorKind::InvalidData, format!("a message of {length} bytes")));
        }
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes)?;
        Ok((bytes, fds))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn processes_of_a_host_find_each_other_and_pass_descriptors() {
        let group = || LocalGroup::new(&format!("test-{}", std::process::id()), 0..3);
        let limit = Duration::from_secs(30);
        let members: Vec<_> = [2, 1]
            .map(|rank| {
                std::thread::spawn(move || {
                    let mut member =
                        group().follow(&LocalHello { rank, cores: vec![rank] }, limit, &|_| ()).unwrap();
                    let (bytes, fds) = member.receive().unwrap();
                    let mut text = String::new();
                    let mut file = File::from(fds.into_iter().next().unwrap());
                    file.read_to_string(&mut text).unwrap();
                    let end = member.receive().unwrap();
                    assert!(end.0 == b"end" && end.1.is_empty());
                    assert_eq!(member.receive().unwrap_err().kind(), ErrorKind::UnexpectedEof);
                    (bytes, text)
                })
            })
            .into();
        let leader = group().lead(limit, &|_| ()).unwrap();
        let mut ranks: Vec<usize> = leader.hellos().map(|hello| hello.rank).collect();
        ranks.sort();
        assert_eq!((ranks, leader.lost()), (vec![1, 2], vec![]));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "content").unwrap();
        for rank in [1, 2] {
            let open = File::open(file.path()).unwrap();
            leader.send(rank, &vec![rank as u8; 40_000], &[open.as_fd()]).unwrap();
            leader.send(rank, b"end", &[]).unwrap();
        }
        assert!(leader.send(3, b"", &[]).unwrap_err().to_string().contains("rank 3"));
        // A second job of the same name is told so.
        drop(leader);
        let got: Vec<_> = members.into_iter().map(|member| member.join().unwrap()).collect();
        assert_eq!(got, [(vec![2; 40_000], "content".to_string()), (vec![1; 40_000], "content".to_string())]);
    }

    #[test]
    fn processes_that_do_not_come_are_named_while_they_are_awaited_and_at_the_end() {
        let group = LocalGroup::new(&format!("alone-{}", std::process::id()), 4..7);
        let said = Mutex::new(Vec::new());
        let note = |line: &str| said.lock().unwrap().push(line.to_string());
        let limit = Duration::from_secs(1);
        let error = group.lead(limit, &note).err().unwrap().to_string();
        assert!(error.contains("1 of 3 processes") && error.contains("ranks 5, 6"), "{error}");
        let error =
            group.follow(&LocalHello { rank: 5, cores: vec![] }, limit, &note).err().unwrap().to_string();
        assert!(error.contains("local rank 0"), "{error}");
        let said = said.into_inner().unwrap();
        let [led, followed] = &said[..] else { panic!("one line for each wait, at once: {said:?}") };
        assert!(led.contains("with ranks 5, 6 (0 s of 1 s, --join-timeout)"), "{led}");
        assert!(followed.contains("local rank 0, rank 4 (0 s of 1 s"), "{followed}");
    }
}
