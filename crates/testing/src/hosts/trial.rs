//! One trial: the run on one host, the same run over several hosts, and the comparison of their checkpoints.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::namespaces::{NETWORK, address};

use crate::hosts::arguments::{Arguments, Fault};
use crate::hosts::network::Linked;
use crate::hosts::ssh::Servers;

/// The port of the rendezvous; in a network of its own, nothing else uses it.
const PORT: u16 = 29400;

/// Time in which every launcher has to end after a fault: the default of `run.stall_timeout_s` and a second, and as much
/// again for a slow machine.
const NOTICED: Duration = Duration::from_secs(22);

/// Runs the trial; whether the runs ended as they should.
///
/// # Errors
/// When the trial could not be made: no root, a tool that is missing, a build that failed.
pub fn run(arguments: &Arguments) -> Result<bool, String> {
    let binary = arguments
        .binary
        .as_deref()
        .ok_or("give the binary: --binary FILE, or start with cargo xtask hosts")?;
    let binary = fs::canonicalize(binary).map_err(|error| format!("{}: {error}", binary.display()))?;
    let folder = Folder::new()?;
    let network = Linked::new(arguments.hosts, &arguments.link)?;
    let trial = Trial { arguments, binary, folder, network };
    match arguments.fault {
        None => trial.compare(),
        Some((fault, host, after)) => trial.fail(fault, host, after),
    }
}

struct Trial<'a> {
    arguments: &'a Arguments,
    binary: PathBuf,
    folder: Folder,
    network: Linked,
}

impl Trial<'_> {
    /// Trains on one host and on several: the checkpoints have to be equal.
    fn compare(&self) -> Result<bool, String> {
        let [one, many] = ["one", "many"].map(|name| self.folder.0.join(name));
        let ranks = self.arguments.hosts * self.arguments.nproc;
        println!("{ranks} ranks on one host:");
        let mut command = Command::new(&self.binary);
        command.arg("train").arg(&self.arguments.config);
        command.args(["--nproc", &ranks.to_string()]).arg("--run").arg(&one).args(&self.arguments.more);
        let status = command.status().map_err(|error| format!("{}: {error}", self.binary.display()))?;
        if !status.success() {
            return Err(format!("the run on one host ended with {status}"));
        }
        println!("\n{ranks} ranks on {} hosts:", self.arguments.hosts);
        let ends = wait(self.launch(&many)?, self.arguments.timeout);
        if let Some(host) = ends.iter().position(|end| !end.is_some_and(|status| status.success())) {
            println!("host {host}: {}", describe(ends[host]));
            return Ok(false);
        }
        for run in [&one, &many] {
            let (step, exposed) = times(&run.join("metrics.jsonl"));
            let name = run.file_name().unwrap_or_default().to_string_lossy().to_string();
            println!("{name:>5}: median step {step:.3} s, exposed communication {exposed:.3} s");
        }
        let differences = differing(&one.join("checkpoints"), &many.join("checkpoints"))?;
        match differences.first() {
            None => println!("the checkpoints of both runs are equal"),
            Some(first) => println!("{} files of the checkpoints differ, first {first}", differences.len()),
        }
        Ok(differences.is_empty())
    }

    /// Trains on several hosts and does `fault` to one of them: all launchers have to end, in time.
    fn fail(&self, fault: Fault, host: usize, after: Duration) -> Result<bool, String> {
        let mut launched = self.launch(&self.folder.0.join("many"))?;
        std::thread::sleep(after);
        for (number, launcher) in launched.launchers.iter_mut().enumerate() {
            if let Ok(Some(status)) = launcher.try_wait() {
                return Err(format!("the launcher of host {number} ended before the fault: {status}"));
            }
        }
        match fault {
            Fault::Cut => self.network.cut(host)?,
            Fault::Kill => {
                let _ = launched.launchers[host].kill();
            }
        }
        println!("{fault:?} of host {host} after {after:?}");
        let start = Instant::now();
        let ends = wait(launched, NOTICED);
        println!("all ended {:.1} s after the fault:", start.elapsed().as_secs_f64());
        let mut right = true;
        for (number, end) in ends.iter().enumerate() {
            println!("  host {number}: {}", describe(*end));
            right &= end.is_some_and(|status| !status.success());
        }
        Ok(right)
    }

    /// Starts the launcher of each host, or one that starts them over ssh.
    fn launch(&self, run: &Path) -> Result<Launched, String> {
        if self.arguments.mpirun {
            return self.mpirun(run);
        }
        if self.arguments.ssh {
            let Arguments { hosts, nproc, config, more, .. } = self.arguments;
            let servers = Servers::start(&self.network, *hosts, *nproc, &self.folder.0)?;
            let mut command = self.network.host(0).command(&self.binary.to_string_lossy());
            command.arg("launch").arg("--hostfile").arg(&servers.hostfile);
            command.arg(config).arg("--run").arg(run).args(more).stdin(Stdio::null());
            let path = std::env::var("PATH").unwrap_or_default();
            command.env("PATH", format!("{}:{path}", servers.programs.display()));
            let launcher = command.spawn().map_err(|error| format!("setpriv (util-linux): {error}"))?;
            return Ok(Launched { launchers: vec![launcher], _servers: Some(servers) });
        }
        let secret = self.folder.secret()?;
        let (hosts, nproc) = (self.arguments.hosts.to_string(), self.arguments.nproc.to_string());
        let rendezvous = format!("{}:{PORT}", address(0));
        let start = |host: usize| {
            let mut command = self.network.host(host).command(&self.binary.to_string_lossy());
            command.args(["launch", "--nnodes", &hosts, "--node-rank", &host.to_string()]);
            command.args(["--rendezvous", &rendezvous, "--nproc", &nproc]);
            command.arg("--secret-file").arg(&secret);
            command.arg(&self.arguments.config).arg("--run").arg(run).args(&self.arguments.more);
            command.stdin(Stdio::null());
            command.spawn().map_err(|error| format!("setpriv (util-linux): {error}"))
        };
        let launchers = (0..self.arguments.hosts).map(start).collect::<Result<_, _>>()?;
        Ok(Launched { launchers, _servers: None })
    }
}

impl Trial<'_> {
    /// Lets Open MPI's mpirun start the ranks of all hosts, over ssh.
    fn mpirun(&self, run: &Path) -> Result<Launched, String> {
        let Arguments { hosts, nproc, config, more, .. } = self.arguments;
        let servers = Servers::start(&self.network, *hosts, *nproc, &self.folder.0)?;
        let secret = self.folder.secret()?;
        let mut command = self.network.host(0).command("mpirun");
        command.args(["--allow-run-as-root", "--bind-to", "none", "--map-by", "slot"]);
        command.arg("--hostfile").arg(&servers.hostfile).args(["-n", &(hosts * nproc).to_string()]);
        command.args(["--mca", "plm_rsh_agent"]).arg(servers.programs.join("ssh"));
        for (name, value) in
            [("btl", "tcp,self"), ("btl_tcp_if_include", NETWORK), ("oob_tcp_if_include", NETWORK)]
        {
            command.args(["--mca", name, value]);
        }
        command.args(["-x", &format!("PHALANX_RENDEZVOUS={}:{PORT}", address(0))]);
        command.args(["-x", &format!("PHALANX_SECRET_FILE={}", secret.display())]);
        command.arg(&self.binary).arg("train").arg(config).arg("--run").arg(run);
        command.args(["--transport", "mpi"]).args(more).stdin(Stdio::null());
        let launcher = command.spawn().map_err(|error| format!("setpriv (util-linux): {error}"))?;
        Ok(Launched { launchers: vec![launcher], _servers: Some(servers) })
    }
}

/// The launchers of a run, and the ssh servers that they need.
struct Launched {
    launchers: Vec<Child>,
    _servers: Option<Servers>,
}

/// Waits for the launchers, for `limit` at most: how each has ended. Those that are left are killed.
fn wait(launched: Launched, limit: Duration) -> Vec<Option<ExitStatus>> {
    let Launched { mut launchers, _servers } = launched;
    let until = Instant::now() + limit;
    let mut ends = vec![None; launchers.len()];
    while ends.iter().any(Option::is_none) && Instant::now() < until {
        for (end, launcher) in ends.iter_mut().zip(&mut launchers) {
            if end.is_none() {
                *end = launcher.try_wait().ok().flatten();
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    for launcher in &mut launchers {
        let _ = launcher.kill();
        let _ = launcher.wait();
    }
    ends
}

fn describe(end: Option<ExitStatus>) -> String {
    end.map_or("did not end in time".to_string(), |status| status.to_string())
}

/// The median step time and the mean exposed communication of a run, in seconds.
fn times(metrics: &Path) -> (f64, f64) {
    let text = fs::read_to_string(metrics).unwrap_or_default();
    let value = |line: &str, key: &str| -> Option<f64> {
        let after = line.split_once(&format!("\"{key}\":"))?.1;
        after.split([',', '}']).next()?.trim().parse().ok()
    };
    let of = |key: &str| -> Vec<f64> { text.lines().filter_map(|line| value(line, key)).collect() };
    let (mut steps, exposed) = (of("step_s"), of("exposed_comm_s"));
    steps.sort_by(f64::total_cmp);
    let median = steps.get(steps.len() / 2).copied().unwrap_or(f64::NAN);
    (median, exposed.iter().sum::<f64>() / exposed.len() as f64)
}

/// The tensor files below `one` that `other` has not, or with other bytes.
fn differing(one: &Path, other: &Path) -> Result<Vec<String>, String> {
    let read = |path: &Path| fs::read_dir(path).map_err(|error| format!("{}: {error}", path.display()));
    let (mut differing, mut compared) = (Vec::new(), 0);
    for checkpoint in read(one)?.flatten() {
        for file in read(&checkpoint.path())?.flatten() {
            let name = Path::new(&checkpoint.file_name()).join(file.file_name());
            if name.extension().is_none_or(|extension| extension != "safetensors") {
                continue;
            }
            compared += 1;
            if fs::read(file.path()).ok() != fs::read(other.join(&name)).ok() {
                differing.push(name.display().to_string());
            }
        }
    }
    if compared == 0 { Err(format!("{} has no tensors to compare", one.display())) } else { Ok(differing) }
}

/// A temporary folder, removed with all that is in it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Folder, String> {
        let path = std::env::temp_dir().join(format!("phalanx-hosts-{}", std::process::id()));
        fs::create_dir(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Folder(path))
    }

    /// A file with a random secret, which only this user can read.
    fn secret(&self) -> Result<PathBuf, String> {
        let path = self.0.join("secret");
        let mut bytes = [0; 32];
        let made =
            File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut bytes)).and_then(|()| {
                let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
                let mut options = File::options();
                let mut file = options.write(true).create_new(true).mode(0o600).open(&path)?;
                std::io::Write::write_all(&mut file, hex.as_bytes())
            });
        made.map(|()| path.clone()).map_err(|error| format!("{}: {error}", path.display()))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_differ_or_are_missing_are_named() {
        let folder = std::env::temp_dir().join(format!("phalanx-hosts-test-{}", std::process::id()));
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (name, one, other) in [("a", "1", "1"), ("b", "1", "2")] {
            write(&format!("one/step-1/{name}.safetensors"), one);
            write(&format!("other/step-1/{name}.safetensors"), other);
        }
        write("one/step-1/c.safetensors", "1");
        write("one/step-1/manifest.json", "1");
        let mut names = differing(&folder.join("one"), &folder.join("other")).unwrap();
        names.sort();
        assert_eq!(names, ["step-1/b.safetensors", "step-1/c.safetensors"]);
        fs::create_dir_all(folder.join("empty")).unwrap();
        assert!(differing(&folder.join("empty"), &folder.join("one")).unwrap_err().contains("no tensors"));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn times_are_read_from_metrics() {
        let path = std::env::temp_dir().join(format!("phalanx-metrics-test-{}", std::process::id()));
        fs::write(
            &path,
            "{\"step_s\":3.0,\"exposed_comm_s\":0.5}\n{\"step_s\":1.0,\"exposed_comm_s\":1.5}\n{}\n",
        )
        .unwrap();
        assert_eq!(times(&path), (3.0, 1.0));
        fs::remove_file(path).unwrap();
    }
}
