//! Token tables and output projections of which each rank has some rows of the vocabulary are the whole ones, also
//! where the last rank has fewer.

use crate::rig;
use std::sync::Arc;

use crate::rig::{
    AXES, BATCH, DRAW, HIDDEN, MICRO_BATCHES, PLAIN, ROWS, SEQ, Setting, TestRank, allowed, close, distance,
    join_gradient, joined, on_ranks, parts, run, same_within, whole,
};
use phalanx_collectives::Group;
use phalanx_layers::{
    AdapterInit, AnyLayer, Call, Dropped, Embedding, Head, Init, Inputs, LinearCrossEntropy, Lora, Parameter,
    ParameterSpec, Parameters, PositionTable, Sequence, TARGETS,
};
use phalanx_parallel::TensorParallel;
use phalanx_tensor::{Category, CrossEntropy, DType, IGNORED, Tensor};
use phalanx_testing::planted::{FaultKind, PlantedFault, sites};

/// Divided by all numbers of ranks, by some, by none: four ranks have 12, 12, 12, 12 or 13, 13, 13, 11 or 13, 13, 13,
/// 10 rows.
const VOCABULARIES: [usize; 3] = [48, 50, 49];

fn embedding(vocab: usize, types: bool) -> Embedding {
    Embedding {
        tokens: "tokens".into(),
        positions: Some(PositionTable { name: "positions".into(), rows: SEQ + 2 }),
        types: types.then(|| "types".into()),
        vocab,
        added: 0,
        hidden: HIDDEN,
        init: Init::Normal(1.0),
    }
}

/// Sums behind an embedding: of ranks, a position, a type and a residual; gradients over the rows of both
/// micro-batches, of ranks, and what was there.
const EMBEDDING: [usize; 4] = [4, 4, 2 * ROWS, 4];

#[test]
fn an_embedding_of_which_each_rank_has_some_tokens() {
    for vocab in VOCABULARIES {
        for types in [false, true] {
            let build = move |tensor: &TensorParallel| tensor.embedding(embedding(vocab, types));
            for residual in [false, true] {
                let setting = Setting { vocab: Some(vocab), residual, ..PLAIN };
                let expected = whole(&build, setting);
                for axis in AXES {
                    let what = format!("{vocab} tokens, types {types}, {axis:?}, residual {residual}");
                    let got = parts(&build, axis, setting);
                    same_within(&joined(&got, axis.1), &expected, allowed(&EMBEDDING), &what);
                    assert!(
                        parts(&build, axis, Setting { split: true, ..setting }) == got,
                        "{what}, in two parts"
                    );
                }
            }
        }
    }
}

/// The same, which trains the rows of so many tokens, the last ones, beside the table.
fn adding(tensor: &TensorParallel, added: usize) -> TensorParallel {
    let targets = Arc::new(|_: &str| false);
    let (init, magnitudes) = (AdapterInit::Uniform, false);
    tensor.adapting(Arc::new(Lora { width: 1, scale: 1.0, dropout: 0.0, init, magnitudes, added, targets }))
}

/// Every rank has the rows of added tokens, more ranks than rows or fewer, and their whole gradient.
#[test]
fn an_embedding_with_added_tokens() {
    for (added, types) in [(1, false), (7, true)] {
        let build = move |tensor: &TensorParallel| adding(tensor, added).embedding(embedding(50, types));
        let setting = Setting { vocab: Some(50), residual: true, ..PLAIN };
        let expected = whole(&build, setting);
        for axis in AXES {
            let what = format!("{added} added, types {types}, {axis:?}");
            let got = parts(&build, axis, setting);
            same_within(&joined(&got, axis.1), &expected, allowed(&EMBEDDING), &what);
            assert!(parts(&build, axis, Setting { split: true, ..setting }) == got, "{what}, in two parts");
        }
    }
}

#[test]
fn an_embedding_under_dropout_and_a_norm() {
    let build = |tensor: &TensorParallel| -> Box<dyn AnyLayer> {
        let layer = Dropped { layer: tensor.embedding(embedding(50, true)), p: 0.3, name: "drop".into() };
        Box::new(Sequence::new(vec![Box::new(layer), tensor.rows(rig::norm("ln"))]))
    };
    let setting = Setting { vocab: Some(50), draw: Some(DRAW), ..PLAIN };
    let expected = whole(&build, setting);
    for axis in AXES {
        let got = parts(&build, axis, setting);
        // A norm forward and backward, behind the embedding.
        let sums = [&EMBEDDING[..], &[HIDDEN, 2 * HIDDEN]].concat();
        same_within(&joined(&got, axis.1), &expected, allowed(&sums), &format!("{axis:?}"));
        assert!(parts(&build, axis, Setting { split: true, ..setting }) == got, "{axis:?}, in two parts");
    }
}

#[test]
fn a_planted_fault_in_an_embedding_is_far_outside_of_what_is_allowed() {
    let setting = Setting { vocab: Some(50), ..PLAIN };
    for axis in AXES {
        let build = |tensor: &TensorParallel| tensor.embedding(embedding(50, true));
        let run_with = |fault| {
            on_ranks(axis.0, |group| {
                TestRank::with_fault(group, axis.1, fault, |place| run(place, &*build(place.tensor), setting))
            })
        };
        let right = parts(&build, axis, setting);
        for site in [sites::EMBEDDING_Y, sites::EMBEDDING_DY].into_iter().take(1 + axis.1 as usize) {
            for kind in [FaultKind::Dropped, FaultKind::Doubled] {
                let got = run_with(PlantedFault { site, kind });
                let worst =
                    got.iter().zip(&right).map(|(got, right)| distance(got, right)).fold(0.0, f32::max);
                assert!(
                    worst > 20.0 * allowed(&EMBEDDING),
                    "{site:?} {kind:?} on {axis:?}: off by {worst:e}"
                );
            }
        }
    }
}

/// Loss factors with all terms.
const NUMBERS: CrossEntropy =
    CrossEntropy { scale: 0.25, gradient_scale: 0.5, label_smoothing: 0.1, z_loss: 0.01 };

/// The results of a head on one rank: loss and dx of each micro-batch, and the gradients of both.
#[derive(Debug, PartialEq)]
struct HeadNumbers {
    losses: Vec<f32>,
    dx: Vec<Vec<f32>>,
    gradients: Vec<Vec<f32>>,
    specs: Vec<ParameterSpec>,
}

fn targets(place: &TestRank, vocab: usize, micro_batch: usize) -> Tensor {
    let target = |i: usize| if i % 5 == 3 { IGNORED } else { ((i * 31 + micro_batch * 7) % vocab) as u32 };
    let all: Vec<u32> = (0..ROWS).map(target).collect();
    let mut tensor = place.device.alloc(DType::U32, [BATCH, SEQ], Category::Activations, "test");
    place.device.upload(&all, tensor.view_mut());
    tensor
}

fn head(vocab: usize, bias: bool) -> LinearCrossEntropy {
    let bias = bias.then(|| "head.bias".into());
    LinearCrossEntropy {
        weight: "head.weight".into(),
        bias,
        vocab,
        added: 0,
        hidden: HIDDEN,
        init: Init::Normal(1.0),
    }
}

fn run_head(place: &TestRank, head: &dyn Head, vocab: usize) -> HeadNumbers {
    let specs = head.parameters();
    let parameters: Vec<Tensor> = specs.iter().map(|s| place.parameter(DType::F32, s, "parameter")).collect();
    let mut gradients: Vec<Tensor> = specs.iter().map(|s| place.gradient(DType::F32, s)).collect();
    let mut written = vec![true; specs.len()];
    let (mut losses, mut dx) = (Vec::new(), Vec::new());
    for m in 0..MICRO_BATCHES {
        let inputs = Inputs::only(TARGETS, targets(place, vocab, m).into());
        let cx = place.context(PLAIN, m).with(&inputs);
        let x = place.activation(DType::F32, "x", m);
        let own = Parameter::read_all(&parameters);
        let call = Call { input_wanted: false, ..Call::new(Parameters::new(&own), x.clone()) };
        let (alone, none) = head.loss(&cx, call, NUMBERS).unwrap();
        assert!(none.is_none());
        let own = Parameter::with_gradients(&parameters, &mut gradients, &mut written);
        let (loss, derivative) = head.loss(&cx, Call::new(Parameters::new(&own), x), NUMBERS).unwrap();
        assert_eq!(place.read(&alone), place.read(&loss), "a loss with gradients and one without");
        losses.extend(place.read(&loss));
        dx.push(place.read(&derivative.unwrap()));
    }
    HeadNumbers { losses, dx, gradients: gradients.iter().map(|g| place.read(g)).collect(), specs }
}

fn run_heads(
    (ranks, sequence): (usize, bool),
    vocab: usize,
    (bias, added): (bool, usize),
) -> Vec<HeadNumbers> {
    on_ranks(ranks, |group| {
        let rank = group.rank();
        let tensor = adding(&TensorParallel::new(group, sequence), added);
        run_head(&TestRank::new(&tensor, rank), &*tensor.head(head(vocab, bias)), vocab)
    })
}

/// Assembles the parts of all ranks.
fn joined_heads(parts: &[HeadNumbers], sequence: bool) -> (Vec<f32>, Vec<Vec<f32>>, Vec<Vec<f32>>) {
    assert!(parts.iter().all(|part| part.losses == parts[0].losses), "every rank has the loss of all");
    let dx = (0..MICRO_BATCHES).map(|m| match sequence {
        true => parts.iter().flat_map(|part| part.dx[m].clone()).collect(),
        false => {
            assert!(parts.iter().all(|part| part.dx[m] == parts[0].dx[m]), "ranks differ");
            parts[0].dx[m].clone()
        }
    });
    let gradient = |i: usize| {
        let of: Vec<_> = parts.iter().map(|part| (&part.specs[i], part.gradients[i].as_slice())).collect();
        join_gradient(&of)
    };
    (parts[0].losses.clone(), dx.collect(), (0..parts[0].specs.len()).map(gradient).collect())
}

#[test]
fn a_head_of_which_each_rank_has_some_classes() {
    for vocab in VOCABULARIES {
        // Logits, the softmax, losses or derivatives over rows or classes, what was there, and ranks. An error of a
        // logit is one of its exponential, in parts of it.
        let allowed = allowed(&[HIDDEN, vocab, vocab, 2 * ROWS + 1, 4]);
        for (bias, added) in [(false, 0), (true, 0), (false, 1), (false, 7)] {
            let solo = adding(&TensorParallel::solo(), added);
            let expected = run_head(&TestRank::new(&solo, 0), &*solo.head(head(vocab, bias)), vocab);
            for axis in AXES {
                let what = format!("{vocab} classes, bias {bias}, {added} added, {axis:?}");
                let (losses, dx, gradients) = joined_heads(&run_heads(axis, vocab, (bias, added)), axis.1);
                close(&losses, &expected.losses, allowed, &what);
                assert_eq!(dx.len(), expected.dx.len());
                for (dx, expected) in dx.iter().zip(&expected.dx) {
                    close(dx, expected, allowed, &format!("{what}: dx"));
                }
                let parameters = 1 + usize::from(bias) + usize::from(added > 0);
                assert_eq!([gradients.len(), expected.gradients.len()], [parameters; 2]);
                for (gradient, expected) in gradients.iter().zip(&expected.gradients) {
                    close(gradient, expected, allowed, &format!("{what}: gradient"));
                }
            }
        }
    }
}

/// Sums over ranks have a fixed order, so results that all ranks have are equal bit for bit; logits of a part are
/// columns of the whole logits.
#[test]
fn logits_are_those_of_the_classes_that_are_here() {
    let solo = TensorParallel::solo();
    let logits = |tensor: &TensorParallel, rank: usize| {
        let (place, head) = (TestRank::new(tensor, rank), tensor.head(head(50, true)));
        let specs = head.parameters();
        let parameters: Vec<Tensor> =
            specs.iter().map(|s| place.parameter(DType::F32, s, "parameter")).collect();
        let own = Parameter::read_all(&parameters);
        let x = place.upload(DType::F32, [3, HIDDEN], &rig::normals("x", 3 * HIDDEN));
        let logits = head.logits(&place.context(PLAIN, 0), Parameters::new(&own), x.view());
        let [rows, classes] = logits.dims();
        (rows, classes, place.read(&logits))
    };
    let (_, all, expected) = logits(&solo, 0);
    assert_eq!(all, 50);
    let parts = on_ranks(4, |group: Arc<dyn Group>| {
        let rank = group.rank();
        logits(&TensorParallel::new(group, false), rank)
    });
    assert_eq!(parts.iter().map(|part| part.1).collect::<Vec<_>>(), [13, 13, 13, 11]);
    for row in 0..3 {
        let joined: Vec<f32> = parts
            .iter()
            .flat_map(|(_, here, logits)| logits[row * here..(row + 1) * here].to_vec())
            .collect();
        close(&joined, &expected[row * all..(row + 1) * all], allowed(&[HIDDEN + 1]), "logits");
    }
}
