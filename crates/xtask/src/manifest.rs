//! The dependencies that a `Cargo.toml` names. Enough of TOML for that: tables and keys at line starts.

/// Name of each dependency that is built into the crate (tests aside), with its line.
pub fn dependencies(toml: &str) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    let mut inside = false;
    for (line, text) in (1..).zip(toml.lines()) {
        let text = text.trim();
        if let Some(table) = text.strip_prefix('[') {
            let table = table.split(']').next().unwrap_or(table);
            let parts: Vec<&str> = table.split('.').map(|part| part.trim_matches(['"', '\'', ' '])).collect();
            let counts = |part: &&str| matches!(*part, "dependencies" | "build-dependencies");
            let at = parts.iter().position(counts).filter(|_| parts[0] != "workspace");
            inside = at.is_some_and(|at| at + 1 == parts.len());
            if let Some(name) = at.and_then(|at| parts.get(at + 1)) {
                found.push((name.to_string(), line));
            }
        } else if inside && !text.starts_with('#') {
            let name: String = text
                .trim_start_matches('"')
                .chars()
                .take_while(|letter| letter.is_alphanumeric() || matches!(letter, '-' | '_'))
                .collect();
            if !name.is_empty() {
                found.push((name, line));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_name_one() {
        let toml = "\
[package]
name = \"x\"

[dependencies] # ours
phalanx-plan.workspace = true
# phalanx-none = \"1\"
serde = { version = \"1\" }

[dependencies.toml]
version = \"1\"

[target.'cfg(unix)'.dependencies]
rustix = \"1\"

[dev-dependencies]
phalanx-train.workspace = true

[build-dependencies]
cc = \"1\"
";
        let expected = [("phalanx-plan", 5), ("serde", 7), ("toml", 9), ("rustix", 13), ("cc", 19)];
        assert_eq!(dependencies(toml), expected.map(|(name, line)| (name.to_string(), line)));
    }
}
