//! Token and position embedding; tokens repeat, and one never occurs.

use phalanx_tensor::{DType, Device};

use super::case::{each_case, poisoned};

pub fn embedding(dtype: DType) {
    each_case("embedding", dtype, |case| {
        if !case.has("y") {
            return;
        }
        let kernel = |device: &Device| {
            let tokens = case.ids(device, "tokens");
            let [table, positions] = ["table", "positions"].map(|name| case.input(device, name));
            let mut y = poisoned(device, dtype, case.dims::<3>("y"));
            device.embedding(tokens.view(), table.view(), positions.view(), y.view_mut());
            vec![y]
        };
        case.check("forward", kernel, &[case.wanted("y")]);
    });
}

/// What is accumulated into are the tables.
pub fn embedding_backward(dtype: DType) {
    each_case("embedding", dtype, |case| {
        let [batch, seq] = case.dims("tokens");
        for accumulate in [[false, false], [true, false], [false, true]] {
            for gradient in case.gradient_types() {
                let kernel = |device: &Device| {
                    let (tokens, dy) = (case.ids(device, "tokens"), case.input(device, "dy"));
                    let [mut dtable, mut dpositions] =
                        [("table", accumulate[0]), ("positions", accumulate[1])].map(
                            |(name, add)| match add {
                                true => case.input_as(device, name, gradient),
                                false => poisoned(device, gradient, case.dims::<2>(name)),
                            },
                        );
                    device.embedding_backward(
                        tokens.view(),
                        dy.view(),
                        dtable.view_mut(),
                        dpositions.view_mut(),
                        accumulate,
                    );
                    vec![dtable, dpositions]
                };
                let wanted = |name, add, before, additions| match add {
                    true => case.wanted(name).plus(&case.numbers(before), additions),
                    false => case.wanted(name),
                };
                let wanted = [
                    wanted("dtable", accumulate[0], "table", batch * seq),
                    wanted("dpositions", accumulate[1], "positions", batch),
                ];
                let what = format!("accumulate {accumulate:?}, into {}", gradient.name());
                case.check(&what, kernel, &wanted);
            }
        }
    });
}
