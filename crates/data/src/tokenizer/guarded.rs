//! Calls of the `tokenizers` library, whose panics become errors.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    /// True while this thread is in a call of the library.
    static IS_WITHIN: Cell<bool> = const { Cell::new(false) };
}

/// Calls the library, which does `what` to a text or a file. The error is a reason to print.
///
/// The message of a panic in the call is part of the error, and is not printed; what prints messages of other panics stays.
pub(super) fn guarded<T>(what: &str, call: impl FnOnce() -> T) -> Result<T, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !IS_WITHIN.get() {
                others(panic);
            }
        }));
    });
    let before = IS_WITHIN.replace(true);
    // A tokenizer in which a call has panicked is used on: its parts do not change in a call, but for caches behind locks.
    let done = panic::catch_unwind(AssertUnwindSafe(call));
    IS_WITHIN.set(before);
    done.map_err(|cause| {
        let text = cause.downcast_ref::<String>().map(String::as_str);
        let text = text.or(cause.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
        format!("the tokenizers library failed while it {what} ({text}): its tokenizer.json is damaged, or made to do this")
    })
}
