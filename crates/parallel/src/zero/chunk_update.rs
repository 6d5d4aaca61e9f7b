//! Updates one chunk, on the device or on the host: after backward, or within it (`update_in_backward`).

use phalanx_collectives::CollectiveError;
use phalanx_tensor::View;

use super::Zero;
use super::host_update::HostUpdate;
use super::update::Step;

impl Zero {
    /// The first tiles begin to come.
    pub(super) fn read_first_tiles(&mut self, on_host: Option<&mut HostUpdate>) {
        if let Some(on_host) = on_host {
            self.read_first_on_host(on_host);
        }
        self.states.begin();
    }

    /// Updates what this rank owns of a chunk. What lies elsewhere may still return.
    pub(super) fn update_chunk(
        &mut self,
        c: usize,
        step: Step,
        factor: View,
        on_host: Option<&mut HostUpdate>,
    ) -> Result<(), CollectiveError> {
        if self.states.parameters(c).is_some() {
            self.parameters.assert_away(c);
        }
        let tiles = self.update_tiles(c).into_iter().enumerate();
        match on_host.filter(|_| self.states.is_updated_on_host(c)) {
            Some(on_host) => {
                for (t, tile) in tiles {
                    self.update_on_host(on_host, (c, t), tile, step)?;
                }
                Ok(())
            }
            None => {
                for (t, tile) in tiles {
                    self.states.enter((c, t))?;
                    self.update_tile((c, t), tile, step, factor, None);
                    self.states.leave()?;
                }
                self.publish_updated(c)
            }
        }
    }

    /// Waits until all tiles are in their places.
    pub(super) fn end_update(&mut self, on_host: Option<HostUpdate>) -> Result<(), CollectiveError> {
        if let Some(on_host) = on_host {
            self.finish_on_host(on_host)?;
        }
        Ok(self.states.finish()?)
    }
}
