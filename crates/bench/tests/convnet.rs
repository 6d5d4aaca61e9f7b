//! The ConvNet of the example, with every method: the same training, on the planned bytes.

#[path = "../examples/convnet.rs"]
#[allow(dead_code, reason = "its main function")]
mod example;

use example::{Digits, SIDE, all, apart, on_ranks};

#[test]
fn every_method_trains_the_same_network() {
    let trained = all(12).unwrap();
    let [ddp, zero, in_forward, gathered, alone] = &trained[..] else { panic!("five methods") };
    for run in &trained {
        let (method, losses) = (run.method, &run.losses);
        assert!(losses[11] < losses[0], "{method}: {losses:?}");
        assert!(run.peaks.iter().all(|[measured, planned]| measured == planned), "{method}: {:?}", run.peaks);
        // A loss of about 2 has a rounding of 1.2e-7; another order of sums may move it a few times as far.
        assert!(apart(run, ddp) <= 1e-6, "{method}: {losses:?}, DDP: {:?}", ddp.losses);
    }
    let bits = |losses: &[f32]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&ddp.losses), bits(&zero.losses));
    assert_eq!(ddp.accuracy.to_bits(), zero.accuracy.to_bits());
    // Device 0 of DataParallel holds the states, and the outputs of all devices where they are gathered.
    for run in [in_forward, gathered] {
        assert!(run.peaks[0][0] > run.peaks[1][0], "{}: {:?}", run.method, run.peaks);
    }
    assert_eq!((ddp.peaks[0], alone.peaks.len()), (ddp.peaks[1], 1));
    assert!(zero.peaks[0][0] < ddp.peaks[0][0], "{:?} and {:?}", zero.peaks, ddp.peaks);
}

#[test]
fn images_of_another_size_are_refused() {
    let error = on_ranks("DDP", (2, 0), 1, Digits { side: 28 }).err().unwrap().to_string();
    let (read, given) = (SIDE * SIDE, 28 * 28);
    for part in ["`image`", &format!("{read} numbers"), &format!("has {given}")] {
        assert!(error.contains(part), "{error}");
    }
}
