//! Copies between the memories: uploads that are larger than the staging buffer, whole tensors there and back, late numbers.

use phalanx_tensor::{Category, DType};

use phalanx_cuda::checks::bench::{random, read, tensor};

use crate::bench::Bench;

/// More bytes than the staging buffer has, and no whole number of its slots.
const LARGE: usize = (9 << 20) / 4 + 1001;

#[test]
fn an_upload_larger_than_the_staging_buffer() {
    let Some(bench) = Bench::new("large upload") else { return };
    let device = bench.card();
    let mut values: Vec<u32> = (0..LARGE as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let expected = values.clone();
    let mut x = device.alloc(DType::U32, [LARGE], Category::Workspace, "x");
    device.upload(&values, x.view_mut());
    // The bytes were read before the upload returned.
    values.fill(0);
    let mut found = vec![0u32; LARGE];
    device.download(x.view(), &mut found).unwrap();
    assert!(found == expected, "element {:?} differs", (0..LARGE).find(|i| found[*i] != expected[*i]));
}

#[test]
fn tensors_go_to_the_host_and_back_behind_the_kernels_that_write_them() {
    let Some(bench) = Bench::new("copies of tensors") else { return };
    let device = bench.card();
    let mut sum = random(device, DType::F32, &[5000], 1);
    let one = tensor(device, DType::F32, &[5000], &[0.25; 5000]);
    let expected: Vec<f64> =
        read(device, sum.view()).unwrap().iter().map(|x| f64::from(*x as f32 + 0.25)).collect();
    device.add(one.view(), sum.view_mut());
    let to = device.alloc_host(DType::F32, [5000], Category::Workspace, "host");
    let (mut sum, host) = device.copy_to_host(sum, to).wait().unwrap();
    let on_host: Vec<f64> = host.host_slice::<f32>().iter().map(|x| f64::from(*x)).collect();
    assert_eq!(on_host, expected);
    device.fill(sum.view_mut(), 0.0);
    let (_, sum) = device.copy_to_device(host, sum).wait().unwrap();
    assert_eq!(read(device, sum.view()).unwrap(), expected);
}

#[test]
fn late_numbers_are_those_of_the_moment_when_they_were_asked_for() {
    let Some(bench) = Bench::new("late numbers") else { return };
    let device = bench.card();
    let [mut a, b] = [1.5f32, -2.5].map(|x| tensor(device, DType::F32, &[1], &[x]));
    device.add(b.view(), a.view_mut());
    let fetch = device.fetch_later(&[a.view(), b.view()]);
    assert_eq!(fetch.wait().unwrap(), [-1.0, -2.5]);
    assert_eq!(device.fetch([b.view()]).unwrap(), [-2.5]);
}
