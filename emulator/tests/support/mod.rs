//! Launches of kernels on the executor alone, without a driver.

use phalanx_cuda_emulator::checks::{Checks, Report, Reports};
use phalanx_cuda_emulator::execute::{Launch, Operands, Statistics, run};
use phalanx_cuda_emulator::memory::DeviceMemory;
use phalanx_cuda_emulator::module::LoadedModule;

/// A device with a module.
pub struct Device {
    pub memory: DeviceMemory,
    pub reports: Reports,
    pub checks: Checks,
    pub seed: u64,
    pub limit: u64,
    module: LoadedModule,
    operations: u32,
}

/// Numbers that are stored as their bytes.
pub trait Number: Copy {
    const BYTES: usize;
    fn store(self, out: &mut [u8]);
    fn load(bytes: &[u8]) -> Self;
}

macro_rules! numbers {
    ($($kind:ty),*) => {$(
        impl Number for $kind {
            const BYTES: usize = size_of::<$kind>();
            fn store(self, out: &mut [u8]) {
                out.copy_from_slice(&self.to_le_bytes());
            }
            fn load(bytes: &[u8]) -> Self {
                Self::from_le_bytes(bytes.try_into().unwrap())
            }
        }
    )*};
}

numbers!(u8, u16, u32, i32, u64, i64, f32, f64);

impl Device {
    pub fn new(ptx: &str) -> Self {
        let mut memory = DeviceMemory::new(1 << 30).unwrap();
        let module = LoadedModule::load(ptx, &mut memory).unwrap();
        let (reports, checks) = (Reports::default(), Checks::default());
        Self { memory, reports, checks, seed: 0, limit: 1 << 30, module, operations: 0 }
    }

    /// Memory that holds values.
    pub fn put<T: Number>(&mut self, values: &[T]) -> u64 {
        let address = self.empty::<T>(values.len());
        let bytes = values.len() * T::BYTES;
        let place = self.memory.range_place(address, bytes).unwrap();
        for (chunk, value) in self.memory.bytes(place, bytes).chunks_exact_mut(T::BYTES).zip(values) {
            value.store(chunk);
        }
        self.memory.mark_range_written(place, bytes);
        address
    }

    /// Memory for values that nobody has written.
    pub fn empty<T: Number>(&mut self, count: usize) -> u64 {
        self.memory.allocate(count * T::BYTES).unwrap()
    }

    /// Reads values, which must have been written.
    pub fn get<T: Number>(&mut self, address: u64, count: usize) -> Vec<T> {
        let bytes = count * T::BYTES;
        let place = self.memory.range_place(address, bytes).unwrap();
        assert!(self.memory.is_range_written(place, bytes), "the kernel did not write all of its output");
        self.memory.bytes(place, bytes).chunks_exact(T::BYTES).map(T::load).collect()
    }

    /// Launches a kernel with parameters of 8 or 4 bytes each. All earlier launches are ordered before it.
    pub fn launch(
        &mut self,
        name: &str,
        grid: [u32; 3],
        block: [u32; 3],
        parameters: &[Parameter],
    ) -> Statistics {
        self.launch_shared(name, grid, block, parameters, 0)
    }

    /// `launch` with dynamic shared memory.
    pub fn launch_shared(
        &mut self,
        name: &str,
        grid: [u32; 3],
        block: [u32; 3],
        parameters: &[Parameter],
        dynamic_shared: usize,
    ) -> Statistics {
        let kernel = self.module.kernels.get(name).unwrap_or_else(|| panic!("no kernel `{name}`"));
        let mut bytes = vec![0u8; kernel.parameter_bytes];
        assert_eq!(parameters.len(), kernel.parameters.len(), "parameters of {name}");
        for (parameter, &(offset, size)) in parameters.iter().zip(&kernel.parameters) {
            let value = match *parameter {
                Parameter::Address(value) => value,
                Parameter::Integer(value) => value as u32 as u64,
                Parameter::Float(value) => u64::from(value.to_bits()),
            };
            bytes[offset..offset + size].copy_from_slice(&value.to_le_bytes()[..size]);
        }
        self.operations += 1;
        let launch = Launch {
            kernel,
            grid,
            block,
            parameters: &bytes,
            dynamic_shared,
            operands: &Operands::default(),
            operation: self.operations,
            order: &|_| true,
            checks: self.checks,
            seed: self.seed,
            limit: self.limit,
        };
        run(&launch, &mut self.memory, &mut self.reports)
    }

    /// Fails if there is any report.
    pub fn assert_clean(&self) {
        let reports: Vec<String> = self.reports.all().iter().map(Report::to_string).collect();
        assert!(reports.is_empty(), "{}", reports.join("\n"));
    }
}

/// A parameter of a kernel.
#[derive(Clone, Copy)]
pub enum Parameter {
    Address(u64),
    Integer(i32),
    Float(f32),
}

/// Numbers from -1 to 1 that a seed determines.
pub fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}
