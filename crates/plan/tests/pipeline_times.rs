//! Times against the closed forms of the papers and against a solver of the same constraints; activations in
//! flight; messages.

use std::collections::HashMap;

use crate::generator::Generator;
use phalanx_plan::pipeline::depth;
use phalanx_plan::pipeline::simulate::simulate_with_depth;
use phalanx_plan::{
    Action, Costs, PipelineSchedule, Plan, StageCost, Step, check, generate, in_flight, lower, messages,
    simulate,
};

fn unit(plan: Plan, ranks: usize, micro_batches: usize) -> (PipelineSchedule, phalanx_plan::Timeline) {
    let schedule = generate(plan, ranks, micro_batches).expect("legal");
    let timeline = simulate(&schedule, &Costs::unit(schedule.stages()));
    (schedule, timeline)
}

/// p and m: every p, and m from p to 8p.
fn sizes() -> impl Iterator<Item = (usize, usize)> {
    (2..=16).flat_map(|ranks| (1..=8).map(move |times| (ranks, times * ranks)))
}

/// Checks that every rank idles for this time. Sums of small integers are exact.
fn idles(plan: Plan, ranks: usize, micro_batches: usize, expected: usize) {
    let (_, timeline) = unit(plan, ranks, micro_batches);
    for rank in 0..ranks {
        let idle = timeline.idle(rank);
        assert_eq!(
            idle,
            expected as f64,
            "{plan} {} p {ranks} m {micro_batches}: rank {rank}",
            plan.chunks()
        );
        assert_eq!(timeline.busy[rank], (3 * plan.chunks() * micro_batches) as f64);
    }
}

/// F + B = 3 for a chunk.
#[test]
fn bubbles_are_those_of_the_papers() {
    for (p, m) in sizes() {
        idles(Plan::ModelParallel, p, m, 3 * m * (p - 1));
        idles(Plan::ZeroBubbleH1, p, m, p - 1);
        for plan in [Plan::GPipe, Plan::OneForwardOneBackward] {
            // Not only multiples.
            idles(plan, p, m + 1, 3 * (p - 1));
            let (_, timeline) = unit(plan, p, m);
            let expected = (p - 1) as f64 / (m + p - 1) as f64;
            // Five roundings of numbers up to 1.
            assert!(
                (timeline.bubble_fraction() - expected).abs() <= 5.0 * f64::EPSILON,
                "{plan} p {p} m {m}"
            );
        }
        // (p - 1)(F + B)/v, where F and B are of a rank, v times those of a chunk.
        for chunks in 1..=4 {
            idles(Plan::Interleaved { chunks }, p, m, 3 * (p - 1));
        }
    }
}

/// (p - 1)(F + I - W), as long as that is the longest way through: W no longer than I or F.
#[test]
fn zero_bubble_h1_with_unequal_parts() {
    for (p, m) in sizes().filter(|(p, _)| *p <= 8) {
        for (forward, input, weight) in [(4.0, 5.0, 3.0), (2.0, 3.0, 2.0), (3.0, 3.0, 1.0), (4.0, 4.0, 4.0)] {
            let schedule = generate(Plan::ZeroBubbleH1, p, m).expect("legal");
            let costs = Costs { stages: vec![StageCost { forward, input, weight }; p], message: 0.0 };
            let timeline = simulate(&schedule, &costs);
            let expected = (p - 1) as f64 * (forward + input - weight);
            assert_eq!(timeline.idle(0), expected, "p {p} m {m} {forward} {input} {weight}");
        }
    }
}

/// Between its first and its last action no rank waits, from 2p - 1 micro-batches on.
#[test]
fn zero_bubble_h2_and_v_have_none() {
    let sizes = || sizes().chain((2..=16).map(|p| (p, 2 * p - 1)));
    let plans = [Plan::ZeroBubbleH2, Plan::ZeroBubbleV];
    for (plan, (p, m)) in plans.into_iter().flat_map(|plan| sizes().map(move |size| (plan, size))) {
        let (_, timeline) = unit(plan, p, m);
        let busy = 3 * plan.chunks() * m;
        let times = timeline.ranks.iter().map(|spans| spans[spans.len() - 1].end - spans[0].start);
        if m < 2 * p - 1 {
            let longest = times.fold(0.0, f64::max);
            assert!(longest > busy as f64, "{plan} p {p} m {m}: no rank waits in between");
            // With ZB-H2 the whole may take no longer: a rank waits where it would else idle at the end.
            assert!(plan == Plan::ZeroBubbleH2 || timeline.makespan > (busy + p - 1) as f64, "p {p} m {m}");
            continue;
        }
        for time in times {
            assert_eq!(time, busy as f64, "{plan} p {p} m {m}");
        }
        assert_eq!(timeline.makespan, (busy + p - 1) as f64, "{plan} p {p} m {m}");
    }
}

#[test]
fn activations_in_flight() {
    for (p, m) in sizes().flat_map(|(p, m)| [(p, m), (p, m + 1)]) {
        let of = |plan: Plan| generate(plan, p, m).ok().map(|schedule| in_flight(&schedule));
        let case = format!("p {p} m {m}");
        for rank in 0..p {
            let held = |plan: Plan| {
                let held = of(plan).expect("legal").ranks[rank];
                (held.to_input, held.to_weight)
            };
            if rank == 0 || rank == p / 2 || rank + 1 == p {
                assert_eq!(held(Plan::ModelParallel), (1, 1), "{case}");
                assert_eq!(held(Plan::GPipe), (m, m), "{case}");
                assert_eq!(held(Plan::OneForwardOneBackward), (p - rank, p - rank), "{case}: rank {rank}");
                assert_eq!(held(Plan::ZeroBubbleH1), (p - rank, p), "{case}: rank {rank}");
                let h2 = ((2 * (p - rank) - 1).min(m), (2 * p - 1).min(m));
                assert_eq!(held(Plan::ZeroBubbleH2), h2, "{case}: rank {rank}");
            }
        }
        for chunks in (1..=4).filter(|_| m % p == 0) {
            let held = of(Plan::Interleaved { chunks }).expect("multiples work");
            for rank in 0..p {
                let expected = ((chunks - 1) * p + 2 * (p - rank - 1) + 1).min(chunks * m);
                assert_eq!(held.ranks[rank].to_input, expected, "{case} v {chunks}: rank {rank}");
            }
        }
        // Two chunks, each half of a stage: p stages' worth on every rank.
        let v = of(Plan::ZeroBubbleV).expect("legal");
        for (rank, held) in v.ranks.iter().enumerate() {
            assert!(held.to_input <= 2 * p && held.to_weight <= 2 * p, "{case}: rank {rank} {held:?}");
            assert!(m < 2 * p - 1 || held.to_weight == 2 * p, "{case}: rank {rank} {held:?}");
            let stages = [rank, 2 * p - 1 - rank].map(|stage| v.stages[stage].to_input);
            assert!(
                stages.iter().sum::<usize>() >= held.to_input && stages.into_iter().all(|held| held <= m)
            );
        }
    }
}

/// 0F0 | message | 1F0 1B0 | message | 0B0
#[test]
fn messages_take_time_between_ranks() {
    let schedule = PipelineSchedule::parse("0F0,0B0\n1F0,1B0").expect("can be read");
    let costs = Costs { message: 0.5, ..Costs::unit(2) };
    let timeline = simulate(&schedule, &costs);
    let times =
        |rank: usize| timeline.ranks[rank].iter().map(|span| (span.start, span.end)).collect::<Vec<_>>();
    assert_eq!(times(0), [(0.0, 1.0), (5.0, 7.0)]);
    assert_eq!(times(1), [(1.5, 2.5), (2.5, 4.5)]);
    assert_eq!((timeline.makespan, timeline.idle(0), timeline.bubble_fraction()), (7.0, 4.0, 4.0 / 7.0));
}

/// The sender computes while its messages are under way.
#[test]
fn messages_do_not_hold_their_sender_up() {
    let schedule = generate(Plan::GPipe, 2, 3).expect("legal");
    let costs = Costs { message: 0.5, ..Costs::unit(2) };
    let timeline = simulate(&schedule, &costs);
    let starts = |rank: usize| timeline.ranks[rank].iter().take(3).map(|span| span.start).collect::<Vec<_>>();
    assert_eq!((starts(0), starts(1)), (vec![0.0, 1.0, 2.0], vec![1.5, 2.5, 3.5]));
}

/// (p - 1)(F + B)/v over m(F + B) more, also where rounds are larger than the ranks.
#[test]
fn interleaved_rounds_beyond_the_ranks_idle_no_more() {
    let (_, timeline) = unit(Plan::Interleaved { chunks: 2 }, 5, 9);
    assert!((timeline.bubble_fraction() - 6.0 / 33.0).abs() < 1e-12, "{}", timeline.bubble_fraction());
}

/// The bubble rates that Qi et al. (arXiv 2401.10241, table 5) publish for the times that they measured: 1 - m(F + I + W)
/// over the longest time of a rank between its first and its last action.
#[test]
fn published_bubble_rates_follow_from_their_times() {
    let plans = [Plan::OneForwardOneBackward, Plan::ZeroBubbleH1, Plan::ZeroBubbleH2];
    let rows: [(usize, usize, [f64; 4], &[f64]); 6] = [
        (8, 24, [18.522, 18.086, 9.337, 0.601], &[0.2431, 0.1585, 0.1083]),
        (8, 32, [18.513, 18.086, 9.331, 0.626], &[0.1985, 0.1242, 0.0837]),
        (8, 64, [18.546, 18.097, 9.321, 0.762], &[0.1240, 0.0674, 0.0444]),
        (16, 48, [11.347, 11.248, 8.132, 0.377], &[0.2552, 0.1397]),
        (16, 64, [11.307, 11.254, 8.101, 0.379], &[0.2082, 0.1088]),
        (16, 128, [11.325, 11.308, 8.109, 0.378], &[0.1251, 0.0576]),
    ];
    for (p, m, [forward, input, weight, message], published) in rows {
        for (plan, published) in plans.into_iter().zip(published) {
            let schedule = generate(plan, p, m).expect("legal");
            let costs = Costs { stages: vec![StageCost { forward, input, weight }; p], message };
            let timeline = simulate(&schedule, &costs);
            let times = timeline.ranks.iter().map(|spans| spans[spans.len() - 1].end - spans[0].start);
            let rate = 1.0 - m as f64 * (forward + input + weight) / times.fold(0.0, f64::max);
            // The published times have five digits, the rates four.
            assert!((rate - published).abs() < 1e-4, "{plan} p {p} m {m}: {rate:.5}, published {published}");
        }
    }
}

/// The second rank is ten times slower: the first is one message received and one under way ahead of it, then
/// waits until its last but one has been asked for.
#[test]
fn a_slow_receiver_holds_its_sender_up() {
    let schedule = generate(Plan::GPipe, 2, 6).expect("legal");
    let cost = |forward| StageCost { forward, input: 0.0, weight: 0.0 };
    let timeline = simulate(&schedule, &Costs { stages: vec![cost(1.0), cost(10.0)], message: 0.0 });
    let starts: Vec<f64> = timeline.ranks[0].iter().take(6).map(|span| span.start).collect();
    assert_eq!(starts, [0.0, 1.0, 2.0, 3.0, 11.0, 21.0]);
}

/// The steps of each channel, by sending and receiving rank: (rank, number of the step), in order.
type Places = HashMap<(usize, usize), Vec<(usize, usize)>>;

fn places(steps: &[Vec<Step>]) -> (Places, Places) {
    let (mut sends, mut receives) = (Places::new(), Places::new());
    for (rank, row) in steps.iter().enumerate() {
        for (at, step) in row.iter().enumerate() {
            match *step {
                Step::Send { to, .. } => sends.entry((rank, to)).or_default().push((rank, at)),
                Step::Recv { from, .. } => receives.entry((from, rank)).or_default().push((rank, at)),
                Step::Compute(_) => {}
            }
        }
    }
    (sends, receives)
}

/// The end of each step by relaxation: it is no earlier than the step before, and a receive no earlier than the arrival of
/// its message. The n-th send over channels of depth d is no earlier than the arrival of message n - d, and than the
/// receive of message n - 2d.
fn relaxed(steps: &[Vec<Step>], costs: &Costs, depth: usize) -> Vec<Vec<f64>> {
    let (sends, receives) = places(steps);
    let number = |places: &Places, channel, place| {
        places[&channel].iter().position(|other| *other == place).expect("every message has its place")
    };
    let mut ends: Vec<Vec<f64>> = steps.iter().map(|row| vec![0.0; row.len()]).collect();
    loop {
        let before = ends.clone();
        for (rank, row) in steps.iter().enumerate() {
            for (at, step) in row.iter().enumerate() {
                let end_of = |(rank, at): (usize, usize)| ends[rank][at];
                let own = if at == 0 { 0.0 } else { ends[rank][at - 1] };
                ends[rank][at] = match *step {
                    Step::Compute(action) => own + costs.of(action),
                    Step::Recv { from, .. } => {
                        let channel = (from, rank);
                        let sent = end_of(sends[&channel][number(&receives, channel, (rank, at))]);
                        own.max(sent + costs.message)
                    }
                    Step::Send { to, .. } => {
                        let channel = (rank, to);
                        let number = number(&sends, channel, (rank, at));
                        let arrived =
                            number.checked_sub(depth).map(|n| end_of(sends[&channel][n]) + costs.message);
                        let freed = number.checked_sub(2 * depth).map(|n| end_of(receives[&channel][n]));
                        own.max(arrived.unwrap_or(0.0)).max(freed.unwrap_or(0.0))
                    }
                };
            }
        }
        if ends == before {
            return ends;
        }
    }
}

#[test]
fn times_are_the_earliest_that_the_constraints_allow() {
    let mut random = Generator(5);
    for round in 0..120 {
        let name = Plan::NAMES[round % Plan::NAMES.len()];
        let ranks = random.within(1, 5) as usize;
        let plan = name.parse::<Plan>().expect("a name").with_chunks(random.within(1, 3) as usize);
        let schedule = generate(plan, ranks, ranks * random.within(1, 3) as usize).expect("legal");
        let mut cost = || random.within(0, 20) as f64;
        let stages = 0..schedule.stages();
        let stages = stages.map(|_| StageCost { forward: cost(), input: cost(), weight: cost() }).collect();
        let costs = Costs { stages, message: cost() / 4.0 };
        let steps = lower(&schedule);
        let depth = depth(&schedule) + round % 3;
        let ends = relaxed(&steps, &costs, depth);
        let timeline = simulate_with_depth(&schedule, &costs, depth);
        for (rank, row) in steps.iter().enumerate() {
            let computed = row.iter().zip(&ends[rank]).filter(|(step, _)| matches!(step, Step::Compute(_)));
            let expected: Vec<f64> = computed.map(|(_, end)| *end).collect();
            // Sums of quarters are exact.
            let found: Vec<f64> = timeline.ranks[rank].iter().map(|span| span.end).collect();
            assert_eq!(found, expected, "{plan} p {ranks}: rank {rank}");
        }
    }
}

#[test]
fn messages_arrive_before_they_are_needed_and_in_the_order_of_sending() {
    for (plan, ranks, micro_batches) in [
        (Plan::ModelParallel, 3, 2),
        (Plan::OneForwardOneBackward, 4, 9),
        (Plan::Interleaved { chunks: 3 }, 2, 6),
        (Plan::Interleaved { chunks: 2 }, 4, 10),
        (Plan::ZeroBubbleV, 4, 9),
        (Plan::ZeroBubbleV, 1, 3),
    ] {
        let schedule = generate(plan, ranks, micro_batches).expect("legal");
        let steps = lower(&schedule);
        let channels = messages(&schedule);
        let hops = schedule.placement.windows(2).filter(|pair| pair[0] != pair[1]).count();
        let count: usize = channels.iter().map(|channel| channel.messages.len()).sum();
        assert_eq!(count, 2 * hops * micro_batches, "{plan}");
        for channel in &channels {
            let received = steps[channel.to].iter().filter_map(|step| match step {
                Step::Recv { from, message } if *from == channel.from => Some(*message),
                _ => None,
            });
            assert_eq!(received.collect::<Vec<_>>(), channel.messages, "{plan}");
            let sent = steps[channel.from].iter().filter_map(|step| match step {
                Step::Send { to, message } if *to == channel.to => Some(*message),
                _ => None,
            });
            assert_eq!(sent.collect::<Vec<_>>(), channel.messages, "{plan}");
        }
        for (rank, row) in steps.iter().enumerate() {
            let computed: Vec<Action> = row
                .iter()
                .filter_map(|step| if let Step::Compute(action) = step { Some(*action) } else { None })
                .collect();
            assert_eq!(computed, schedule.actions(rank).collect::<Vec<_>>());
        }
    }
}

/// Rank 1 needs the second message first, and keeps the first meanwhile.
#[test]
fn early_messages_are_kept() {
    let schedule = PipelineSchedule::parse("0F0,0F1,0B1,0B0\n1F1,1B1,1F0,1B0").expect("can be read");
    assert_eq!(check(&schedule), Ok(()));
    let steps = &lower(&schedule)[1];
    let numbers: Vec<usize> = steps
        .iter()
        .filter_map(
            |step| if let Step::Recv { message, .. } = step { Some(message.micro_batch) } else { None },
        )
        .collect();
    assert_eq!(numbers, [0, 1]);
    assert!(matches!(steps[..3], [Step::Recv { .. }, Step::Recv { .. }, Step::Compute(_)]));
}
