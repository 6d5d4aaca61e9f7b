//! The kernels' figures as a table for people and as JSON.

use phalanx_drawing::report::{Table, percent};
use phalanx_tensor::DType;
use serde_json::{Value, json};

use super::{Measured, Threads};
use crate::kernel_table::CallPrice;

/// Labels of a measurement in the report.
pub struct Labels {
    /// Name of the setting.
    pub setting: &'static str,
    /// Type of the elements.
    pub dtype: DType,
    /// Name of the instruction set.
    pub isa: &'static str,
}

/// Measured kernels, for each number of threads.
pub type Columns = [(Threads, Vec<Measured>)];

/// The figures for scripts.
pub fn to_json(labels: &Labels, columns: &Columns) -> Value {
    let run = |threads: &Threads, kernel: &Measured| {
        let Measured { price, calls, min_s, median_s, .. } = kernel;
        let floor_s = threads.peaks.floor_s(*price);
        json!({
            "threads": threads.threads, "calls": calls, "s_min": min_s, "s_median": median_s,
            "flops_per_s": price.flops as f64 / min_s, "bytes_per_s": price.bytes as f64 / min_s, "floor_s": floor_s,
            "floor_share": floor_s / min_s,
        })
    };
    let kernel = |(index, kernel): (usize, &Measured)| {
        let runs: Vec<Value> = columns.iter().map(|(threads, all)| run(threads, &all[index])).collect();
        let CallPrice { flops, bytes, rate } = kernel.price;
        json!({
            "name": kernel.name, "size": kernel.size, "flops": flops, "bytes": bytes, "rate": rate, "runs": runs,
        })
    };
    let threads = |(threads, _): &(Threads, _)| {
        let Threads { threads, peaks, fork_join_s } = threads;
        json!({ "threads": threads, "peaks": peaks, "fork_join_s": fork_join_s })
    };
    json!({
        "setting": labels.setting, "dtype": labels.dtype.name(), "isa": labels.isa,
        "threads": columns.iter().map(threads).collect::<Vec<_>>(),
        "kernels": columns[0].1.iter().enumerate().map(kernel).collect::<Vec<_>>(),
    })
}

/// The figures as a table for people.
pub fn to_text(labels: &Labels, columns: &Columns) -> String {
    let Labels { setting, dtype, isa } = labels;
    let mut text =
        format!("{setting} in {}, {isa}; rates and shares are those of the fastest call\n", dtype.name());
    let mut headings = vec!["kernel".to_string()];
    for (Threads { threads, peaks, fork_join_s }, _) in columns {
        text.push_str(&format!(
            "{threads}t: peaks {:.1} GFLOP/s, {:.1} GB/s of memory; {:.2} us a fork and join\n",
            peaks.products_per_s(*dtype) / 1e9,
            peaks.bytes_per_s / 1e9,
            fork_join_s * 1e6
        ));
        headings.extend(["ms", "median", "rate", "of floor"].map(|word| format!("{threads}t {word}")));
    }
    headings.extend(columns.get(1).map(|_| "gain".to_string()));
    let mut table = Table::new(&headings.iter().map(String::as_str).collect::<Vec<_>>());
    for (index, first) in columns[0].1.iter().enumerate() {
        let mut cells = vec![format!("{} {}", first.name, first.size)];
        for (Threads { peaks, .. }, all) in columns {
            let Measured { price, min_s, median_s, .. } = all[index];
            cells.extend([
                ms(min_s),
                ms(median_s),
                peaks.achieved(price, min_s).to_string(),
                percent(peaks.floor_s(price) / min_s),
            ]);
        }
        cells.extend(columns.get(1).map(|(_, all)| format!("x{:.2}", first.min_s / all[index].min_s)));
        table.row(cells);
    }
    text + &table.to_string()
}

/// Milliseconds, short ones to a tenth of a microsecond.
fn ms(seconds: f64) -> String {
    let digits = if seconds < 1e-3 { 4 } else { 3 };
    format!("{:.digits$}", seconds * 1e3)
}
