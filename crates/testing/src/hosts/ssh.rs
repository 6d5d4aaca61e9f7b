//! An ssh server on every host, with keys of its own, and an `ssh` that uses them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::namespaces::address;

use crate::hosts::network::Linked;

/// The servers of all hosts; dropping it ends them.
pub struct Servers {
    servers: Vec<Child>,
    /// A folder with the program `ssh`, which reaches the hosts without a question.
    pub programs: PathBuf,
    /// The hostfile.
    pub hostfile: PathBuf,
}

impl Servers {
    /// Starts a server on each of `hosts` hosts, which offer `slots` ranks each. Files are made in `folder`.
    ///
    /// # Errors
    /// When OpenSSH is missing or a file cannot be written.
    pub fn start(network: &Linked, hosts: usize, slots: usize, folder: &Path) -> Result<Servers, String> {
        let programs = folder.join("programs");
        fs::create_dir_all(&programs).map_err(|error| format!("{}: {error}", programs.display()))?;
        let [host_key, key] = ["host_key", "key"].map(|name| folder.join(name));
        make_key(&host_key)?;
        make_key(&key)?;
        let path = |path: &Path| path.display().to_string();
        let write = |file: &Path, text: &str| {
            fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()))
        };
        let server = folder.join("sshd_config");
        write(
            &server,
            &format!(
                "HostKey {}\nAuthorizedKeysFile {}.pub\nStrictModes no\nUsePAM no\nPermitRootLogin yes\nPidFile none\n",
                path(&host_key),
                path(&key)
            ),
        )?;
        let client = folder.join("ssh_config");
        write(
            &client,
            &format!(
                "Host *\nIdentityFile {}\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n",
                path(&key)
            ),
        )?;
        let ssh = programs.join("ssh");
        write(&ssh, &format!("#!/bin/sh\nexec /usr/bin/ssh -F {} \"$@\"\n", path(&client)))?;
        fs::set_permissions(&ssh, fs::Permissions::from_mode(0o755)).map_err(|error| error.to_string())?;
        let hostfile = folder.join("hostfile");
        let lines: String = (0..hosts).map(|host| format!("{} slots={slots}\n", address(host))).collect();
        write(&hostfile, &lines)?;
        // The server demands this folder, which packages make at the first start of its service.
        let _ = fs::create_dir_all("/run/sshd");
        let start = |host: usize| {
            let mut command = network.host(host).command("/usr/sbin/sshd");
            command.args(["-D", "-e", "-f"]).arg(&server);
            command.stdin(Stdio::null()).stderr(Stdio::null());
            command.spawn().map_err(|error| format!("sshd (openssh-server): {error}"))
        };
        let servers = (0..hosts).map(start).collect::<Result<_, _>>()?;
        let servers = Servers { servers, programs, hostfile };
        (0..hosts).try_for_each(|host| wait_for_server(network, host))?;
        Ok(servers)
    }
}

/// Longest time that a server may take to start.
const SERVER_STARTS: Duration = Duration::from_secs(10);

/// A line of `/proc/net/tcp` has this for a socket that listens on port 22 of every address.
const LISTENING: &str = " 00000000:0016 00000000:0000 0A ";

impl Drop for Servers {
    fn drop(&mut self) {
        for server in &mut self.servers {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// Waits until a host's server accepts connections.
fn wait_for_server(network: &Linked, host: usize) -> Result<(), String> {
    let until = Instant::now() + SERVER_STARTS;
    while Instant::now() < until {
        let sockets = network.host(host).command("cat").arg("/proc/net/tcp").output();
        let sockets = sockets.map_err(|error| format!("cat: {error}"))?;
        if String::from_utf8_lossy(&sockets.stdout).lines().any(|line| line.contains(LISTENING)) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(format!("sshd of host {host} does not listen after {SERVER_STARTS:?}"))
}

fn make_key(file: &Path) -> Result<(), String> {
    let mut command = Command::new("ssh-keygen");
    command.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(file);
    let status = command.status().map_err(|error| format!("ssh-keygen (openssh-client): {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("ssh-keygen ended with {status}")) }
}
