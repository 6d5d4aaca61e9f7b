//! Errors of a card for invalid ids.

use phalanx_cuda::checks::bench::{ids, random};
use phalanx_tensor::DType;
use phalanx_tensor::arguments::Lookup;

use crate::bench::Bench;

#[test]
fn an_id_that_cannot_be_is_an_error_that_names_the_call() {
    let Some(bench) = Bench::new("ids that cannot be") else { return };
    let device = bench.card();
    let ids = ids(device, &[1, 70, 2]);
    let table = random(device, DType::F32, &[50, 8], 1);
    let mut y = random(device, DType::F32, &[3, 8], 2);
    device.embedding(ids.view(), Lookup::whole(50), table.view(), None, false, y.view_mut());
    let line = line!() - 1;
    let error = device.synchronize().unwrap_err().to_string();
    let expected = format!("faults.rs:{line} ");
    assert!(
        error.contains("token 70 is outside the vocabulary of 50") && error.contains(&expected),
        "{error}"
    );
    // Nothing runs after a failure, and every wait returns it.
    assert_eq!(device.download(y.view(), &mut [0f32; 24]).unwrap_err().to_string(), error);
}
