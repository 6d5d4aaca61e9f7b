//! The leader's view of the hosts: prepares a start of the ranks on all of them, starts them, and waits for their end.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use phalanx_collectives::secure::Secret;
use phalanx_collectives::{Connections, HostJob, Hosts, Network, Wire};
use phalanx_launch::{ControlPlane, HostInfo, LocalLeader, Message, Parting, lost_host, receive_program};

use crate::configuration::kept_kernels;
use crate::host::environment::Environment;
use crate::host::host_kernels::HostKernels;
use crate::host::output::note;
use crate::host::signals::{STOPPED, Signals};
use crate::jobs::hosts::protocol::{FromLeader, FromMember, Preparation, decode, encode};
use crate::jobs::launch::{RankProcesses, Start};
use crate::jobs::rank_output::Output;
use crate::jobs::task::Task;
use crate::jobs::task_file;
use crate::plans::planned::Across;
use phalanx_train::RunPlan;

/// Time after which a launcher that says nothing counts as lost, before the run's own timeout is known: the default of that.
pub const SILENCE: Duration = Duration::from_secs(10);

/// The hosts of a job, as the launcher of host 0 leads them.
pub struct Team {
    plane: ControlPlane,
    /// Ranks that each host can run.
    capacity: Vec<HostInfo>,
    /// The address of this host by which the others reach it.
    address: IpAddr,
    secret: Secret,
    job: [u8; 16],
    epoch: u32,
    between: Between,
    helpers: Option<Arc<LocalLeader>>,
}

/// Settings of the communication between ranks of different hosts.
#[derive(Clone, Copy, Debug)]
pub struct Between {
    /// Transport of the bytes.
    pub wire: Wire,
    /// True if TCP is not encrypted.
    pub plaintext: bool,
    /// TCP connections between two ranks.
    pub streams: usize,
}

impl Team {
    /// The hosts that have met.
    ///
    /// # Errors
    /// A host that says of its processor what this one does not understand, and when the system gives no random number.
    pub fn new(plane: ControlPlane, address: IpAddr, secret: Secret, between: Between) -> Result<Team> {
        let capacity = plane.hosts().to_vec();
        if let Some(host) = capacity.iter().find(|host| HostKernels::of(host).is_none()) {
            bail!(
                "{} says of its processor what is not understood here: {:?}",
                plane.describe(host.id),
                host.about
            );
        }
        let random = Secret::generate().context("a random number for the job")?.to_bytes();
        let mut job = [0; 16];
        job.copy_from_slice(&random[..16]);
        Ok(Team { plane, capacity, address, secret, job, epoch: 0, between, helpers: None })
    }

    /// The same, where other processes start the other ranks of this host.
    #[must_use]
    pub fn with_starters(self, helpers: Option<Arc<LocalLeader>>) -> Team {
        Team { helpers, ..self }
    }

    /// Number of ranks of all hosts.
    pub fn world_size(&self) -> usize {
        self.capacity.iter().map(|host| host.ranks).sum()
    }

    /// Largest number of ranks on one machine.
    pub fn ranks_of_a_machine(&self) -> usize {
        let mut machines: BTreeMap<&str, usize> = BTreeMap::new();
        for host in &self.capacity {
            *machines.entry(&host.machine).or_default() += host.ranks;
        }
        machines.into_values().max().unwrap_or(1)
    }

    /// Layout of the ranks on the hosts, for plans.
    pub fn across(&self) -> Across {
        let Between { wire, plaintext, streams } = self.between;
        Across {
            hosts: Hosts::new(self.capacity.iter().map(|host| host.ranks).collect()),
            ranks_of_a_machine: self.ranks_of_a_machine(),
            connections: Connections { wire, streams, encrypted: !plaintext },
        }
    }

    /// The environment of this job, whose ranks all compute with kernels that the processors of all hosts have. Says so where
    /// some host could use others.
    pub fn kernels_of_all(&self, own: Environment) -> Environment {
        let (shared, line) = kept_kernels::on_hosts(own, &self.capacity);
        line.iter().for_each(|line| note(line));
        shared
    }

    /// The hosts in words: `4 ranks on 2 hosts: node1 (2), node2 (2)`.
    pub fn describe(&self) -> String {
        const SHOWN: usize = 8;
        let hosts = self.capacity.iter().take(SHOWN).map(|host| format!("{} ({})", host.name, host.ranks));
        let more = self.capacity.len().saturating_sub(SHOWN);
        let more = if more > 0 { format!(", and {more} more") } else { String::new() };
        format!(
            "{} ranks on {} hosts: {}{more}",
            self.world_size(),
            self.capacity.len(),
            hosts.collect::<Vec<_>>().join(", ")
        )
    }

    /// Does `work`, which prepares the run; the other hosts show what it says of its progress. When this launcher's user asks for the
    /// end meanwhile, or that of another host, all hosts are told and this process ends: nothing has begun that could be saved.
    pub fn while_preparing<T>(&mut self, signals: &Signals, work: impl FnOnce(&dyn Fn(&str)) -> T) -> T {
        const LOOK: Duration = Duration::from_millis(50);
        let plane = &mut self.plane;
        let (lines, said) = channel::<String>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                loop {
                    match said.recv_timeout(LOOK) {
                        Err(RecvTimeoutError::Disconnected) => return,
                        Err(RecvTimeoutError::Timeout) => {}
                        Ok(line) => {
                            let told = encode(&FromLeader::Progress { line }, &[]).expect("plain data");
                            plane.broadcast(&Message::Program(told));
                        }
                    }
                    let here = signals.came().then(|| "host 0 was asked to stop".to_string());
                    let Some(who) = here.or_else(|| plane.stop_asked()) else { continue };
                    note(&format!("stopped while host 0 prepared the run: {who}"));
                    plane.broadcast(&Message::Stopped(who));
                    plane.close();
                    std::process::exit(STOPPED.into());
                }
            });
            // The thread lives as long as this end of the channel.
            let result = work(&|line| lines.send(line.to_string()).unwrap_or_default());
            drop(lines);
            result
        })
    }

    /// Trains: starts the ranks of all hosts and waits until they have ended.
    ///
    /// # Errors
    /// A host that cannot start its ranks or does not see the run folder; and a
    /// [`Failure`](phalanx_launch::Failure) of a rank or a host.
    pub fn run(
        &mut self,
        run: &Path,
        task: &Task,
        plan: &RunPlan,
        output: &Output,
        signals: &Signals,
    ) -> Result<()> {
        let file = task_file::encode(task, Some(plan))?;
        // Answers to an announcement that came to nothing belong to no other start.
        let epoch = self.epoch;
        self.epoch += 1;
        let token = Token::write(run)?;
        let hosts = self.take_ranks(plan.spec.world_size())?;
        let mut job = HostJob::on_host(&hosts, 0).context("the memory that ranks share")?;
        let own = listen(&mut job, self.address)?;
        let preparation = Preparation {
            hosts: self.plane.hosts().to_vec(),
            run: std::path::absolute(run).context("the run folder")?,
            token: token.text(),
            job: self.job,
            epoch,
            stall_timeout_s: task.timeout().as_secs(),
            streams: self.between.streams,
            wire: self.between.wire,
        };
        self.tell_job(&FromLeader::Prepare(preparation), &[])?;
        let addresses = self.gather_addresses((&hosts, epoch), own, task.timeout(), signals)?;
        drop(token);
        self.tell_job(&FromLeader::Start { addresses: addresses.clone() }, &file)?;
        let network = Network {
            hosts,
            host: 0,
            job: self.job,
            epoch,
            secret: self.secret.clone(),
            addresses,
            plaintext: self.between.plaintext,
            streams: self.between.streams,
            wire: self.between.wire,
        };
        let output = &output.clone().on_host(self.capacity.first().map(|host| host.name.clone()));
        let start = Start {
            task: &file,
            network: Some(&network),
            timeout: task.timeout(),
            pin: task.pin(),
            output,
            helpers: self.helpers.clone(),
        };
        let ranks = RankProcesses::start_in(job, &start)?;
        ranks.wait_with(signals, &mut self.plane)?;
        Ok(())
    }

    /// Waits until every other host of this start has said where its ranks listen.
    fn gather_addresses(
        &mut self,
        (hosts, epoch): (&Hosts, u32),
        own: Vec<SocketAddr>,
        silence: Duration,
        signals: &Signals,
    ) -> Result<Vec<SocketAddr>> {
        let mut by_host = BTreeMap::from([(0, own)]);
        while by_host.len() < hosts.len() {
            let said = receive_program(&mut self.plane, silence, &|| signals.came(), &note);
            for (id, bytes) in said.map_err(|parting| self.failure_of(parting))? {
                // A host that runs no ranks of this start answers an earlier announcement.
                let Some(host) = self.plane.number(id) else { continue };
                match decode::<FromMember>(&bytes)?.0 {
                    FromMember::Ready { epoch: of, .. } | FromMember::Cannot { epoch: of, .. }
                        if of != epoch => {}
                    FromMember::Ready { addresses, .. } if addresses.len() == hosts.ranks(host).len() => {
                        by_host.insert(host, addresses);
                    }
                    FromMember::Ready { addresses, .. } => {
                        bail!("{} listens for {} ranks", self.plane.describe(id), addresses.len())
                    }
                    FromMember::Cannot { reason, .. } => {
                        bail!("{} cannot start its ranks: {reason}", self.plane.describe(id))
                    }
                }
            }
        }
        Ok(by_host.into_values().flatten().collect())
    }

    /// A host that is lost before its ranks have started is lost as later: the run may start again without it.
    fn failure_of(&self, parting: Parting) -> anyhow::Error {
        let Parting::Lost { host, why, .. } = &parting else { return parting.into() };
        match self.plane.number(*host) {
            None => parting.into(),
            Some(number) => {
                lost_host(&self.plane, number, why, "its ranks had not started".to_string()).into()
            }
        }
    }

    /// Says to the other launchers that the job is over: how it ended here.
    pub fn finish(self, ended: &Result<u8>) {
        let told = match ended {
            Ok(code) => self.tell_all(&FromLeader::Finish { code: *code }),
            Err(error) => {
                self.plane.broadcast(&Message::GivenUp(format!("{error:#}")));
                Ok(())
            }
        };
        if let Err(error) = told {
            note(&error.to_string());
        }
    }

    /// Divides the ranks of a start over the hosts: as many on each as it can run, in their order.
    fn take_ranks(&mut self, world_size: usize) -> Result<Hosts> {
        let mut left = world_size;
        let mut used = Vec::new();
        for host in &self.capacity {
            let ranks = host.ranks.min(left);
            left -= ranks;
            used.extend((ranks > 0).then(|| HostInfo { ranks, ..host.clone() }));
        }
        if left > 0 {
            bail!(
                "the configuration has {world_size} ranks, and the hosts run {}: {}; give each launcher its number of ranks \
                 with --nproc, or leave out parallel.ranks",
                self.world_size(),
                self.describe()
            );
        }
        self.plane.set_hosts(used);
        Ok(self.plane.ranks())
    }

    /// Forgets the hosts that are not connected any more. Returns the number of ranks that the others can run.
    pub fn leave_out_lost(&mut self) -> usize {
        let connected = self.plane.connected();
        self.capacity.retain(|host| host.id == self.plane.own_id() || connected.contains(&host.id));
        self.world_size()
    }

    /// Says something to the launchers of the hosts of this start.
    fn tell_job(&self, message: &FromLeader, blob: &[u8]) -> Result<()> {
        let bytes = Message::Program(encode(message, blob)?);
        self.plane.hosts().iter().skip(1).for_each(|host| self.plane.send(host.id, &bytes));
        Ok(())
    }

    /// Says something to all launchers.
    fn tell_all(&self, message: &FromLeader) -> Result<()> {
        self.plane.broadcast(&Message::Program(encode(message, &[])?));
        Ok(())
    }
}

/// Opens the listeners of the ranks of this host.
///
/// # Errors
/// The system's.
pub fn listen(job: &mut HostJob, address: IpAddr) -> Result<Vec<SocketAddr>> {
    let ranks = job.ranks();
    let addresses = ranks.map(|rank| job.listen(rank, address)).collect::<std::io::Result<Vec<_>>>();
    addresses.with_context(|| format!("the listeners of this host's ranks at {address}"))
}

/// Beginning of the name of a [`Token`]'s file, before the first digits of its content.
const TOKEN: &str = ".hosts-";

/// Digits of a token's content, and of its name.
const DIGITS: [usize; 2] = [32, 8];

/// Returns whether a file is the token of a start that was killed.
pub fn is_token(path: &Path, name: &str) -> bool {
    let digits = name.strip_prefix(TOKEN).filter(|digits| digits.len() == DIGITS[1]);
    let begins = |digits: &str| {
        let content = phalanx_system::files::read_text(path, DIGITS[0] as u64).unwrap_or_default();
        content.len() == DIGITS[0] && content.starts_with(digits)
    };
    digits.is_some_and(begins)
}

/// A file in the run folder for a moment, by which other hosts see that it is the same folder.
struct Token {
    path: std::path::PathBuf,
    name: String,
    content: String,
}

impl Token {
    fn write(run: &Path) -> Result<Token> {
        let random = Secret::generate().context("a random number")?.to_bytes();
        let content: String = random[..DIGITS[0] / 2].iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("{TOKEN}{}", &content[..DIGITS[1]]);
        let path = run.join(&name);
        phalanx_system::files::write(&path, &content)
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Token { path, name, content })
    }

    fn text(&self) -> (String, String) {
        (self.name.clone(), self.content.clone())
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        // What remains after a crash is removed by the next start, which makes the folder its own.
        let _ = std::fs::remove_file(&self.path);
    }
}
