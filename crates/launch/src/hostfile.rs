//! Hostfiles as DeepSpeed has them: one `host slots=n` a line, with `#` comments; and what `--include` and `--exclude` choose
//! from them: `host1@host2:0,2` (a host with all its slots, or some of them).

use std::collections::HashSet;

/// A host, and the number of ranks that it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSlots {
    /// The name by which ssh reaches it.
    pub host: String,
    /// The slots that are used, by number.
    pub slots: Vec<usize>,
}

/// Largest number of slots of a host, and of hosts.
const MAX: usize = 1 << 16;

/// Largest length of a host's name; the longest in DNS has 253 bytes, a user in front of it.
const MAX_NAME: usize = 300;

/// Reads a hostfile.
///
/// # Errors
/// A line that is none of a hostfile, a host that occurs twice, no hosts; with the number of the line.
pub fn parse_hostfile(text: &str) -> Result<Vec<HostSlots>, String> {
    let mut hosts: Vec<HostSlots> = Vec::new();
    let mut known = HashSet::new();
    for (number, line) in text.lines().enumerate() {
        let content = line.split('#').next().unwrap_or("").trim();
        if content.is_empty() {
            continue;
        }
        let at = |why: String| format!("line {}: {why}", number + 1);
        let mut words = content.split_whitespace();
        let host = check_name(words.next().unwrap_or("")).map_err(at)?;
        let slots =
            match words.next().map(|word| (word, word.strip_prefix("slots="))) {
                Some((_, Some(count))) => count
                    .parse::<usize>()
                    .ok()
                    .filter(|count| (1..=MAX).contains(count))
                    .ok_or_else(|| at(format!("slots={count}: expected a number from 1 to {MAX}")))?,
                Some((word, None)) => return Err(at(format!("{word:?}: expected `host slots=n`"))),
                None => {
                    return Err(at(format!(
                        "{host}: expected `host slots=n`, with the number of ranks that it runs"
                    )));
                }
            };
        if let Some(word) = words.next() {
            return Err(at(format!(
                "{word:?} behind `{host} slots={slots}`: expected nothing, or a comment after #"
            )));
        }
        if !known.insert(host.clone()) {
            return Err(at(format!("the host {host} occurs twice")));
        }
        if hosts.len() == MAX {
            return Err(at(format!("more than {MAX} hosts")));
        }
        hosts.push(HostSlots { host, slots: (0..slots).collect() });
    }
    if hosts.is_empty() {
        return Err("it names no host; expected lines of `host slots=n`".to_string());
    }
    Ok(hosts)
}

/// Names that ssh would take as an option, or a shell as more than a word, are refused.
fn check_name(name: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-@:[]%".contains(c);
    if name.is_empty() || name.len() > MAX_NAME || name.starts_with('-') || !name.chars().all(allowed) {
        return Err(format!("{name:?} is no name of a host"));
    }
    Ok(name.to_string())
}

/// The hosts that `include` names (all when empty), or those that `exclude` does not, in the order of the hostfile.
///
/// # Errors
/// Hosts or slots that the hostfile does not have, both options at once, or nothing left.
pub fn filter_hosts(hosts: Vec<HostSlots>, include: &str, exclude: &str) -> Result<Vec<HostSlots>, String> {
    let left = match (include.is_empty(), exclude.is_empty()) {
        (true, true) => hosts,
        (false, false) => {
            return Err("--include and --exclude exclude each other: give one of them".to_string());
        }
        (false, true) => {
            let chosen = choices("--include", include, &hosts)?;
            keep(hosts, |host, slot| chosen.iter().any(|choice| choice.holds(host, slot)))
        }
        (true, false) => {
            let chosen = choices("--exclude", exclude, &hosts)?;
            keep(hosts, |host, slot| !chosen.iter().any(|choice| choice.holds(host, slot)))
        }
    };
    if left.is_empty() {
        return Err("no host is left: --exclude takes all of them".to_string());
    }
    Ok(left)
}

fn keep(hosts: Vec<HostSlots>, stays: impl Fn(&str, usize) -> bool) -> Vec<HostSlots> {
    let kept = hosts.into_iter().map(|HostSlots { host, slots }| {
        let slots = slots.into_iter().filter(|slot| stays(&host, *slot)).collect();
        HostSlots { host, slots }
    });
    kept.filter(|host| !host.slots.is_empty()).collect()
}

/// `host` or `host:0,1`.
struct Choice {
    host: String,
    /// All when `None`.
    slots: Option<Vec<usize>>,
}

impl Choice {
    fn holds(&self, host: &str, slot: usize) -> bool {
        self.host == host && self.slots.as_ref().is_none_or(|slots| slots.contains(&slot))
    }
}

fn choices(option: &str, text: &str, hosts: &[HostSlots]) -> Result<Vec<Choice>, String> {
    let choice = |part: &str| {
        let wrong = |why: String| format!("{option} {part}: {why}");
        // A name that the hostfile has may hold a colon itself.
        let known = |name: &str| hosts.iter().find(|host| host.host == name);
        let (host, slots) = match (known(part), part.rsplit_once(':')) {
            (Some(host), _) => (host, None),
            (None, Some((name, slots))) => {
                (known(name).ok_or_else(|| wrong(format!("the hostfile has no host {name:?}")))?, Some(slots))
            }
            (None, None) => return Err(wrong(format!("the hostfile has no host {part:?}"))),
        };
        let slots = slots.map(|slots| {
            let slot = |text: &str| {
                let number = text.parse::<usize>().ok().filter(|slot| host.slots.contains(slot));
                number.ok_or_else(|| {
                    wrong(format!("{} has no slot {text:?}; it has {}", host.host, host.slots.len()))
                })
            };
            slots.split(',').map(slot).collect::<Result<Vec<_>, _>>()
        });
        Ok(Choice { host: host.host.clone(), slots: slots.transpose()? })
    };
    text.split('@').map(choice).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# two racks\nnode1 slots=4\n  node2   slots=2 # old\n\nuser@10.0.0.3 slots=1\n";

    fn chosen(include: &str, exclude: &str) -> Result<String, String> {
        let hosts = filter_hosts(parse_hostfile(FILE).unwrap(), include, exclude)?;
        let word = |host: HostSlots| {
            format!("{}:{}", host.host, host.slots.iter().map(usize::to_string).collect::<Vec<_>>().join(","))
        };
        Ok(hosts.into_iter().map(word).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn a_hostfile_is_read_and_chosen_from() {
        assert_eq!(chosen("", "").unwrap(), "node1:0,1,2,3 node2:0,1 user@10.0.0.3:0");
        assert_eq!(chosen("node2", "").unwrap(), "node2:0,1");
        assert_eq!(chosen("node2@node1:0,3", "").unwrap(), "node1:0,3 node2:0,1");
        assert_eq!(chosen("", "node1@node2:1").unwrap(), "node2:0 user@10.0.0.3:0");
        assert_eq!(chosen("", "node1:0").unwrap(), "node1:1,2,3 node2:0,1 user@10.0.0.3:0");
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (file, words) in [
            ("", "names no host"),
            ("a slots=1\na slots=2", "line 2: the host a occurs twice"),
            ("a", "line 1: a: expected `host slots=n`"),
            ("a 4", "line 1: \"4\""),
            ("a slots=0", "slots=0"),
            ("a slots=99999999", "slots=99999999"),
            ("a slots=2 b", "\"b\" behind"),
            ("-oProxyCommand=x slots=1", "no name of a host"),
            ("a;reboot slots=1", "no name of a host"),
        ] {
            let error = parse_hostfile(file).unwrap_err();
            assert!(error.contains(words), "{file}: {error}");
        }
        for (include, exclude, words) in [
            ("node9", "", "no host \"node9\""),
            ("node2:7", "", "no slot \"7\""),
            ("node2:x", "", "no slot \"x\""),
            ("node1", "node2", "exclude each other"),
            ("", "node1@node2@user@10.0.0.3", "no host \"user\""),
        ] {
            let error = chosen(include, exclude).unwrap_err();
            assert!(error.contains(words), "{include} {exclude}: {error}");
        }
        let one = parse_hostfile("a slots=2").unwrap();
        assert!(filter_hosts(one, "", "a").unwrap_err().contains("no host is left"));
    }
}
