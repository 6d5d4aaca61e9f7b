//! Look-ahead against a scan, sums against sums by hand, formulas against the paper.

use std::sync::Arc;

use crate::generator::Generator;
use phalanx_plan::trace::{
    Bytes, Collective, CollectiveOp, DType, Event, Memory, Phase, PhaseName, Placements, Rate, Site, Stream,
};
use phalanx_plan::{Cost, Lookahead, Precision, ZeroStage, textbook};

#[test]
fn forward_and_backward_look_ahead() {
    let order = Lookahead::new(vec![0, 1, 2, 2, 1, 0]);
    let ahead = |position, count| order.ahead(position, count).collect::<Vec<_>>();
    assert_eq!(ahead(0, 2), [1, 2]);
    assert_eq!(ahead(1, 9), [2, 0]);
    assert_eq!(ahead(2, 1), [1]);
    assert_eq!(ahead(3, 9), [1, 0]);
    assert!(ahead(5, 3).is_empty() && ahead(99, 3).is_empty());
    assert_eq!(order.upcoming(0).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(order.next_use(0, 0), Some(5));
    assert_eq!(order.next_use(2, 2), Some(3));
    assert_eq!(order.next_use(2, 3), None);
    assert_eq!(order.next_use(7, 0), None);
}

#[test]
fn answers_equal_a_scan() {
    let mut random = Generator(8);
    for _ in 0..200 {
        let chunks = random.within(1, 12);
        let order: Vec<u32> = (0..random.within(0, 60)).map(|_| random.within(1, chunks) as u32).collect();
        let lookahead = Lookahead::new(order.clone());
        assert_eq!(lookahead.order(), order);
        for position in 0..order.len() + 2 {
            let mut distinct = Vec::new();
            for chunk in order.iter().skip(position) {
                if !distinct.contains(chunk) {
                    distinct.push(*chunk);
                }
            }
            assert_eq!(lookahead.upcoming(position).collect::<Vec<_>>(), distinct);
            for chunk in 0..=chunks as u32 + 1 {
                let scanned = (position + 1..order.len()).find(|at| order[*at] == chunk);
                assert_eq!(lookahead.next_use(chunk, position), scanned);
            }
        }
    }
}

fn kernel(name: &'static str, flops: u64, bytes: u64) -> Event {
    product(name, flops, bytes, false)
}

fn product(name: &'static str, flops: u64, bytes: u64, again: bool) -> Event {
    Event::Kernel { name, flops, bytes, rate: Rate::MatrixProduct(DType::F32), again }
}

#[test]
fn costs_are_sums() {
    let site = Site { file: "zero.rs", line: 1 };
    let collective = |op, count, sent_bytes| {
        let (group, dtype) = ("data", DType::F32);
        Event::Collective(Box::new(Collective {
            group,
            members: Arc::default(),
            world_size: 2,
            op,
            dtype,
            count,
            root: None,
            tag: None,
            placements: Placements::REPLICATED,
            sent_bytes,
            site,
        }))
    };
    let copy = |from, to, bytes| {
        let rate = Rate::of_copy([from, to]);
        Event::Copy { name: "copy", from, to, bytes, rate, stream: Stream::ToHost }
    };
    let events = vec![
        copy(Memory::Device, Memory::Host, 40),
        copy(Memory::Host, Memory::Device, 5),
        copy(Memory::Device, Memory::Host, 2),
        copy(Memory::Disk, Memory::Host, 9),
        Event::Kernel { name: "linear", flops: 0, bytes: 6, rate: Rate::Bandwidth, again: false },
        kernel("gelu", 10, 80),
        kernel("linear", 100, 8),
        collective(CollectiveOp::AllGather, 64, 128),
        kernel("linear", 300, 24),
        collective(CollectiveOp::ReduceScatter, 64, 130),
        collective(CollectiveOp::AllGather, 32, 64),
    ];
    let cost = Cost::of(&Phase { name: PhaseName::Step, events });
    assert_eq!((cost.flops, cost.kernel_bytes, cost.sent_bytes), (410, 118, 322));
    let product = Rate::MatrixProduct(DType::F32);
    let kernels: Vec<_> = cost.kernels.iter().map(|k| (k.name, k.calls, k.flops, k.bytes, k.rate)).collect();
    let expected =
        [("linear", 2, 400, 32, product), ("gelu", 1, 10, 80, product), ("linear", 1, 0, 6, Rate::Bandwidth)];
    assert_eq!(kernels, expected, "a kernel has a row for each rate");
    let copies: Vec<_> = cost.copies.iter().map(|c| ([c.from, c.to], c.calls, c.bytes, c.rate)).collect();
    let expected = [
        ([Memory::Device, Memory::Host], 2, 42, Rate::Copy),
        ([Memory::Host, Memory::Device], 1, 5, Rate::Copy),
        ([Memory::Disk, Memory::Host], 1, 9, Rate::Disk),
    ];
    assert_eq!(copies, expected);
    assert!(cost.collectives.iter().all(|collective| collective.rate == Rate::Transport));
    let row = |op| cost.collective(op).map(|c| (c.calls, c.elements, c.sent_bytes));
    assert_eq!(row(CollectiveOp::AllGather), Some((2, 96, 192)));
    assert_eq!(row(CollectiveOp::ReduceScatter), Some((1, 64, 130)));
    assert_eq!(row(CollectiveOp::Barrier), None);
    assert_eq!(cost.collectives[0].op, CollectiveOp::ReduceScatter, "in the order of CollectiveOp::ALL");
}

#[test]
fn what_is_computed_again_is_no_work_of_the_model() {
    let model =
        [kernel("linear", 100, 0), kernel("attention", 20, 0), kernel("linear_input_gradient", 730, 0)];
    let cost = |events| Cost::of(&Phase { name: PhaseName::Step, events });
    let plain = cost(model.to_vec());
    assert_eq!((plain.flops, plain.model_flops()), (850, 850));
    let again = [product("linear", 100, 0, true), product("attention", 20, 0, true)];
    let recomputed = cost([&model[..], &again].concat());
    assert_eq!((recomputed.flops, recomputed.model_flops()), (970, 850));
}

#[test]
fn textbook_formulas() {
    // P = 64 parameters on N = 4 ranks: (parameters, gradients, optimizer, sent).
    let bf16 = Precision { compute: DType::BF16, ..Precision::F32 };
    let all_bf16 = Precision { accumulate: DType::BF16, communicate: DType::BF16, ..bf16 };
    let sent_bf16 = Precision { communicate: DType::BF16, ..Precision::F32 };
    for (precision, stage, parameters, gradients, optimizer, sent_bytes) in [
        (Precision::F32, ZeroStage::Zero, 256, 256, 512, 384),
        (Precision::F32, ZeroStage::One, 256, 256, 128, 384),
        (Precision::F32, ZeroStage::Two, 256, 64, 128, 384),
        (Precision::F32, ZeroStage::Three, 64, 64, 128, 576),
        (bf16, ZeroStage::Zero, 128, 256, 768, 384),
        (bf16, ZeroStage::One, 128, 256, 192, 288),
        (bf16, ZeroStage::Three, 32, 64, 192, 384),
        (all_bf16, ZeroStage::Two, 128, 32, 192, 192),
        (all_bf16, ZeroStage::Three, 32, 32, 192, 288),
        (sent_bf16, ZeroStage::Two, 256, 64, 128, 288),
    ] {
        let said = textbook([64; 2], 4, stage, precision, 2);
        let expected = Bytes { parameters, gradients, optimizer, ..Bytes::default() };
        assert_eq!(said.state, expected, "{precision:?}, {stage:?}");
        assert_eq!(said.sent_bytes, sent_bytes, "{precision:?}, {stage:?}");
    }
    // SGD keeps one state, in a 16-bit type with the master weights.
    assert_eq!(textbook([64; 2], 4, ZeroStage::Zero, Precision::F32, 1).state.optimizer, 256);
    assert_eq!(textbook([64; 2], 4, ZeroStage::One, bf16, 1).state.optimizer, 128);
    for (number, stage) in ZeroStage::ALL.into_iter().enumerate() {
        assert_eq!(ZeroStage::from_number(number as u8), Some(stage));
    }
    assert_eq!(ZeroStage::from_number(4), None);
    assert_eq!(textbook([10; 2], 1, ZeroStage::Three, bf16, 2).sent_bytes, 0);
}
