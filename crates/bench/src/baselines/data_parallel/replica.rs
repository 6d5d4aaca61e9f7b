//! One device of DataParallel: a replica of the model, of which the first holds the state.

use std::sync::Arc;

use phalanx_collectives::{CollectiveError, Group};
use phalanx_optim::Verdict;
use phalanx_plan::Precision;
use phalanx_plan::trace::PhaseName;
use phalanx_tensor::{Category, Device, Tensor};
use phalanx_train::groups::{GroupSource, Groups};
use phalanx_train::rank::{Batch, Rank, Replica};
use phalanx_train::spec::Spec;
use phalanx_train::step::Outcome;

use super::ROOT;
use super::head::GatheringHead;

/// A device with its copy of the model.
pub(super) struct DeviceReplica {
    pub(super) rank: Rank,
    pub(super) group: Arc<dyn Group>,
    spec: Spec,
}

impl DeviceReplica {
    /// Allocates a copy of the model of `spec`, a data axis of the devices; the first device has optimizer states, too.
    pub(super) fn new(
        device: &Device,
        source: &GroupSource,
        group: Arc<dyn Group>,
        spec: &Spec,
        loss_in_forward: bool,
    ) -> DeviceReplica {
        let (mut network, groups) = (spec.model.whole(), Groups::new(source, spec));
        let wrap = |head| Box::new(GatheringHead { head, group: Arc::clone(&group), loss_in_forward }) as _;
        network.head = network.head.take().map(wrap);
        let replica = Some(Replica { updates: group.rank() == ROOT });
        let rank =
            device.phase(PhaseName::Init, || Rank::allocate(device.clone(), groups, spec, network, replica));
        let rank = rank.expect("there are no links to connect between processors");
        DeviceReplica { rank, group, spec: spec.clone() }
    }

    /// Runs step `number` (from 1) on this device's part of a batch with `targets` targets. The first device returns the outcome.
    pub(super) fn step(
        &mut self,
        number: u64,
        part: &Batch,
        targets: usize,
        loss_scale: f32,
    ) -> Result<Option<(Outcome, Verdict)>, CollectiveError> {
        let device = self.rank.device().clone();
        let DeviceReplica { rank, group, spec } = self;
        device.try_phase(PhaseName::Step, || {
            rank.chunks_mut().lend_parameters(|parameters| group.broadcast(parameters, ROOT).wait())?;
            let loss = rank.own_gradients(number, part, targets, loss_scale)?;
            rank.chunks_mut()
                .lend_gradients(|gradients, _| reduce(&device, &**group, spec.precision.types, gradients))?;
            if group.rank() != ROOT {
                return Ok(None);
            }
            let (lr, nobody) = (rank.lr(), rank.stop_requests(false));
            let judged = rank.judge(targets, lr, loss, nobody)?;
            rank.update(number, &judged)?;
            Ok(Some(judged))
        })
    }
}

/// Sums gradients on the first device, in the communication type.
fn reduce(
    device: &Device,
    group: &dyn Group,
    precision: Precision,
    mut gradients: Tensor,
) -> Result<Tensor, CollectiveError> {
    let communicate = precision.communicate;
    if communicate == precision.accumulate {
        return group.reduce(gradients, ROOT).wait();
    }
    let elements = gradients.shape().elements();
    let mut sent = device.alloc(communicate, [elements], Category::Communication, "gradients.sent");
    device.convert(gradients.view(), sent.view_mut());
    let sent = group.reduce(sent, ROOT).wait()?;
    if group.rank() == ROOT {
        device.convert(sent.view(), gradients.view_mut());
    }
    Ok(gradients)
}
