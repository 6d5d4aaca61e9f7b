//! Nothing hangs without a name: ranks that disagree, panic, leave or do not come, on one host and on several.

use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use crate::support::{HOSTS, Layout, host, ranks, ranks_on, sample, tensor, within_a_second, zeros};
use phalanx_collectives::{CollectiveError, Endpoint, Group, Options};
use phalanx_tensor::DType;

/// The result of `body` on each rank, and the longest time that a rank took.
fn errors(
    layout: Layout,
    overlap: bool,
    body: impl Fn(&dyn Group) -> Result<(), CollectiveError> + Sync,
) -> (Vec<String>, Duration) {
    let options = Options { overlap, ..Options::default() };
    let ready = Barrier::new(layout.world());
    let results = ranks_on(layout, &options, |endpoint| {
        let group = endpoint.group("data");
        ready.wait();
        let start = Instant::now();
        let error = body(&*group).expect_err("the ranks disagree");
        assert!(matches!(error, CollectiveError::Disagreement { .. }), "{error}");
        (error.to_string(), start.elapsed())
    });
    let (texts, times): (Vec<_>, Vec<_>) = results.into_iter().map(|r| r.unwrap()).unzip();
    (texts, times.into_iter().max().unwrap())
}

type Side = fn(&dyn Group) -> Result<(), CollectiveError>;

fn f32s(g: &dyn Group, n: usize) -> phalanx_tensor::Tensor {
    tensor(&host(), &sample::<f32>(g.rank(), n))
}

/// One row per field: the call of rank 1, the call of the others, and the words in the report for each side.
const ROWS: [(&str, Side, Side, [&str; 2]); 10] = [
    (
        "op",
        |g| g.all_reduce(f32s(g, 120)).wait().map(drop),
        |g| g.reduce_scatter_in_place(f32s(g, 120)).wait().map(drop),
        ["all_reduce of 120 f32", "reduce_scatter of 120 f32"],
    ),
    (
        "dtype",
        |g| g.all_reduce(f32s(g, 120)).wait().map(drop),
        |g| g.all_reduce(zeros(&host(), DType::F64, 120)).wait().map(drop),
        ["of 120 f32", "of 120 f64"],
    ),
    (
        "count",
        |g| g.all_reduce(f32s(g, 120)).wait().map(drop),
        |g| g.all_reduce(f32s(g, 121)).wait().map(drop),
        ["of 120 f32", "of 121 f32"],
    ),
    (
        "root",
        |g| g.broadcast(f32s(g, 120), 0).wait().map(drop),
        |g| g.broadcast(f32s(g, 120), 1).wait().map(drop),
        ["broadcast with root 0", "broadcast with root 1"],
    ),
    (
        "accumulate",
        |g| g.reduce_scatter(f32s(g, 2 * g.world_size()), f32s(g, 2), true).wait().map(drop),
        |g| g.reduce_scatter(f32s(g, 2 * g.world_size()), f32s(g, 2), false).wait().map(drop),
        ["f32, accumulating (call", "f32 (call"],
    ),
    (
        "sequence",
        |g| g.barrier().wait().and_then(|()| g.all_reduce(f32s(g, 120)).wait().map(drop)),
        |g| g.all_reduce(f32s(g, 120)).wait().map(drop),
        ["barrier of 0", "all_reduce of 120 f32"],
    ),
    (
        "a message against a collective",
        |g| g.recv(f32s(g, 120), 0, 7).wait().map(drop),
        |g| g.all_reduce(f32s(g, 120)).wait().map(drop),
        ["recv from rank 0 of 120 f32 with tag 7", "all_reduce of 120 f32"],
    ),
    (
        "two senders",
        |g| g.send(f32s(g, 120), 0, 7).wait().map(drop),
        |g| if g.rank() == 0 { g.send(f32s(g, 120), 1, 7).wait().map(drop) } else { g.barrier().wait() },
        ["send to rank 0 of 120 f32", "send to rank 1 of 120 f32"],
    ),
    (
        "length of a message",
        |g| g.send(f32s(g, 120), 0, 7).wait().map(drop),
        |g| if g.rank() == 0 { g.recv(f32s(g, 119), 1, 7).wait().map(drop) } else { g.barrier().wait() },
        ["send to rank 0 of 120 f32", "recv from rank 1 of 119 f32"],
    ),
    (
        "tag of a message",
        |g| g.send(f32s(g, 120), 0, 7).wait().map(drop),
        |g| if g.rank() == 0 { g.recv(f32s(g, 120), 1, 9).wait().map(drop) } else { g.barrier().wait() },
        ["send to rank 0 of 120 f32 with tag 7", "recv from rank 1 of 120 f32 with tag 9"],
    ),
];

#[test]
fn a_disagreement_names_both_calls_on_every_rank() {
    for (field, odd_one, others, words) in ROWS {
        for layout in [2, 3, 5].map(Layout::Shared).into_iter().chain(HOSTS) {
            for overlap in [false, true] {
                within_a_second(field, || {
                    let side = |g: &dyn Group| if g.rank() == 1 { odd_one(g) } else { others(g) };
                    let (texts, time) = errors(layout, overlap, side);
                    for (rank, text) in texts.iter().enumerate() {
                        let what = format!("{field}, {layout:?}, rank {rank}: {text}");
                        for word in words {
                            assert!(text.contains(word), "{what}: no '{word}'");
                        }
                        assert!(text.contains("rank 1: ") && text.contains("group data"), "{what}");
                        assert_eq!(text.matches("tests/faults.rs:").count(), 2, "{what}");
                    }
                    time
                });
            }
        }
    }
}

#[test]
fn groups_made_in_another_order_disagree() {
    for layout in [Layout::Shared(2), Layout::Hosts(&[1, 1])] {
        let results = ranks_on(layout, &Options::default(), |endpoint| {
            let names = if endpoint.rank() == 0 { ["data", "tensor"] } else { ["tensor", "data"] };
            let groups = names.map(|name| endpoint.group(name));
            groups[0].barrier().wait().expect_err("other groups").to_string()
        });
        for text in results.into_iter().map(|r| r.unwrap()) {
            assert!(text.contains("group data") && text.contains("group tensor"), "{text}");
        }
    }
}

/// A rank that panics between its calls ends the waits of the others, and the error names it.
#[test]
fn a_panic_ends_the_others_by_name() {
    for layout in
        [Layout::Shared(3), Layout::Hosts(&[1, 1, 1]), Layout::Hosts(&[2, 1]), Layout::Hosts(&[1, 2])]
    {
        for overlap in [false, true] {
            within_a_second("freeing the others", || panic_between_calls(layout, overlap));
        }
    }
}

fn panic_between_calls(layout: Layout, overlap: bool) -> Duration {
    let options = Options { overlap, ..Options::default() };
    let died = Mutex::new(None);
    let results = ranks_on(layout, &options, |endpoint| {
        let group = endpoint.group("data");
        endpoint.note(41);
        group.barrier().wait().unwrap();
        if endpoint.rank() == 2 {
            *died.lock().unwrap() = Some(Instant::now());
            panic!("on purpose");
        }
        let error = group.all_reduce(f32s(&*group, 1000)).wait().expect_err("rank 2 is gone");
        let since = died.lock().unwrap().map_or(Duration::ZERO, |t| t.elapsed());
        // The job stays ended.
        assert_eq!(group.barrier().wait(), Err(error.clone()));
        assert_eq!(endpoint.check(), Err(error.clone()));
        (error, since)
    });
    let panic = results[2].as_ref().expect_err("rank 2 panics");
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"on purpose"));
    let freed = results.into_iter().take(2).map(|result| match result.unwrap() {
        (CollectiveError::Aborted { rank: 2, reason }, since) => {
            assert!(reason.contains("rank-2 panicked") && reason.contains("step 41"), "{reason}");
            assert!(reason.contains("barrier") && reason.contains("tests/faults.rs"), "{reason}");
            since
        }
        (other, _) => panic!("{other}"),
    });
    freed.max().unwrap()
}

/// A rank panics while a call is in flight that no other rank will make.
#[test]
fn a_panic_with_a_call_in_flight_ends_the_others() {
    for overlap in [false, true] {
        within_a_second("freeing both", || panic_in_flight(overlap));
    }
}

fn panic_in_flight(overlap: bool) -> Duration {
    let options = Options { overlap, ..Options::default() };
    let start = Instant::now();
    let results = ranks(2, &options, |endpoint| {
        let [data, other] = ["data", "other"].map(|name| endpoint.group(name));
        if endpoint.rank() == 1 {
            // Without overlap the submitter waits, so the call cannot be in flight.
            let _in_flight = overlap.then(|| other.all_reduce(f32s(&*other, 1000)));
            panic!("on purpose");
        }
        data.barrier().wait()
    });
    let time = start.elapsed();
    let [Ok(Err(CollectiveError::Aborted { rank: 1, reason })), Err(_)] = &results[..] else {
        panic!("{results:?}")
    };
    assert!(reason.contains("rank-1 panicked"), "{reason}");
    time
}

/// A tensor that breaks a rule of the call stops its rank, and through it the others.
#[test]
fn a_failed_assertion_ends_the_others() {
    let results = ranks(2, &Options::default(), |endpoint| {
        let group = endpoint.group("data");
        if endpoint.rank() == 0 {
            let _ = group.all_reduce(zeros(&host(), DType::U32, 4)).wait();
        }
        group.barrier().wait()
    });
    assert!(results[0].is_err(), "u32 cannot be summed");
    let Ok(Err(CollectiveError::Aborted { rank: 0, .. })) = &results[1] else { panic!("{:?}", results[1]) };
}

#[test]
fn an_abort_carries_its_reason() {
    let results = ranks(3, &Options::default(), |endpoint| {
        let group = endpoint.group("data");
        if endpoint.rank() == 1 {
            endpoint.abort("loss is NaN at step 3");
        }
        group.all_reduce(f32s(&*group, 10)).wait().map(drop)
    });
    for result in results {
        let expected = CollectiveError::Aborted { rank: 1, reason: "loss is NaN at step 3".into() };
        assert_eq!(result.unwrap(), Err(expected));
    }
}

/// Rank 0 sleeps until rank 1 ends the job, and no longer.
#[test]
fn a_rank_can_wait_for_the_reason_of_another() {
    let ready = Barrier::new(2);
    let results = ranks(2, &Options::default(), |endpoint| {
        assert!(!endpoint.wait_for_abort(Duration::from_millis(1)), "nobody has ended the job");
        ready.wait();
        if endpoint.rank() == 1 {
            endpoint.abort("no luck");
        }
        (endpoint.wait_for_abort(Duration::from_secs(60)), endpoint.check())
    });
    for result in results {
        let expected = CollectiveError::Aborted { rank: 1, reason: "no luck".into() };
        assert_eq!(result.unwrap(), (true, Err(expected)));
    }
}

#[test]
fn a_rank_that_left_is_named() {
    let results = ranks(2, &Options::default(), one_leaves);
    let [Ok(Err(CollectiveError::Left { rank: 1, report })), Ok(Ok(()))] = &results[..] else {
        panic!("{results:?}")
    };
    assert!(report.contains("rank 0 waits") && report.contains("then left"), "{report}");
}

/// Rank 1 makes one call less.
fn one_leaves(endpoint: Endpoint) -> Result<(), CollectiveError> {
    let group = endpoint.group("data");
    group.barrier().wait()?;
    if endpoint.rank() == 0 { group.barrier().wait() } else { Ok(()) }
}

/// On another host, its connection breaks; the report has its host and address, and the call that waits for it.
#[test]
fn a_rank_that_left_another_host_is_named() {
    let results = ranks_on(Layout::Hosts(&[1, 1]), &Options::default(), one_leaves);
    let [Ok(Err(error)), Ok(Ok(()))] = &results[..] else { panic!("{results:?}") };
    let text = error.to_string();
    for word in [
        "rank 1",
        "on the connection to host 1 at 127.0.0.1:",
        "barrier of 0",
        "tests/faults.rs",
        "then left",
    ] {
        assert!(text.contains(word), "no '{word}' in {text}");
    }
}

/// One rank waits for another that never arrives: the user is notified once, then the rank gives up.
fn wait_for_nobody(endpoint: Endpoint, waiting_is_over: &Barrier) -> Result<(), CollectiveError> {
    let group = endpoint.group("data");
    endpoint.note(7);
    let result = group.barrier().wait().and_then(|()| match endpoint.rank() {
        0 => group.all_reduce(f32s(&*group, 10)).wait().map(drop),
        _ => Ok(()),
    });
    waiting_is_over.wait();
    result
}

#[test]
fn a_missing_rank_is_told_of_and_then_named() {
    missing_rank(Layout::Shared(2));
}

#[test]
fn a_missing_rank_of_another_host_is_told_of_and_then_named() {
    missing_rank(Layout::Hosts(&[1, 1]));
}

fn missing_rank(layout: Layout) {
    let notices = Arc::new(Mutex::new(Vec::new()));
    let heard = Arc::clone(&notices);
    let options = Options {
        overlap: true,
        deadline: Duration::from_secs(2),
        notice_after: Duration::from_millis(300),
        notice: Arc::new(move |line| heard.lock().unwrap().push(line.to_string())),
        ..Options::default()
    };
    let over = Barrier::new(2);
    let results = ranks_on(layout, &options, |endpoint| wait_for_nobody(endpoint, &over));
    let [Ok(Err(CollectiveError::Missing { rank: 1, report })), Ok(Ok(()))] = &results[..] else {
        panic!("{results:?}")
    };
    // A busy machine may keep ranks waiting at the barrier too.
    notices.lock().unwrap().retain(|line| line.contains("all_reduce"));
    for text in notices.lock().unwrap().iter().chain([report]) {
        for word in ["rank 0 waits", "for rank 1 in all_reduce of 10 f32", "rank 1: step 7, barrier"] {
            assert!(text.contains(word), "no '{word}' in {text}");
        }
        assert!(!text.contains('\n'));
    }
    assert_eq!(notices.lock().unwrap().len(), 1);
}

/// Ranks 0, 1 and 2 wait for each other across hosts; rank 3 does not come. All name it.
#[test]
fn waits_are_followed_from_host_to_host() {
    let options = Options { deadline: Duration::from_secs(2), ..Options::default() };
    let over = Barrier::new(4);
    let results = ranks_on(Layout::Hosts(&[2, 2]), &options, |endpoint| {
        let groups = [[0, 1], [1, 2], [2, 3]].map(|members| match members.contains(&endpoint.rank()) {
            true => Some(endpoint.sub_group("pair", &members)),
            false => {
                endpoint.no_group();
                None
            }
        });
        endpoint.note(3);
        // Each rank first meets the rank above, so rank 0 waits for 1, 1 for 2, and 2 for 3.
        let upper = groups.iter().flatten().next_back().filter(|_| endpoint.rank() < 3);
        let result = upper.map_or(Ok(()), |group| group.barrier().wait());
        over.wait();
        result
    });
    for result in results.into_iter().take(3) {
        let text = result.unwrap().expect_err("rank 3 does not come").to_string();
        for word in ["rank 3", "rank 2 waits", "for rank 3 in barrier", "step 3"] {
            assert!(text.contains(word), "no '{word}' in {text}");
        }
    }
}
