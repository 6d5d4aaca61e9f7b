//! Shows how far text is read and tokenised: a bar on a terminal, else a line every five seconds, on every host.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use phalanx_drawing::report;
use phalanx_train::dataset::TextProgress;

use crate::host::output::{self, note};
use crate::plans::data_report::DataReport;

/// Time between two lines.
const BETWEEN: Duration = Duration::from_secs(5);

/// Time after which a bar is shown.
const SHORT: Duration = Duration::from_millis(500);

/// Runs `work`, which says how far it is, and shows this unless it is `quiet`; `tell` hears the lines, for other hosts. What was
/// skipped is said in any case.
pub fn with_progress<T>(
    quiet: bool,
    tell: &dyn Fn(&str),
    work: impl FnOnce(&mut dyn FnMut(TextProgress)) -> T,
) -> T {
    let bar = ProgressBar::no_length();
    let style = ProgressStyle::with_template("{spinner} {msg}");
    bar.set_style(style.expect("a template that is well formed"));
    let on_terminal = output::stderr_width().is_some();
    let mut said = Instant::now();
    let done = work(&mut |stage: TextProgress| {
        if let TextProgress::Read(findings) = stage {
            return bar.suspend(|| DataReport::note_findings(findings));
        }
        if quiet {
            return;
        }
        if on_terminal && bar.elapsed() > SHORT {
            bar.set_message(line(&stage));
            bar.tick();
        }
        if said.elapsed() >= BETWEEN {
            said = Instant::now();
            let line = line(&stage);
            if !on_terminal {
                note(&line);
            }
            tell(&line);
        }
    });
    bar.finish_and_clear();
    done
}

fn line(stage: &TextProgress) -> String {
    match stage {
        TextProgress::Reading(bytes) => format!("reads text, {} so far", report::bytes(*bytes)),
        TextProgress::Read(_) => "has read the text".to_string(),
        TextProgress::Tokenising(done) => format!(
            "tokenises, {} % of {}: {} documents, {} tokens",
            done.bytes * 100 / done.of.max(1),
            report::bytes(done.of),
            done.documents,
            done.tokens
        ),
    }
}

#[cfg(test)]
mod tests {
    use phalanx_data::Progress;

    use super::*;

    #[test]
    fn a_line_says_how_far_it_is() {
        let progress = Progress { documents: 7, bytes: 43 << 19, of: 50 << 20, tokens: 99 };
        assert_eq!(
            line(&TextProgress::Tokenising(progress)),
            "tokenises, 43 % of 50.0 MiB: 7 documents, 99 tokens"
        );
        assert_eq!(line(&TextProgress::Reading(3 << 20)), "reads text, 3.0 MiB so far");
    }
}
