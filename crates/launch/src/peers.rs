//! Exchange of a launcher with the launchers of other hosts while it waits for its ranks.
//!
//! A failure is reported by the launcher of the host where it happened, which sees how a process ended. Ranks of other hosts
//! may see a closed connection before this report arrives; then the report corrects what they said.

use std::time::{Duration, Instant};

use phalanx_collectives::Blame;

use crate::control::{ControlPlane, Event, FailureReport, Message, Parting};
use crate::failure::Failure;
use crate::watch::{TELL_EVERY, Watch};

/// Time for which a failure of another host's rank waits for the report of its launcher.
const CORRECTION: Duration = Duration::from_millis(500);

impl Watch<'_> {
    /// Returns whether the ranks of other hosts still run, or a launcher may still report why the job failed.
    pub(crate) fn waits_for_others(&mut self) -> bool {
        let Some(plane) = &self.plane else { return false };
        match (&self.failure, self.failed_at) {
            (Some(failure), Some(at)) => !failure.is_first_hand && at.elapsed() < CORRECTION,
            _ => {
                let own = plane.own_id();
                if self.ended.insert(own) {
                    plane.broadcast(&Message::RanksEnded(own, true));
                }
                !self.all_ended()
            }
        }
    }

    /// Returns whether the ranks of all hosts, also of this one, have ended well.
    fn all_ended(&self) -> bool {
        self.plane
            .as_ref()
            .is_some_and(|plane| plane.hosts().iter().all(|host| self.ended.contains(&host.id)))
    }

    /// Takes in what other launchers have said; returns the first reason to end the job.
    pub(crate) fn hear(&mut self) -> Option<Failure> {
        let events = self.plane.as_mut()?.events();
        let mut first: Option<Failure> = None;
        for event in events {
            let failure = match event {
                Event::Message(_, Message::Activity(states)) => {
                    states.iter().for_each(|(rank, state)| self.processes.job.mirror(*rank, state));
                    None
                }
                Event::Message(_, Message::Stop) if !self.stopping => {
                    self.ask_to_stop();
                    None
                }
                Event::Message(_, Message::RanksEnded(host, true)) => {
                    self.ended.insert(host);
                    None
                }
                Event::Message(_, Message::Failed(report)) => self.failure_of(report),
                // That of host 0 has said its last word, and may leave, when all ranks have ended well. Its word and its end may have come
                // together with the report of that; they are for who asks next.
                event @ (Event::Lost(0, _) | Event::Message(0, Message::GivenUp(_))) if self.all_ended() => {
                    self.plane.as_mut()?.keep(event);
                    None
                }
                // A launcher whose ranks have ended well may leave.
                Event::Lost(host, _) if self.ended.contains(&host) && host != 0 => None,
                Event::Lost(host, why) => self.lost(host, &format!("its connection ended: {why}")),
                Event::Message(host, Message::GivenUp(why)) => {
                    let reason = format!("its launcher has given up: {why}");
                    self.lost(host, "").map(|failure| Failure { reason, ..failure })
                }
                Event::Message(..) => None,
            };
            first = match (first, failure) {
                (Some(first), Some(failure)) if !first.is_first_hand && failure.is_first_hand => {
                    Some(failure)
                }
                (None, failure) => failure,
                (first, _) => first,
            };
        }
        first.or_else(|| self.silent())
    }

    /// A host whose launcher has not been heard for the timeout.
    fn silent(&mut self) -> Option<Failure> {
        let limit = self.processes.timeout;
        let plane = self.plane.as_mut()?;
        let (host, time) = plane.silent(limit).into_iter().next()?;
        plane.give_up(host);
        let setting = self.hooks.timeout_setting(limit);
        let why = format!(
            "its launcher has sent nothing for {:.1} s ({setting}): it is stopped, or the network is cut",
            time.as_secs_f64()
        );
        self.lost(host, &why)
    }

    /// The failure of a host that cannot be reached any more; of one that runs no ranks of the job, a line for the user.
    fn lost(&self, host: usize, why: &str) -> Option<Failure> {
        let plane = self.plane.as_ref()?;
        let Some(number) = plane.number(host) else {
            self.hooks.note(&lost_without_ranks(plane, host, why));
            return None;
        };
        let ranks = plane.ranks().ranks(number).take(4);
        let activities: Vec<String> =
            ranks.map(|rank| format!("rank {rank}: {}", self.processes.job.last_activity(rank))).collect();
        Some(lost_host(plane, number, why, activities.join("; ")))
    }

    /// The failure that another launcher has reported; what it says is checked.
    fn failure_of(&self, report: FailureReport) -> Option<Failure> {
        let plane = self.plane.as_ref()?;
        let FailureReport { reporter, rank, reason, activity, host_lost, blame } = report;
        if rank >= plane.ranks().world_size() || plane.number(reporter).is_none() {
            return None;
        }
        if !host_lost && plane.host_of(rank) == plane.own_id() {
            // Ranks elsewhere wait for a rank of this host, whose process only this launcher sees.
            let failure = Failure::new(rank, reason, self.processes.job.last_activity(rank));
            let mut failure = Failure { blame, ..failure };
            self.place(&mut failure);
            return Some(failure);
        }
        let is_first_hand = host_lost || plane.host_of(rank) == reporter;
        let failure = Failure::new(rank, reason, activity);
        let mut failure = Failure { is_remote: true, host_lost, blame, ..failure };
        self.place(&mut failure);
        failure.is_first_hand = is_first_hand;
        Some(failure)
    }

    /// Adds the host to what names a failed rank.
    pub(crate) fn place(&self, failure: &mut Failure) {
        let Some(plane) = &self.plane else { return };
        if failure.rank >= plane.ranks().world_size() {
            return;
        }
        let host = plane.host_of(failure.rank);
        let between = match failure.blame {
            Blame::Link { peer } if usize::from(peer) < plane.ranks().world_size() => {
                Some(plane.host_of(peer.into()))
            }
            _ => None,
        };
        failure.place = match (failure.host_lost, between.filter(|other| *other != host)) {
            (true, _) => plane.describe(host).into(),
            (false, Some(other)) => {
                let [one, other] = [host.min(other), host.max(other)].map(|host| plane.describe(host));
                format!("the network between {one} and {other}").into()
            }
            (false, None) => format!("rank {} on {}", failure.rank, plane.describe(host)).into(),
        };
        if !failure.is_remote {
            failure.is_first_hand = host == plane.own_id();
        }
    }

    /// Tells the other launchers why the job ends.
    pub(crate) fn report(&self, failure: &Failure) {
        let Some(plane) = &self.plane else { return };
        // What another launcher has said is passed on by that of host 0, except that a host is lost, which it sees itself.
        if failure.is_remote && !failure.host_lost {
            return;
        }
        plane.broadcast(&Message::Failed(FailureReport {
            reporter: plane.own_id(),
            rank: failure.rank,
            reason: failure.reason.clone(),
            activity: failure.activity.to_string(),
            host_lost: failure.host_lost,
            blame: failure.blame,
        }));
    }

    /// Takes a better report in the place of what the job ended with.
    pub(crate) fn correct(&mut self, heard: Option<Failure>) {
        let is_first_hand = self.failure.as_ref().is_some_and(|failure| failure.is_first_hand);
        if let Some(failure) = heard.filter(|heard| heard.is_first_hand && !is_first_hand) {
            self.report(&failure);
            self.failure = Some(failure);
        }
    }

    pub(crate) fn pass_on_stop(&self) {
        if let Some(plane) = &self.plane {
            plane.broadcast(&Message::Stop);
        }
    }

    /// Tells the other launchers what the ranks of this host do. Also what it told before: a rank that gives signs of life has
    /// been silent for the same number of milliseconds whenever a state is taken in step with them, and others would take it for
    /// stopped if they were not told again.
    pub(crate) fn tell_states(&mut self, now: Instant) {
        let Some(plane) = &self.plane else { return };
        if now.saturating_duration_since(self.told_at) < TELL_EVERY {
            return;
        }
        self.told_at = now;
        let job = &self.processes.job;
        plane.broadcast(&Message::Activity(job.ranks().map(|rank| (rank, job.activity(rank))).collect()));
    }

    /// Says that the ranks of this host have ended.
    pub(crate) fn tell_end(&self) {
        if let (Some(plane), Some(_)) = (&self.plane, &self.failure) {
            plane.broadcast(&Message::RanksEnded(plane.own_id(), false));
        }
    }
}

/// The failure of the job when the host with this number is lost. `activity`: what its ranks did last, as far as it is known.
pub fn lost_host(plane: &ControlPlane, number: usize, why: &str, activity: String) -> Failure {
    let ranks = plane.ranks().ranks(number);
    let which = match ranks.len() {
        1 => format!("rank {}", ranks.start),
        _ => format!("ranks {} to {}", ranks.start, ranks.end - 1),
    };
    let place = plane.describe(plane.hosts()[number].id);
    let failure = Failure::new(ranks.start, format!("{place} is lost, with {which}: {why}"), activity);
    Failure { is_remote: true, host_lost: true, place: place.into(), ..failure }
}

fn lost_without_ranks(plane: &ControlPlane, host: usize, why: &str) -> String {
    format!("{} is lost, and the job goes on, as it runs no ranks of it: {why}", plane.describe(host))
}

/// Waits for what other launchers say to the program of this one. When `stop` says that this launcher's user asks for the end, or
/// another launcher's has, host 0 ends the job; the others ask it to, and wait for its answer. `note` gets lines for the user.
///
/// # Errors
/// When the connection with a launcher is lost, or it was silent for `silence`, unless its host runs no ranks of the job; when the
/// job is to end.
pub fn receive_program(
    plane: &mut ControlPlane,
    silence: Duration,
    stop: &dyn Fn() -> bool,
    note: &dyn Fn(&str),
) -> Result<Vec<(usize, Vec<u8>)>, Parting> {
    let mut asked = false;
    let stopped = |asked: bool, parting: Parting| match asked {
        true => Parting::Stopped("this host was asked to stop".to_string()),
        false => parting,
    };
    // Whether the job cannot do without this host: host 0 knows which run ranks of it, and the others need host 0.
    let is_needed = |plane: &ControlPlane, host: usize| plane.own_id() != 0 || plane.number(host).is_some();
    loop {
        for event in plane.events_before_program() {
            match event {
                Event::Message(_, Message::Refused(reason)) => {
                    return Err(Parting::Failed(format!(
                        "host 0 does not take this host into the job: {reason}"
                    )));
                }
                Event::Message(_, Message::GivenUp(reason)) => {
                    let parting = Parting::Failed(format!("host 0 has given up: {reason}"));
                    return Err(stopped(asked, parting));
                }
                Event::Message(_, Message::Stopped(who)) => return Err(Parting::Stopped(who)),
                Event::Message(host, Message::Stop) if plane.own_id() == 0 => {
                    return Err(Parting::Stopped(format!("{} was asked to stop", plane.describe(host))));
                }
                Event::Message(..) => {}
                Event::Lost(host, why) if is_needed(plane, host) => {
                    return Err(stopped(asked, Parting::Lost { host, name: plane.describe(host), why }));
                }
                Event::Lost(host, why) => note(&lost_without_ranks(plane, host, &why)),
            }
        }
        let messages = plane.take_for_program();
        if !messages.is_empty() {
            return Ok(messages);
        }
        if stop() && !asked {
            asked = true;
            plane.broadcast(&Message::Stop);
            if plane.own_id() == 0 {
                return Err(stopped(asked, Parting::Failed(String::new())));
            }
        }
        if plane.connected().is_empty() {
            let why = "the launchers of the other hosts are gone".to_string();
            return Err(stopped(asked, Parting::Failed(why)));
        }
        if let Some((host, time)) = plane.silent(silence).into_iter().next() {
            let why = format!(
                "it has sent nothing for {:.1} s: it is stopped, or the network is cut",
                time.as_secs_f64()
            );
            plane.give_up(host);
            if is_needed(plane, host) {
                return Err(Parting::Lost { host, name: plane.describe(host), why });
            }
            note(&lost_without_ranks(plane, host, &why));
        }
        plane.wait(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use phalanx_collectives::HostJob;
    use phalanx_collectives::secure::{Protection, Secret};

    use super::*;
    use crate::control::{Introduction, Meeting, connect};
    use crate::processes::RankProcesses;

    const LIMIT: Duration = Duration::from_secs(30);

    /// The control planes of two hosts with a rank each.
    fn planes() -> [ControlPlane; 2] {
        let (secret, meeting) = (Secret::generate().unwrap(), Meeting::listen("127.0.0.1", 0).unwrap());
        let port = meeting.port();
        let own = |host| {
            let (name, machine, job, about) =
                (format!("node{host}"), String::new(), String::new(), String::new());
            Introduction { name, machine, host, hosts: 2, ranks: 1, build: "test", job, about }
        };
        std::thread::scope(|scope| {
            let member = scope.spawn(|| {
                let known = || Ok(Some(secret.clone()));
                connect(("127.0.0.1", port), &known, &own(1), Protection::Encrypted, LIMIT, &|_| ()).unwrap()
            });
            let leader = meeting.gather(own(0), &secret, Protection::Encrypted, LIMIT, &|_| (), &|| None);
            let (leader, mut member) = (leader.unwrap().plane, member.join().unwrap().plane);
            member.set_hosts(leader.hosts().to_vec());
            [leader, member]
        })
    }

    /// Messages that the launcher of host 1 receives for its program.
    type Said = Result<Vec<(usize, Vec<u8>)>, Parting>;

    /// Failure and messages of the launcher of host 1 when its rank has ended well, and host 0 sends `last` and is gone before
    /// host 1 looks.
    fn after(last: &[Message]) -> (Option<String>, Said) {
        let [leader, mut member] = planes();
        let job = HostJob::on_host(&member.ranks(), 1).unwrap();
        let mut processes = RankProcesses::new(job, LIMIT);
        let failure = {
            let mut watch = Watch::new(&mut processes, &(), Some(&mut member));
            assert!(watch.waits_for_others());
            last.iter().for_each(|message| leader.send(1, message));
            drop(leader);
            let start = Instant::now();
            // All of it comes at once: a link that has ended has nothing more to bring.
            while !watch.plane.as_ref().unwrap().links_have_ended() {
                assert!(start.elapsed() < LIMIT, "the connection ends");
                std::thread::sleep(Duration::from_millis(1));
            }
            watch.hear().map(|failure| failure.to_string())
        };
        (failure, receive_program(&mut member, LIMIT, &|| false, &|_| ()))
    }

    #[test]
    fn the_last_word_of_host_0_is_heard_though_its_connection_has_ended() {
        let ended = Message::RanksEnded(0, true);
        let (failure, said) = after(&[ended.clone(), Message::Program(b"finish".to_vec())]);
        assert_eq!((failure, said), (None, Ok(vec![(0, b"finish".to_vec())])));
        let (failure, said) = after(&[ended.clone(), Message::GivenUp("the disk is full".into())]);
        assert_eq!(failure, None);
        assert_eq!(said.unwrap_err().to_string(), "host 0 has given up: the disk is full");
        // Without a last word it is lost, and so it is while its ranks run.
        let (failure, said) = after(&[ended]);
        assert_eq!(failure, None);
        assert!(said.unwrap_err().to_string().contains("the launcher of host 0 (node0) is gone"));
        let (failure, _) = after(&[]);
        assert!(failure.unwrap().contains("host 0 (node0) is lost"));
        let (failure, _) = after(&[Message::GivenUp("the disk is full".into())]);
        assert!(
            failure.unwrap().contains("host 0 (node0) failed: its launcher has given up: the disk is full")
        );
    }

    /// Ranks of both hosts live, and nothing passes between them: the host of either rank names the network, as the other does.
    #[test]
    fn a_cut_that_another_host_reports_of_an_own_rank_is_named_with_both_hosts() {
        for (rank, peer) in [(0, 1), (1, 0)] {
            let (reason, activity) = ("nothing passes".to_string(), String::new());
            let blame = Blame::Link { peer };
            let report = FailureReport { reporter: 0, rank, reason, activity, host_lost: false, blame };
            let (failure, _) = after(&[Message::Failed(report)]);
            let failure = failure.unwrap();
            let named = "the network between host 0 (node0) and host 1 (node1) failed: nothing passes";
            assert!(failure.starts_with(named), "rank {rank}: {failure}");
        }
    }
}
