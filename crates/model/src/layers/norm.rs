//! RMSNorm in the forms that models have.

use ballast_kernels::Element;
use ballast_kernels::norm::{Gamma, Saved, rms_norm_backward, rms_norm_backward_scratch, rms_norm_forward};

use crate::config::Config;
use crate::error::Result;
use crate::params::{Grads, Id, Init, Specs, Weight};
use crate::run::{Run, lower, zeros};
use crate::site::Site;
use crate::with_weight;

/// x / rms(x), times 1 + w, w or nothing, over rows of `width`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    weight: Option<Id<Weight>>,
    one_plus: bool,
    width: usize,
    eps: f32,
}

impl Norm {
    /// The norm called `name` (`.weight` is added), in the form that the model's norms have.
    pub(crate) fn new(specs: &mut Specs, name: &str, width: usize, config: &Config) -> Norm {
        Norm::with_eps(specs, name, width, config, config.eps)
    }

    pub(crate) fn with_eps(specs: &mut Specs, name: &str, width: usize, config: &Config, eps: f32) -> Norm {
        let init = if config.one_plus_norms { Init::Zeros } else { Init::Ones };
        let weight = specs.weight(format!("{name}.weight"), &[width], init);
        Norm { weight: Some(weight), one_plus: config.one_plus_norms, width, eps }
    }

    pub(crate) fn weightless(width: usize, config: &Config) -> Norm {
        Norm { weight: None, one_plus: false, width, eps: config.eps }
    }

    /// y, in any type, and what backward needs beside x.
    pub(crate) fn forward<Y: Element, X: Element>(&self, run: &Run<'_>, x: &[X]) -> Result<(Vec<Y>, Saved)> {
        let (mut y, mut saved) = (zeros(x.len()), Saved::default());
        let keep = Some(&mut saved);
        match self.weight {
            None => rms_norm_forward(&mut y, keep, x, Gamma::<f32>::Weightless, self.eps, self.width)?,
            Some(weight) => with_weight!(run.weight(weight), |w| {
                let gamma = if self.one_plus { Gamma::OnePlus(w) } else { Gamma::Plain(w) };
                rms_norm_forward(&mut y, keep, x, gamma, self.eps, self.width)?;
            }),
        }
        lower(&mut y, run.precision.site(Site::Norms));
        Ok((y, saved))
    }

    /// dx in the type of x, and the weight's gradient.
    pub(crate) fn backward<X: Element, D: Element>(
        &self,
        run: &Run<'_>,
        grads: &mut Grads,
        dy: &[D],
        x: &[X],
        saved: &Saved,
    ) -> Result<Vec<X>> {
        let mut dx = zeros(x.len());
        match self.weight {
            None => {
                let gamma = Gamma::<f32>::Weightless;
                rms_norm_backward(&mut dx, None, dy, x, gamma, saved, self.width, run.scratch)?;
            }
            Some(weight) => with_weight!(run.weight(weight), |w| {
                let gamma = if self.one_plus { Gamma::OnePlus(w) } else { Gamma::Plain(w) };
                rms_norm_backward(&mut dx, grads.of(weight), dy, x, gamma, saved, self.width, run.scratch)?;
            }),
        }
        Ok(dx)
    }

    /// f32 of scratch, for `rows` rows.
    pub(crate) fn scratch(&self, rows: usize) -> usize {
        rms_norm_backward_scratch(rows, self.width)
    }
}
