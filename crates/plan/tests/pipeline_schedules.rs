//! Named schedules against a checker of their own; wishes and schedules that are refused, and in which words.

use std::collections::HashSet;

use phalanx_plan::pipeline::depth;
use phalanx_plan::{
    Action, Costs, Kind, PipelineSchedule, Plan, ScheduleError, check, check_order, generate, simulate,
};

/// Every named plan, interleaved with one to four chunks.
fn plans() -> Vec<Plan> {
    let interleaved = (1..=4).map(|chunks| Plan::Interleaved { chunks });
    let named = Plan::NAMES.map(|name| name.parse::<Plan>().expect("a name of the list"));
    named.into_iter().filter(|plan| plan.name() != "interleaved").chain(interleaved).collect()
}

/// Numbers of micro-batches for p ranks: multiples, and all from p to 3p.
fn micro_batches(ranks: usize) -> Vec<usize> {
    (ranks..3 * ranks).chain((3..=8).map(|times| times * ranks)).collect()
}

/// Calls `test` with every schedule of the table.
fn each(mut test: impl FnMut(Plan, usize, usize, &PipelineSchedule)) {
    for plan in plans() {
        for ranks in (1..=6).chain([8, 16]) {
            for micro_batches in micro_batches(ranks) {
                match generate(plan, ranks, micro_batches) {
                    Ok(schedule) => test(plan, ranks, micro_batches, &schedule),
                    Err(ScheduleError::UnequalRounds { .. }) => {
                        assert_eq!(plan.name(), "interleaved");
                        assert_ne!(micro_batches % ranks, 0, "{plan}: multiples always work");
                    }
                    Err(problem) => panic!("{plan} on {ranks} with {micro_batches}: {problem}"),
                }
            }
        }
    }
}

#[test]
fn named_schedules_are_complete_and_in_order() {
    each(|plan, ranks, micro_batches, schedule| {
        let case = format!("{plan} p {ranks} m {micro_batches} v {}", plan.chunks());
        assert_eq!(schedule.stages(), ranks * plan.chunks(), "{case}");
        let split = plan.name().starts_with("zb-");
        let kinds: &[Kind] = if split {
            &[Kind::Forward, Kind::Input, Kind::Weight]
        } else {
            &[Kind::Forward, Kind::Backward]
        };
        let cells: usize = (0..ranks).map(|rank| schedule.actions(rank).count()).sum();
        assert_eq!(cells, kinds.len() * schedule.stages() * micro_batches, "{case}");
        for stage in 0..schedule.stages() {
            for &kind in kinds {
                let of_stage = schedule.actions(schedule.placement[stage]);
                let numbers = of_stage.filter(|action| (action.stage, action.kind) == (stage, kind));
                let numbers: Vec<usize> = numbers.map(|action| action.micro_batch).collect();
                assert_eq!(numbers, (0..micro_batches).collect::<Vec<_>>(), "{case}: stage {stage} {kind:?}");
            }
        }
        assert_eq!(check(schedule), Ok(()), "{case}");
        assert_eq!(check_order(schedule), Ok(()), "{case}");
    });
}

/// Checks column by column that the inputs of every action were computed in an earlier column.
#[test]
fn cells_line_up() {
    each(|plan, ranks, micro_batches, schedule| {
        let case = format!("{plan} p {ranks} m {micro_batches} v {}", plan.chunks());
        let last = schedule.stages() - 1;
        let mut done: HashSet<(usize, usize, Kind)> = HashSet::new();
        let columns = schedule.ranks.iter().map(Vec::len).max().unwrap_or(0);
        for column in 0..columns {
            let cells = schedule.ranks.iter().filter_map(|row| row.get(column).copied().flatten());
            let cells: Vec<Action> = cells.collect();
            for &Action { stage, kind, micro_batch } in &cells {
                let needed = match kind {
                    Kind::Forward => stage.checked_sub(1).map(|below| (below, micro_batch, Kind::Forward)),
                    Kind::Weight => Some((stage, micro_batch, Kind::Input)),
                    _ if stage == last => Some((stage, micro_batch, Kind::Forward)),
                    _ => Some((stage + 1, micro_batch, Kind::Input)),
                };
                assert!(needed.is_none_or(|part| done.contains(&part)), "{case}: column {column} {needed:?}");
            }
            for action in cells {
                done.extend(action.kind.parts().iter().map(|&part| (action.stage, action.micro_batch, part)));
            }
        }
    });
}

#[test]
fn text_comes_back() {
    each(|plan, ranks, micro_batches, schedule| {
        let text = schedule.to_string();
        assert_eq!(text.lines().count(), ranks);
        let mut read = PipelineSchedule::parse(&text).expect("our own text");
        assert_eq!(read.name, "custom");
        read.name = plan.to_string();
        assert_eq!(read, *schedule, "{plan} p {ranks} m {micro_batches}");
        assert_eq!(
            PipelineSchedule::parse(&text.replace('\n', "\r\n")).expect("as Python writes it").ranks,
            read.ranks
        );
    });
}

#[test]
fn small_schedules_are_those_of_the_papers() {
    for (plan, ranks, micro_batches, expected) in [
        (Plan::ModelParallel, 2, 2, "0F0,,,0B0,0F1,,,0B1\n,1F0,1B0,,,1F1,1B1\n"),
        (Plan::GPipe, 2, 3, "0F0,0F1,0F2,,,0B0,0B1,0B2\n,1F0,1F1,1F2,1B0,1B1,1B2\n"),
        (Plan::OneForwardOneBackward, 2, 3, "0F0,0F1,,0B0,0F2,0B1,,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2\n"),
        (
            Plan::Interleaved { chunks: 2 },
            2,
            2,
            "0F0,0F1,2F0,2F1,,2B0,,2B1,0B0,0B1\n,1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n",
        ),
        (Plan::ZeroBubbleH1, 2, 2, "0F0,0F1,,0I0,0W0,0I1,0W1\n,1F0,1I0,1F1,1I1,1W0,1W1\n"),
        (
            Plan::ZeroBubbleH2,
            2,
            3,
            "0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2\n,1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2\n",
        ),
        (Plan::ZeroBubbleV, 1, 1, "0F0,1F0,1I0,1W0,0I0,0W0\n"),
    ] {
        let schedule = generate(plan, ranks, micro_batches).expect("small and legal");
        assert_eq!(schedule.to_string(), expected, "{plan}");
    }
    let v = generate(Plan::ZeroBubbleV, 4, 4).expect("legal");
    assert_eq!(v.placement, [0, 1, 2, 3, 3, 2, 1, 0]);
    let interleaved = generate(Plan::Interleaved { chunks: 2 }, 3, 3).expect("legal");
    assert_eq!(interleaved.placement, [0, 1, 2, 0, 1, 2]);
    assert_eq!((0..6).map(|stage| interleaved.chunk(stage)).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1]);
}

#[test]
fn names() {
    for name in Plan::NAMES {
        let plan: Plan = name.parse().expect("a name of the list");
        assert_eq!(plan.to_string(), name);
        assert_eq!(plan.with_chunks(3).chunks() == 3, name == "interleaved");
    }
    let problem = "1F1B".parse::<Plan>().expect_err("names are lower case").to_string();
    assert_eq!(
        problem,
        "there is no pipeline schedule `1F1B`: expected one of model, gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v"
    );
}

#[test]
fn impossible_wishes_say_what_would_work() {
    for plan in plans() {
        for (ranks, micro_batches) in [(0, 4), (4, 0)] {
            let problem = generate(plan, ranks, micro_batches).expect_err("zero");
            assert!(matches!(problem, ScheduleError::Zero { .. }), "{problem}");
        }
        let few = generate(plan, 4, 3);
        if plan == Plan::ModelParallel {
            assert_eq!(few.map(|schedule| schedule.micro_batches), Ok(3));
        } else {
            let problem = few.expect_err("fewer micro-batches than ranks").to_string();
            assert!(problem.contains(&format!("`{plan}` on 4 ranks needs at least 4")), "{problem}");
            assert!(problem.contains("and has 3: raise"), "{problem}");
        }
    }
    let problem = generate(Plan::Interleaved { chunks: 0 }, 2, 2).unwrap_err();
    assert!(matches!(problem, ScheduleError::Zero { .. }), "{problem}");
    // Rounds are m / p: two for 9 to 11, so that 10 works; three for 13 to 15, so that 15 works.
    for (ranks, micro_batches, expected) in [
        (4, 9, 10),
        (4, 11, 12),
        (4, 13, 12),
        (4, 14, 15),
        (4, 4, 4),
        (4, 7, 7),
        (4, 10, 10),
        // Two rounds of seven.
        (5, 14, 14),
        (5, 12, 12),
        (16, 40, 40),
        (16, 41, 42),
    ] {
        match generate(Plan::Interleaved { chunks: 2 }, ranks, micro_batches) {
            Ok(_) => assert_eq!(expected, micro_batches),
            Err(ScheduleError::UnequalRounds { nearest, .. }) => {
                assert_eq!(nearest, expected, "{micro_batches}")
            }
            Err(problem) => panic!("{problem}"),
        }
    }
}

/// Rounds of one more micro-batch than ranks, with every possible number of rounds.
#[test]
fn rounds_beyond_the_ranks() {
    for ranks in 2..=10 {
        for rounds in 1..ranks {
            let plan = Plan::Interleaved { chunks: 3 };
            assert_eq!(
                generate(plan, ranks, rounds * (ranks + 1)).map(|schedule| schedule.stages()),
                Ok(3 * ranks)
            );
        }
    }
}

/// 1F1B on two ranks with three micro-batches, with one cell replaced.
fn changed(rank: usize, cell: usize, content: &str) -> Result<(), ScheduleError> {
    let rows = ["0F0,0F1,,0B0,0F2,0B1,,0B2", ",1F0,1B0,1F1,1B1,1F2,1B2"];
    let mut rows = rows.map(|row| row.split(',').collect::<Vec<_>>());
    rows[rank][cell] = content;
    check(&PipelineSchedule::parse(&rows.map(|row| row.join(",")).join("\n"))?)
}

#[test]
fn what_would_not_train_is_refused() {
    assert_eq!(changed(0, 0, "0F0"), Ok(()));
    for (rank, cell, content, expected) in [
        (0, 3, "", "`0B0` is missing on rank 0"),
        (0, 0, "", "`0F0` is missing on rank 0"),
        (0, 3, "0I0", "`0W0` is missing on rank 0"),
        (1, 2, "1W0", "`1I0` is missing on rank 1"),
        (1, 6, "1F2", "rank 1, cell 6: `1F2` repeats `1F2` in cell 5"),
        (0, 2, "0I0", "rank 0, cell 3: `0B0` repeats `0I0` in cell 2"),
        (0, 2, "1F0", "rank 1, cell 1: `1F0` runs stage 1 here, which lives on rank 0"),
        (1, 6, "3B2", "there is a stage 3 but no stage 2"),
        (0, 2, "0F9", "`0F3` is missing on rank 0: each stage has one F and either one B or one I and one W"),
        (0, 2, "0F18446744073709551615", "rank 0, cell 2: `0F18446744073709551615` is outside of"),
    ] {
        let problem = changed(rank, cell, content).expect_err(expected).to_string();
        assert!(problem.starts_with(expected), "{problem}\nnot: {expected}");
    }
}

#[test]
fn ranks_that_wait_are_named_with_what_they_wait_for() {
    for (text, expected) in [
        (
            "0F0,0B0\n1B0,1F0",
            "rank 1, cell 0: `1B0` waits for `1F0`, which the same rank runs only in cell 1: move `1F0` \
             before it",
        ),
        (
            "1F0,0F0,1B0,0B0",
            "rank 0, cell 0: `1F0` waits for `0F0`, which the same rank runs only in cell 1: move `0F0` \
             before it",
        ),
        (
            "0F0,0W0,0I0",
            "rank 0, cell 1: `0W0` waits for `0I0`, which the same rank runs only in cell 2: move `0I0` \
             before it",
        ),
        (
            "0F0,,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            "the schedule deadlocks: rank 0, cell 2: `0B0` waits for the gradient of micro-batch 0 from \
             stage 1 on rank 1; rank 1, cell 1: `1F1` waits for the activation of micro-batch 1 from stage 0 \
              on rank 0",
        ),
    ] {
        let schedule = PipelineSchedule::parse(text).expect("can be read");
        assert_eq!(check(&schedule).expect_err(text).to_string(), expected);
    }
}

/// Three ranks; stage 2 needs rank 0 again, and rank 1 turns to stage 4 between its forwards of stage 1.
fn held_up(micro_batches: usize) -> PipelineSchedule {
    let all = |letter: &str, stage: usize| -> Vec<String> {
        (0..micro_batches).map(|number| format!("{stage}{letter}{number}")).collect()
    };
    let turns = (0..micro_batches).flat_map(|number| [format!("1F{number}"), format!("4F{number}")]);
    let rows = [
        [all("F", 0), all("F", 2), all("B", 2), all("B", 0)].concat(),
        turns.chain([all("B", 4), all("B", 1)].concat()).collect(),
        [all("F", 3), all("B", 3)].concat(),
    ];
    PipelineSchedule::parse(&rows.map(|row: Vec<String>| row.join(",")).join("\n")).expect("can be read")
}

/// Rank 1 takes one activation and then waits for what rank 0 makes after all its forwards. Of the others, d meet the
/// receives posted ahead and d are under way: more cannot be sent.
#[test]
fn channels_are_as_deep_as_a_schedule_needs() {
    for micro_batches in 2..=12 {
        let schedule = held_up(micro_batches);
        assert_eq!(check(&schedule), Ok(()));
        assert_eq!(depth(&schedule), (micro_batches - 1).div_ceil(2), "{micro_batches}");
    }
    for name in ["model", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"] {
        let plan: Plan = name.parse().expect("a name");
        for (ranks, micro_batches) in [(1, 4), (2, 2), (4, 8), (5, 19), (8, 16)] {
            assert_eq!(depth(&generate(plan, ranks, micro_batches).expect("legal")), 1, "{name} {ranks}");
        }
    }
    assert!(depth(&generate(Plan::Interleaved { chunks: 2 }, 5, 9).expect("legal")) > 1);
}

#[test]
fn another_order_of_micro_batches_can_run_and_is_told_apart() {
    let schedule = PipelineSchedule::parse("0F0,0F1,0B1,0B0").expect("can be read");
    assert_eq!(check(&schedule), Ok(()));
    let problem = check_order(&schedule).expect_err("descends").to_string();
    assert!(problem.starts_with("rank 0, cell 3: `0B0` comes after `0B1`: each stage"), "{problem}");
}

#[test]
fn texts_that_cannot_be_read_are_refused_with_their_place() {
    for (text, expected) in [
        (
            "0F0,0X0",
            "line 1, column 5: cell `0X0` cannot be read: `X` is none of the actions F, B, I, W; expected",
        ),
        ("0F0\n 1F0 , 1f1", "line 2, column 8: cell `1f1` cannot be read: `f` is none of"),
        ("0F0,F1", "line 1, column 5: cell `F1` cannot be read: it does not begin with a stage number;"),
        ("0F", "line 1, column 1: cell `0F` cannot be read: `` is not the number of a micro-batch;"),
        ("0", "line 1, column 1: cell `0` cannot be read: `` is none of the actions"),
        ("0F1x", "line 1, column 1: cell `0F1x` cannot be read: `1x` is not the number of a micro-batch;"),
        ("0F99999999999999999999", "line 1, column 1: cell `0F99999999999999999999` cannot be read: `9999"),
        (
            "0SEND_F0",
            "line 1, column 1: cell `0SEND_F0` cannot be read: `SEND_F` is not a computation: write",
        ),
        ("0UNSHARD", "line 1, column 1: cell `0UNSHARD` cannot be read: `UNSHARD` is not a computation"),
        ("é,0F0", "line 1, column 1: cell `é` cannot be read: it does not begin"),
        ("0F0,0B0\n,,\n1F0,1B0", "rank 1 has no action"),
        ("0F0,0B0\n\n1F0,1B0", "rank 1 has no action"),
        ("", "the schedule is empty"),
        ("\n\n", "the schedule is empty"),
    ] {
        let problem = PipelineSchedule::parse(text).expect_err(text).to_string();
        assert!(problem.starts_with(expected), "{problem}\nnot: {expected}");
    }
    let read = PipelineSchedule::parse("\"\",0F0, ,0B0,\n").expect("quotes, blanks and a last empty cell");
    assert_eq!(read.to_string(), ",0F0,,0B0,\n");
}

/// Schedules that were built in code, not parsed: their numbers may contradict each other.
#[test]
fn contradictions_are_refused() {
    let good = generate(Plan::GPipe, 2, 2).expect("legal");
    let refused = |change: fn(&mut PipelineSchedule)| {
        let mut schedule = good.clone();
        change(&mut schedule);
        check(&schedule).expect_err("contradiction")
    };
    assert!(matches!(refused(|s| s.placement = vec![1, 0]), ScheduleError::Elsewhere { home: 1, .. }));
    assert!(matches!(refused(|s| s.placement = vec![0]), ScheduleError::Outside { stages: 1, .. }));
    assert!(matches!(refused(|s| s.placement.push(0)), ScheduleError::Missing { .. }));
    assert!(matches!(refused(|s| s.placement.push(7)), ScheduleError::Missing { .. }));
    assert!(matches!(refused(|s| s.micro_batches = 1), ScheduleError::Outside { micro_batches: 1, .. }));
    assert!(matches!(refused(|s| s.micro_batches = usize::MAX), ScheduleError::Missing { .. }));
    assert!(matches!(refused(|s| s.ranks.clear()), ScheduleError::Empty));
    assert!(matches!(refused(|s| s.ranks.push(vec![None])), ScheduleError::EmptyRank { rank: 2 }));
}

/// PyTorch's `ScheduleInterleavedZeroBubble` for p = 5, m = 10 and v = 3; `tools/check_schedules.py` compares it with
/// PyTorch. It idles (p - 1)(F + I - W) of one of the v stages.
#[test]
fn the_interleaved_zero_bubble_schedule_of_pytorch_runs() {
    let text = include_str!("schedules/interleaved-zero-bubble-p5-m10-v3.csv");
    let schedule = PipelineSchedule::parse(text).expect("can be read");
    assert_eq!((check(&schedule), check_order(&schedule)), (Ok(()), Ok(())));
    assert_eq!(schedule.placement, (0..15).map(|stage| stage % 5).collect::<Vec<_>>());
    assert_eq!((schedule.micro_batches, schedule.splits_backward()), (10, true));
    let timeline = simulate(&schedule, &Costs::unit(15));
    for rank in 0..5 {
        assert_eq!((timeline.busy[rank], timeline.idle(rank)), (90.0, 4.0), "rank {rank}");
    }
}
