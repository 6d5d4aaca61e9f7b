//! Messages with descriptors, from the process that leads a host to the others.

use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Read, Result, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use super::{BYTES, LocalHello, LocalLeader, LocalMember};

/// Descriptors that the system passes in one message.
const DESCRIPTORS: usize = 253;

impl LocalLeader {
    /// Messages of the other processes.
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
