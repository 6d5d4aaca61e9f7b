//! Detects other programs that keep the machine busy while it is measured. Rates are too low then, and no advice follows from them.

use serde::Serialize;

/// Share of the machine's processor time from which on other programs disturb a measurement.
const OTHERS: f64 = 0.1;

/// Difference between the best and the middle one of repeated calls, as a share of the best, from which on something disturbs them. Clocks
/// that rise and fall make a few hundredths.
const SPREAD: f64 = 0.2;

/// Ticks of the clock of `/proc` in a second, the same on every Linux.
const TICKS_PER_S: f64 = 100.0;

/// Processor time since the machine and this process started, in ticks of the system's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticks {
    all: u64,
    idle: u64,
    own: u64,
}

impl Ticks {
    /// As the system counts them now; `None` where it does not.
    pub fn now() -> Option<Ticks> {
        Ticks::parse(
            &phalanx_system::host::text("/proc/stat")?,
            &phalanx_system::host::text("/proc/self/stat")?,
        )
    }

    /// `machine` is `/proc/stat`, `own` is `/proc/self/stat`.
    fn parse(machine: &str, own: &str) -> Option<Ticks> {
        let of_all = machine.lines().next()?.strip_prefix("cpu ")?;
        // user, nice, system, idle, iowait, irq, softirq, steal; what follows is in user and nice.
        let counts: Vec<u64> =
            of_all.split_whitespace().take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
        let idle = counts.get(3)? + counts.get(4)?;
        // The name of the program may hold anything; the times are the 12th and 13th word behind it.
        let times = own.rsplit_once(')')?.1.split_whitespace().skip(11).take(2);
        let own = times.map(str::parse::<u64>).sum::<Result<u64, _>>().ok()?;
        Some(Ticks { all: counts.iter().sum(), idle, own })
    }

    /// The share of the machine's processor time that others have had since `earlier`.
    fn others_since(self, earlier: Ticks) -> f64 {
        let all = self.all.saturating_sub(earlier.all);
        let mine = self.own.saturating_sub(earlier.own) + self.idle.saturating_sub(earlier.idle);
        if all == 0 { 0.0 } else { all.saturating_sub(mine) as f64 / all as f64 }
    }
}

/// Seconds of processor time that this process has used.
pub fn own_s() -> f64 {
    Ticks::now().map_or(0.0, |ticks| ticks.own as f64 / TICKS_PER_S)
}

/// Signs that a measurement was disturbed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Disturbance {
    /// The share of the machine's processor time that other programs had meanwhile.
    pub others_share: f64,
    /// Gap between the median and the best of repeated calls, as a share of the best.
    pub spread: f64,
    /// The load average of the last minute, before the measurement.
    pub load_average: Option<f64>,
}

impl Disturbance {
    /// Between two counts.
    pub fn between(
        before: Option<Ticks>,
        after: Option<Ticks>,
        spread: f64,
        load_average: Option<f64>,
    ) -> Disturbance {
        let others = before.zip(after).map_or(0.0, |(before, after)| after.others_since(before));
        Disturbance { others_share: others, spread, load_average }
    }

    /// Returns whether it is too large for rates and advice.
    pub fn is_busy(&self) -> bool {
        self.others_share > OTHERS || self.spread > SPREAD
    }

    /// Message about a busy machine.
    pub fn to_text(self) -> String {
        let load = self.load_average.map_or(String::new(), |load| format!(" (load average {load:.1})"));
        format!(
            "this machine is busy: other programs had {:.0}% of its processor time meanwhile{load}, and repeated calls differ by {:.0}%.\n\
             The rates above are too low, and no advice is given: run this again at rest\n",
            100.0 * self.others_share,
            100.0 * self.spread
        )
    }
}

/// The load average of the last minute.
pub fn load_average() -> Option<f64> {
    phalanx_system::host::text("/proc/loadavg")?.split_whitespace().next()?.parse().ok()
}

/// Gap between the median and the best of `rates`, as a share of the best.
pub fn spread(rates: &[f64]) -> f64 {
    let mut sorted = rates.to_vec();
    sorted.sort_by(f64::total_cmp);
    match (sorted.get(sorted.len() / 2), sorted.last()) {
        (Some(middle), Some(best)) if *best > 0.0 => 1.0 - middle / best,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two processors for 10 s, 2,000 ticks; `idle` of them idle, `own` of this process.
    fn measured(idle: u64, own: u64, rates: &[f64]) -> Disturbance {
        let at = |all: u64, idle: u64, own: u64| {
            let machine =
                format!("cpu  {} 0 0 {} {} 0 0 0 7 7\ncpu0 1 2 3\n", all - idle, idle - idle / 4, idle / 4);
            let process = format!("77 (a (b) c) R 1 1 1 0 -1 4 9 0 0 0 {} {} 0 0 20", own / 2, own - own / 2);
            Ticks::parse(&machine, &process)
        };
        Disturbance::between(at(5000, 1000, 40), at(7000, 1000 + idle, 40 + own), spread(rates), Some(3.25))
    }

    #[test]
    fn others_or_unequal_calls_make_a_machine_busy() {
        let steady = [1.0, 0.97, 0.99, 1.0, 0.95];
        for (idle, own, rates, others, is_busy) in [
            (1000, 1000, &steady[..], 0.0, false),
            (0, 2000, &steady, 0.0, false),
            (900, 1000, &steady, 0.05, false),
            (0, 1000, &steady, 0.5, true),
            (600, 800, &steady, 0.3, true),
            // Others do not count where ticks of this process and of the machine are rounded apart.
            (1000, 1001, &steady, 0.0, false),
            // Another machine has the processors.
            (1000, 1000, &[1.0, 0.5, 0.6, 0.98, 0.7], 0.0, true),
            (1000, 1000, &[], 0.0, false),
        ] {
            let found = measured(idle, own, rates);
            assert!((found.others_share - others).abs() < 1e-9, "{found:?}");
            assert_eq!(found.is_busy(), is_busy, "{found:?}");
        }
        let said = measured(0, 1000, &steady).to_text();
        for words in ["this machine is busy", "50% of its processor time", "load average 3.2", "no advice"] {
            assert!(said.contains(words), "no {words:?} in: {said}");
        }
        let unknown = Disturbance::between(None, Ticks::now(), 0.0, None);
        assert!(!unknown.is_busy() && Ticks::now().is_some(), "{unknown:?}");
    }
}
