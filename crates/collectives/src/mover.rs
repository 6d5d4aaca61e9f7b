//! Who moves the bytes of a call where this crate does not: once all members are known to make the same call, a mover starts, and the group
//! waits for it as it waits for a rank.

use phalanx_tensor::DeviceError;

/// Moves the bytes of one call of one rank.
pub trait Mover: Send {
    /// All members make the same call: starts.
    ///
    /// # Errors
    /// When the device cannot.
    fn start(&mut self) -> Result<(), DeviceError>;

    /// Whether this rank's part is over. Called again and again until it is.
    ///
    /// # Errors
    /// When it failed.
    fn is_over(&mut self) -> Result<bool, DeviceError>;

    /// The call has failed: when this returns, nothing uses its memory.
    fn abandon(&mut self);
}

/// A mover that has started. Dropped before it is over, it abandons the call.
pub(crate) struct Started<'a> {
    mover: &'a mut dyn Mover,
    is_over: bool,
}

impl<'a> Started<'a> {
    pub(crate) fn start(mover: &'a mut dyn Mover) -> Result<Started<'a>, DeviceError> {
        // A start that fails halfway is abandoned, too.
        let started = Started { mover, is_over: false };
        started.mover.start()?;
        Ok(started)
    }

    pub(crate) fn is_over(&mut self) -> Result<bool, DeviceError> {
        self.is_over = self.mover.is_over()?;
        Ok(self.is_over)
    }
}

impl Drop for Started<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.mover.abandon();
        }
    }
}
