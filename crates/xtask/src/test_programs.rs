//! Test files of some packages, built with the features of the whole workspace.
//!
//! `cargo test --package` would choose other features for some crates and build them, and all that stands on them, once more; and
//! `cargo test --workspace --test NAME` would run files of this name in other packages as well.

use std::env;
use std::ffi::OsString;
use std::io::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A test file: the folder of its package under `crates/`, and its name.
pub type TestFile<'a> = (&'a str, &'a str);

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
}

impl TestProgram {
    /// Runs its tests with options of the test harness; whether all passed.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn run(&self, options: &[&str], variables: &[(&str, OsString)]) -> Result<bool> {
        let mut command = Command::new(&self.executable);
        command
            .args(options)
            .current_dir(&self.folder)
            .envs(variables.iter().map(|(name, value)| (name, value)));
        Ok(command.status()?.success())
    }
}

/// Builds test files; None when one does not compile, which cargo has explained then. In the order of `files`.
///
/// # Errors
/// When cargo cannot be started, or does not name the program of a file.
pub fn build(files: &[TestFile]) -> Result<Option<Vec<TestProgram>>> {
    let mut command = cargo();
    command.args(["test", "--quiet", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]);
    command.args(files.iter().flat_map(|(_, name)| ["--test", name]));
    let output = command.stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Ok(None);
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let find = |file: &TestFile| {
        let found = messages.lines().find_map(|line| program(line, *file));
        found.ok_or_else(|| {
            Error::other(format!("cargo names no program of crates/{}/tests/{}", file.0, file.1))
        })
    };
    files.iter().map(find).collect::<Result<_>>().map(Some)
}

/// The program of a test file, if this line of cargo's messages is about it.
fn program(message: &str, (package, name): TestFile) -> Option<TestProgram> {
    let manifest = Path::new(text(message, "\"manifest_path\":\"")?);
    let target = message.split_once("\"target\":{")?.1;
    let is_it = target.contains("\"kind\":[\"test\"]")
        && text(target, "\"name\":\"") == Some(name)
        && manifest.ends_with(Path::new("crates").join(package).join("Cargo.toml"));
    let executable = PathBuf::from(text(message, "\"executable\":\"")?);
    is_it.then(|| TestProgram { executable, folder: manifest.with_file_name("") })
}

/// What stands behind `key` up to the next quotation mark.
fn text<'a>(message: &'a str, key: &str) -> Option<&'a str> {
    message.split_once(key)?.1.split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_file_is_found_by_its_package() {
        let message = r#"{"reason":"compiler-artifact","package_id":"path+file:///p/crates/train#phalanx-train@0.1.0","manifest_path":"/p/crates/train/Cargo.toml","target":{"kind":["test"],"crate_types":["bin"],"name":"goldens","src_path":"/p/crates/train/tests/goldens.rs"},"executable":"/p/target/debug/deps/goldens-1","fresh":true}"#;
        let expected = TestProgram {
            executable: "/p/target/debug/deps/goldens-1".into(),
            folder: "/p/crates/train".into(),
        };
        assert_eq!(program(message, ("train", "goldens")), Some(expected));
        assert_eq!(program(message, ("models", "goldens")), None);
        assert_eq!(program(message, ("train", "golden")), None);
        let library = message.replace(r#"["test"]"#, r#"["lib"]"#);
        assert_eq!(program(&library, ("train", "goldens")), None);
    }
}
