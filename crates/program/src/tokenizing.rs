//! A progress bar for text that takes long to tokenise.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use phalanx_data::Progress;

/// Runs `work` and shows its progress on a terminal, after half a second.
pub fn with_progress<T>(quiet: bool, work: impl FnOnce(&mut dyn FnMut(Progress)) -> T) -> T {
    let bar = ProgressBar::no_length();
    let style = ProgressStyle::with_template("tokenising {spinner} {bytes} of text, {msg} tokens");
    bar.set_style(style.expect("a template that is well formed"));
    let done = work(&mut |progress: Progress| {
        if !quiet && bar.elapsed() > Duration::from_millis(500) {
            bar.set_position(progress.bytes);
            bar.set_message(progress.tokens.to_string());
        }
    });
    bar.finish_and_clear();
    done
}
