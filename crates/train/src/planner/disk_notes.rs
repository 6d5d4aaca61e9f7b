//! Notes for the user about the folders of disk memory, before a run starts.

use phalanx_tensor::DiskOptions;
use phalanx_tensor::disk::survey;

use crate::planner::planning::RunPlan;

impl RunPlan {
    /// Checks the folders of disk memory, before any rank has its own. Returns notes about what is slower there than it could be.
    ///
    /// # Errors
    /// Folders that cannot hold the disk memory of all ranks.
    pub fn disk_notes(&self) -> std::io::Result<Vec<String>> {
        match self.used_disk() {
            Some(disk) => Ok(survey(disk, &self.disk_bytes())?.notes),
            None => Ok(Vec::new()),
        }
    }

    /// Options of disk memory, if a rank has any.
    pub(crate) fn used_disk(&self) -> Option<&DiskOptions> {
        self.spec.device.disk.as_ref().filter(|_| self.disk_bytes().iter().any(|bytes| *bytes > 0))
    }

    /// Bytes of disk memory of each rank.
    fn disk_bytes(&self) -> Vec<u64> {
        (0..self.spec.world_size()).map(|rank| self.of(rank).disk.arena_bytes).collect()
    }
}
