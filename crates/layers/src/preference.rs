//! A head whose loss is that of preferences: of pairs of answers, one chosen and one rejected.
//!
//! It is around a head with a cross entropy. The factor of each token's derivative depends on all tokens of a pair, so the logits of a
//! micro-batch are computed twice, in slices both times: first for the log-probabilities of the answers, then with these factors for the
//! derivatives. Cost: the logits once more (a third of the head's products), and 8 bytes a token.

use std::sync::Arc;

use phalanx_tensor::preference::PREFERENCE_SUMS;
use phalanx_tensor::{Category, CrossEntropy, DType, Preference, PreferenceLoss, Tensor, View};

use crate::activation::Activation;
use crate::call::{Call, Parameter, Parameters};
use crate::failure::Result;
use crate::head::{Head, RowTerms};
use crate::inputs::{REFERENCES, TARGETS};
use crate::layer::Context;
use crate::parameter::ParameterSpec;

/// The head of a model that learns preferences. Two neighbouring sequences of a micro-batch are a pair.
pub struct PreferenceHead {
    /// Head that computes logits and derivatives.
    pub head: Box<dyn Head>,
    /// The loss.
    pub preference: Preference,
}

impl Head for PreferenceHead {
    fn parameters(&self) -> Vec<ParameterSpec> {
        self.head.parameters()
    }

    /// x: `[sequences, seq, hidden]`, inputs `targets` `[sequences, seq]` u32 and `references` `[sequences, 2]` f32 ->
    /// `[PREFERENCE_SUMS + sequences]` f32 ([`PreferenceLoss`]), and dx.
    fn loss(&self, cx: &Context, call: Call, numbers: CrossEntropy) -> Result<(Tensor, Option<Activation>)> {
        let (targets, references) = (cx.input(TARGETS), cx.input(REFERENCES));
        let [sequences, _] = targets.dims();
        let of_rows =
            |name| cx.device.alloc(DType::F32, [targets.shape().elements()], Category::Workspace, name);
        let mut losses = of_rows("preference.losses");
        let values: Vec<Parameter> =
            call.parameters.values().map(|value| Parameter::read(value, false)).collect();
        let parameters = Parameters::new(&values);
        let forward = Call { input_wanted: false, ..Call::new(parameters, Arc::clone(&call.x)) };
        let terms = RowTerms { losses: Some(&mut losses), weights: None };
        // The logits are those of the second pass, which counts.
        drop(cx.device.again(|| self.head.loss_of_rows(cx, forward, numbers, terms))?);
        let mut sums = cx.statistics([PREFERENCE_SUMS + sequences], "preference.sums");
        let mut weights = of_rows("preference.weights");
        cx.device.run(PreferenceLoss {
            losses: losses.view(),
            targets: targets.view(),
            references: references.view(),
            preference: self.preference,
            scale: numbers.scale,
            weights: weights.view_mut(),
            sums: sums.view_mut(),
        });
        drop(losses);
        if !call.input_wanted && !call.parameters.want_gradients() {
            return Ok((sums, None));
        }
        let terms = RowTerms { weights: Some(&weights), losses: None };
        let (_, dx) = self.head.loss_of_rows(cx, call, numbers, terms)?;
        Ok((sums, dx))
    }

    fn logits(&self, cx: &Context, parameters: Parameters, x: View) -> Tensor {
        self.head.logits(cx, parameters, x)
    }
}
