//! Makes memory resident before it is used.

use std::io::ErrorKind;
use std::sync::{Mutex, PoisonError};

use phalanx_tensor::region::{HUGE, Region};

use crate::Cpu;

impl Cpu {
    /// Makes every page of `region` resident, so that no step faults later: each thread touches a contiguous share.
    /// Linux before 5.14 does not support this and allocates pages at first use.
    ///
    /// # Errors
    /// Errors of the system, mainly out of memory.
    pub fn populate(&self, region: &Region) -> std::io::Result<()> {
        let share = region.bytes().div_ceil(self.pool.threads()).next_multiple_of(HUGE);
        let failed = Mutex::new(None);
        self.over(region.bytes(), share, |range| {
            if let Err(error) = region.populate(range)
                && error.kind() != ErrorKind::InvalidInput
            {
                failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}
