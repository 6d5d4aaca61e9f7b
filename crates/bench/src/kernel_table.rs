//! Kernels, copies and collectives beside what the machine could do: floors, rates, and the table of one step.
//!
//! The floor of a call is what it would take if nothing but its operations or nothing but its bytes counted,
//! whichever takes longer. Operations and bytes come from the description of the operation, and so does the rate that
//! they count against. Bytes that caches keep from one kernel to the next are moved faster than that, so
//! short kernels may be above 100% of their floor.

use std::collections::{BTreeMap, BTreeSet};

use phalanx_drawing::report::{Table, bytes, count, percent};
use phalanx_plan::trace::{DType, Rate};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Peak rates of a rank's threads, measured in the same run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peaks {
    /// Operations per second from registers, for each element type of the matrix products; 0 where they are unknown.
    pub flops_per_s: BTreeMap<DType, f64>,
    /// Bytes per second, read and written; 0 where they are unknown.
    pub bytes_per_s: f64,
    /// Bytes per second that are copied between device and host memory, counted once.
    pub copied_bytes_per_s: f64,
    /// Bytes per second that the transport of collectives sends: the ranks of a machine copy from each other's memory.
    pub sent_bytes_per_s: f64,
    /// Bytes per second that are read and written, both together, in the folders of disk memory. None without disk memory.
    pub disk_bytes_per_s: Option<f64>,
}

/// The price of a call: operations and bytes, and the rate that they count against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CallPrice {
    /// Operations of matrix products.
    pub flops: u64,
    /// Bytes read and written at least; bytes copied or sent.
    pub bytes: u64,
    /// The rate that limits it.
    pub rate: Rate,
}

impl CallPrice {
    fn times(self, calls: u64) -> CallPrice {
        CallPrice { flops: calls * self.flops, bytes: calls * self.bytes, ..self }
    }
}

/// A rate that was achieved, of what limits a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Achieved {
    /// Operations per second.
    Flops(f64),
    /// Bytes per second.
    Bytes(f64),
}

impl Achieved {
    /// The operations of a call, or its bytes if it has none, in `seconds`.
    pub fn of(price: CallPrice, seconds: f64) -> Achieved {
        match price.flops {
            0 => Achieved::Bytes(price.bytes as f64 / seconds),
            flops => Achieved::Flops(flops as f64 / seconds),
        }
    }

    /// Operations or bytes per second.
    pub fn per_s(self) -> f64 {
        match self {
            Achieved::Flops(rate) | Achieved::Bytes(rate) => rate,
        }
    }
}

impl std::fmt::Display for Achieved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Achieved::Flops(rate) => write!(f, "{:.1} GFLOP/s", rate / 1e9),
            Achieved::Bytes(rate) => write!(f, "{:.1} GB/s", rate / 1e9),
        }
    }
}

impl Peaks {
    /// Operations per second of products of `dtype`, which was measured.
    pub fn products_per_s(&self, dtype: DType) -> f64 {
        *self.flops_per_s.get(&dtype).expect("every element type of a product was measured")
    }

    /// The shortest possible seconds of the operations, and of the bytes.
    fn limits_s(&self, price: CallPrice) -> [f64; 2] {
        let CallPrice { flops, bytes, rate } = price;
        let bytes = bytes as f64;
        // What has no known limit takes no time.
        let at = |amount: f64, per_s: f64| if per_s > 0.0 { amount / per_s } else { 0.0 };
        match rate {
            // Operations of the host run on the processor whose bandwidth was measured.
            Rate::Bandwidth | Rate::Host => [0.0, at(bytes, self.bytes_per_s)],
            Rate::MatrixProduct(dtype) => {
                [at(flops as f64, self.products_per_s(dtype)), at(bytes, self.bytes_per_s)]
            }
            Rate::Copy => [0.0, bytes / self.copied_bytes_per_s],
            Rate::Transport => [0.0, bytes / self.sent_bytes_per_s],
            Rate::Disk => [0.0, self.disk_bytes_per_s.map_or(0.0, |rate| bytes / rate)],
        }
    }

    /// The shortest possible time of a call, in seconds.
    pub fn floor_s(&self, price: CallPrice) -> f64 {
        let [flops, bytes] = self.limits_s(price);
        flops.max(bytes)
    }

    /// The achieved rate of operations or bytes, whichever decides the floor.
    pub fn achieved(&self, price: CallPrice, seconds: f64) -> Achieved {
        let [flops, bytes] = self.limits_s(price);
        // Without known limits, products count by their operations.
        match flops > bytes || (bytes == 0.0 && price.flops > 0) {
            true => Achieved::Flops(price.flops as f64 / seconds),
            false => Achieved::Bytes(price.bytes as f64 / seconds),
        }
    }
}

/// The element types of the matrix products among some rates.
pub fn product_types(rates: impl Iterator<Item = Rate>) -> BTreeSet<DType> {
    let of = |rate| if let Rate::MatrixProduct(dtype) = rate { Some(dtype) } else { None };
    rates.filter_map(of).collect()
}

/// One kernel, or one kind of copy, at one size in one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelFigures {
    /// As in the plan: `linear`, `attention_backward`.
    pub name: String,
    /// The price of one call.
    pub price: CallPrice,
    /// Calls in the step.
    pub calls: u64,
    /// Seconds of all of them.
    pub seconds: f64,
}

impl KernelFigures {
    fn floor_s(&self, peaks: &Peaks) -> f64 {
        self.calls as f64 * peaks.floor_s(self.price)
    }
}

/// The collectives of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CollectiveTimes {
    /// Number of collectives that were completed.
    pub calls: u64,
    /// Bytes that they sent from this rank.
    pub sent_bytes: u64,
    /// Seconds in which this rank waited for them: what it did not compute meanwhile.
    pub waited_s: f64,
}

impl CollectiveTimes {
    fn price(&self) -> CallPrice {
        CallPrice { flops: 0, bytes: self.sent_bytes, rate: Rate::Transport }
    }
}

/// One step, every kernel call of which was timed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepProfile {
    /// Seconds of the step, timing included.
    pub step_s: f64,
    /// Kernels that it called.
    pub kernels: Vec<KernelFigures>,
    /// Its collectives.
    pub collectives: CollectiveTimes,
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
            names.then_with(|| a.price.rate.cmp(&b.price.rate)).then_with(|| b.price.cmp(&a.price))
        });
        self.kernels = keyed.into_iter().map(|(_, kernel)| kernel).collect();
    }

    /// Seconds in which no kernel ran and no collective was waited for: joins, bookkeeping.
    pub fn outside_s(&self) -> f64 {
        // Transfers to and from a disk, and operations of the host for a device of its own, run beside kernels.
        let is_beside = |rate| matches!(rate, Rate::Disk | Rate::Host);
        let on_host = self.kernels.iter().filter(|kernel| !is_beside(kernel.price.rate));
        let kernels_s: f64 = on_host.map(|kernel| kernel.seconds).sum();
        self.step_s - kernels_s - self.collectives.waited_s
    }

    /// Sum of the kernels' floors, or of those of the transfers to and from disk, which run beside kernels: whichever is
    /// larger. Collectives are not in it, since they run beside kernels, too.
    pub fn floor_s(&self, peaks: &Peaks) -> f64 {
        let sum = |on_disk: bool| -> f64 {
            let chosen = self.kernels.iter().filter(|kernel| (kernel.price.rate == Rate::Disk) == on_disk);
            chosen.map(|kernel| kernel.floor_s(peaks)).sum()
        };
        sum(false).max(sum(true))
    }

    /// Operations of the step.
    pub fn flops(&self) -> u64 {
        self.kernels.iter().map(|kernel| kernel.calls * kernel.price.flops).sum()
    }

    /// The rows as data.
    pub fn to_json(&self, peaks: &Peaks) -> Value {
        let kernel = |k: &KernelFigures| {
            let CallPrice { flops, bytes, rate } = k.price;
            let floor_s = k.floor_s(peaks);
            let (flops, bytes) = ((k.calls * flops) as f64, (k.calls * bytes) as f64);
            json!({
                "name": k.name, "flops": k.price.flops, "bytes": k.price.bytes, "rate": rate, "calls": k.calls, "s": k.seconds,
                "share": k.seconds / self.step_s, "flops_per_s": flops / k.seconds,
                "bytes_per_s": bytes / k.seconds, "floor_s": floor_s, "floor_share": floor_s / k.seconds,
            })
        };
        let CollectiveTimes { calls, sent_bytes, waited_s } = self.collectives;
        let collectives = json!({
            "calls": calls, "sent_bytes": sent_bytes, "rate": Rate::Transport, "waited_s": waited_s,
            "floor_s": peaks.floor_s(self.collectives.price()),
        });
        json!({
            "step_s": self.step_s, "kernels": self.kernels.iter().map(kernel).collect::<Vec<_>>(),
            "collectives": collectives,
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
        for TableRow { label, size, calls, price, seconds, floor_s } in self.rows(peaks) {
            let [operations, size] = size;
            let rate =
                if seconds > 0.0 { peaks.achieved(price, seconds).to_string() } else { "-".to_string() };
            // What is not waited for, and what has no measured limit, is compared with nothing.
            let is_compared = seconds > 0.0 && floor_s > 0.0;
            let of_floor = if is_compared { percent(floor_s / seconds) } else { "-".to_string() };
            let (calls, time, part) = (calls.to_string(), ms(seconds), share(seconds));
            table.row([label, operations, size, calls, time, part, rate, ms(floor_s), of_floor]);
        }
        let row = |label: &str, seconds: f64| {
            let label = label.to_string();
            [label, String::new(), String::new(), String::new(), ms(seconds), share(seconds)]
        };
        table.row(row("outside of kernels", self.outside_s()));
        let floor_s = self.floor_s(peaks);
        let rate = Achieved::Flops(self.flops() as f64 / self.step_s).to_string();
        let ends = [rate, ms(floor_s), percent(floor_s / self.step_s)];
        table.row(row(total, self.step_s).into_iter().chain(ends));
        table
    }

    fn rows(&self, peaks: &Peaks) -> Vec<TableRow> {
        let mut rows = Vec::new();
        for of_name in self.kernels.chunk_by(|a, b| (&a.name, a.price.rate) == (&b.name, b.price.rate)) {
            let small = |kernel: &&KernelFigures| kernel.seconds < SMALL * self.step_s;
            let (few, many): (Vec<_>, Vec<_>) = of_name.iter().partition(small);
            rows.extend(many.into_iter().map(|kernel| TableRow::of(kernel, peaks)));
            let few: Vec<TableRow> = few.into_iter().map(|kernel| TableRow::of(kernel, peaks)).collect();
            match few.len() {
                0 | 1 => rows.extend(few),
                sizes => {
                    let label = format!("{}, {sizes} sizes", of_name[0].name);
                    rows.extend(few.into_iter().reduce(TableRow::plus).map(|sum| TableRow {
                        label,
                        size: Default::default(),
                        ..sum
                    }));
                }
            }
        }
        if self.collectives.calls > 0 {
            rows.push(TableRow::of_collectives(&self.collectives, peaks));
        }
        rows
    }
}

/// Sizes of a kernel below this share of a step are merged into one row of the table.
const SMALL: f64 = 1e-3;

/// A row for people: sums over its calls.
struct TableRow {
    label: String,
    /// Operations and bytes of one call.
    size: [String; 2],
    calls: u64,
    price: CallPrice,
    seconds: f64,
    floor_s: f64,
}

impl TableRow {
    fn of(kernel: &KernelFigures, peaks: &Peaks) -> TableRow {
        let KernelFigures { name, price, calls, seconds } = kernel;
        let operations = if price.flops > 0 { count(price.flops as f64) } else { "-".to_string() };
        TableRow {
            label: name.clone(),
            size: [operations, bytes(price.bytes)],
            calls: *calls,
            price: price.times(*calls),
            seconds: *seconds,
            floor_s: kernel.floor_s(peaks),
        }
    }

    /// The collectives of a step together; their bytes are those of all.
    fn of_collectives(times: &CollectiveTimes, peaks: &Peaks) -> TableRow {
        let price = times.price();
        TableRow {
            label: "waiting for collectives".to_string(),
            size: ["-".to_string(), bytes(price.bytes)],
            calls: times.calls,
            price,
            seconds: times.waited_s,
            floor_s: peaks.floor_s(price),
        }
    }

    fn plus(self, other: TableRow) -> TableRow {
        let CallPrice { flops, bytes, rate } = self.price;
        let price = CallPrice { flops: flops + other.price.flops, bytes: bytes + other.price.bytes, rate };
        let calls = self.calls + other.calls;
        let (seconds, floor_s) = (self.seconds + other.seconds, self.floor_s + other.floor_s);
        TableRow { calls, price, seconds, floor_s, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRODUCT: Rate = Rate::MatrixProduct(DType::F32);

    fn peaks() -> Peaks {
        let flops_per_s = BTreeMap::from([(DType::F32, 100e9), (DType::BF16, 200e9)]);
        Peaks {
            flops_per_s,
            bytes_per_s: 10e9,
            copied_bytes_per_s: 2e9,
            sent_bytes_per_s: 4e9,
            disk_bytes_per_s: Some(1e9),
        }
    }

    fn price(flops: u64, bytes: u64, rate: Rate) -> CallPrice {
        CallPrice { flops, bytes, rate }
    }

    fn kernel(name: &str, price: CallPrice, calls: u64, seconds: f64) -> KernelFigures {
        KernelFigures { name: name.to_string(), price, calls, seconds }
    }

    fn profile() -> StepProfile {
        let kernels = vec![
            kernel("add", price(0, 10_000_000, Rate::Bandwidth), 2, 0.004),
            kernel("linear", price(100_000_000, 1_000_000, PRODUCT), 4, 0.008),
            kernel("linear", price(400_000_000, 2_000_000, PRODUCT), 1, 0.005),
        ];
        let collectives = CollectiveTimes { calls: 3, sent_bytes: 2_000_000, waited_s: 0.001 };
        let mut profile = StepProfile { step_s: 0.021, kernels, collectives };
        profile.sort();
        profile
    }

    #[test]
    fn without_known_limits_there_are_no_floors() {
        let flops_per_s = BTreeMap::from([(DType::F32, 0.0)]);
        let unknown = Peaks { flops_per_s, bytes_per_s: 0.0, ..peaks() };
        let [product, sum] = [price(100_000_000, 1_000_000, PRODUCT), price(0, 1_000_000, Rate::Bandwidth)];
        assert_eq!((unknown.floor_s(product), unknown.floor_s(sum)), (0.0, 0.0));
        assert_eq!(unknown.achieved(product, 2e-3), Achieved::Flops(50e9));
        assert_eq!(unknown.achieved(sum, 2e-3), Achieved::Bytes(0.5e9));
    }

    #[test]
    fn the_rate_of_the_work_says_what_limits_it() {
        for (price, floor_s, achieved) in [
            (price(100_000_000, 1_000_000, PRODUCT), 1e-3, Achieved::Flops(50e9)),
            (price(100_000_000, 1_000_000, Rate::MatrixProduct(DType::BF16)), 0.5e-3, Achieved::Flops(50e9)),
            (price(100_000_000, 20_000_000, PRODUCT), 2e-3, Achieved::Bytes(10e9)),
            (price(0, 10_000_000, Rate::Bandwidth), 1e-3, Achieved::Bytes(5e9)),
            (price(0, 10_000_000, Rate::Copy), 5e-3, Achieved::Bytes(5e9)),
            (price(0, 10_000_000, Rate::Transport), 2.5e-3, Achieved::Bytes(5e9)),
            (price(0, 10_000_000, Rate::Disk), 1e-2, Achieved::Bytes(5e9)),
        ] {
            assert_eq!(peaks().floor_s(price), floor_s, "{price:?}");
            assert_eq!(peaks().achieved(price, 2e-3), achieved, "{price:?}");
        }
        assert_eq!(Achieved::Flops(412.34e9).to_string(), "412.3 GFLOP/s");
        let rates = [Rate::Copy, PRODUCT, Rate::MatrixProduct(DType::BF16), PRODUCT];
        assert!(product_types(rates.into_iter()).into_iter().eq([DType::F32, DType::BF16]));
    }

    #[test]
    fn rows_and_what_is_left_add_up_to_the_step() {
        let profile = profile();
        let order: Vec<_> = profile.kernels.iter().map(|k| (k.name.as_str(), k.price.flops)).collect();
        assert_eq!(order, [("linear", 400_000_000), ("linear", 100_000_000), ("add", 0)]);
        assert!((profile.outside_s() - 0.003).abs() < 1e-12);
        assert_eq!(profile.flops(), 800_000_000);
        // 4 ms and 4 x 1 ms of operations, 2 x 1 ms of bytes.
        assert!((profile.floor_s(&peaks()) - 0.010).abs() < 1e-12);
        // Transfers run beside the kernels: less than theirs is hidden, more is not.
        for (bytes, floor_s) in [(4_000_000, 0.010), (15_000_000, 0.015)] {
            let mut profile = profile.clone();
            profile.kernels.push(kernel("copy_to_disk", price(0, bytes, Rate::Disk), 1, 0.1));
            assert!((profile.floor_s(&peaks()) - floor_s).abs() < 1e-12, "{bytes}");
            assert!((profile.outside_s() - 0.003).abs() < 1e-12);
            let unknown = Peaks { disk_bytes_per_s: None, ..peaks() };
            assert!((profile.floor_s(&unknown) - 0.010).abs() < 1e-12, "{bytes}");
        }
    }

    #[test]
    fn data_and_table_say_the_same() {
        let data = profile().to_json(&peaks());
        let add = &data["kernels"][2];
        let near =
            |value: &Value, expected: f64| (value.as_f64().unwrap() - expected).abs() < 1e-9 * expected;
        assert_eq!(
            (&add["name"], &add["calls"], &add["bytes"], &add["rate"]),
            (&json!("add"), &json!(2), &json!(10_000_000), &json!("bandwidth"))
        );
        assert_eq!(data["kernels"][0]["rate"], json!({ "matrix_product": "f32" }));
        assert!(
            near(&add["share"], 4.0 / 21.0)
                && near(&add["floor_share"], 0.5)
                && near(&add["bytes_per_s"], 5e9)
        );
        let collectives = &data["collectives"];
        assert_eq!(
            (&collectives["rate"], &collectives["sent_bytes"]),
            (&json!("transport"), &json!(2_000_000))
        );
        assert!(near(&collectives["floor_s"], 5e-4) && near(&collectives["waited_s"], 1e-3));
        let text = profile().to_table(&peaks(), "step: mfu 40.0%").to_string();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines[3],
            ["add", "-", "9.5", "MiB", "2", "4.000", "19.0%", "5.0", "GB/s", "2.000", "50.0%"]
        );
        let waiting = ["waiting", "for", "collectives", "-", "1.9", "MiB", "3", "1.000", "4.8%"];
        assert_eq!(lines[4][..9], waiting);
        assert_eq!(lines[4][9..], ["2.0", "GB/s", "0.500", "50.0%"]);
        assert_eq!(lines[5], ["outside", "of", "kernels", "3.000", "14.3%"]);
        let total = ["step:", "mfu", "40.0%", "21.000", "100.0%", "38.1", "GFLOP/s", "10.000", "47.6%"];
        assert_eq!(lines[6], total);
    }

    #[test]
    fn sizes_that_hardly_count_share_a_row() {
        let moved = |bytes| price(0, bytes, Rate::Bandwidth);
        let kernels = vec![
            kernel("adamw", moved(5_000_000), 1, 0.5),
            kernel("adamw", moved(2_000), 10, 0.0004),
            kernel("adamw", moved(1_000), 10, 0.0002),
            kernel("norm", moved(100), 1, 0.0001),
        ];
        let profile = StepProfile { step_s: 1.0, kernels, ..StepProfile::default() };
        let rows = profile.rows(&peaks());
        let said: Vec<_> = rows.iter().map(|row| (row.label.as_str(), row.calls, row.price.bytes)).collect();
        assert_eq!(said, [("adamw", 1, 5_000_000), ("adamw, 2 sizes", 20, 30_000), ("norm", 1, 100)]);
        assert!((rows[1].seconds - 0.0006).abs() < 1e-12 && (rows[1].floor_s - 3e-6).abs() < 1e-15);
    }
}
