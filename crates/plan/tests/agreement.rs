//! Ranks that agree pass; every kind of disagreement is named with both ranks and both call sites.

use phalanx_plan::{Disagreement, compare};
use phalanx_trace::{Collective, CollectiveOp, DType, Event, Phase, Site, Trace};

fn collective(op: CollectiveOp, count: u64, line: u32) -> Collective {
    let site = Site { file: "zero.rs", line };
    Collective { group: "data", world_size: 3, op, dtype: DType::F32, count, root: None, sent_bytes: 0, site }
}

fn step() -> Vec<Collective> {
    vec![
        collective(CollectiveOp::AllGather, 4096, 10),
        collective(CollectiveOp::ReduceScatter, 4096, 20),
        collective(CollectiveOp::Barrier, 0, 30),
    ]
}

fn trace(rank: usize, step: Vec<Collective>) -> Trace {
    let init = Phase { name: "init", events: Vec::new() };
    let events = step.into_iter().map(Event::Collective).collect();
    Trace { rank, phases: vec![init, Phase { name: "step", events }] }
}

/// What rank 1 of 3 does otherwise, and what the error must say.
type Row = (fn(&mut Vec<Collective>), &'static [&'static str]);

#[test]
fn agreeing_ranks_pass() {
    assert_eq!(compare(&[]), Ok(()));
    assert_eq!(compare(&[trace(0, step())]), Ok(()));
    let mut elsewhere = step();
    elsewhere[0].site.line = 99;
    elsewhere[1].sent_bytes = 7;
    assert_eq!(compare(&[trace(0, step()), trace(1, elsewhere), trace(2, step())]), Ok(()));
}

#[test]
fn sends_and_receives_are_left_out() {
    let (mut left, mut right) = (step(), step());
    left.insert(1, collective(CollectiveOp::Send, 5, 1));
    right.insert(2, collective(CollectiveOp::Recv, 5, 2));
    assert_eq!(compare(&[trace(0, left), trace(1, right)]), Ok(()));
}

#[test]
fn disagreements_are_named() {
    let rows: [Row; 7] = [
        (
            |s| s[1].count = 8192,
            &[
                "phase `step`, group `data`: the ranks disagree on collective 1 (count)",
                "rank 0 (and 1 more) asks for reduce_scatter of 4096 f32 among 3 ranks at zero.rs:20",
                "rank 1 asks for reduce_scatter of 8192 f32 among 3 ranks at zero.rs:20",
                "what makes rank 1 take another path",
            ],
        ),
        (|s| s[0].op = CollectiveOp::AllReduce, &["collective 0 (op)", "all_reduce of 4096"]),
        (|s| s[0].dtype = DType::BF16, &["collective 0 (dtype)", "4096 bf16"]),
        (|s| s[2].root = Some(4), &["collective 2 (root)", "with root 4"]),
        (|s| s[2].world_size = 2, &["collective 2 (world_size)", "among 2 ranks"]),
        (|s| s.truncate(2), &["collective 2 (length)", "rank 1 asks for nothing more", "zero.rs:30"]),
        (
            |s| s.push(collective(CollectiveOp::AllGather, 64, 40)),
            &["collective 3 (length)", "rank 0 (and 1 more) asks for nothing more", "zero.rs:40"],
        ),
    ];
    for (change, expected) in rows {
        let mut changed = step();
        change(&mut changed);
        let error = compare(&[trace(0, step()), trace(1, changed), trace(2, step())]).unwrap_err();
        for part in expected {
            assert!(error.to_string().contains(part), "{error} lacks {part}");
        }
    }
}

#[test]
fn the_earliest_disagreement_is_reported_and_the_odd_rank_named() {
    let (mut early, mut late) = (step(), step());
    late[2].count = 1;
    early[0].count = 1;
    let error = compare(&[trace(0, step()), trace(1, late), trace(2, early)]).unwrap_err();
    let Disagreement::Collective(found) = error else { panic!("{error}") };
    assert_eq!((found.index, found.left.rank, found.right.rank), (0, 0, 2));

    let mut odd = step();
    odd[0].count = 1;
    let error = compare(&[trace(0, odd), trace(1, step()), trace(2, step())]).unwrap_err().to_string();
    assert!(error.contains("what makes rank 0 take another path"), "{error}");
}

#[test]
fn ranks_go_through_the_same_phases() {
    let mut short = trace(1, step());
    short.phases.pop();
    let error = compare(&[trace(0, step()), short]).unwrap_err().to_string();
    assert!(
        error.contains(r#"rank 0 goes through the phases ["init", "step"], rank 1 through ["init"]"#),
        "{error}"
    );
}
