//! Attention. The name of a case is batch, seq, heads, size, and whether it is causal.

use phalanx_tensor::{DType, Device, Heads, Tensor};

use super::case::{Case, each_case, poisoned};

fn heads(case: &Case) -> Heads {
    let ([_, heads, _], [_, _, hidden]) = (case.dims("log_sum_exp"), case.dims("out"));
    Heads::equal(heads, hidden / heads, case.name().ends_with("causal"))
}

/// out, log_sum_exp.
fn forward(case: &Case, device: &Device, qkv: &Tensor) -> [Tensor; 2] {
    let mut out = poisoned(device, case.dtype, case.dims::<3>("out"));
    let mut log_sum_exp = poisoned(device, DType::F32, case.dims::<3>("log_sum_exp"));
    device.attention(qkv.view(), heads(case), None, None, out.view_mut(), log_sum_exp.view_mut());
    [out, log_sum_exp]
}

pub fn attention(dtype: DType) {
    each_case("attention", dtype, |case| {
        let kernel = |device: &Device| forward(case, device, &case.input(device, "qkv")).into();
        case.check("forward", kernel, &["out", "log_sum_exp"].map(|name| case.wanted(name)));
    });
}

/// Uses `out` and `log_sum_exp` of the kernel's own forward.
pub fn attention_backward(dtype: DType) {
    each_case("attention", dtype, |case| {
        let kernel = |device: &Device| {
            let (qkv, dout) = (case.input(device, "qkv"), case.input(device, "dout"));
            let [out, log_sum_exp] = forward(case, device, &qkv);
            let mut dqkv = poisoned(device, dtype, qkv.shape());
            let rows = [out.view(), log_sum_exp.view(), dout.view()];
            device.attention_backward(qkv.view(), rows, heads(case), None, None, dqkv.view_mut());
            vec![dqkv]
        };
        case.check("backward", kernel, &[case.wanted("dqkv")]);
    });
}
