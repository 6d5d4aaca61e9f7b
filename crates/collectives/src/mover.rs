//! `Mover`: moves the bytes of a call outside of this crate, as NCCL does. Once all members are known to make the same
//! call, a mover starts, and the group waits for it as it waits for a rank.

use phalanx_tensor::DeviceError;

/// Moves the bytes of one call of one rank.
pub trait Mover: Send {
    /// All members make the same call: starts.
    ///
    /// # Errors
    /// When the device cannot.
    fn start(&mut self) -> Result<(), DeviceError>;

    /// Returns whether the device has reached the call: all work that it was given before is over. Called repeatedly until it is
    /// true or the call is over. `others_are_over` is true once all other ranks have ended their parts; a mover whose work may
    /// take any time decides by it.
    ///
    /// # Errors
    /// When it failed.
    fn has_begun(&mut self, others_are_over: bool) -> Result<bool, DeviceError>;

    /// Returns whether this rank's part is over. Called repeatedly until it is.
    ///
    /// # Errors
    /// When it failed.
    fn is_over(&mut self) -> Result<bool, DeviceError>;

    /// The call has failed, and `why`: when this returns, nothing uses its memory.
    fn abandon(&mut self, why: &str);
}

/// A mover that has started. Dropped before it is over, it abandons the call.
pub(crate) struct Started<'a> {
    mover: &'a mut dyn Mover,
    is_over: bool,
    why: String,
}

impl<'a> Started<'a> {
    pub(crate) fn start(mover: &'a mut dyn Mover) -> Result<Started<'a>, DeviceError> {
        // A start that fails halfway is abandoned, too.
        let mut started = Started { mover, is_over: false, why: "a panic".to_string() };
        started.mover.start().inspect_err(|error| started.why = error.to_string())?;
        Ok(started)
    }

    pub(crate) fn has_begun(&mut self, others_are_over: bool) -> Result<bool, DeviceError> {
        self.mover.has_begun(others_are_over)
    }

    pub(crate) fn is_over(&mut self) -> Result<bool, DeviceError> {
        self.is_over = self.mover.is_over()?;
        Ok(self.is_over)
    }

    /// Why the call has failed, before it is abandoned.
    pub(crate) fn note_failure(&mut self, why: String) {
        self.why = why;
    }
}

impl Drop for Started<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.mover.abandon(&self.why);
        }
    }
}
