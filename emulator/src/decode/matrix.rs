//! Tensor-core instructions: `ldmatrix` and `mma.sync`.

use super::Decoder;
use crate::kernel::{LoadMatrix, MatrixKind, Multiply, Operation};
use crate::ptx::{Operand, PtxError, StateSpace};
use crate::registers::Class;

impl Decoder<'_> {
    pub(super) fn load_matrix(&mut self, parts: &[&str], operands: &[Operand]) -> Result<(), PtxError> {
        let ["ldmatrix", "sync", "aligned", "m8n8", words @ .., "b16"] = parts else {
            return Err(self.unknown(parts));
        };
        let mut count = 0;
        let (mut transposed, mut space) = (false, StateSpace::Generic);
        for &word in words {
            match word {
                "x1" => count = 1,
                "x2" => count = 2,
                "x4" => count = 4,
                "trans" => transposed = true,
                "shared" | "shared::cta" => space = StateSpace::Shared,
                _ => return Err(self.unknown(parts)),
            }
        }
        let [Operand::Vector(results), address] = operands else { return Err(self.unknown(parts)) };
        if results.len() != count {
            return Err(self.error(format!("{} registers for {count} matrices", results.len())));
        }
        let results = self.slots(results)?;
        let (address, _) = self.address(address)?;
        self.emit(Operation::LoadMatrix(Box::new(LoadMatrix { address, space, transposed, results })));
        Ok(())
    }

    fn slots(&mut self, operands: &[Operand]) -> Result<Vec<u16>, PtxError> {
        operands.iter().map(|operand| self.slot(operand, Class::Word)).collect()
    }

    pub(super) fn multiply(&mut self, parts: &[&str], operands: &[Operand]) -> Result<(), PtxError> {
        let ["mma", "sync", "aligned", shape, "row", "col", d_kind, a_kind, b_kind, c_kind] = parts else {
            return Err(self.unknown(parts));
        };
        let kind = match *a_kind {
            "f16" => MatrixKind::F16,
            "bf16" => MatrixKind::Bf16,
            "tf32" => MatrixKind::Tf32,
            _ => return Err(self.unknown(parts)),
        };
        let depth = match (*shape, kind) {
            ("m16n8k4", MatrixKind::Tf32) => 4,
            ("m16n8k8", _) => 8,
            ("m16n8k16", MatrixKind::F16 | MatrixKind::Bf16) => 16,
            _ => return Err(self.unknown(parts)),
        };
        let half_sum = match (*d_kind, *c_kind) {
            ("f32", "f32") => false,
            ("f16", "f16") if kind == MatrixKind::F16 => true,
            _ => return Err(self.unknown(parts)),
        };
        let [Operand::Vector(d), Operand::Vector(a), Operand::Vector(b), Operand::Vector(c)] = operands
        else {
            return Err(self.unknown(parts));
        };
        let per_register = if kind == MatrixKind::Tf32 { 1 } else { 2 };
        let expected = [depth / 2 / per_register, depth / 4 / per_register, if half_sum { 2 } else { 4 }];
        if a_kind != b_kind || [a.len(), b.len(), c.len()] != expected || d.len() != c.len() {
            return Err(self.unknown(parts));
        }
        let multiply = Multiply {
            depth,
            kind,
            half_sum,
            d: self.slots(d)?,
            a: self.slots(a)?,
            b: self.slots(b)?,
            c: self.slots(c)?,
        };
        self.emit(Operation::Multiply(Box::new(multiply)));
        Ok(())
    }
}
