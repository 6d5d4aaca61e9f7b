//! Token and position embedding; tokens repeat, and one never occurs.

use phalanx_tensor::{DType, Device, Lookup, Positions};

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
            let ([vocab, _], [_, seq]) = (table.dims(), tokens.dims());
            let positions = Some(Positions { table: positions.view(), first_row: 0, seq });
            let lookup = Lookup::whole(vocab);
            device.embedding(tokens.view(), lookup, table.view(), positions, false, y.view_mut());
            vec![y]
        };
        case.check("forward", kernel, &[case.wanted("y")]);
    });
}

/// The initial values of accumulated gradients are the tables.
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
                    let [vocab, _] = dtable.dims();
                    let (lookup, into) = (Lookup::whole(vocab), dtable.view_mut());
                    device.embedding_backward(tokens.view(), lookup, dy.view(), into, accumulate[0]);
                    device.position_gradient(dy.view(), 0, seq, dpositions.view_mut(), accumulate[1]);
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
