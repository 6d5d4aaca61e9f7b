//! Variables of an environment, read by name.

/// A variable that is missing or cannot be used; the text says which, what it holds and what was expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvironmentError(pub(crate) String);

impl std::fmt::Display for EnvironmentError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for EnvironmentError {}

/// Variables of an environment. An empty variable counts as one that is not set.
pub struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl<'a> Variables<'a> {
    /// Variables that `read` finds by their names.
    pub fn new(read: &'a dyn Fn(&str) -> Option<String>) -> Variables<'a> {
        Variables(read)
    }

    /// The value of a variable.
    pub(crate) fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|text| text.trim().to_string()).filter(|text| !text.is_empty())
    }

    pub(crate) fn is_set(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    /// Describes the absence of a variable: `not set`, or `empty`.
    pub(crate) fn absence(&self, name: &str) -> &'static str {
        if (self.0)(name).is_some() { "empty" } else { "not set" }
    }

    /// The value of a variable as it is.
    pub(crate) fn raw(&self, name: &str) -> Option<String> {
        (self.0)(name)
    }

    /// A variable that must be set because `because` is.
    pub(crate) fn required(&self, name: &str, because: &str) -> Result<String, EnvironmentError> {
        self.text(name).ok_or_else(|| {
            EnvironmentError(format!(
                "{because} is set, so another launcher has started this process, but {name} is {}: set it, or \
                 start without the other launcher ({}=none)",
                self.absence(name),
                super::CHOICE
            ))
        })
    }

    /// The number in a variable that must be set because `because` is.
    pub(crate) fn number(&self, name: &str, because: &str) -> Result<usize, EnvironmentError> {
        number(name, &self.required(name, because)?)
    }

    /// The number in a variable, if it is set.
    pub(crate) fn number_if_set(&self, name: &str) -> Result<Option<usize>, EnvironmentError> {
        self.text(name).map(|text| number(name, &text)).transpose()
    }

    /// `MASTER_ADDR` and `MASTER_PORT`, which several launchers and many scripts set.
    pub(crate) fn master(&self) -> Result<Option<(String, u16)>, EnvironmentError> {
        match (self.text("MASTER_ADDR"), self.text("MASTER_PORT")) {
            (Some(host), Some(text)) => Ok(Some((host, port("MASTER_PORT", &text)?))),
            _ => Ok(None),
        }
    }
}

/// Ranks and worlds are below this; a larger number is a mistake.
const MAX: usize = 1 << 20;

fn number(name: &str, text: &str) -> Result<usize, EnvironmentError> {
    let number = text.parse::<usize>().ok().filter(|number| *number <= MAX);
    number.ok_or_else(|| EnvironmentError(format!("{name}={text}: expected a number from 0 to {MAX}")))
}

pub(crate) fn port(name: &str, text: &str) -> Result<u16, EnvironmentError> {
    let port = text.parse::<u16>().ok().filter(|port| *port != 0);
    port.ok_or_else(|| EnvironmentError(format!("{name}={text}: expected a port from 1 to 65535")))
}

/// Splits `HOST:PORT` of the variable or option `name`; an IPv6 address stands in brackets. `any_port`: whether port 0 may
/// stand for any port.
///
/// # Errors
/// A text of another form.
pub fn host_and_port(name: &str, text: &str, any_port: bool) -> Result<(String, u16), EnvironmentError> {
    let expected = || {
        EnvironmentError(format!("{name}={text}: expected HOST:PORT, such as node1:29500 or [fe80::1]:29500"))
    };
    let (host, port_text) = text.rsplit_once(':').ok_or_else(expected)?;
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host = match bare {
        Some(inner) => inner,
        None if host.contains(':') => return Err(expected()),
        None => host,
    };
    if host.is_empty() || host.contains(char::is_whitespace) {
        return Err(expected());
    }
    let port = if any_port && port_text == "0" { 0 } else { port(name, port_text)? };
    Ok((host.to_string(), port))
}
