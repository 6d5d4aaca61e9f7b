//! The recording group writes what a real one would do, for any rank of any world, and checks how the buffers
//! are placed.

use std::sync::Arc;

use phalanx_collectives::{CollectiveOp, Group, MetaGroup, Solo, threads};
use phalanx_plan::trace::Placement::{self, Partial, Replicated, Shard};
use phalanx_plan::trace::{Axis, Event, Fault, PhaseName, Placements};
use phalanx_tensor::{AdamW, AdamWUpdate, Category, DType, Device, Epilogue, Gelu, Layout, Tensor, Weight};

#[test]
fn collectives_and_waits_are_recorded_in_order() {
    let device = Device::meta(1);
    let recorder = Arc::clone(device.recorder().unwrap());
    let group: Box<dyn Group> = Box::new(MetaGroup::new("data", 3, 1024, Arc::clone(&recorder)));
    device.arena().begin(PhaseName::Step);
    let alloc = |n: usize| device.alloc(DType::F32, [n], Category::Communication, "x");
    let x = group.all_reduce(alloc(1 << 20));
    let line = line!() + 1;
    let (whole, shard) = group.reduce_scatter(alloc(2048), alloc(2), true).wait().unwrap();
    drop((whole, shard));
    x.wait().unwrap();
    drop(group.barrier());

    let trace = recorder.take(3);
    let events: Vec<&Event> = trace.phases[0]
        .events
        .iter()
        .filter(|e| matches!(e, Event::Collective(_) | Event::Wait { .. }))
        .collect();
    let waits: Vec<u32> = events
        .iter()
        .filter_map(|e| match e {
            Event::Wait { collective } => Some(*collective),
            _ => None,
        })
        .collect();
    assert_eq!(waits, [1, 0, 2]);
    let Event::Collective(c) = events[1] else { panic!("{events:?}") };
    assert_eq!(
        (c.group, c.world_size, c.op, c.dtype, c.count),
        ("data", 1024, CollectiveOp::ReduceScatter, DType::F32, 2048)
    );
    assert_eq!((c.root, c.sent_bytes, c.site.line), (None, 1023 * 8, line));
    assert!(c.site.file.ends_with("tests/meta.rs"));
    assert_eq!(group.take_statistics().calls, 3);
}

const WORLD: usize = 4;
const RANK: usize = 1;

/// A device, and groups over `data` and `tensor`.
fn mesh() -> (Device, Box<dyn Group>, Box<dyn Group>) {
    let device = Device::meta(1);
    let group = |name, axis, members: &[usize]| -> Box<dyn Group> {
        let recorder = Arc::clone(device.recorder().unwrap());
        Box::new(MetaGroup::over(name, &[axis], members, RANK, recorder))
    };
    let data = group("data", Axis::Data, &[1, 5, 9, 13]);
    let tensor = group("tensor", Axis::Tensor, &[4, 5, 6, 7]);
    (device, data, tensor)
}

fn alloc(device: &Device, name: &'static str, shape: &[usize]) -> Tensor {
    device.alloc(DType::F32, shape, Category::Activations, name)
}

fn along(placement: Placement) -> Placements {
    Placements::REPLICATED.with(Axis::Tensor, placement)
}

fn of(device: &Device, x: &Tensor) -> Placement {
    device.placements(x.view()).get(Axis::Tensor)
}

/// Checks that there is no fault if `words` is empty, else one that contains them.
#[track_caller]
fn found(device: &Device, words: &[&str], row: &str) {
    let faults: Vec<Fault> = device.take_trace(5).faults;
    assert_eq!(faults.len(), usize::from(!words.is_empty()), "{row}: {faults:?}");
    for word in words {
        let text = faults[0].to_string();
        assert!(text.contains(word), "{row}: {text} lacks {word}");
        assert!(text.contains("tests/meta.rs:"), "{row}: {text}");
    }
}

#[test]
fn groups_know_their_axes_and_members() {
    let (_, data, tensor) = mesh();
    assert_eq!((data.axes(), data.members()), (&[Axis::Data][..], &[1, 5, 9, 13][..]));
    assert_eq!((tensor.axes(), tensor.rank(), tensor.world_size()), (&[Axis::Tensor][..], RANK, WORLD));
    let others: [Box<dyn Group>; 2] = [
        Box::new(Solo::new("pipeline")),
        Box::new(MetaGroup::new("tensor", 0, 2, Arc::clone(Device::meta(1).recorder().unwrap()))),
    ];
    assert!(others.iter().all(|group| group.axes().is_empty()), "a name is not an axis");
    let endpoints = threads(3);
    assert_eq!(endpoints[2].sub_group("data", &[0, 2]).members(), [0, 2]);
}

/// Placement of the source along the group's axis, and the expected placement of the result.
#[test]
fn collectives_want_sums_or_parts() {
    type Start = fn(&dyn Group, Tensor, Tensor) -> (Tensor, Tensor);
    let all_reduce: Start = |g, x, y| (y, g.all_reduce(x).wait().unwrap());
    let broadcast: Start = |g, x, y| (y, g.broadcast(x, 0).wait().unwrap());
    let reduce: Start = |g, x, y| (y, g.reduce(x, RANK).wait().unwrap());
    let reduce_scatter: Start = |g, x, y| g.reduce_scatter(x, y, false).wait().unwrap();
    let all_gather: Start = |g, x, y| g.all_gather(y, x).wait().unwrap();
    /// Name, call, placements of whole and part, and the result or the words of the fault.
    type RuleCase = (&'static str, Start, [Option<Placement>; 2], Placement, &'static [&'static str]);
    let rows: [RuleCase; 13] = [
        ("all_reduce", all_reduce, [Some(Partial), None], Replicated, &[]),
        (
            "all_reduce",
            all_reduce,
            [Some(Replicated), None],
            Replicated,
            &[
                "`whole` goes into all_reduce of group `tensor` but is already replicated over `tensor`: doubled?",
            ],
        ),
        (
            "all_reduce",
            all_reduce,
            [Some(Shard(0)), None],
            Replicated,
            &["sharded over `tensor` in dimension 0: wrong collective or axis?", "all_gather"],
        ),
        ("all_reduce of what is unknown", all_reduce, [None, None], Replicated, &[]),
        ("reduce", reduce, [Some(Partial), None], Replicated, &[]),
        ("reduce", reduce, [Some(Replicated), None], Replicated, &["goes into reduce of", "doubled?"]),
        ("broadcast", broadcast, [Some(Shard(1)), None], Replicated, &[]),
        ("reduce_scatter", reduce_scatter, [Some(Partial), None], Shard(0), &[]),
        ("reduce_scatter of rows", reduce_scatter, [Some(Partial), Some(Shard(1))], Shard(1), &[]),
        (
            "reduce_scatter",
            reduce_scatter,
            [Some(Shard(0)), None],
            Shard(0),
            &["into reduce_scatter", "wrong"],
        ),
        ("all_gather", all_gather, [None, Some(Shard(1))], Replicated, &[]),
        ("all_gather", all_gather, [None, Some(Replicated)], Replicated, &["`part` goes into", "doubled?"]),
        (
            "all_gather",
            all_gather,
            [None, Some(Partial)],
            Replicated,
            &["a partial sum over `tensor`: wrong"],
        ),
    ];
    for (name, start, [whole_placed, part_placed], expected, words) in rows {
        let (device, _, tensor) = mesh();
        let marked = alloc(&device, "marked", &[2]);
        device.place(marked.view(), along(Shard(0)));
        let (whole, part) = (alloc(&device, "whole", &[8, 6]), alloc(&device, "part", &[2, 6]));
        for (x, placement) in [(&whole, whole_placed), (&part, part_placed)] {
            if let Some(placement) = placement {
                // Placements along other axes are kept.
                device.place(x.view(), along(placement).with(Axis::Data, Shard(0)));
            }
        }
        let (_, result) = start(&*tensor, whole, part);
        assert_eq!(of(&device, &result), expected, "{name}");
        if [whole_placed, part_placed] != [None; 2] {
            assert_eq!(device.placements(result.view()).get(Axis::Data), Shard(0), "{name}");
        }
        found(&device, words, name);
    }
}

/// A zero may be summed, and an axis without placements is not checked.
#[test]
fn zeros_and_unknown_axes_are_let_through() {
    let (device, data, tensor) = mesh();
    let x = alloc(&device, "x", &[8]);
    device.place(x.view(), along(Replicated).with(Axis::Data, Replicated));
    let x = tensor.all_reduce(x).wait().unwrap();
    device.place(x.view(), along(Partial));
    let mut x = data.all_reduce(x).wait().unwrap();
    assert_eq!(of(&device, &x), Partial);
    device.fill(x.view_mut(), 0.0);
    let x = tensor.all_reduce(x).wait().unwrap();
    assert_eq!(of(&device, &x), Replicated);
    found(&device, &[], "let through");
}

/// Parameters in a chunk keep their placement along the tensor axis while the chunk is reduced, updated and gathered
/// over the data axis. A gradient that was never summed over the tensor axis is found at the update.
#[test]
fn pieces_of_a_chunk_are_followed() {
    for stage_three in [false, true] {
        for forgotten in [false, true] {
            let (device, data, _) = mesh();
            // This rank's part is 10..20.
            let pieces = [(0..12, Shard(0)), (12..18, Replicated), (18..40, Shard(0))];
            let mut gradients = alloc(&device, "gradients", &[40]);
            device.fill(gradients.view_mut(), 0.0);
            let parameters = alloc(&device, "parameters", &[40]);
            let mut shard = alloc(&device, "shard", &[10]);
            for (range, placement) in pieces.clone() {
                let sum = if forgotten && placement == Replicated { Partial } else { placement };
                let name = format!("parameter {}", range.start);
                let gradient = gradients.view().range(range.clone());
                device.place_named(gradient, along(sum).with(Axis::Data, Partial), || name);
                device.place(parameters.view().range(range), along(placement));
            }
            device.copy(parameters.view().range(10..20), shard.view_mut());
            let mut parameters = parameters;
            let mut sums = alloc(&device, "sums", &[10]);
            let [mut m, mut v, one] = [10, 10, 1].map(|n| alloc(&device, "state", &[n]));
            device.fill(sums.view_mut(), 0.0);
            let own = RANK * 10..(RANK + 1) * 10;
            let (_, sums) = data.reduce_scatter(gradients, sums, true).wait().unwrap();
            let step = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.9, eps: 0.1, weight_decay: 0.0, step: 1 };
            let states = (m.view_mut(), v.view_mut());
            let p = if stage_three { shard.view_mut() } else { parameters.view_mut().range(own) };
            device.run(AdamWUpdate {
                step,
                p,
                g: sums.view(),
                moments: [states.0, states.1],
                gradient_scale: one.view(),
                rounded: None,
            });
            let whole = if stage_three {
                data.all_gather(shard, parameters).wait().unwrap().1
            } else {
                data.all_gather_in_place(parameters).wait().unwrap()
            };
            for (range, placement) in pieces {
                let placed = device.placements(whole.view().range(range));
                assert_eq!(placed, along(placement), "stage three: {stage_three}");
            }
            let words = ["`sums` is a partial sum", "over `tensor` is missing before adamw reads it"];
            found(&device, if forgotten { &words } else { &[] }, "chunk");
        }
    }
}

/// Padding between parameters has no placement: it is never reported as summed or gathered twice, however often the
/// chunk is reduced and gathered.
#[test]
fn padding_of_a_chunk_is_nobodys() {
    let (device, data, _) = mesh();
    // This rank's part is 10..20, of which 18..20 are padding, as is everything after it.
    let (mut whole, mut shard) = (alloc(&device, "whole", &[40]), alloc(&device, "shard", &[10]));
    let partial = Placements::REPLICATED.with(Axis::Data, Partial);
    for round in 0..3 {
        device.place(whole.view().range(0..18), partial);
        (whole, shard) = data.reduce_scatter(whole, shard, false).wait().unwrap();
        let mut twice = alloc(&device, "twice", &[10]);
        device.copy(shard.view(), twice.view_mut());
        device.add(shard.view(), twice.view_mut());
        device.copy(twice.view(), whole.view_mut().range(10..20));
        whole = data.all_gather_in_place(whole).wait().unwrap();
        let known = |at: usize| device.recorder().unwrap().mark_of(whole.view().range(at..40)).is_some();
        assert_eq!([0, 17, 18, 20, 39].map(known), [true, true, false, false, false], "round {round}");
    }
    found(&device, &[], "padding");
}

/// A fault planted in [`perceptron`].
#[derive(Clone, Copy, PartialEq, Debug)]
enum PlantedFault {
    Nothing,
    /// The row-parallel product is never summed.
    NoForwardSum,
    TwoForwardSums,
    /// The sum goes over the data axis.
    WrongAxis,
    /// The hidden activation is summed, instead of the output.
    SumOfParts,
    /// The bias of the second matrix is added before the sum.
    EarlyBias,
    /// The second matrix was not cut.
    WholeWeight,
    /// The gradient of the input is never summed.
    NoBackwardSum,
    TwoBackwardSums,
    /// Gradients are not reduced over the data axis.
    NoDataSum,
}

/// Megatron's perceptron on one rank of a mesh: columns, GELU, rows, one sum each way; then one update.
fn perceptron(planted: PlantedFault) -> Vec<Fault> {
    use PlantedFault::*;
    let (device, data, tensor) = mesh();
    device.arena().begin(PhaseName::Step);
    let _block = device.scope("h.0.mlp");
    let batch = |placement| along(placement).with(Axis::Data, Shard(0));
    let parameter = |name, shape: &[usize], placement| {
        let x = alloc(&device, name, shape);
        device.place_named(x.view(), along(placement), || format!("h.0.{name}"));
        x
    };
    let (w1, b1) = (parameter("fc.weight", &[16, 16], Shard(1)), parameter("fc.bias", &[16], Shard(0)));
    let mut w2 =
        parameter("proj.weight", &[16, 16], if planted == WholeWeight { Replicated } else { Shard(0) });
    let b2 = parameter("proj.bias", &[16], Replicated);
    let weight = |matrix| Weight { matrix, layout: Layout::InOut };
    let activation = |name| alloc(&device, name, &[2, 4, 16]);

    let x = activation("x");
    device.place(x.view(), batch(Replicated));
    let [mut pre, mut act, mut out] = ["pre", "act", "out"].map(activation);
    let epilogue = Epilogue { bias: Some(b1.view()), residual: None };
    device.linear(x.view(), weight(w1.view()), epilogue, pre.view_mut());
    device.gelu(pre.view(), Gelu::Tanh, act.view_mut());
    if planted == SumOfParts {
        act = tensor.all_reduce(act).wait().unwrap();
        device.place(act.view(), batch(Shard(2)));
    }
    let early = (planted == EarlyBias).then(|| b2.view());
    let epilogue = Epilogue { bias: early, residual: None };
    device.linear(act.view(), weight(w2.view()), epilogue, out.view_mut());
    out = match planted {
        NoForwardSum => out,
        WrongAxis => data.all_reduce(out).wait().unwrap(),
        TwoForwardSums => tensor.all_reduce(tensor.all_reduce(out).wait().unwrap()).wait().unwrap(),
        _ => tensor.all_reduce(out).wait().unwrap(),
    };
    // After a sum over the wrong axis, everything after it is wrong too; reporting the next reader is enough.
    let mut y = activation("y");
    device.gelu(out.view(), Gelu::Tanh, y.view_mut());
    if planted == WrongAxis {
        return device.take_trace(5).faults;
    }

    let [mut dact, mut dx, mut end] = ["dact", "dx", "end"].map(activation);
    let [mut dw2, mut m, mut v] = ["dw2", "m", "v"].map(|name| alloc(&device, name, &[16, 16]));
    let dy = activation("dy");
    device.place(dy.view(), batch(Replicated));
    device.linear_input_gradient(dy.view(), weight(w2.view()), dact.view_mut(), false);
    device.linear_weight_gradient(act.view(), dy.view(), dw2.view_mut(), Layout::InOut, false);
    device.linear_input_gradient(dact.view(), weight(w1.view()), dx.view_mut(), false);
    let sums = [NoBackwardSum, Nothing, TwoBackwardSums].iter().position(|m| *m == planted).unwrap_or(1);
    for _ in 0..sums {
        dx = tensor.all_reduce(dx).wait().unwrap();
    }
    device.gelu(dx.view(), Gelu::Tanh, end.view_mut());
    if planted != NoDataSum {
        dw2 = data.all_reduce(dw2).wait().unwrap();
    }
    let step = AdamW { lr: 0.1, beta1: 0.9, beta2: 0.9, eps: 0.1, weight_decay: 0.0, step: 1 };
    let one = alloc(&device, "one", &[1]);
    device.run(AdamWUpdate {
        step,
        p: w2.view_mut(),
        g: dw2.view(),
        moments: [m.view_mut(), v.view_mut()],
        gradient_scale: one.view(),
        rounded: None,
    });
    device.take_trace(5).faults
}

#[test]
fn a_perceptron_is_right_or_named() {
    use PlantedFault::*;
    let rows: [(PlantedFault, Axis, &str, &str); 9] = [
        (
            NoForwardSum,
            Axis::Tensor,
            "h.0.mlp.out",
            "is a partial sum that gelu reads as `x` before it is reduced",
        ),
        (
            TwoForwardSums,
            Axis::Tensor,
            "h.0.mlp.out",
            "goes into all_reduce of group `tensor` but is already",
        ),
        (
            WrongAxis,
            Axis::Data,
            "h.0.mlp.out",
            "goes into all_reduce of group `data` but is sharded over `data`",
        ),
        (
            SumOfParts,
            Axis::Tensor,
            "h.0.mlp.act",
            "but is sharded over `tensor` in dimension 2: wrong collective",
        ),
        (EarlyBias, Axis::Tensor, "h.0.proj.bias", "would add it once; reduce the sum over `tensor` first"),
        (
            WholeWeight,
            Axis::Tensor,
            "h.0.proj.weight",
            "is replicated, while `x` of the same linear is sharded",
        ),
        (
            NoBackwardSum,
            Axis::Tensor,
            "h.0.mlp.dx",
            "an all_reduce or reduce_scatter over `tensor` is missing",
        ),
        (TwoBackwardSums, Axis::Tensor, "h.0.mlp.dx", "is already replicated over `tensor`: doubled?"),
        (NoDataSum, Axis::Data, "h.0.mlp.dw2", "over `data` is missing before adamw reads it as `gradient`"),
    ];
    assert_eq!(perceptron(Nothing), []);
    for (planted, axis, tensor, words) in rows {
        let faults = perceptron(planted);
        let first = faults.first().unwrap_or_else(|| panic!("{planted:?} was not found"));
        assert_eq!(
            (first.axis, first.tensor.as_str(), first.phase),
            (axis, tensor, Some(PhaseName::Step)),
            "{planted:?}"
        );
        assert!(first.to_string().contains(words), "{planted:?}: {first} lacks {words}");
        // One planted fault is reported once, except where the rest is undefined.
        let known = !matches!(planted, WrongAxis | WholeWeight);
        assert!(!known || faults.len() == 1, "{planted:?}: {faults:?}");
    }
}

#[test]
fn messages_carry_tag_members_and_placements() {
    let device = Device::meta(1);
    let recorder = Arc::clone(device.recorder().unwrap());
    let group: Box<dyn Group> =
        Box::new(MetaGroup::over("pipeline", &[Axis::Pipeline], &[3, 7], 0, recorder));
    device.arena().begin(PhaseName::Step);
    let x = alloc(&device, "x", &[2, 8]);
    let placements = along(Shard(1)).with(Axis::Data, Shard(0));
    device.place(x.view(), placements);
    let x = group.send(x, 1, 41).wait().unwrap();
    let x = group.recv(x, 1, 42).wait().unwrap();
    assert_eq!(device.placements(x.view()), placements);
    let trace = device.take_trace(3);
    let calls: Vec<_> = trace.phases[0].collectives().collect();
    assert_eq!(calls.iter().map(|c| c.tag).collect::<Vec<_>>(), [Some(41), Some(42)]);
    for c in calls {
        assert_eq!((&*c.members, c.placements, c.root), (&[3, 7][..], placements, Some(1)));
    }
}
