//! The time of messages and collectives over the links of a machine.

use crate::links::units_of;
use crate::machine::Machine;
use crate::trace::{Collective, CollectiveOp};

impl Machine {
    /// Devices that links join; `None` for any number.
    pub fn joined_devices(&self) -> Option<usize> {
        match self.links.last() {
            Some(link) => link.devices,
            None => Some(1),
        }
    }

    /// Seconds of a collective that has the links for itself; `None` where no link joins its ranks. Among one rank nothing is sent.
    pub fn collective_s(&self, collective: &Collective) -> Option<f64> {
        Some(self.link_use(collective)?.seconds())
    }

    /// What a collective takes of the links.
    pub(crate) fn link_use(&self, collective: &Collective) -> Option<LinkUse> {
        let Collective { op, members, world_size, count, dtype, sent_bytes, .. } = collective;
        let message_bytes = count * dtype.bytes() as u64;
        if members.is_empty() {
            // The group of all ranks does not list them.
            let all: Vec<usize> = (0..*world_size).collect();
            return self.link_use_of(*op, &all, message_bytes, *sent_bytes);
        }
        self.link_use_of(*op, members, message_bytes, *sent_bytes)
    }

    /// Seconds of an operation among the world ranks `members`, by the bytes of the whole buffer and those that a rank sends.
    pub fn collective_of_bytes_s(
        &self,
        op: CollectiveOp,
        members: &[usize],
        message_bytes: u64,
        sent_bytes: u64,
    ) -> Option<f64> {
        Some(self.link_use_of(op, members, message_bytes, sent_bytes)?.seconds())
    }

    fn link_use_of(
        &self,
        op: CollectiveOp,
        members: &[usize],
        message_bytes: u64,
        sent_bytes: u64,
    ) -> Option<LinkUse> {
        let ranks = members.len();
        if ranks == 1 {
            return Some(LinkUse::default());
        }
        let known = self.collectives.iter().find(|known| known.op == op && known.ranks == ranks);
        match known {
            Some(known) => Some(LinkUse { levels: Vec::new(), steps_s: known.time.seconds(message_bytes) }),
            None => self.levels_used(op, members, sent_bytes),
        }
    }

    /// The use of all levels that a group spans, of which a rank sends so many bytes.
    fn levels_used(&self, op: CollectiveOp, members: &[usize], sent_bytes: u64) -> Option<LinkUse> {
        let (mut used, mut below) = (LinkUse::default(), 1);
        for link in &self.links {
            let (units, together) = units_of(members, below);
            let senders = match op {
                CollectiveOp::Send | CollectiveOp::Recv => 1,
                _ => together as u64,
            };
            used.levels.push(link.seconds(sent_bytes.div_ceil(senders)));
            used.steps_s += link.steps_s(op, units);
            match link.devices {
                Some(devices) if units_of(members, devices).0 > 1 => below = devices,
                _ => return Some(used),
            }
        }
        None
    }
}

/// What a collective takes of the links.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LinkUse {
    /// Seconds of each level from the nearest on, all at once.
    pub levels: Vec<f64>,
    /// Seconds that its steps add.
    pub steps_s: f64,
}

impl LinkUse {
    /// Seconds where nothing else uses the links.
    pub(crate) fn seconds(&self) -> f64 {
        self.levels.iter().copied().fold(0.0, f64::max) + self.steps_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::links::Link;
    use crate::transfer::TransferRate;

    fn link(devices: Option<usize>, gb_per_s: f64) -> Link {
        let time = TransferRate::Line { latency_us: 0.0, gb_per_s };
        Link { name: "link".into(), devices, shared_by: 1, time, step_us: 0.0 }
    }

    fn hosts_of_four() -> Machine {
        let value = serde_json::json!({
            "name": "hosts of four", "memory_bytes": 1, "host_bytes": 1, "memory_gb_per_s": 1.0, "host_gb_per_s": 1.0,
            "copy": { "latency_us": 0.0, "gb_per_s": 1.0 }, "tflops": {}, "devices_per_host": 4,
        });
        let links = vec![link(Some(4), 8.0), link(None, 1.0)];
        let machine = Machine { links, ..serde_json::from_value(value).unwrap() };
        machine.check().unwrap();
        machine
    }

    #[test]
    fn groups_of_several_hosts_use_the_network_of_their_devices() {
        let machine = hosts_of_four();
        let seconds = |members: &[usize]| {
            machine.collective_of_bytes_s(CollectiveOp::AllGather, members, 9, 8_000_000_000)
        };
        for (members, expected) in [
            (&[0][..], 0.0),
            (&[0, 1, 2, 3], 1.0),
            (&[4, 7], 1.0),
            // One, two and four devices of each host send to the other.
            (&[0, 4], 8.0),
            (&[0, 1, 4, 5], 4.0),
            (&[0, 1, 2, 3, 4, 5, 6, 7], 2.0),
            // A host with one of them is the slowest.
            (&[0, 1, 2, 3, 4], 8.0),
        ] {
            assert_eq!(seconds(members), Some(expected), "{members:?}");
        }
        let message = machine.collective_of_bytes_s(CollectiveOp::Send, &[0, 1, 4, 5], 9, 1_000_000_000);
        assert_eq!(message, Some(1.0), "a message has one sender");
        assert_eq!([1, 4, 5, 9].map(|ranks| machine.hosts_of(ranks)), [1, 1, 2, 3]);
        let alone = Machine { links: vec![link(Some(4), 8.0)], ..machine.clone() };
        let among = |members| alone.collective_of_bytes_s(CollectiveOp::AllGather, members, 9, 9);
        assert_eq!((among(&[3, 4]), among(&[2, 3]).is_some()), (None, true));
        assert_eq!([machine.joined_devices(), alone.joined_devices()], [None, Some(4)]);
    }

    /// Four devices of a host share one network card: each has a quarter of it, and all together the whole.
    #[test]
    fn devices_share_what_is_shared_and_steps_take_their_time() {
        let mut machine = hosts_of_four();
        machine.links[1].shared_by = 4;
        let seconds = |machine: &Machine, op, members: &[usize]| {
            machine.collective_of_bytes_s(op, members, 9, 8_000_000_000).unwrap()
        };
        let (gather, sum) = (CollectiveOp::AllGather, CollectiveOp::AllReduce);
        assert_eq!(seconds(&machine, gather, &[0, 4]), 32.0);
        assert_eq!(seconds(&machine, gather, &[0, 1, 2, 3, 4, 5, 6, 7]), 8.0);
        machine.links[1].step_us = 1e6;
        let every_fourth: Vec<usize> = (0..16).map(|host| 4 * host).collect();
        assert_eq!(seconds(&machine, gather, &every_fourth), 32.0 + 15.0);
        assert_eq!(seconds(&machine, sum, &every_fourth), 32.0 + 8.0);
    }

    #[test]
    fn levels_that_do_not_nest_are_refused() {
        for (links, words) in [
            (vec![link(None, 1.0), link(Some(4), 1.0)], "nearest to the farthest"),
            (vec![link(Some(4), 1.0), link(Some(6), 1.0)], "multiples"),
            (vec![link(Some(0), 1.0)], "devices"),
            (vec![Link { shared_by: 0, ..link(None, 1.0) }], "shared_by"),
            (vec![link(None, 0.0)], "gb_per_s"),
        ] {
            let wrong = Machine { links, ..hosts_of_four() }.check().unwrap_err();
            assert!(wrong.key == "links" && wrong.expected.contains(words), "{wrong}");
        }
    }
}
