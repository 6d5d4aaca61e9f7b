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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn every_page_is_there() {
        // Counts shared memory: no other test of this process uses any.
        let resident_bytes = || {
            let text = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix("RssShmem:")).unwrap();
            1024 * line.trim().trim_end_matches(" kB").parse::<usize>().unwrap()
        };
        // The last share is short, and ends on a small page.
        let bytes = 9 * HUGE + 3 * 4096;
        let file = rustix::fs::memfd_create("resident", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes as u64).unwrap();
        let region = Region::shared(file.as_fd(), bytes).unwrap();
        assert!(resident_bytes() < HUGE);
        Cpu::new(3).populate(&region).unwrap();
        assert!(resident_bytes() > bytes - HUGE, "{} of {bytes}", resident_bytes());
    }
}
