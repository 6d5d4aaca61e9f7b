//! Launches and attributes of functions.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use super::modules::Function;
use super::regions::OPERANDS;
use super::{Driver, Status, call_in_context, entry_points, put};
use crate::execute::MAX_THREADS;
use crate::queues::{Launch, Work};

/// How a kernel is launched (`CUlaunchConfig`).
#[derive(Clone, Copy)]
#[repr(C)]
#[allow(missing_docs)]
pub struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: usize,
    pub attributes: *const c_void,
    pub attribute_count: c_uint,
}

impl Driver {
    fn launch(
        &mut self,
        function: usize,
        config: &LaunchConfig,
        parameters: *const *const u8,
        extra: *const c_void,
    ) -> Result<(), Status> {
        let launch = self.checked_launch(function, config, parameters, extra)?;
        let stream = self.stream(config.stream)?;
        self.queues.launches += usize::from(!self.queues.is_capturing(stream));
        Ok(self.queues.enqueue(stream, Work::Launch(launch))?)
    }

    /// A launch whose sizes a device has, with its parameters as they are now.
    pub(super) fn checked_launch(
        &self,
        function: usize,
        config: &LaunchConfig,
        parameters: *const *const u8,
        extra: *const c_void,
    ) -> Result<Launch, Status> {
        let function = self.functions.get(function)?;
        check_size(function, config, self.config.shared)?;
        if !extra.is_null() || config.attribute_count > 0 {
            return Err(Status::NOT_SUPPORTED);
        }
        let kernel = function.kernel.clone();
        let mut bytes = vec![0u8; kernel.parameter_bytes];
        if parameters.is_null() && !kernel.parameters.is_empty() {
            return Err(Status::INVALID_VALUE);
        }
        for (index, &(offset, size)) in kernel.parameters.iter().enumerate() {
            // SAFETY: the caller gives a pointer for each parameter, to as many bytes as it has.
            let source = unsafe { std::slice::from_raw_parts(*parameters.add(index), size) };
            bytes[offset..offset + size].copy_from_slice(source);
        }
        Ok(Launch {
            kernel,
            grid: config.grid,
            block: config.block,
            parameters: bytes,
            dynamic_shared: config.shared_bytes as usize,
            operands: OPERANDS.with_borrow(Arc::clone),
        })
    }
}

/// Whether a card with so much shared memory for a block has room for a launch.
fn check_size(function: &Function, config: &LaunchConfig, shared: usize) -> Result<(), Status> {
    let [x, y, z] = config.grid;
    let [block_x, block_y, block_z] = config.block;
    let sizes = [x, y, z, block_x, block_y, block_z];
    let too_large = x > i32::MAX as u32 || y > 65535 || z > 65535 || block_z > 64;
    let threads = config.block.iter().try_fold(1u32, |all, &size| all.checked_mul(size));
    let Some(threads) =
        threads.filter(|threads| !sizes.contains(&0) && !too_large && *threads <= MAX_THREADS)
    else {
        return Err(Status::INVALID_VALUE);
    };
    let limit = function.kernel.max_threads;
    if limit > 0 && threads > limit {
        return Err(Status::LAUNCH_OUT_OF_RESOURCES);
    }
    let dynamic = config.shared_bytes as usize;
    if dynamic > function.max_dynamic_shared {
        return Err(Status::INVALID_VALUE);
    }
    if function.kernel.static_shared + dynamic > shared {
        return Err(Status::LAUNCH_OUT_OF_RESOURCES);
    }
    Ok(())
}

entry_points! {
    /// Queues a launch.
    cuLaunchKernel(
        function: usize,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: usize,
        parameters: *const *const u8, extra: *const c_void,
    ) call_in_context |driver| {
        let config = LaunchConfig {
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            shared_bytes,
            stream,
            attributes: std::ptr::null(),
            attribute_count: 0,
        };
        driver.launch(function, &config, parameters, extra)
    }

    /// Queues a launch. Attributes, such as clusters, are not supported.
    cuLaunchKernelEx(config: *const LaunchConfig, function: usize, parameters: *const *const u8, extra: *const c_void)
        call_in_context |driver| {
        if config.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the caller gives a valid configuration.
        let config = unsafe { *config };
        driver.launch(function, &config, parameters, extra)
    }

    /// An attribute of a function: threads (0), shared (1), constant (2), local bytes (3), PTX version (5), dynamic
    /// shared bytes (8). How many registers a compiler would use is not known.
    cuFuncGetAttribute(out: *mut c_int, attribute: c_int, function: usize) call_in_context |driver| {
        let function = driver.functions.get(function)?;
        let kernel = &function.kernel;
        let value = match attribute {
            0 if kernel.max_threads > 0 => kernel.max_threads as usize,
            0 => MAX_THREADS as usize,
            1 => kernel.static_shared,
            2 => 0,
            3 => kernel.local_bytes,
            8 => function.max_dynamic_shared,
            _ => return Err(Status::NOT_SUPPORTED),
        };
        put(out, value as c_int)
    }

    /// Sets the dynamic shared memory (8) that launches may use; the preferred split of the cache (9) makes no difference.
    cuFuncSetAttribute(function: usize, attribute: c_int, value: c_int) call_in_context |driver| {
        let shared = driver.config.shared;
        let function = driver.functions.get_mut(function)?;
        match attribute {
            8 if value >= 0 && function.kernel.static_shared + value as usize <= shared => {
                function.max_dynamic_shared = value as usize;
                Ok(())
            }
            9 => Ok(()),
            _ => Err(Status::INVALID_VALUE),
        }
    }
}
