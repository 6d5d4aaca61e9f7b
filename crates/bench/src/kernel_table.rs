//! Kernels beside what the machine could do: floors, rates, and the table of one step.
//!
//! The floor of a call is what it would take if nothing but its operations or nothing but its bytes counted,
//! whichever takes longer. Bytes that caches keep from one kernel to the next are moved faster than that, so
//! short kernels may be above 100% of their floor.

use phalanx_drawing::report::{Table, bytes, count};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// What the threads of a rank are capable of, measured in the same run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peaks {
    /// Operations per second from registers, in the compute type.
    pub flops_per_s: f64,
    /// Bytes per second, read and written.
    pub bytes_per_s: f64,
}

/// A rate of the thing that limits a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rate {
    /// Operations per second.
    Flops(f64),
    /// Bytes per second.
    Bytes(f64),
}

impl std::fmt::Display for Rate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Rate::Flops(rate) => write!(f, "{:.1} GFLOP/s", rate / 1e9),
            Rate::Bytes(rate) => write!(f, "{:.1} GB/s", rate / 1e9),
        }
    }
}

impl Peaks {
    /// The shortest possible time for so many operations and bytes, in seconds.
    pub fn floor_s(&self, flops: u64, bytes: u64) -> f64 {
        (flops as f64 / self.flops_per_s).max(bytes as f64 / self.bytes_per_s)
    }

    /// The achieved rate of operations or bytes, whichever decides the floor.
    pub fn rate(&self, flops: u64, bytes: u64, seconds: f64) -> Rate {
        if flops as f64 / self.flops_per_s < bytes as f64 / self.bytes_per_s {
            Rate::Bytes(bytes as f64 / seconds)
        } else {
            Rate::Flops(flops as f64 / seconds)
        }
    }
}

/// One kernel at one size in one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelFigures {
    /// As in the plan: `linear`, `attention_backward`.
    pub name: String,
    /// Operations of one call.
    pub flops: u64,
    /// Bytes that one call reads and writes at least.
    pub bytes: u64,
    /// Calls in the step.
    pub calls: u64,
    /// Seconds of all of them.
    pub seconds: f64,
}

impl KernelFigures {
    fn floor_s(&self, peaks: &Peaks) -> f64 {
        self.calls as f64 * peaks.floor_s(self.flops, self.bytes)
    }
}

/// One step, every kernel call of which was timed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepProfile {
    /// Seconds of the step, timing included.
    pub step_s: f64,
    /// What it called.
    pub kernels: Vec<KernelFigures>,
}

impl StepProfile {
    /// The names that took longest first; of a name, the largest size first.
    pub fn sort(&mut self) {
        let of_name =
            |name: &str| -> f64 { self.kernels.iter().filter(|k| k.name == name).map(|k| k.seconds).sum() };
        let mut keyed: Vec<_> =
            self.kernels.iter().map(|kernel| (of_name(&kernel.name), kernel.clone())).collect();
        keyed.sort_by(|(a_name_s, a), (b_name_s, b)| {
            let names = b_name_s.total_cmp(a_name_s).then_with(|| a.name.cmp(&b.name));
            names.then_with(|| (b.flops, b.bytes).cmp(&(a.flops, a.bytes)))
        });
        self.kernels = keyed.into_iter().map(|(_, kernel)| kernel).collect();
    }

    /// Seconds in which no kernel ran: waiting for communication, uploads, joins, bookkeeping.
    pub fn outside_s(&self) -> f64 {
        self.step_s - self.kernels.iter().map(|kernel| kernel.seconds).sum::<f64>()
    }

    /// Sum of the kernels' floors.
    pub fn floor_s(&self, peaks: &Peaks) -> f64 {
        self.kernels.iter().map(|kernel| kernel.floor_s(peaks)).sum()
    }

    /// Operations of the step.
    pub fn flops(&self) -> u64 {
        self.kernels.iter().map(|kernel| kernel.calls * kernel.flops).sum()
    }

    /// The rows as data.
    pub fn to_json(&self, peaks: &Peaks) -> Value {
        let kernel = |k: &KernelFigures| {
            let (flops, bytes) = ((k.calls * k.flops) as f64, (k.calls * k.bytes) as f64);
            let floor_s = k.floor_s(peaks);
            json!({
                "name": k.name, "flops": k.flops, "bytes": k.bytes, "calls": k.calls, "s": k.seconds,
                "share": k.seconds / self.step_s, "flops_per_s": flops / k.seconds,
                "bytes_per_s": bytes / k.seconds, "floor_s": floor_s, "floor_share": floor_s / k.seconds,
            })
        };
        json!({
            "step_s": self.step_s, "kernels": self.kernels.iter().map(kernel).collect::<Vec<_>>(),
            "outside_s": self.outside_s(), "floor_s": self.floor_s(peaks),
        })
    }

    /// The rows for people; sizes of a kernel that hardly count share a row. `total` is what is said of the whole
    /// step.
    pub fn to_table(&self, peaks: &Peaks, total: &str) -> Table {
        let mut table = Table::new(&[
            "kernel", "flops", "bytes", "calls", "ms", "of step", "rate", "floor ms", "of floor",
        ]);
        let ms = |seconds: f64| format!("{:.3}", seconds * 1e3);
        let share = |seconds: f64| percent(seconds / self.step_s);
        for TableRow { label, size, calls, flops, moved, seconds, floor_s } in self.rows(peaks) {
            let [operations, size] = size;
            let rate = peaks.rate(flops, moved, seconds).to_string();
            let (calls, of_floor) = (calls.to_string(), percent(floor_s / seconds));
            table.row([
                label,
                operations,
                size,
                calls,
                ms(seconds),
                share(seconds),
                rate,
                ms(floor_s),
                of_floor,
            ]);
        }
        let row = |label: &str, seconds: f64| {
            let label = label.to_string();
            [label, String::new(), String::new(), String::new(), ms(seconds), share(seconds)]
        };
        table.row(row("outside of kernels", self.outside_s()));
        let floor_s = self.floor_s(peaks);
        let rate = Rate::Flops(self.flops() as f64 / self.step_s).to_string();
        let ends = [rate, ms(floor_s), percent(floor_s / self.step_s)];
        table.row(row(total, self.step_s).into_iter().chain(ends));
        table
    }

    fn rows(&self, peaks: &Peaks) -> Vec<TableRow> {
        let mut rows = Vec::new();
        for of_name in self.kernels.chunk_by(|a, b| a.name == b.name) {
            let small = |kernel: &&KernelFigures| kernel.seconds < SMALL * self.step_s;
            let (few, many): (Vec<_>, Vec<_>) = of_name.iter().partition(small);
            rows.extend(many.into_iter().map(|kernel| TableRow::of(kernel, peaks)));
            let few: Vec<TableRow> = few.into_iter().map(|kernel| TableRow::of(kernel, peaks)).collect();
            match few.len() {
                0 | 1 => rows.extend(few),
                sizes => {
                    let mut sum = TableRow {
                        label: format!("{}, {sizes} sizes", of_name[0].name),
                        ..TableRow::default()
                    };
                    few.iter().for_each(|row| sum.add(row));
                    rows.push(sum);
                }
            }
        }
        rows
    }
}

/// Sizes of a kernel that take less than this share of a step each are one row for people.
const SMALL: f64 = 1e-3;

/// A row for people: sums over its calls.
#[derive(Default)]
struct TableRow {
    label: String,
    /// Operations and bytes of one call.
    size: [String; 2],
    calls: u64,
    flops: u64,
    moved: u64,
    seconds: f64,
    floor_s: f64,
}

impl TableRow {
    fn of(kernel: &KernelFigures, peaks: &Peaks) -> TableRow {
        let KernelFigures { name, flops, bytes: moved, calls, seconds } = kernel;
        let operations = if *flops > 0 { count(*flops as f64) } else { "-".to_string() };
        TableRow {
            label: name.clone(),
            size: [operations, bytes(*moved)],
            calls: *calls,
            flops: calls * flops,
            moved: calls * moved,
            seconds: *seconds,
            floor_s: kernel.floor_s(peaks),
        }
    }

    fn add(&mut self, other: &TableRow) {
        self.calls += other.calls;
        self.flops += other.flops;
        self.moved += other.moved;
        self.seconds += other.seconds;
        self.floor_s += other.floor_s;
    }
}

/// `87.4%`.
pub fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEAKS: Peaks = Peaks { flops_per_s: 100e9, bytes_per_s: 10e9 };

    fn kernel(name: &str, flops: u64, bytes: u64, calls: u64, seconds: f64) -> KernelFigures {
        KernelFigures { name: name.to_string(), flops, bytes, calls, seconds }
    }

    fn profile() -> StepProfile {
        let kernels = vec![
            kernel("add", 0, 10_000_000, 2, 0.004),
            kernel("linear", 100_000_000, 1_000_000, 4, 0.008),
            kernel("linear", 400_000_000, 2_000_000, 1, 0.005),
        ];
        let mut profile = StepProfile { step_s: 0.020, kernels };
        profile.sort();
        profile
    }

    #[test]
    fn the_floor_is_what_limits() {
        assert_eq!(PEAKS.floor_s(100_000_000, 1_000_000), 1e-3);
        assert_eq!(PEAKS.floor_s(100_000_000, 20_000_000), 2e-3);
        assert_eq!(PEAKS.rate(100_000_000, 1_000_000, 2e-3), Rate::Flops(50e9));
        assert_eq!(PEAKS.rate(0, 10_000_000, 2e-3), Rate::Bytes(5e9));
        assert_eq!(PEAKS.rate(100_000_000, 20_000_000, 4e-3), Rate::Bytes(5e9));
        assert_eq!(Rate::Flops(412.34e9).to_string(), "412.3 GFLOP/s");
    }

    #[test]
    fn rows_and_what_is_left_add_up_to_the_step() {
        let profile = profile();
        let order: Vec<_> = profile.kernels.iter().map(|k| (k.name.as_str(), k.flops)).collect();
        assert_eq!(order, [("linear", 400_000_000), ("linear", 100_000_000), ("add", 0)]);
        assert!((profile.outside_s() - 0.003).abs() < 1e-12);
        assert_eq!(profile.flops(), 800_000_000);
        // 4 ms and 4 x 1 ms of operations, 2 x 1 ms of bytes.
        assert!((profile.floor_s(&PEAKS) - 0.010).abs() < 1e-12);
    }

    #[test]
    fn data_and_table_say_the_same() {
        let data = profile().to_json(&PEAKS);
        let add = &data["kernels"][2];
        let near =
            |value: &Value, expected: f64| (value.as_f64().unwrap() - expected).abs() < 1e-9 * expected;
        assert_eq!(
            (&add["name"], &add["calls"], &add["bytes"]),
            (&json!("add"), &json!(2), &json!(10_000_000))
        );
        assert!(near(&add["share"], 0.2) && near(&add["floor_share"], 0.5) && near(&add["bytes_per_s"], 5e9));
        let text = profile().to_table(&PEAKS, "step: mfu 40.0%").to_string();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines[3],
            ["add", "-", "9.5", "MiB", "2", "4.000", "20.0%", "5.0", "GB/s", "2.000", "50.0%"]
        );
        assert_eq!(lines[4], ["outside", "of", "kernels", "3.000", "15.0%"]);
        let total = ["step:", "mfu", "40.0%", "20.000", "100.0%", "40.0", "GFLOP/s", "10.000", "50.0%"];
        assert_eq!(lines[5], total);
    }

    #[test]
    fn sizes_that_hardly_count_share_a_row() {
        let kernels = vec![
            kernel("adamw", 0, 5_000_000, 1, 0.5),
            kernel("adamw", 0, 2_000, 10, 0.0004),
            kernel("adamw", 0, 1_000, 10, 0.0002),
            kernel("norm", 0, 100, 1, 0.0001),
        ];
        let profile = StepProfile { step_s: 1.0, kernels };
        let rows = profile.rows(&PEAKS);
        let said: Vec<_> = rows.iter().map(|row| (row.label.as_str(), row.calls, row.moved)).collect();
        assert_eq!(said, [("adamw", 1, 5_000_000), ("adamw, 2 sizes", 20, 30_000), ("norm", 1, 100)]);
        assert!((rows[1].seconds - 0.0006).abs() < 1e-12 && (rows[1].floor_s - 3e-6).abs() < 1e-15);
    }
}
