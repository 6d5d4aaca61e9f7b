//! The figures of `verify_all`, by tables worked out by hand.

use phalanx_checkpoint::{Checkpoint, TensorPiece, begin, commit, write_rank};
use phalanx_plan::trace::DType;
use serde_json::Value;
use tempfile::tempdir;

#[test]
fn figures_of_every_type() {
    let f32s = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let f64s = |values: &[f64]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let u16s = |values: &[u16]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let u32s = |values: &[u32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    // Type, bytes of four elements, then min, max, mean, rms and how many are not finite.
    let cases = [
        (DType::F32, f32s(&[-3.0, 1.0, 1.0, 5.0]), [-3.0, 5.0, 1.0, 3.0], 0),
        (DType::F64, f64s(&[2.0, f64::NAN, f64::INFINITY, -2.0]), [-2.0, 2.0, 0.0, 2.0], 2),
        (DType::F16, u16s(&[0x3c00, 0xbc00, 0x7c00, 0x3c00]), [-1.0, 1.0, 1.0 / 3.0, 1.0], 1),
        (DType::BF16, u16s(&[0x3f80, 0x4000, 0x3f80, 0x4000]), [1.0, 2.0, 1.5, 2.5f64.sqrt()], 0),
        (DType::U32, u32s(&[7, 7, 7, 7]), [7.0, 7.0, 7.0, 7.0], 0),
    ];
    for (dtype, bytes, [min, max, mean, rms], non_finite) in cases {
        let folder = tempdir().unwrap();
        let tmp = begin(folder.path(), 0).unwrap();
        let piece = |range| TensorPiece {
            state: "parameters",
            name: "w".into(),
            shape: vec![2, 2],
            dtype,
            stripe: None,
            range,
        };
        let pieces = [piece(0..1), piece(1..4)];
        let size = dtype.bytes() as u64;
        write_rank(&tmp, 0, &pieces, 8, &mut |index, range, out| {
            let from = ((pieces[index].range.start + range.start) * size) as usize;
            out.copy_from_slice(&bytes[from..from + out.len()]);
        })
        .unwrap();
        let checkpoint = Checkpoint::open(&commit(&tmp, Value::Null, 1).unwrap()).unwrap();
        let report = checkpoint.verify_all(&mut |_| ()).unwrap().remove(0);
        assert_eq!((report.pieces, report.dtype, report.shape.as_slice()), (2, dtype, &[2, 2][..]));
        let found = report.statistics.unwrap();
        assert_eq!([found.min, found.max, found.mean, found.rms], [min, max, mean, rms], "{dtype:?}");
        assert_eq!(found.non_finite, non_finite);
    }
}

#[test]
fn nothing_finite_is_null() {
    let folder = tempdir().unwrap();
    let tmp = begin(folder.path(), 0).unwrap();
    let piece = TensorPiece {
        state: "parameters",
        name: "w".into(),
        shape: vec![1],
        dtype: DType::F32,
        stripe: None,
        range: 0..1,
    };
    write_rank(&tmp, 0, &[piece], 8, &mut |_, _, out| out.copy_from_slice(&f32::NAN.to_le_bytes())).unwrap();
    let checkpoint = Checkpoint::open(&commit(&tmp, Value::Null, 1).unwrap()).unwrap();
    let report = serde_json::to_value(&checkpoint.verify_all(&mut |_| ()).unwrap()[0]).unwrap();
    assert_eq!(report["statistics"]["mean"], Value::Null);
    assert_eq!(report["statistics"]["non_finite"], 1);
    assert_eq!(report["dtype"], "f32");
}
