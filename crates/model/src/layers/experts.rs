//! Mixture of experts, with the shared expert.
//!
//! ```text
//! logits = W_r x                       in f32; Gemma 4: W_r (s x / rms(x)) H^-1/2, x the residual
//! y = sum over the selected of weight * expert(x)  +  sigmoid(w_g x) shared(x), or shared(x)
//! ```

use ballast_kernels::Element;
use ballast_kernels::elementwise::{accumulate, add_assign, row_products, scale_rows};
use ballast_kernels::glu::Activation;
use ballast_kernels::moe::{
    self, Dims, Dispatch, Experts as Weights, ExpertsGrads, Router as KernelRouter, Routing,
    experts_backward, experts_backward_workspace, experts_forward, experts_forward_workspace,
    experts_scratch, route_backward, route_forward,
};
use ballast_kernels::norm::{
    Gamma, Saved as NormSaved, rms_norm_backward, rms_norm_backward_scratch, rms_norm_forward,
};

use super::mlp::{self, Mlp};
use super::residual::Stream;
use super::{Keep, Linear, bytes_of};
use crate::config::{Config, Experts as Shape, Router as RouterShape};
use crate::error::Result;
use crate::params::{Grads, Id, Init, Protected, Specs, Weight};
use crate::precision::with_storage;
use crate::run::{Run, lower, zeros};
use crate::site::Site;

#[derive(Clone, Debug)]
pub(crate) struct Experts {
    layer: usize,
    shape: Shape,
    hidden: usize,
    eps: f32,
    activation: Activation,
    router: Router,
    gate_up: Id<Weight>,
    down: Id<Weight>,
    shared: Option<Shared>,
}

/// Parameters of the router.
#[derive(Clone, Debug)]
enum Router {
    Plain { linear: Linear },
    Biased { linear: Linear, bias: Id<Protected> },
    Normed { linear: Linear<Protected>, scale: Id<Protected>, per_expert_scale: Id<Weight> },
}

#[derive(Clone, Debug)]
struct Shared {
    mlp: Mlp,
    gate: Option<Linear>,
}

/// Activations that forward keeps for backward, beside x.
#[derive(Clone, Debug, Default)]
pub(crate) struct Saved<A> {
    /// [tokens, E]
    logits: Vec<f32>,
    routing: Routing,
    /// Gate and up of the experts' tokens
    experts: moe::Saved<A>,
    /// rstd of the router's norm
    router_norm: NormSaved,
    shared: mlp::Saved<A>,
    /// [tokens, H]; empty without a gate
    shared_out: Vec<A>,
    /// sigmoid of the shared expert's gate: \[tokens\]
    shared_factor: Vec<f32>,
}

impl<A> Saved<A> {
    pub(crate) fn bytes(&self) -> usize {
        bytes_of(&[&self.logits, &self.shared_factor])
            + bytes_of(&[&self.shared_out])
            + self.routing.bytes()
            + self.experts.bytes()
            + self.router_norm.bytes()
            + self.shared.bytes()
    }
}

impl Experts {
    /// Qwen and DeepSeek: everything is in `{name}.mlp`; Gemma 4: in `{name}.router` and `{name}.experts`.
    pub(crate) fn new(specs: &mut Specs, name: &str, layer: usize, config: &Config, shape: Shape) -> Experts {
        let (h, e, im) = (config.hidden, shape.count, shape.intermediate);
        let normed = shape.router == RouterShape::Normed;
        let mlp = if normed { name.to_string() } else { format!("{name}.mlp") };
        let router = match shape.router {
            RouterShape::Softmax { .. } => {
                Router::Plain { linear: Linear::new(specs, &format!("{mlp}.gate"), h, e, false) }
            }
            RouterShape::SigmoidGroups { .. } => Router::Biased {
                linear: Linear::new(specs, &format!("{mlp}.gate"), h, e, false),
                bias: specs.protected_constant(
                    format!("{mlp}.gate.e_score_correction_bias"),
                    &[e],
                    Init::Zeros,
                ),
            },
            RouterShape::Normed => Router::Normed {
                linear: Linear::protected(specs, &format!("{name}.router.proj"), h, e),
                scale: specs.protected(format!("{name}.router.scale"), &[h], Init::Ones),
                per_expert_scale: specs.weight(format!("{name}.router.per_expert_scale"), &[e], Init::Ones),
            },
        };
        let shared = shape.shared.map(|shared| {
            let part = if shared.gated { "shared_expert" } else { "shared_experts" };
            let gate = format!("{mlp}.shared_expert_gate");
            Shared {
                mlp: Mlp::new(specs, &format!("{mlp}.{part}"), h, shared.intermediate, config.activation),
                gate: shared.gated.then(|| Linear::new(specs, &gate, h, 1, false)),
            }
        });
        Experts {
            layer,
            shape,
            hidden: h,
            eps: config.eps,
            activation: config.activation,
            router,
            gate_up: specs.weight(format!("{mlp}.experts.gate_up_proj"), &[e, 2 * im, h], Init::Normal),
            down: specs.weight(format!("{mlp}.experts.down_proj"), &[e, h, im], Init::Normal),
            shared,
        }
    }

    /// Output for x [tokens, H]; Gemma 4's router reads the residual stream instead of x.
    pub(crate) fn forward<A: Element>(
        &self,
        run: &Run<'_>,
        x: &[A],
        residual: &[f32],
        keep: Keep,
    ) -> Result<(Vec<A>, Saved<A>)> {
        let (dims, layer) = (self.dims(), Some(self.layer));
        let mut saved = Saved::default();
        let (logits, router_norm) = self.logits(run, x, residual)?;
        run.see(layer, "mlp.router", &logits);
        let scale = self.per_expert_scale(run);
        let routing = route_forward(&logits, scale.as_deref(), &self.kernel_router(run), dims)?;
        run.see(layer, "mlp.router_weights", &routing.weights);
        if let Some(balance) = &run.tally.balance {
            balance.add(&logits, &routing, dims)?;
        }
        let dispatch = Dispatch::new(&routing, dims)?;
        let mut y = zeros(x.len());
        let mut work = vec![0.0; experts_forward_workspace::<A>(&dispatch, dims, keep.any())];
        match (run.weight(self.gate_up), run.weight(self.down)) {
            (Weight::F32(gate_up), Weight::F32(down)) => {
                let weights = Weights { gate_up, down, activation: self.activation };
                let to = keep.any().then_some(&mut saved.experts);
                experts_forward(&mut y, to, x, &routing, &dispatch, &weights, dims, &mut work, run.scratch)?;
            }
            (Weight::Bf16(gate_up), Weight::Bf16(down)) => {
                let weights = Weights { gate_up, down, activation: self.activation };
                let to = keep.any().then_some(&mut saved.experts);
                experts_forward(&mut y, to, x, &routing, &dispatch, &weights, dims, &mut work, run.scratch)?;
            }
            _ => unreachable!("weights are cast all at once"),
        }
        if let Some(shared) = &self.shared {
            let (mut out, shared_saved) = shared.mlp.forward(run, x, keep)?;
            saved.shared = shared_saved;
            if let Some(gate) = &shared.gate {
                let factor = sigmoid(gate.forward(run, x)?);
                let plain = out.clone();
                scale_rows(&mut out, &plain, &factor, self.hidden)?;
                (saved.shared_out, saved.shared_factor) = (keep.always(plain), keep.always(factor));
            }
            add_assign(&mut y, &out)?;
        }
        if keep.any() {
            (saved.logits, saved.routing, saved.router_norm) = (logits, routing, router_norm);
        }
        Ok((y, saved))
    }

    /// Adds the gradient of x to dx and that of the residual stream to d_residual, or to dx if `None`.
    #[allow(clippy::too_many_arguments)] // run, then outputs, then inputs
    pub(crate) fn backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        d_residual: Option<&mut [f32]>,
        dy: &[A],
        x: &[A],
        residual: &Stream,
        saved: Saved<A>,
    ) -> Result {
        let dims = self.dims();
        let (routing, logits) = (&saved.routing, &saved.logits);
        let dispatch = Dispatch::new(routing, dims)?;
        let mut d_experts: Vec<A> = zeros(x.len());
        let mut dweights = vec![0.0; routing.weights.len()];
        let mut work = vec![0.0; experts_backward_workspace(&dispatch, dims)];
        let [dgate_up, ddown] = grads.of_two(self.gate_up, self.down);
        let to = ExpertsGrads { dx: &mut d_experts, dweights: &mut dweights, dgate_up, ddown };
        match (run.weight(self.gate_up), run.weight(self.down)) {
            (Weight::F32(gate_up), Weight::F32(down)) => {
                let w = Weights { gate_up, down, activation: self.activation };
                let s = &saved.experts;
                experts_backward(to, dy, x, s, routing, &dispatch, &w, dims, &mut work, run.scratch)?;
            }
            (Weight::Bf16(gate_up), Weight::Bf16(down)) => {
                let w = Weights { gate_up, down, activation: self.activation };
                let s = &saved.experts;
                experts_backward(to, dy, x, s, routing, &dispatch, &w, dims, &mut work, run.scratch)?;
            }
            _ => unreachable!("weights are cast all at once"),
        }
        accumulate(dx, &d_experts)?;
        drop(d_experts);
        let mut dlogits = vec![0.0; logits.len()];
        let scale = self.per_expert_scale(run);
        let mut dscale = scale.as_ref().map(|scale| vec![0.0; scale.len()]);
        let router = self.kernel_router(run);
        route_backward(
            &mut dlogits,
            dscale.as_deref_mut(),
            &dweights,
            logits,
            routing,
            scale.as_deref(),
            &router,
            dims,
        )?;
        if let Some(balance) = &run.tally.balance {
            balance.backward(&mut dlogits, logits)?;
        }
        run.see_gradient(Some(self.layer), "mlp.router", &dlogits);
        self.logits_backward(
            run,
            grads,
            dx,
            d_residual,
            &mut dlogits,
            dscale,
            x,
            residual,
            &saved.router_norm,
        )?;
        self.shared_backward(run, grads, dx, dy, x, saved)
    }

    fn shared_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        dy: &[A],
        x: &[A],
        saved: Saved<A>,
    ) -> Result {
        let Some(shared) = &self.shared else { return Ok(()) };
        let Some(gate) = &shared.gate else {
            return shared.mlp.backward(run, grads, dx, dy, x, saved.shared);
        };
        let mut d_gate = vec![0.0; saved.shared_factor.len()];
        row_products(&mut d_gate, dy, &saved.shared_out, self.hidden)?;
        for (d, s) in d_gate.iter_mut().zip(&saved.shared_factor) {
            *d *= s * (1.0 - s);
        }
        let mut d_out = saved.shared_out;
        scale_rows(&mut d_out, dy, &saved.shared_factor, self.hidden)?;
        shared.mlp.backward(run, grads, dx, &d_out, x, saved.shared)?;
        gate.backward(run, grads, dx, &d_gate, x)
    }

    fn dims(&self) -> Dims {
        Dims {
            experts: self.shape.count,
            top_k: self.shape.top_k,
            hidden: self.hidden,
            intermediate: self.shape.intermediate,
        }
    }

    fn kernel_router<'a>(&self, run: &'a Run<'_>) -> KernelRouter<'a> {
        match (self.shape.router, &self.router) {
            (
                RouterShape::SigmoidGroups { groups, kept_groups, normalize, scaling },
                Router::Biased { bias, .. },
            ) => {
                let bias = Some(run.protected(*bias));
                KernelRouter::SigmoidGroups { bias, groups, kept_groups, normalize, scaling }
            }
            (RouterShape::Softmax { normalize }, _) => KernelRouter::Softmax { normalize },
            _ => KernelRouter::Softmax { normalize: true },
        }
    }

    fn per_expert_scale(&self, run: &Run<'_>) -> Option<Vec<f32>> {
        match &self.router {
            Router::Normed { per_expert_scale, .. } => Some(run.weight(*per_expert_scale).to_f32()),
            _ => None,
        }
    }

    /// Logits, and what the router's norm keeps.
    fn logits<A: Element>(&self, run: &Run<'_>, x: &[A], residual: &[f32]) -> Result<(Vec<f32>, NormSaved)> {
        let mut saved = NormSaved::default();
        let mut logits: Vec<f32> = match &self.router {
            Router::Plain { linear } | Router::Biased { linear, .. } => linear.forward(run, x)?,
            Router::Normed { linear, scale, .. } => {
                let normed: Vec<A> = self.router_norm(run, *scale, residual, Some(&mut saved))?;
                let mut logits = linear.forward(run, &normed)?;
                ballast_kernels::elementwise::scale(&mut logits, self.root());
                logits
            }
        };
        lower(&mut logits, run.precision.site(Site::Router));
        Ok((logits, saved))
    }

    /// H^-1/2
    fn root(&self) -> f32 {
        (self.hidden as f32).powf(-0.5)
    }

    /// Norm of the router's input; its rounding is not a site.
    fn router_norm<A: Element, X: Element>(
        &self,
        run: &Run<'_>,
        scale: Id<Protected>,
        residual: &[X],
        saved: Option<&mut NormSaved>,
    ) -> Result<Vec<A>> {
        let mut normed = zeros(residual.len());
        let gamma = Gamma::Plain(run.protected(scale));
        rms_norm_forward(&mut normed, saved, residual, gamma, self.eps, self.hidden)?;
        Ok(normed)
    }

    #[allow(clippy::too_many_arguments)] // run, then outputs, then inputs
    fn logits_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dx: &mut [f32],
        d_residual: Option<&mut [f32]>,
        dlogits: &mut [f32],
        dscale: Option<Vec<f32>>,
        x: &[A],
        residual: &Stream,
        saved: &NormSaved,
    ) -> Result {
        match &self.router {
            Router::Plain { linear } | Router::Biased { linear, .. } => {
                linear.backward(run, grads, dx, dlogits, x)
            }
            Router::Normed { linear, scale, per_expert_scale } => {
                if let (Some(sum), Some(dscale)) = (grads.of(*per_expert_scale), dscale) {
                    accumulate(sum, &dscale)?;
                }
                ballast_kernels::elementwise::scale(dlogits, self.root());
                let normed: Vec<A> = with_storage!(Stream, residual, |residual| self
                    .router_norm(run, *scale, residual, None)?);
                let mut d_normed = vec![0.0; normed.len()];
                linear.backward(run, grads, &mut d_normed, dlogits, &normed)?;
                let mut dy = normed;
                ballast_kernels::elementwise::convert(&mut dy, &d_normed)?;
                let gamma = Gamma::Plain(run.protected(*scale));
                with_storage!(Stream, residual, |residual| {
                    let mut d = zeros(residual.len());
                    rms_norm_backward(
                        &mut d,
                        grads.of(*scale),
                        &dy,
                        residual,
                        gamma,
                        saved,
                        self.hidden,
                        run.scratch,
                    )?;
                    accumulate(d_residual.unwrap_or(dx), &d)?;
                });
                Ok(())
            }
        }
    }

    /// Bytes that forward keeps for backward.
    pub(crate) fn saved_bytes<A>(&self, tokens: usize, keep: Keep) -> usize {
        if !keep.any() {
            return 0;
        }
        let slots = tokens * self.shape.top_k;
        let normed = matches!(self.router, Router::Normed { .. });
        let own = 4 * (tokens * self.shape.count + 2 * slots + if normed { tokens } else { 0 })
            + 2 * slots * self.shape.intermediate * size_of::<A>();
        let shared = self.shared.as_ref().map_or(0, |shared| {
            let gated = if shared.gate.is_some() { tokens * (self.hidden * size_of::<A>() + 4) } else { 0 };
            shared.mlp.saved_bytes::<A>(tokens, keep) + gated
        });
        own + shared
    }

    /// Peak bytes of backward's temporary tensorsfor evenly loaded experts: the kernel's f32 sums
    /// and the rows of one expert, or the shared expert's gradients.
    pub(crate) fn transient<A>(&self, tokens: usize, keep: Keep) -> usize {
        let Dims { experts, top_k, hidden, intermediate } = self.dims();
        let load = (tokens * top_k).div_ceil(experts);
        let rows = 4 * (tokens * hidden + load * (3 * hidden + 6 * intermediate));
        let own = tokens * hidden * size_of::<A>() + rows;
        let shared = self.shared.as_ref().map_or(0, |shared| shared.mlp.transient::<A>(tokens, keep));
        own.max(4 * tokens * experts + shared)
    }

    pub(crate) fn scratch(&self, tokens: usize) -> usize {
        let shared = self.shared.as_ref().map_or(0, |shared| shared.mlp.scratch(tokens));
        let router = match &self.router {
            Router::Plain { linear } | Router::Biased { linear, .. } => linear.scratch(tokens),
            Router::Normed { linear, .. } => {
                linear.scratch(tokens).max(rms_norm_backward_scratch(tokens, self.hidden))
            }
        };
        experts_scratch(self.dims(), tokens).max(shared).max(router)
    }
}

fn sigmoid(mut x: Vec<f32>) -> Vec<f32> {
    ballast_kernels::simd::sigmoid(&mut x);
    x
}
