//! Ranks that agree pass; every kind of disagreement is named with both ranks and both call sites.

use std::sync::Arc;

use phalanx_plan::trace::{
    Axis, Collective, CollectiveOp, DType, Event, Fault, Phase, PhaseName, Placement, Placements, Site, Trace,
};
use phalanx_plan::{Disagreement, compare, faults};

fn collective(op: CollectiveOp, count: u64, line: u32) -> Collective {
    let site = Site { file: "zero.rs", line };
    Collective {
        group: "data",
        members: Arc::default(),
        world_size: 3,
        op,
        dtype: DType::F32,
        count,
        root: None,
        tag: None,
        placements: Placements::REPLICATED,
        sent_bytes: 0,
        site,
    }
}

fn step() -> Vec<Collective> {
    vec![
        collective(CollectiveOp::AllGather, 4096, 10),
        collective(CollectiveOp::ReduceScatter, 4096, 20),
        collective(CollectiveOp::Barrier, 0, 30),
    ]
}

fn trace(rank: usize, step: Vec<Collective>) -> Trace {
    let init = Phase { name: PhaseName::Init, events: Vec::new() };
    let events = step.into_iter().map(Box::new).map(Event::Collective).collect();
    Trace { rank, phases: vec![init, Phase { name: PhaseName::Step, events }], faults: Vec::new() }
}

/// A change of rank 1 of 3, and the words that the error must contain.
type Case = (fn(&mut Vec<Collective>), &'static [&'static str]);

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
fn disagreements_are_named() {
    let rows: [Case; 7] = [
        (
            |s| s[1].count = 8192,
            &[
                "phase `step`, group `data`: the ranks disagree on collective 1 (count)",
                "rank 0 (and 1 more) issues reduce_scatter of 4096 f32 among 3 ranks at zero.rs:20",
                "rank 1 issues reduce_scatter of 8192 f32 among 3 ranks at zero.rs:20",
                "what makes rank 1 take another path",
            ],
        ),
        (|s| s[0].op = CollectiveOp::AllReduce, &["collective 0 (op)", "all_reduce of 4096"]),
        (|s| s[0].dtype = DType::BF16, &["collective 0 (dtype)", "4096 bf16"]),
        (|s| s[2].root = Some(4), &["collective 2 (root)", "with root 4"]),
        (|s| s[2].world_size = 2, &["collective 2 (world_size)", "among 2 ranks"]),
        (|s| s.truncate(2), &["collective 2 (length)", "rank 1 issues no more collectives", "zero.rs:30"]),
        (
            |s| s.push(collective(CollectiveOp::AllGather, 64, 40)),
            &["collective 3 (length)", "rank 0 (and 1 more) issues no more collectives", "zero.rs:40"],
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

/// The same call in the group `name` of `members`.
fn within(name: &'static str, members: &[usize], c: Collective) -> Collective {
    Collective { group: name, members: members.into(), world_size: members.len(), ..c }
}

/// Ranks 0 and 1 are one tensor group, 2 and 3 another; 0 and 2, 1 and 3 are data groups.
fn mesh(rank: usize) -> Vec<Collective> {
    let tensor = if rank < 2 { [0, 1] } else { [2, 3] };
    let data = [rank % 2, rank % 2 + 2];
    // The two stages make different calls.
    let count = if rank < 2 { 100 } else { 200 };
    vec![
        within("tensor", &tensor, collective(CollectiveOp::AllReduce, count, 10)),
        within("data", &data, collective(CollectiveOp::ReduceScatter, 64, 20)),
    ]
}

#[test]
fn groups_are_compared_among_their_members() {
    let traces = |change: fn(usize, &mut Vec<Collective>)| -> Vec<Trace> {
        let of_rank = |rank| {
            let mut calls = mesh(rank);
            change(rank, &mut calls);
            trace(rank, calls)
        };
        (0..4).map(of_rank).collect()
    };
    assert_eq!(compare(&traces(|_, _| {})), Ok(()));
    // Rank 2 is the only traced rank of its tensor group, so it is not compared.
    assert_eq!(compare(&traces(|_, _| {})[..3]), Ok(()));

    type Change = fn(usize, &mut Vec<Collective>);
    let rows: [(Change, [&str; 3]); 3] = [
        (
            |rank, calls| calls[0].count += (rank == 3) as u64,
            ["group `tensor` of ranks [2, 3]", "rank 2 issues all_reduce of 200", "all_reduce of 201"],
        ),
        (
            |rank, calls| calls.truncate(2 - (rank == 1) as usize),
            ["group `data` of ranks [1, 3]", "(length)", "rank 1 issues no more collectives"],
        ),
        (
            |rank, calls| {
                if rank == 1 {
                    calls[0].members = [1, 2].into();
                }
            },
            ["group `tensor` of ranks [0, 1]", "(length)", "rank 1 issues no more collectives"],
        ),
    ];
    for (change, words) in rows {
        let error = compare(&traces(change)).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{error} lacks {word}");
        }
    }
}

/// A send or recv of `count` elements with the rank `peer` of a group.
fn message(op: CollectiveOp, peer: usize, count: u64, tag: u64, line: u32) -> Collective {
    let c = Collective { root: Some(peer), tag: Some(tag), ..collective(op, count, line) };
    within("pipeline", &[4, 6], c)
}

/// Rank 4 sends two activations to rank 6 and receives a gradient.
fn stages() -> [Vec<Collective>; 2] {
    use CollectiveOp::{Recv, Send};
    [
        vec![message(Send, 1, 100, 1, 10), message(Send, 1, 100, 2, 11), message(Recv, 1, 100, 3, 12)],
        vec![message(Recv, 0, 100, 1, 20), message(Send, 0, 100, 3, 21), message(Recv, 0, 100, 2, 22)],
    ]
}

#[test]
fn messages_are_matched_in_pairs() {
    type Change = fn(&mut [Vec<Collective>; 2]);
    let traces = |change: Change| {
        let mut both = stages();
        change(&mut both);
        let [first, second] = both;
        [trace(4, first), trace(6, second)]
    };
    assert_eq!(compare(&traces(|_| {})), Ok(()));
    // The other stage has no trace.
    assert_eq!(compare(&traces(|_| {})[..1]), Ok(()));

    let rows: [(Change, &[&str]); 7] = [
        (
            |s| s[1][2].tag = Some(9),
            &[
                "phase `step`, group `pipeline` of ranks [4, 6]",
                "message 1 from rank 4 to rank 6 does not match (tag)",
                "rank 4 sends 100 f32 with tag 2 (replicated) at zero.rs:11",
                "rank 6 receives 100 f32 with tag 9 (replicated) at zero.rs:22",
            ],
        ),
        (|s| s[0].swap(0, 1), &["message 0 from rank 4 to rank 6", "(tag)", "tag 2", "tag 1"]),
        (|s| s[1][1].count = 50, &["message 0 from rank 6 to rank 4", "(count)", "rank 6 sends 50 f32"]),
        (|s| s[1][0].dtype = DType::BF16, &["message 0", "(dtype)", "rank 6 receives 100 bf16"]),
        (
            |s| {
                let sharded = Placements::REPLICATED.with(Axis::Tensor, Placement::Shard(1));
                s[0][1].placements = sharded;
            },
            &["message 1", "(placements)", "(tensor: sharded in dimension 1)", "tag 2 (replicated)"],
        ),
        (|s| s[1].truncate(2), &["message 1", "(length)", "rank 6 receives nothing more", "zero.rs:11"]),
        (
            |s| s[0].truncate(2),
            &["message 0 from rank 6 to rank 4", "(length)", "rank 4 receives nothing more", "zero.rs:21"],
        ),
    ];
    for (change, words) in rows {
        let error = compare(&traces(change)).unwrap_err();
        assert!(matches!(error, Disagreement::Message(_)), "{error}");
        for word in words {
            assert!(error.to_string().contains(word), "{error} lacks {word}");
        }
    }
}

#[test]
fn the_first_placement_fault_is_reported() {
    let fault = |phase, tensor: &str| Fault {
        phase: Some(phase),
        tensor: tensor.to_string(),
        axis: Axis::Tensor,
        what: "is a partial sum".to_string(),
        site: Site { file: "linear.rs", line: 7 },
    };
    let mut traces = [trace(0, step()), trace(1, step())];
    assert_eq!(faults(&traces), Ok(()));
    traces[0].faults = vec![fault(PhaseName::Step, "h.0.out")];
    assert_eq!(faults(&traces).unwrap_err().more, 0);
    traces[1].faults = vec![fault(PhaseName::Init, "wte"), fault(PhaseName::Step, "h.1.out")];
    let error = faults(&traces).unwrap_err();
    assert_eq!((error.rank, error.fault.tensor.as_str(), error.more), (1, "wte", 2));
    let words =
        ["rank 1: phase `init`, axis `tensor`, at linear.rs:7: `wte` is a partial sum", "2 more faults"];
    for word in words {
        assert!(error.to_string().contains(word), "{error} lacks {word}");
    }
}
