//! Links with delays, losses and a rate, made by a program, because few kernels have `netem`.
//!
//! The interface of every host is one end of a VXLAN tunnel (RFC 7348): the kernel puts each Ethernet frame in a UDP packet
//! to the relay. The relay decides when the packet has left the host at the link's rate, whether it is lost, and sends it
//! after the delay to the host whose hardware address the frame bears.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::hosts::arguments::Link;

/// The port of VXLAN.
pub const PORT: u16 = 4789;
/// Bytes of the VXLAN header, before the Ethernet frame, which begins with the address of the receiver.
const HEADER: usize = 8;
/// Largest UDP packet.
const PACKET: usize = 1 << 16;
/// Time for which a packet may wait to leave its host; a packet that would wait longer is lost, as in a switch.
const QUEUE: Duration = Duration::from_millis(50);

/// The hardware address of host `number`'s interface.
pub fn hardware_address(number: usize) -> String {
    format!("02:00:00:00:{:02x}:{:02x}", number >> 8, number & 255)
}

/// The arguments with which this program becomes the relay of `hosts` hosts.
pub fn arguments(hosts: usize, link: &Link) -> [String; 5] {
    let Link { delay_ms, rate_bits, loss_percent } = link;
    ["relay".into(), hosts.to_string(), delay_ms.to_string(), rate_bits.to_string(), loss_percent.to_string()]
}

/// Passes packets on until the process is killed. Writes a line when it listens.
pub fn run(args: &[&str]) -> ExitCode {
    let numbers: Vec<f64> = args.iter().filter_map(|arg| arg.parse().ok()).collect();
    let &[hosts, delay_ms, rate_bits, loss_percent] = &numbers[..] else { return ExitCode::from(2) };
    let link = Link { delay_ms, rate_bits, loss_percent };
    match relay(hosts as usize, &link) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the relay: {error}");
            ExitCode::FAILURE
        }
    }
}

fn relay(hosts: usize, link: &Link) -> std::io::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT))?;
    println!("ready");
    let (sender, packets) = mpsc::channel();
    let outgoing = socket.try_clone()?;
    std::thread::spawn(move || send_in_time(&outgoing, &packets));
    let places: Vec<SocketAddr> = (0..hosts).map(|host| (tunnel_address(host), PORT).into()).collect();
    let mut cables: Vec<Cable> = (0..hosts).map(Cable::new).collect();
    let mut buffer = [0; PACKET];
    let mut number = 0u64;
    loop {
        let (bytes, from) = socket.recv_from(&mut buffer)?;
        let packet = &buffer[..bytes];
        let Some(host) = places.iter().position(|place| place.ip() == from.ip()) else { continue };
        let Some(due) = cables[host].due(Instant::now(), bytes, link) else { continue };
        for to in receivers(packet, host, hosts) {
            number += 1;
            let scheduled = Scheduled { due, number, to: places[to], packet: packet.into() };
            if sender.send(Reverse(scheduled)).is_err() {
                return Ok(());
            }
        }
    }
}

/// The hosts to which a packet of `from` goes: the one that it is for, or all others.
fn receivers(packet: &[u8], from: usize, hosts: usize) -> Vec<usize> {
    let to = match packet.get(HEADER..HEADER + 6) {
        Some(&[2, 0, 0, 0, high, low]) => Some(usize::from(high) << 8 | usize::from(low)),
        _ => None,
    };
    (0..hosts).filter(|host| *host != from && to.is_none_or(|to| to == *host)).collect()
}

/// Outgoing cable of one host.
struct Cable {
    /// When the last packet has left.
    free: Option<Instant>,
    random: u64,
}

impl Cable {
    fn new(host: usize) -> Cable {
        Cable { free: None, random: 0x9e37_79b9_7f4a_7c15 ^ host as u64 }
    }

    /// When a packet arrives that comes `now`; None if it is lost.
    fn due(&mut self, now: Instant, bytes: usize, link: &Link) -> Option<Instant> {
        if self.fraction() * 100.0 < link.loss_percent {
            return None;
        }
        let begin = self.free.map_or(now, |free| free.max(now));
        if begin - now > QUEUE {
            return None;
        }
        let takes = Duration::from_secs_f64(bytes as f64 * 8.0 / link.rate_bits);
        self.free = Some(begin + takes);
        Some(begin + takes + Duration::from_secs_f64(link.delay_ms / 1e3))
    }

    /// The next random number from 0 to 1 (SplitMix64).
    fn fraction(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A packet on its way; ordered by the time of its arrival.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Scheduled {
    due: Instant,
    /// Packets of the same time keep their order.
    number: u64,
    to: SocketAddr,
    packet: Box<[u8]>,
}

/// Sends every packet when it is due.
fn send_in_time(socket: &UdpSocket, packets: &mpsc::Receiver<Reverse<Scheduled>>) {
    let mut waiting: BinaryHeap<Reverse<Scheduled>> = BinaryHeap::new();
    loop {
        let now = Instant::now();
        while let Some(Reverse(next)) = waiting.peek()
            && next.due <= now
        {
            // A packet that the system does not take is lost, as on a cable.
            let _ = socket.send_to(&next.packet, next.to);
            waiting.pop();
        }
        let next = waiting.peek().map(|Reverse(next)| next.due);
        let received = match next {
            Some(due) => packets.recv_timeout(due.saturating_duration_since(Instant::now())),
            None => packets.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match received {
            Ok(packet) => waiting.push(packet),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Address of the end of host `number`'s tunnel.
pub fn tunnel_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 78, (number / 200) as u8, (number % 200 + 1) as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_leave_at_the_rate_arrive_after_the_delay_and_are_lost_as_often_as_asked() {
        let now = Instant::now();
        let link = Link { delay_ms: 5.0, rate_bits: 1e6, loss_percent: 0.0 };
        let mut cable = Cable::new(0);
        let times: Vec<_> = (0..60).filter_map(|_| cable.due(now, 125, &link)).collect();
        // Each takes a millisecond to leave. The one that would wait longer than the queue allows, and all after it, are lost.
        assert_eq!(times.len(), 51);
        for (index, due) in times.iter().enumerate() {
            assert_eq!(*due - now, Duration::from_millis(6 + index as u64));
        }
        let lossy = Link { delay_ms: 0.0, rate_bits: f64::INFINITY, loss_percent: 1.0 };
        let lost = (0..100_000).filter(|_| cable.due(now + QUEUE * 9, 125, &lossy).is_none()).count();
        assert!((900..1100).contains(&lost), "{lost}");
    }

    #[test]
    fn frames_go_to_the_host_of_their_address_and_broadcasts_to_all_others() {
        let packet = |address: [u8; 6]| [&[0; HEADER][..], &address, &[0; 20]].concat();
        assert_eq!(receivers(&packet([2, 0, 0, 0, 0, 2]), 0, 4), [2]);
        assert_eq!(receivers(&packet([255; 6]), 1, 4), [0, 2, 3]);
        assert!(receivers(&packet([2, 0, 0, 0, 1, 0]), 0, 4).is_empty());
        assert_eq!(hardware_address(258), "02:00:00:00:01:02");
    }
}
