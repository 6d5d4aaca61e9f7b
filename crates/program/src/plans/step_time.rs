//! The predicted time of a step on a machine, and what it is made of.

use phalanx_plan::{Machine, PhaseTime};
use serde_json::{Value, json};

use crate::plans::planned::Planned;
use phalanx_drawing::report::{Table, count, seconds};

/// The predicted step of the rank that takes longest.
pub struct StepTime {
    machine: Machine,
    /// `None` if the profile lacks a rate that the step needs.
    time: Option<PhaseTime>,
    /// Number of ranks, and of tokens of a step.
    ranks: usize,
    tokens: u64,
    /// Operations of the model per second and device, as a share of the machine's peak.
    mfu: Option<f64>,
}

impl StepTime {
    /// Predicts the step of a plan.
    pub fn of(planned: &Planned, machine: &Machine) -> StepTime {
        StepTime::of_times(planned, machine, planned.plan.step_times(machine))
    }

    /// The same of times that were played before.
    pub fn of_times(planned: &Planned, machine: &Machine, times: Option<Vec<PhaseTime>>) -> StepTime {
        let plan = &planned.plan;
        let ranks = plan.spec.world_size();
        let time = times.and_then(|times| times.into_iter().max_by(|a, b| a.seconds.total_cmp(&b.seconds)));
        let mfu = time.zip(machine.flops_per_s(planned.compute())).map(|(time, flops_per_s)| {
            plan.model_flops_per_step() as f64 / ranks as f64 / time.seconds / flops_per_s
        });
        StepTime { machine: machine.clone(), time, ranks, tokens: plan.spec.tokens_per_step(), mfu }
    }

    /// The time of the rank that takes longest, where the profile has all rates.
    pub fn time(&self) -> Option<&PhaseTime> {
        self.time.as_ref()
    }

    /// Operations of the model per second and device, as a share of the machine's peak.
    pub fn mfu(&self) -> Option<f64> {
        self.mfu
    }

    /// Tokens a second of all ranks together.
    pub fn tokens_per_s(&self) -> Option<f64> {
        self.time.map(|time| self.tokens as f64 / time.seconds.max(f64::MIN_POSITIVE))
    }

    /// Joules of a step of all ranks, and its price in USD, where the profile has them.
    fn energy_and_price(&self) -> (Option<f64>, Option<f64>) {
        let device_s = self.time.map(|time| time.seconds * self.ranks as f64);
        let joules = device_s.zip(self.machine.power_w).map(|(seconds, watts)| seconds * watts);
        let usd = device_s.zip(self.machine.usd_per_hour).map(|(seconds, usd)| seconds * usd / 3600.0);
        (joules, usd)
    }

    /// A line with tokens a second, and energy and price where the profile has them.
    fn rates(&self) -> String {
        let Some(tokens_per_s) = self.tokens_per_s() else { return String::new() };
        let giga = 1e9 / self.tokens.max(1) as f64;
        let mut parts = vec![
            format!("{} tokens a second", count(tokens_per_s)),
            format!("{} on each device", count(tokens_per_s / self.ranks as f64)),
        ];
        let (joules, usd) = self.energy_and_price();
        parts.extend(joules.map(|joules| format!("{:.0} kWh for 10^9 tokens", joules / 3.6e6 * giga)));
        parts.extend(usd.map(|usd| format!("{:.0} USD for 10^9 tokens", usd * giga)));
        format!("  {}\n", parts.join(", "))
    }

    /// Seconds of the step, where the profile has all rates.
    pub fn seconds(&self) -> Option<f64> {
        self.time.map(|time| time.seconds)
    }

    /// For people.
    pub fn to_text(&self) -> String {
        let name = &self.machine.name;
        let Some(time) = &self.time else {
            return format!(
                "Step on {name}\n  unknown: the profile has no rate for the disk or the transport that the step uses\n"
            );
        };
        let mut table = Table::default();
        let mut row = |label: &str, value: f64, note: String| {
            table.row([label.to_string(), seconds(value), note]);
        };
        let share =
            |part: f64| format!("{:.0}% of the step", 100.0 * part / time.seconds.max(f64::MIN_POSITIVE));
        row("step", time.seconds, self.mfu.map_or(String::new(), |mfu| format!("mfu {:.1}%", 100.0 * mfu)));
        row("floor", time.floor_s(), format!("the time of {} alone", time.limit()));
        row("kernels", time.compute_s, share(time.compute_s));
        row("copies to the device", time.to_device_s, share(time.to_device_s));
        row("copies to the host", time.to_host_s, share(time.to_host_s));
        row("disk", time.disk_s, share(time.disk_s));
        row("the host's processor", time.host_s, share(time.host_s));
        row("collectives", time.collective_s, share(time.collective_s));
        if self.machine.computes_on_host {
            row("the cores: kernels, copies, collectives", time.cores_s, share(time.cores_s));
        }
        row("exposed: compute waits for copies", time.exposed_copy_s, share(time.exposed_copy_s));
        row("exposed: for the host's processor", time.exposed_host_s, share(time.exposed_host_s));
        row("exposed: for collectives", time.exposed_collective_s, share(time.exposed_collective_s));
        row("exposed: for other pipeline stages", time.exposed_message_s, share(time.exposed_message_s));
        format!("Step on {name}, at the rates of its profile\n{table}{}", self.rates())
    }

    /// For scripts.
    pub fn to_json(&self) -> Value {
        json!({
            "machine": self.machine.name, "time": self.time, "mfu": self.mfu,
            "tokens_per_s": self.tokens_per_s(), "energy_j": self.energy_and_price().0, "usd": self.energy_and_price().1,
            "floor_s": self.time.map(|time| time.floor_s()), "limit": self.time.map(|time| time.limit()),
        })
    }
}
