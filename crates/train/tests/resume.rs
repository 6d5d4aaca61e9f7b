//! A checkpoint of any (ranks, stage) goes on in any other: the state that is read is the state that was
//! written, and over the same ranks the rest of the run has the same bits.

mod rig;

use phalanx_train::RunConfig;

const LAYOUTS: [(usize, u8); 7] = [(1, 0), (1, 3), (2, 0), (2, 2), (2, 3), (4, 1), (4, 3)];

fn config((world, stage): (usize, u8)) -> RunConfig {
    let (_, mut config) = rig::golden_config();
    config.parallel.data = world;
    config.parallel.zero = stage;
    config
}

#[test]
fn any_layout_resumes_in_any_other() {
    let (model, _) = rig::golden_config();
    let steps = rig::golden_steps();
    let folder = tempfile::tempdir().unwrap();
    let whole: Vec<_> = LAYOUTS.iter().map(|l| rig::run(&model, &config(*l), &steps)).collect();
    for from in LAYOUTS {
        let dir = folder.path().join(format!("{}-{}", from.0, from.1));
        let save = rig::Checkpoints { restore: None, save: Some(dir.clone()) };
        let first = rig::run_between(&model, &config(from), &steps[..10], &save);
        let restore = rig::Checkpoints { restore: Some(dir.join("step-10")), save: None };
        for (to, whole) in LAYOUTS.iter().zip(&whole) {
            let read = rig::run_between(&model, &config(*to), &[], &restore);
            assert_eq!(read.state, first.state, "{from:?} read as {to:?}");
            let rest = rig::run_between(&model, &config(*to), &steps[10..], &restore);
            if to.0 == from.0 {
                assert_eq!(rest.losses[..10], whole.losses[10..20], "{from:?} -> {to:?}");
                assert_eq!(rest.state, whole.state, "{from:?} -> {to:?}");
            }
            for (a, b) in rest.losses.iter().zip(&whole.losses[10..]) {
                // Sums over 8 sequences in another order, as in goldens.rs.
                assert!((a - b).abs() < 2e-6, "{from:?} -> {to:?}: loss {a} for {b}");
            }
        }
    }
}
