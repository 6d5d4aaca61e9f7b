//! Failures on request: which call fails, and how.

use std::time::Duration;

/// Kind of failure of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The call finds no memory for its scratch.
    OutOfMemory,
    /// The device stops to answer.
    Lost,
    /// A copy takes this much longer, and is right. Where the call is a kernel, the next copy takes longer.
    SlowCopy(Duration),
}

impl Failure {
    /// Text of the error; None for a failure that only takes time.
    pub(crate) fn reason(self) -> Option<&'static str> {
        match self {
            Failure::OutOfMemory => Some("out of memory (requested by the test)"),
            Failure::Lost => Some("the device was lost (requested by the test)"),
            Failure::SlowCopy(_) => None,
        }
    }
}

/// The requests that are open.
#[derive(Default)]
pub(crate) struct Requests {
    calls: u64,
    open: Vec<(u64, Failure)>,
}

impl Requests {
    pub(crate) fn add(&mut self, call: u64, failure: Failure) {
        self.open.push((call, failure));
    }

    /// Calls that were counted so far.
    pub(crate) fn calls(&self) -> u64 {
        self.calls
    }

    /// Counts one call; how it is to fail, if it is.
    pub(crate) fn next(&mut self, is_copy: bool) -> Option<Failure> {
        self.calls += 1;
        let calls = self.calls;
        let is_due = |(call, failure): &(u64, Failure)| match failure {
            Failure::SlowCopy(_) => is_copy && calls >= *call,
            Failure::OutOfMemory | Failure::Lost => calls == *call,
        };
        let due = self.open.iter().position(is_due)?;
        Some(self.open.remove(due).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_met_once_at_its_call() {
        let mut requests = Requests::default();
        requests.add(2, Failure::Lost);
        requests.add(1, Failure::SlowCopy(Duration::ZERO));
        let met = [false, false, true, true].map(|is_copy| requests.next(is_copy));
        assert_eq!(met, [None, Some(Failure::Lost), Some(Failure::SlowCopy(Duration::ZERO)), None]);
        assert_eq!(requests.calls(), 4);
    }
}
