//! The numbers of a line of `metrics.jsonl`, and formats in which they are written.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;

use crate::jobs::metric_names::names_in;
use crate::jobs::metrics_lines::MetricsLine;

/// The numbers of one line of `metrics.jsonl`.
pub struct Measured {
    /// Steps done.
    pub step: u64,
    /// Unix time in seconds.
    pub time_s: f64,
    /// Seconds of the run so far.
    pub elapsed_s: f64,
    /// Name and value of the others that the line has (`metric_names`). A flag is 1 where it is true; numbers that are not finite are
    /// not there.
    pub values: Vec<(&'static str, f64)>,
}

/// A format of metrics.
pub trait Sink: Send {
    /// The bytes with which its file begins.
    fn head(&self) -> Vec<u8>;

    /// The bytes that it gets of one record.
    fn record(&self, measured: &Measured) -> Vec<u8>;
}

impl Measured {
    /// The numbers of a line; None of a line that is no record.
    pub fn of(line: &MetricsLine) -> Option<Measured> {
        let Value::Object(record) = line.record()? else { return None };
        let number = |value: &Value| value.as_f64().or(value.as_bool().map(f64::from));
        let values = names_in(record.contains_key("val_loss"))
            .filter_map(|(metric, name)| Some((metric.name, number(record.get(name)?)?)))
            .collect();
        let of = |name| record.get(name).and_then(Value::as_f64).unwrap_or(0.0);
        Some(Measured { step: line.step()?, time_s: of("time_s"), elapsed_s: of("elapsed_s"), values })
    }
}

/// Unix time in seconds, to a millisecond.
pub(crate) fn now_s() -> f64 {
    in_ms(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()))
}

/// Seconds to a millisecond.
pub(crate) fn in_ms(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3
}
