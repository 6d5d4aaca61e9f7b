//! Waits are said: a line when one is longer than a moment, and again every few seconds, whatever the waiting thread is blocked in.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// A wait that is shorter is not worth a line.
const MOMENT: Duration = Duration::from_millis(300);

/// Time between two lines of a wait.
const AGAIN: Duration = Duration::from_secs(5);

/// Does `work`, which waits. While it does, `note` gets what `describe` says, which is given the time so far.
pub fn tell_while<T>(
    note: &(dyn Fn(&str) + Sync),
    describe: &(dyn Fn(Duration) -> String + Sync),
    work: impl FnOnce() -> T,
) -> T {
    let start = Instant::now();
    let (done, over) = channel::<()>();
    std::thread::scope(|scope| {
        let tell = move || {
            let mut pause = MOMENT;
            while over.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                note(&describe(start.elapsed()));
                pause = AGAIN;
            }
        };
        // Without a thread to spare, the wait itself matters more than its lines.
        let _ = std::thread::Builder::new().name("waits".into()).spawn_scoped(scope, tell);
        let result = work();
        drop(done);
        result
    })
}

/// Text of the time waited so far and of its limit: ` (5 s of 300 s, --join-timeout)`.
pub(crate) fn so_far(waited: Duration, limit: Duration) -> String {
    format!(" ({} s of {} s, --join-timeout)", waited.as_secs(), limit.as_secs())
}

/// Things with numbers, of which at most eight are listed: `hosts 1, 2 and 3 more`.
pub(crate) fn named(what: &str, numbers: &[usize]) -> String {
    const LISTED: usize = 8;
    let listed: Vec<String> = numbers.iter().take(LISTED).map(usize::to_string).collect();
    let more = numbers.len().saturating_sub(LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{what}{} {}{more}", if numbers.len() == 1 { "" } else { "s" }, listed.join(", "))
}
