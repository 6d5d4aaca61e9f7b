//! Limits of the system that are low, an environment that is odd, a working directory that is gone.
//!
//! A command succeeds with its usual result, or ends with an error. A limit on memory is drawn from above what
//! `phalanx --version` needs; an allocation that fails under it may end the program with Rust's own message.

use std::os::unix::fs::chown;
use std::path::Path;

use crate::hostile::Random;
use crate::reliability::command::{Ended, Invocation};
use crate::reliability::groups::pipes::prepared;
use crate::reliability::mesh::{ALONE, Mesh, PAIR};
use crate::reliability::trial::Trial;
use crate::reliability::world::{Case, World};

/// Commands that are tried; those of `train` are made from a mesh.
const COMMANDS: [&[&str]; 6] = [
    &["plan", "small.toml", "--json"],
    &["sample", "r", "--prompt", "rank", "--tokens", "8", "--json"],
    &["inspect", "r", "--verify", "--json"],
    &["export", "r", "--out", "hf"],
    &["tokenize", "--out", "t.bin", "text.txt"],
    &["import", "hf-made", "--run", "i"],
];

/// Users that run nothing else, to whom the limit of processes applies: one for each case that is under way.
const FIRST_USER: u32 = 61_000;

pub(crate) fn case(world: &World, random: &mut Random, number: usize) -> Trial {
    let setting = setting(world, random, number);
    let (fault, detail, result) = match setting {
        Ok(setting) => {
            let mesh = match random.below(3) {
                0 => Some(&ALONE),
                1 => Some(&PAIR),
                _ => None,
            };
            let words: Vec<String> = match mesh {
                Some(mesh) => mesh.train(&["--quiet"]),
                None => random.pick(&COMMANDS).iter().map(|word| word.to_string()).collect(),
            };
            let detail = format!("{}: {}", setting.shown, words.join(" "));
            (setting.fault, detail, world.case().and_then(|case| try_one(&case, &setting, mesh, words)))
        }
        Err(error) => ("preparation", String::new(), Err(error)),
    };
    Trial::new(fault, detail, result)
}

/// A setting of the system under which a command runs.
struct Setting {
    fault: &'static str,
    shown: String,
    /// Shell words before the program.
    before: String,
    variables: Vec<(&'static str, Option<String>)>,
    /// True if an allocation may fail.
    bounds_memory: bool,
    /// The user without rights that the command runs as.
    user: Option<u32>,
}

impl Setting {
    fn shell(fault: &'static str, before: String) -> Setting {
        let shown = before.clone();
        Setting { fault, shown, before, variables: Vec::new(), bounds_memory: false, user: None }
    }

    fn variable(name: &'static str, value: Option<String>) -> Setting {
        let shown = format!("{name} = {value:?}");
        let variables = vec![(name, value)];
        Setting { variables, shown, ..Setting::shell("odd environment", String::new()) }
    }
}

/// One of the settings, each about as often.
fn setting(world: &World, random: &mut Random, number: usize) -> Result<Setting, String> {
    let memory = |fault, letter: char, random: &mut Random| {
        let min = min_memory(world, letter)?;
        // Close to the smallest limit more often than far from it.
        let more = (random.fraction().powi(3) * 400_000.0) as usize;
        let backtrace = if random.chance(0.5) { "RUST_BACKTRACE=1 " } else { "" };
        let before = format!("ulimit -{letter} {};", min + more);
        let mut setting = Setting::shell(fault, before);
        if !backtrace.is_empty() {
            setting.variables.push(("RUST_BACKTRACE", Some("1".to_string())));
        }
        setting.bounds_memory = true;
        Ok::<Setting, String>(setting)
    };
    Ok(match number % 8 {
        0 => memory("ulimit -v", 'v', random)?,
        1 => memory("ulimit -d", 'd', random)?,
        2 => Setting::shell("ulimit -n", format!("ulimit -n {};", 4 + random.below(30))),
        3 => Setting::shell("ulimit -f", format!("ulimit -f {};", random.below(250))),
        4 => {
            // Not every shell has an option for it.
            let before = format!("exec prlimit --nproc={}", 1 + random.below(12));
            let mut setting = Setting::shell("ulimit -u", before);
            let user = FIRST_USER + (number % 1000) as u32;
            setting.user = rustix::process::geteuid().is_root().then_some(user);
            setting
        }
        5 => {
            let stacks = format!("ulimit -s {};", 128 + random.below(8000));
            let gone = "mkdir gone; cd gone; rmdir ../gone;".to_string();
            let others = ["umask 777;", "ulimit -c 0; ulimit -l 0;", "cd /;", "exec 0<&-;"];
            let before = match random.below(6) {
                0 => stacks,
                1 => gone,
                other => others[other - 2].to_string(),
            };
            Setting::shell("stack, working directory, umask, stdin", before)
        }
        _ => variable(random),
    })
}

fn variable(random: &mut Random) -> Setting {
    let isa = ["garbage", "AVX2", " portable", "portable,avx2", "1", "\u{fc}", "avx1024"];
    let value = |text: &str| Some(text.to_string());
    match random.below(8) {
        0 => Setting::variable("HOME", None),
        1 => Setting::variable("PATH", None),
        2 => Setting::variable("TMPDIR", value("no/such/folder")),
        3 => {
            Setting::variable("RUST_MIN_STACK", value(["x", "0", "1000", "99999999999999"][random.below(4)]))
        }
        4 => Setting::variable("LC_ALL", value("tlh_QO.KOI8-R")),
        5 => Setting::variable("TERM", value("nothing")),
        _ => Setting::variable("PHALANX_ISA", value(isa[random.below(isa.len())])),
    }
}

fn try_one(
    case: &Case<'_>,
    setting: &Setting,
    mesh: Option<&Mesh>,
    words: Vec<String>,
) -> Result<(), String> {
    let prepared = prepared(case.world)?;
    case.take(&prepared, "hf")?;
    std::fs::rename(case.path("hf"), case.path("hf-made")).map_err(|error| error.to_string())?;
    if mesh.is_none() {
        case.take(&prepared, "r")?;
    }
    let mut command = match setting.user {
        Some(user) => as_user(case, setting, user, &words)?,
        None if setting.before.is_empty() => case.phalanx(words),
        None if setting.before.starts_with("exec") => case.phalanx(words).in_shell(&setting.before, ""),
        None => case.phalanx(words).in_shell(&format!("{} exec", setting.before), ""),
    };
    for (name, value) in &setting.variables {
        command = command.environment(name, value.as_deref());
    }
    let ended = command.run()?;
    if setting.bounds_memory && allocation_failed(&ended) {
        return ended.bounded();
    }
    ended.orderly()?;
    match mesh {
        Some(mesh) if ended.code == Some(0) && case.path("r").exists() => {
            case.world.reference(mesh)?.is_equal(&case.path("r"))
        }
        _ => Ok(()),
    }
}

/// Returns whether the program ended because an allocation failed: with its own message, with that of the C library, or
/// because it could not be loaded.
fn allocation_failed(ended: &Ended) -> bool {
    let said = ["the system gives no more memory to this program", "Fatal glibc error"]
        .iter()
        .any(|words| ended.stderr.contains(words));
    said || (ended.code == Some(127) && ended.stderr.contains("shared libraries"))
}

/// The command as a user of its own, who has a copy of the program.
fn as_user(case: &Case<'_>, setting: &Setting, user: u32, words: &[String]) -> Result<Invocation, String> {
    let system = |error: std::io::Error| error.to_string();
    let program = case.world.prepared("program", |folder| {
        std::fs::copy(case.world.program(), folder.join("phalanx")).map(drop).map_err(system)
    })?;
    open_to_all(case.world.root()).and_then(|()| open_to_all(&program)).map_err(system)?;
    give(case.root(), user).map_err(system)?;
    // The limit counts processes of the user: set it before the change of user, which keeps it.
    let user = format!("--reuid={user} --regid={user} --clear-groups");
    let rights = "--no-new-privs --inh-caps=-all --bounding-set=-all";
    let before = format!("{} setpriv {user} {rights}", setting.before);
    Ok(Invocation::new(&program.join("phalanx"), case.root(), words.iter().cloned()).in_shell(&before, ""))
}

/// Makes a folder one that everybody may enter.
fn open_to_all(folder: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755))
}

/// Gives everything below `path` to the user.
fn give(path: &Path, user: u32) -> std::io::Result<()> {
    chown(path, Some(user), Some(user))?;
    if path.is_dir() {
        for entry in std::fs::read_dir(path)? {
            give(&entry?.path(), user)?;
        }
    }
    Ok(())
}

/// The smallest limit in KiB under which `phalanx --version` works.
fn min_memory(world: &World, letter: char) -> Result<usize, String> {
    let kept = world.prepared(&format!("min-{letter}"), |folder| {
        let works = |limit: usize| {
            let command = Invocation::new(world.program(), folder, ["--version"]);
            command
                .in_shell(&format!("ulimit -{letter} {limit}; exec"), "")
                .run()
                .map(|ended| ended.code == Some(0))
        };
        let (mut fails, mut suffices) = (0, 4 << 20);
        while suffices - fails > 256 {
            let middle = (fails + suffices) / 2;
            if works(middle)? { suffices = middle } else { fails = middle }
        }
        std::fs::write(folder.join("min"), suffices.to_string()).map_err(|error| error.to_string())
    })?;
    let text = std::fs::read_to_string(kept.join("min")).map_err(|error| error.to_string())?;
    text.parse().map_err(|_| format!("a limit: {text}"))
}
