//! Test files of some packages, built with the features of the whole workspace.
//!
//! `cargo test --package` would choose other features for some crates and build them, and all that stands on them, once more.

use std::env;
use std::ffi::OsString;
use std::io::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A test file: the folder of its package under `crates/`, the test program, and its module there; an empty one means all tests.
pub type TestFile<'a> = (&'a str, &'a str, &'a str);

/// Cargo, as it has started this program, without what `cargo run` tells of this program's own package: a build script that reads
/// such variables, as that of `ring` does, would run again, and everything that stands on it be built once more.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in env::vars_os() {
        if ["CARGO_PKG_", "CARGO_MANIFEST_"]
            .iter()
            .any(|own| name.as_encoded_bytes().starts_with(own.as_bytes()))
        {
            command.env_remove(name);
        }
    }
    command
}

/// A test file that was built.
#[derive(Debug, PartialEq, Eq)]
pub struct TestProgram {
    executable: PathBuf,
    /// The folder of its package, in which tests run.
    folder: PathBuf,
    /// Prefix of the names of its tests.
    prefix: String,
}

impl TestProgram {
    /// Runs its tests, or the one of this name, with variables of the environment; whether all passed.
    ///
    /// # Errors
    /// When it cannot be started, or has no such test.
    pub fn run(&self, only: Option<&str>, variables: &[(&str, OsString)]) -> Result<bool> {
        let names = match only {
            Some(name) => vec![format!("{}{name}", self.prefix)],
            None => self.names()?,
        };
        if names.is_empty() {
            return Err(Error::other(format!("{} has no tests {}*", self.executable.display(), self.prefix)));
        }
        let mut command = self.command(variables);
        Ok(command.args(["--quiet", "--exact"]).args(names).status()?.success())
    }

    /// The names of its tests: the test harness itself selects by any part of a name.
    fn names(&self) -> Result<Vec<String>> {
        let listed = self.command(&[]).args(["--list", "--format", "terse"]).output()?;
        let listed = String::from_utf8_lossy(&listed.stdout);
        let names = listed.lines().filter_map(|line| line.strip_suffix(": test"));
        Ok(names.filter(|name| name.starts_with(&self.prefix)).map(String::from).collect())
    }

    fn command(&self, variables: &[(&str, OsString)]) -> Command {
        let mut command = Command::new(&self.executable);
        command.current_dir(&self.folder).envs(variables.iter().map(|(name, value)| (name, value)));
        command
    }
}

/// Builds test files; None when one does not compile, which cargo has explained then. In the order of `files`.
///
/// # Errors
/// When cargo cannot be started, or does not name the program of a file.
pub fn build(files: &[TestFile]) -> Result<Option<Vec<TestProgram>>> {
    let mut command = cargo();
    command.args(["test", "--quiet", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]);
    let mut targets: Vec<&str> = files.iter().map(|(_, target, _)| *target).collect();
    targets.sort_unstable();
    targets.dedup();
    command.args(targets.into_iter().flat_map(|target| ["--test", target]));
    let output = command.stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Ok(None);
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let find = |file: &TestFile| {
        let found = messages.lines().find_map(|line| program(line, *file));
        found.ok_or_else(|| {
            Error::other(format!("cargo names no test program {} of crates/{}", file.1, file.0))
        })
    };
    files.iter().map(find).collect::<Result<_>>().map(Some)
}

/// The program of a test file, if this line of cargo's messages is about it.
fn program(message: &str, (package, target_name, module): TestFile) -> Option<TestProgram> {
    let manifest = Path::new(text(message, "\"manifest_path\":\"")?);
    let target = message.split_once("\"target\":{")?.1;
    let is_it = target.contains("\"kind\":[\"test\"]")
        && text(target, "\"name\":\"") == Some(target_name)
        && manifest.ends_with(Path::new("crates").join(package).join("Cargo.toml"));
    let executable = PathBuf::from(text(message, "\"executable\":\"")?);
    let prefix = if module.is_empty() { String::new() } else { format!("{module}::") };
    is_it.then(|| TestProgram { executable, folder: manifest.with_file_name(""), prefix })
}

/// Text between `key` and the next quotation mark.
fn text<'a>(message: &'a str, key: &str) -> Option<&'a str> {
    message.split_once(key)?.1.split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_file_is_found_by_its_package() {
        let message = r#"{"reason":"compiler-artifact","package_id":"path+file:///p/crates/train#phalanx-train@0.1.0","manifest_path":"/p/crates/train/Cargo.toml","target":{"kind":["test"],"crate_types":["bin"],"name":"train","src_path":"/p/crates/train/tests/main.rs"},"executable":"/p/target/debug/deps/train-1","fresh":true}"#;
        let expected = TestProgram {
            executable: "/p/target/debug/deps/train-1".into(),
            folder: "/p/crates/train".into(),
            prefix: "goldens::".to_string(),
        };
        assert_eq!(program(message, ("train", "train", "goldens")), Some(expected));
        assert_eq!(program(message, ("models", "train", "goldens")), None);
        assert_eq!(program(message, ("train", "trains", "goldens")), None);
        let library = message.replace(r#"["test"]"#, r#"["lib"]"#);
        assert_eq!(program(&library, ("train", "train", "goldens")), None);
    }
}
