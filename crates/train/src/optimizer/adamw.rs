//! AdamW: two moments of every element. The kernel is [`ballast_kernels::adamw`].

use ballast_kernels::Rounding;
use ballast_kernels::adamw::{Options, adamw_fault, adamw_step, adamw_step_with_copy};
use ballast_model::precision::Storage;
use half::bf16;

use super::rule::{BadElement, StateKind, Step, UpdateRule};
use crate::config::OptimizerConfig;
use crate::error::Result;

/// The first and the second moment.
static STATE: [StateKind; 2] = [
    StateKind {
        prefix: "m",
        label: "first moment",
        shape: <[usize]>::to_vec,
        signed: true,
        is_valid: f32::is_finite,
    },
    StateKind {
        prefix: "v",
        label: "second moment",
        shape: <[usize]>::to_vec,
        signed: false,
        is_valid: |x| x.is_finite() && x >= 0.0,
    },
];

/// AdamW with the settings of one parameter.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdamW {
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
}

impl AdamW {
    /// The configured AdamW; weight decay only where the parameter decays.
    pub(super) fn new(config: &OptimizerConfig, decays: bool) -> AdamW {
        let OptimizerConfig { beta1, beta2, eps, weight_decay, .. } = *config;
        AdamW { beta1, beta2, eps, weight_decay: if decays { weight_decay } else { 0.0 } }
    }

    fn options(&self, lr: f64) -> Options {
        let AdamW { beta1, beta2, eps, weight_decay } = *self;
        Options { lr, beta1, beta2, eps, weight_decay }
    }
}

impl UpdateRule for AdamW {
    fn name(&self) -> &'static str {
        "AdamW"
    }

    fn state_name(&self) -> &'static str {
        "moments"
    }

    fn state(&self) -> &'static [StateKind] {
        &STATE
    }

    fn is_divisible(&self) -> bool {
        true
    }

    fn bad_element(
        &self,
        w: &[f32],
        state: &[&[f32]],
        step: &Step<'_>,
        storage: Storage,
    ) -> Result<Option<BadElement>> {
        let [m, v] = state else { unreachable!("AdamW has two state tensors") };
        let options = self.options(step.lr);
        let Step { gradient: g, scale, number, .. } = *step;
        let found = match storage {
            Storage::F32 => adamw_fault::<f32>(w, m, v, g, scale, number, &options)?,
            Storage::Bf16 => adamw_fault::<bf16>(w, m, v, g, scale, number, &options)?,
        };
        let Some(at) = found else { return Ok(None) };
        let (mut value, mut m, mut v) = ([w[at]], [m[at]], [v[at]]);
        adamw_step(&mut value, &mut m, &mut v, &[g[at]], scale, number, &options)?;
        if storage == Storage::Bf16 {
            Rounding::Bf16.round_all(&mut value);
        }
        let state = vec![(STATE[0].label, m[0]), (STATE[1].label, v[0])];
        Ok(Some(BadElement { element: at, value: value[0], state }))
    }

    fn update(
        &self,
        w: &mut [f32],
        copy: Option<&mut [bf16]>,
        state: &mut [&mut [f32]],
        step: &Step<'_>,
        _workspace: &mut [f32],
    ) -> Result {
        let [m, v] = state else { unreachable!("AdamW has two state tensors") };
        let Step { gradient, scale, lr, number } = *step;
        let options = self.options(lr);
        Ok(adamw_step_with_copy(w, copy, m, v, gradient, scale, number, &options)?)
    }
}
