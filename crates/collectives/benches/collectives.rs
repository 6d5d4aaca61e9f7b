//! Measures collectives between processes of this host:
//! `cargo bench -p phalanx-collectives --bench collectives -- [RANKS] [OP] [BYTES,..] [overlap|blocking]
//! [f32|bf16|f16]`.
//!
//! Starts itself once per rank, as a launcher does: control block and arenas are inherited memfds.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program of its own, for a terminal")]

use std::process::{Command, ExitCode};
use std::sync::Arc;

use phalanx_collectives::{CollectiveOp, Group, HostJob, MetaGroup, Options, bench, join};
use phalanx_cpu::Cpu;
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Arena, DType, Device};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    if args.first().is_some_and(|a| a == "--rank") { rank(&args[1..]) } else { launch(&args) }
}

fn launch(args: &[String]) -> ExitCode {
    let arg = |i: usize, default: &str| args.get(i).cloned().unwrap_or_else(|| default.to_string());
    let world_size: usize = arg(0, "2").parse().expect("a number of ranks");
    let rest = [
        arg(1, "all_reduce"),
        arg(2, "4096,65536,1048576,16777216,134217728"),
        arg(3, "blocking"),
        arg(4, "f32"),
    ];
    let job = HostJob::new(world_size).expect("shared memory");
    let fds = job.inherited_fds().iter().map(|fd| fd.to_string()).collect::<Vec<_>>().join(",");
    let start = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--rank", &rank.to_string(), &world_size.to_string(), &fds]).args(&rest);
        job.pass_to(&mut command);
        command.spawn().expect("a rank")
    };
    let children: Vec<_> = (0..world_size).map(start).collect();
    let mut failed = false;
    for (rank, mut child) in children.into_iter().enumerate() {
        let status = child.wait().expect("a rank");
        if !status.success() {
            job.abort(rank, &format!("{status}; {}", job.last_activity(rank)));
            failed = true;
        }
    }
    ExitCode::from(failed as u8)
}

fn rank(args: &[String]) -> ExitCode {
    let number = |text: &str| text.parse::<usize>().expect("a number");
    let list = |text: &str| text.split(',').map(number).collect::<Vec<_>>();
    let [rank, world_size] = [number(&args[0]), number(&args[1])];
    let fds: Vec<i32> = list(&args[2]).into_iter().map(|fd| fd as i32).collect();
    let op = CollectiveOp::ALL.into_iter().find(|op| op.name() == args[3]).expect("an operation");
    let sizes = list(&args[4]);
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    let dtype = dtypes.into_iter().find(|dtype| dtype.name() == args[6]).expect("a type");
    let measure = |device: &Device, group: &dyn Group| {
        let us = |bytes: &usize| bench::median_us(device, group, op, dtype, *bytes).expect("a working group");
        sizes.iter().map(us).collect::<Vec<f64>>()
    };

    let meta = Device::meta(1);
    let recorder = Arc::clone(meta.recorder().expect("a recording device"));
    recorder.begin(PhaseName::Init);
    recorder.begin(PhaseName::Bench);
    measure(&meta, &MetaGroup::new("data", rank, world_size, Arc::clone(&recorder)));
    let plan = phalanx_plan::memory::plan_memory(&recorder.take(rank)).expect("a plan");

    let options = Options { overlap: args[5] == "overlap", ..Options::default() };
    let endpoint = join(fds[0], &fds[1..], rank, None).expect("a job").with_options(options);
    let region = endpoint.arena(plan.arena_bytes as usize).expect("memory");
    let cpu = Cpu::new(1);
    cpu.populate(&region).expect("memory");
    let arena = Arena::replaying(plan, region);
    let device = Device::new(cpu, Arc::clone(&arena));
    arena.begin(PhaseName::Init);
    arena.end();
    arena.begin(PhaseName::Bench);
    for (bytes, us) in sizes.iter().zip(measure(&device, &*endpoint.group("data"))) {
        if rank == 0 {
            let gbs = *bytes as f64 / us / 1e3;
            let name = op.name();
            print!("{{\"op\":\"{name}\",\"ranks\":{world_size},\"bytes\":{bytes},");
            println!("\"us\":{us:.1},\"algbw_gbs\":{gbs:.3}}}");
        }
    }
    arena.end();
    ExitCode::SUCCESS
}
