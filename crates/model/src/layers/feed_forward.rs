//! Feed-forward part of a layer: MLP, experts or both, with their norms.
//!
//! ```text
//! Qwen, DeepSeek   f(norm(x))                                              f is the MLP or the experts
//! Gemma            after(f(norm(x)))
//! Gemma 4 MoE      after(after_1(mlp(norm(x))) + after_2(experts(norm_2(x))))         router reads x
//! ```

use ballast_kernels::elementwise::{accumulate_rounded, add_assign, convert, round};
use ballast_kernels::norm::Saved as NormSaved;
use ballast_kernels::{Element, Rounding};

use super::experts::{self, Experts};
use super::mlp::{self, Mlp};
use super::residual::{Stream, narrowed};
use super::{Keep, Norm, bytes_of};
use crate::config::{Config, Layer as Shape};
use crate::error::Result;
use crate::params::{Grads, Specs};
use crate::run::{Run, zeros};
use crate::site::Site;

#[derive(Clone, Debug)]
pub(crate) struct FeedForward {
    layer: usize,
    norm: Norm,
    dense: Option<Mlp>,
    experts: Option<Experts>,
    /// Norms after the MLP, before the experts and after the experts; `None` unless the layer has both.
    between: Option<[Norm; 3]>,
    after: Option<Norm>,
}

/// Output of a norm and the statistics for its backward.
#[derive(Clone, Debug, Default)]
struct Normed<A> {
    /// Recomputed
    y: Vec<A>,
    saved: NormSaved,
}

/// Activations that forward saves, in addition to x.
#[derive(Clone, Debug, Default)]
pub(crate) struct Saved<A> {
    norm: Normed<A>,
    dense: mlp::Saved<A>,
    experts: experts::Saved<A>,
    /// Outputs of MLP and experts before their norms, if the layer has both: [tokens, H]
    dense_out: Vec<A>,
    experts_out: Vec<A>,
    before_experts: Normed<A>,
    after_dense: NormSaved,
    after_experts: NormSaved,
    /// Input of the norm `after`: [tokens, H]; empty without one
    out: Vec<A>,
    after: NormSaved,
}

impl<A> Saved<A> {
    pub(crate) fn bytes(&self) -> usize {
        let norms = [
            &self.norm.saved,
            &self.before_experts.saved,
            &self.after_dense,
            &self.after_experts,
            &self.after,
        ];
        let tensors = [&self.norm.y, &self.dense_out, &self.experts_out, &self.before_experts.y, &self.out];
        bytes_of(&tensors)
            + norms.map(NormSaved::bytes).iter().sum::<usize>()
            + self.dense.bytes()
            + self.experts.bytes()
    }
}

impl FeedForward {
    pub(crate) fn new(
        specs: &mut Specs,
        name: &str,
        layer: usize,
        config: &Config,
        shape: &Shape,
    ) -> FeedForward {
        let h = config.hidden;
        let norm = |specs: &mut Specs, part: &str| Norm::new(specs, &format!("{name}.{part}"), h, config);
        let before =
            if config.norms_after { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
        let both = shape.dense.is_some() && shape.experts.is_some();
        FeedForward {
            layer,
            norm: norm(specs, before),
            dense: shape.dense.map(|i| Mlp::new(specs, &format!("{name}.mlp"), h, i, config.activation)),
            experts: shape.experts.map(|experts| Experts::new(specs, name, layer, config, experts)),
            between: both.then(|| {
                [
                    "post_feedforward_layernorm_1",
                    "pre_feedforward_layernorm_2",
                    "post_feedforward_layernorm_2",
                ]
                .map(|part| norm(specs, part))
            }),
            after: config.norms_after.then(|| norm(specs, "post_feedforward_layernorm")),
        }
    }

    /// Returns the output, which the caller adds to the stream x.
    pub(crate) fn forward<A: Element>(
        &self,
        run: &Run<'_>,
        x: &[f32],
        keep: Keep,
    ) -> Result<(Vec<A>, Saved<A>)> {
        let mut saved = Saved::default();
        let (normed, rstd): (Vec<A>, _) = self.norm.forward(run, x)?;
        saved.norm.saved = rstd;
        let mut y = match (&self.dense, &self.experts) {
            (Some(dense), None) => {
                let (y, kept) = dense.forward(run, &normed, keep)?;
                saved.dense = kept;
                y
            }
            (None, Some(experts)) => {
                let (y, kept) = experts.forward(run, &normed, x, keep)?;
                saved.experts = kept;
                y
            }
            (Some(dense), Some(experts)) => self.both(run, dense, experts, &normed, x, keep, &mut saved)?,
            (None, None) => zeros(x.len()),
        };
        run.see(Some(self.layer), "mlp.out", &y);
        if let Some(after) = &self.after {
            let (out, rstd) = after.forward(run, &y)?;
            saved.after = rstd;
            saved.out = keep.always(std::mem::replace(&mut y, out));
        }
        saved.norm.y = keep.unless_recomputed(normed);
        Ok((y, saved))
    }

    #[allow(clippy::too_many_arguments)] // run, then outputs, then inputs
    fn both<A: Element>(
        &self,
        run: &Run<'_>,
        dense: &Mlp,
        experts: &Experts,
        normed: &[A],
        x: &[f32],
        keep: Keep,
        saved: &mut Saved<A>,
    ) -> Result<Vec<A>> {
        let [after_dense, before_experts, after_experts] =
            self.between.as_ref().expect("a layer with MLP and experts has the norms between them");
        let (dense_out, kept) = dense.forward(run, normed, keep)?;
        saved.dense = kept;
        let (mut y, rstd) = after_dense.forward(run, &dense_out)?;
        saved.after_dense = rstd;
        let (input, rstd): (Vec<A>, _) = before_experts.forward(run, x)?;
        saved.before_experts.saved = rstd;
        let (experts_out, kept) = experts.forward(run, &input, x, keep)?;
        saved.experts = kept;
        let (out, rstd) = after_experts.forward(run, &experts_out)?;
        saved.after_experts = rstd;
        add_assign(&mut y, &out)?;
        saved.before_experts.y = keep.unless_recomputed(input);
        (saved.dense_out, saved.experts_out) = (keep.always(dense_out), keep.always(experts_out));
        Ok(y)
    }

    /// Returns true if backward can recompute all that it needs from x, slice by slice of an MLP.
    pub(crate) fn is_recomputed_from_stream(&self) -> bool {
        self.experts.is_none() && self.after.is_none()
    }

    /// Replaces the gradient of the stream after this part by the gradient of x, the stream before it; `saved`
    /// may be empty if [`FeedForward::is_recomputed_from_stream`].
    pub(crate) fn backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        d_stream: &mut [f32],
        x: &Stream,
        mut saved: Saved<A>,
    ) -> Result {
        let rounding = run.precision.site(Site::Residual);
        let dy: Vec<A> = match &self.after {
            Some(norm) => norm.backward(run, grads, d_stream, &saved.out, &saved.after)?,
            None => narrowed(d_stream)?,
        };
        if saved.norm.y.is_empty() {
            (saved.norm.y, saved.norm.saved) = self.norm.forward_again(run, x)?;
        }
        let normed = std::mem::take(&mut saved.norm.y);
        let mut d_normed = vec![0.0; normed.len()];
        // Gradient of x through the experts' norm and router, not through the first norm.
        let mut d_x: Option<Vec<f32>> = None;
        match (&self.dense, &self.experts) {
            (Some(dense), None) => dense.backward(run, grads, &mut d_normed, &dy, &normed, saved.dense)?,
            (None, Some(experts)) => {
                experts.backward(run, grads, &mut d_normed, None, &dy, &normed, x, saved.experts)?;
            }
            (Some(dense), Some(experts)) => {
                d_x = Some(self.both_backward(
                    run,
                    grads,
                    dense,
                    experts,
                    &mut d_normed,
                    &dy,
                    &normed,
                    x,
                    &mut saved,
                )?);
            }
            (None, None) => {}
        }
        drop(dy);
        let mut dn = normed;
        convert(&mut dn, &d_normed)?;
        drop(d_normed);
        let dx = self.norm.backward_stream(run, grads, &dn, x, &saved.norm.saved)?;
        match d_x {
            None => dx.add_to(d_stream, rounding),
            Some(mut d_x) => {
                dx.add_to(&mut d_x, Rounding::F32)?;
                round(&mut d_x, rounding);
                Ok(accumulate_rounded(d_stream, &d_x, rounding)?)
            }
        }
    }

    /// Runs the backward of MLP and experts: adds to the gradient of `normed` and returns the gradient of x
    /// through the experts.
    #[allow(clippy::too_many_arguments)] // run, then outputs, then inputs
    fn both_backward<A: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dense: &Mlp,
        experts: &Experts,
        d_normed: &mut [f32],
        dy: &[A],
        normed: &[A],
        x: &Stream,
        saved: &mut Saved<A>,
    ) -> Result<Vec<f32>> {
        let [after_dense, before_experts, after_experts] =
            self.between.as_ref().expect("a layer with MLP and experts has the norms between them");
        let (dense_saved, experts_saved) =
            (std::mem::take(&mut saved.dense), std::mem::take(&mut saved.experts));
        let d = after_dense.backward(run, grads, dy, &saved.dense_out, &saved.after_dense)?;
        dense.backward(run, grads, d_normed, &d, normed, dense_saved)?;
        let d = after_experts.backward(run, grads, dy, &saved.experts_out, &saved.after_experts)?;
        if saved.before_experts.y.is_empty() {
            (saved.before_experts.y, _) = before_experts.forward_again(run, x)?;
        }
        let (mut d_input, mut d_x) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        let input = &saved.before_experts.y;
        experts.backward(run, grads, &mut d_input, Some(&mut d_x), &d, input, x, experts_saved)?;
        let d_input: Vec<A> = narrowed(&d_input)?;
        let d = before_experts.backward_stream(run, grads, &d_input, x, &saved.before_experts.saved)?;
        d.add_to(&mut d_x, Rounding::F32)?;
        Ok(d_x)
    }

    /// Returns the bytes that forward saves.
    pub(crate) fn saved_bytes<A>(&self, tokens: usize, hidden: usize, keep: Keep) -> usize {
        if !keep.any() {
            return 0;
        }
        let everything = keep == Keep::Everything;
        let (tensor, rstd) = (tokens * hidden * size_of::<A>(), 4 * tokens);
        let mut bytes = rstd + if everything { tensor } else { 0 };
        bytes += self.dense.as_ref().map_or(0, |dense| dense.saved_bytes::<A>(tokens, keep));
        bytes += self.experts.as_ref().map_or(0, |experts| experts.saved_bytes::<A>(tokens, keep));
        if self.between.is_some() {
            bytes += 3 * rstd + 2 * tensor + if everything { tensor } else { 0 };
        }
        bytes + if self.after.is_some() { tensor + rstd } else { 0 }
    }

    /// Returns the temporary bytes of backward, without the stream's gradient: the gradient of the output,
    /// the gradient of the normed input in f32, the normed input if it is recomputed, and the temporary bytes
    /// of MLP and experts.
    pub(crate) fn transient<A>(&self, tokens: usize, hidden: usize, keep: Keep) -> usize {
        let (tensor, wide) = (tokens * hidden * size_of::<A>(), 4 * tokens * hidden);
        let normed = if keep == Keep::Everything { 0 } else { tensor };
        let dense = self.dense.as_ref().map_or(0, |dense| dense.transient::<A>(tokens, keep));
        let experts = self.experts.as_ref().map_or(0, |experts| experts.transient::<A>(tokens, keep));
        let between = if self.between.is_some() { 2 * wide + tensor + normed } else { 0 };
        tensor + wide + normed + dense.max(between + experts)
    }

    pub(crate) fn scratch(&self, tokens: usize) -> usize {
        let dense = self.dense.as_ref().map_or(0, |dense| dense.scratch(tokens));
        let experts = self.experts.as_ref().map_or(0, |experts| experts.scratch(tokens));
        self.norm.scratch(tokens).max(dense).max(experts)
    }
}
