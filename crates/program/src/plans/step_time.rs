//! The predicted time of a step on a machine, and what it is made of.

use phalanx_plan::{Machine, PhaseTime};
use serde_json::{Value, json};

use crate::plans::planned::Planned;
use phalanx_drawing::report::{Table, seconds};

/// The predicted step of the rank that takes longest.
pub struct StepTime {
    machine: Machine,
    /// `None` if the profile lacks a rate that the step needs.
    time: Option<PhaseTime>,
    /// True if the ranks of a pipeline wait for each other, which the time does not include.
    is_of_pipeline: bool,
    /// Operations of the model per second and device, as a share of the machine's peak.
    mfu: Option<f64>,
}

impl StepTime {
    /// Predicts the step of a plan.
    pub fn of(planned: &Planned, machine: &Machine) -> StepTime {
        let plan = &planned.plan;
        let times = plan.step_times(machine);
        let time = times
            .into_iter()
            .collect::<Option<Vec<_>>>()
            .and_then(|times| times.into_iter().max_by(|a, b| a.seconds.total_cmp(&b.seconds)));
        let mfu = time.zip(machine.flops_per_s(planned.compute())).map(|(time, flops_per_s)| {
            plan.model_flops_per_step() as f64 / plan.spec.world_size() as f64 / time.seconds / flops_per_s
        });
        StepTime { machine: machine.clone(), time, is_of_pipeline: plan.spec.mesh.axes.pipeline > 1, mfu }
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
        let pipeline = match self.is_of_pipeline {
            true => "  of the slowest pipeline stage; the bubble comes on top\n",
            false => "",
        };
        format!("Step on {name}, at the rates of its profile: what they allow at best\n{table}{pipeline}")
    }

    /// For scripts.
    pub fn to_json(&self) -> Value {
        json!({
            "machine": self.machine.name, "time": self.time, "mfu": self.mfu,
            "floor_s": self.time.map(|time| time.floor_s()), "limit": self.time.map(|time| time.limit()),
        })
    }
}
