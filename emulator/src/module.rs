//! A loaded module: its kernels, and its variables in device memory.

use std::collections::HashMap;
use std::sync::Arc;

use crate::decode;
use crate::kernel::Kernel;
use crate::memory::DeviceMemory;
use crate::ptx::{self, PtxError, StateSpace};

/// A module whose variables have memory.
pub struct LoadedModule {
    /// Its kernels by name.
    pub kernels: HashMap<String, Arc<Kernel>>,
    /// Address and size of its variables by name.
    pub variables: HashMap<String, (u64, usize)>,
}

impl LoadedModule {
    /// Reads a PTX text, places its variables and decodes its kernels.
    ///
    /// # Errors
    /// The line and reason, if the text is not supported or memory is used up.
    pub fn load(text: &str, memory: &mut DeviceMemory) -> Result<Self, PtxError> {
        let module = ptx::parse(text)?;
        let mut variables = HashMap::new();
        for variable in &module.variables {
            if !matches!(variable.space, StateSpace::Global | StateSpace::Const) || variable.bytes == 0 {
                continue;
            }
            let out_of_memory = || PtxError::new(variable.line, "no device memory is left for the variable");
            let address = memory.allocate(variable.bytes).ok_or_else(out_of_memory)?;
            let explain = |_| PtxError::new(variable.line, "the variable has no memory");
            let place = memory.range_place(address, variable.bytes).map_err(explain)?;
            // Variables without an initial value are zeros.
            let mut bytes = variable.initial.clone();
            bytes.resize(variable.bytes, 0);
            memory.bytes(place, variable.bytes).copy_from_slice(&bytes);
            memory.mark_range_written(place, variable.bytes);
            variables.insert(variable.name.clone(), (address, variable.bytes));
        }
        let addresses = variables.iter().map(|(name, (address, _))| (name.clone(), *address)).collect();
        let kernels = decode::kernels(&module, &addresses);
        let mut loaded = Self { kernels: HashMap::new(), variables };
        match kernels {
            Ok(kernels) => {
                loaded.kernels = kernels.into_iter().map(|kernel| (kernel.name.clone(), kernel)).collect();
                Ok(loaded)
            }
            Err(error) => {
                loaded.unload(memory);
                Err(error)
            }
        }
    }

    /// Frees the memory of the variables.
    pub fn unload(&self, memory: &mut DeviceMemory) {
        for (address, _) in self.variables.values() {
            // The addresses came from `allocate`, so this cannot fail.
            let _ = memory.free(*address);
        }
    }
}
