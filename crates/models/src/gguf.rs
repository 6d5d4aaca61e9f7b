//! Models as GGUF files describe them to llama.cpp: the name of the architecture, its keys, and the tensors with their names.
//!
//! Models that llama.cpp would compute differently are refused, and the error names the reason. Source: `conversion/` and
//! `src/models/` of llama.cpp, August 2026.

use phalanx_layers::Network;

/// The parts of a model that llama.cpp reads.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufModel {
    /// Name of its architecture in llama.cpp (`general.architecture`).
    pub arch: &'static str,
    /// Keys without the name of the architecture before them.
    pub keys: Vec<(&'static str, GgufNumber)>,
    /// The tensors.
    pub tensors: Vec<GgufSource>,
    /// Settings that llama.cpp computes otherwise in some of its settings, for people.
    pub notes: Vec<String>,
}

/// The value of a key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GgufNumber {
    /// A size.
    Count(usize),
    /// A number.
    Real(f64),
    /// A word.
    Word(&'static str),
}

/// A tensor: its name, its extents, and what it is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufSource {
    /// Its name in the file.
    pub name: String,
    /// Its extents in the file, the rows first.
    pub shape: Vec<usize>,
    /// Its numbers.
    pub from: GgufFrom,
}

/// The numbers of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufFrom {
    /// Those of parameters.
    Parameters {
        /// Their names; the rows of each lie behind those of the one before it.
        names: Vec<String>,
        /// Their order.
        order: RowOrder,
        /// True if each is one more: the model multiplies by 1 + weight, and llama.cpp by what the file has.
        plus_one: bool,
    },
    /// These.
    Numbers(Vec<f32>),
}

impl GgufFrom {
    /// The numbers of one parameter.
    pub(crate) fn parameter(name: &str, order: RowOrder) -> GgufFrom {
        GgufFrom::Parameters { names: vec![name.to_string()], order, plus_one: false }
    }
}

/// The order of a parameter's numbers in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// As it is.
    Kept,
    /// In each head of so many rows, those that turn together by rotary positions become neighbours: row 2 i + s is row s n / 2 + i of the
    /// parameter.
    Neighbours(usize),
    /// Rows and columns exchanged.
    Transposed,
}

impl RowOrder {
    /// The row of the file that has row `row` of the parameter.
    ///
    /// # Panics
    /// If rows and columns are exchanged.
    pub fn place(self, row: usize) -> usize {
        match self {
            RowOrder::Kept => row,
            RowOrder::Neighbours(rows) => {
                let (head, within) = (row / rows, row % rows);
                head * rows + within % (rows / 2) * 2 + within / (rows / 2)
            }
            RowOrder::Transposed => unreachable!("a row becomes a column"),
        }
    }
}

impl GgufSource {
    /// The tensors of a network, whose parameters have these names and orders in the file; neighbours of one name are one tensor. The error
    /// is that of `name`.
    pub(crate) fn of_network(
        network: &Network,
        name: impl Fn(&str) -> Result<(String, RowOrder), String>,
    ) -> Result<Vec<GgufSource>, String> {
        let mut tensors: Vec<GgufSource> = Vec::new();
        for spec in network.members() {
            let (name, order) = name(&spec.name)?;
            let mut shape = spec.shape.clone();
            if order == RowOrder::Transposed {
                shape.reverse();
            }
            match tensors.last_mut() {
                Some(GgufSource { name: last, shape: whole, from: GgufFrom::Parameters { names, .. } })
                    if *last == name =>
                {
                    whole[0] += shape[0];
                    names.push(spec.name.clone());
                }
                _ => tensors.push(GgufSource { name, shape, from: GgufFrom::parameter(&spec.name, order) }),
            }
        }
        Ok(tensors)
    }

    /// Returns whether llama.cpp reads this tensor only in f32, whatever the type of the others: vectors, norms, the position table.
    pub fn is_always_f32(&self) -> bool {
        self.shape.len() == 1 || self.name.ends_with("_norm.weight") || self.name == "position_embd.weight"
    }
}

/// Splits the name of a layer's parameter into the number, the part, and its ending after the last dot.
pub(crate) fn of_layer<'a>(name: &'a str, prefix: &str) -> Option<(&'a str, &'a str, &'a str)> {
    let (number, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    let (part, ending) = rest.rsplit_once('.')?;
    Some((number, part, ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_each_head_become_neighbours() {
        let order = RowOrder::Neighbours(6);
        let mut file = [0; 12];
        (0..12).for_each(|row| file[order.place(row)] = row);
        assert_eq!(file, [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]);
    }
}
