//! Threads that the system may refuse.

use std::io::Error;

/// The error for a thread, named by `whose`, that the system did not start: with the limits that may be the reason.
pub fn refused_thread(whose: &str, error: &Error) -> Error {
    let text = format!(
        "{whose}: the system starts no further thread ({error}); `ulimit -u` limits processes and threads, `ulimit -v` \
         and `ulimit -d` the memory for their stacks: raise them, or use fewer threads or ranks"
    );
    Error::new(error.kind(), text)
}

/// Text of a panic of `what`.
pub fn panic_text(what: &str, panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
    format!("{what} panicked: {text}")
}
