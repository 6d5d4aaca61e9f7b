//! Planted faults in kernels: each must be reported as what it is, with its source line, and the right version of the
//! same kernel must run without a report.

use crate::support::Parameter::{Address, Integer};
use crate::support::{Device, numbers};
use phalanx_cuda_emulator::checks::{Finding, Report};

const PTX: &str = include_str!("kernels/faults.ptx");
const SOURCE: &str = include_str!("kernels/faults.cu");

/// Elements of the data.
const COUNT: usize = 1024;

/// A kernel, how many blocks it runs in, and what its fault is reported as.
const FAULTS: [(&str, u32, Finding); 35] = [
    ("sum_barrier", 1, Finding::Race),
    ("reuse_barrier", 1, Finding::Race),
    ("tree_barrier", 1, Finding::Race),
    ("warp_barrier", 1, Finding::Race),
    ("same_element", 1, Finding::Race),
    ("stencil_in_place", 1, Finding::Race),
    ("stencil_between_blocks", 8, Finding::RaceBetweenBlocks),
    ("sum_of_blocks", 8, Finding::RaceBetweenBlocks),
    ("histogram", 1, Finding::Race),
    ("read_of_atomic", 1, Finding::Race),
    ("wait_for_last", 1, Finding::UnfinishedCopy),
    ("wait_and_barrier", 1, Finding::Race),
    ("wait_before_barrier", 1, Finding::UnfinishedCopy),
    ("commit_of_copy", 1, Finding::UnfinishedCopy),
    ("stage_in_use", 1, Finding::Race),
    ("wait_at_end", 1, Finding::UnfinishedCopy),
    ("aligned_copy", 1, Finding::Misaligned),
    ("one_too_many", 9, Finding::OutOfBounds),
    ("one_too_few", 1, Finding::OutOfBounds),
    ("index_overflow", 1, Finding::OutOfBounds),
    ("shared_bounds", 1, Finding::OutOfBounds),
    ("local_bounds", 1, Finding::OutOfBounds),
    ("aligned_vector", 1, Finding::Misaligned),
    ("aligned_rows", 1, Finding::Misaligned),
    ("unwritten_global", 1, Finding::Unwritten),
    ("unwritten_shared", 1, Finding::Unwritten),
    ("unwritten_local", 1, Finding::Unwritten),
    ("barrier_in_branch", 1, Finding::Divergence),
    ("barrier_number", 1, Finding::Deadlock),
    ("barrier_count", 1, Finding::Deadlock),
    ("barrier_of_some", 1, Finding::Race),
    ("exchange_in_branch", 1, Finding::Divergence),
    ("exchange_with_inactive", 1, Finding::InactiveLane),
    ("trap", 1, Finding::Trap),
    ("endless", 1, Finding::Endless),
];

fn reports(kernel: &str, blocks: u32, seed: u64) -> Vec<Report> {
    let mut device = Device::new(PTX);
    device.seed = seed;
    device.limit = 1 << 20;
    let data = device.put(&numbers(COUNT, 1));
    let scratch = device.empty::<f32>(COUNT);
    device.launch(
        kernel,
        [blocks, 1, 1],
        [128, 1, 1],
        &[Address(data), Integer(COUNT as i32), Address(scratch)],
    );
    device.reports.take()
}

fn text(reports: &[Report]) -> String {
    reports.iter().map(Report::to_string).collect::<Vec<_>>().join("\n")
}

/// The lines of a kernel in the source: from its `BODY` to its `PAIR`.
fn lines(kernel: &str) -> std::ops::RangeInclusive<u32> {
    let line = |wanted: String| SOURCE.lines().position(|line| line.starts_with(&wanted)).unwrap() as u32 + 1;
    line(format!("BODY({kernel})"))..=line(format!("PAIR({kernel})"))
}

#[test]
fn planted_faults_are_reported() {
    for (kernel, blocks, expected) in FAULTS {
        for seed in 0..4 {
            let found = reports(&format!("{kernel}_fault"), blocks, seed);
            let matching: Vec<&Report> = found.iter().filter(|report| report.finding == expected).collect();
            assert!(
                !matching.is_empty(),
                "{kernel}, seed {seed}: expected {expected:?}, found:\n{}",
                text(&found)
            );
            for report in matching {
                let (file, line) = report.source.as_ref().unwrap_or_else(|| panic!("{report}"));
                let is_copy = *line < 30;
                assert!(
                    file == "faults.cu" && (is_copy || lines(kernel).contains(line)),
                    "{kernel}: {report}"
                );
                assert!(report.thread.is_some() && report.ptx_line > 0, "{report}");
            }
        }
    }
}

#[test]
fn right_kernels_run_without_a_report() {
    for (kernel, blocks, _) in FAULTS {
        // `one_too_many` has threads beyond the data in its right version, too.
        for seed in 0..4 {
            let found = reports(kernel, blocks.min(8), seed);
            assert!(found.is_empty(), "{kernel}, seed {seed}:\n{}", text(&found));
        }
    }
}

#[test]
fn a_report_says_where_and_what() {
    let found = reports("one_too_many_fault", 9, 0);
    let line = lines("one_too_many").start() + 2;
    let text = found[0].to_string();
    assert!(
        text.starts_with(&format!(
            "access out of bounds in one_too_many_fault at faults.cu:{line} (PTX line "
        ))
    );
    assert!(text.contains("block [8, 0, 0], thread [0, 0, 0], address 0x"), "{text}");
    assert!(text.ends_with("4 bytes, 0 past the end of an allocation of 4096 bytes"), "{text}");
    let race = reports("sum_barrier_fault", 1, 0)[0].to_string();
    assert!(race.contains("thread [0, 0, 0]") && race.contains("no barrier orders them"), "{race}");
}

#[test]
fn unsupported_instructions_name_their_line() {
    let refused = |instruction: &str| {
        let text = format!(".version 8.0\n.target sm_90\n.visible .entry k() {{\n{instruction};\nret;\n}}\n");
        phalanx_cuda_emulator::decode::text(&text).map(|_| ()).unwrap_err().to_string()
    };
    assert_eq!(refused("foo.bar.u32 1, 2"), "PTX line 4: instruction `foo.bar.u32` is not supported");
    assert!(refused("barrier.cluster.arrive").contains("clusters and the tensor memory accelerator"));
    assert!(refused("cp.async.bulk.wait_group 0").contains("clusters and the tensor memory accelerator"));
    assert_eq!(refused("mov.u32 %r1, %tid.x"), "PTX line 4: `%r1` is not declared");
    assert_eq!(refused("bra $nowhere"), "PTX line 4: there is no label `$nowhere`");
}
