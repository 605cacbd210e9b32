//! RMSNorm in its three forms: weight 1 + w, weight w, no weight.

use ballast_kernels::Element;
use ballast_kernels::norm::{Gamma, Saved, rms_norm_backward, rms_norm_backward_scratch, rms_norm_forward};

use crate::config::Config;
use crate::error::Result;
use crate::params::{Grads, Id, Init, Specs, Weight};
use crate::precision::with_storage;
use crate::run::{Run, lower, zeros};
use crate::site::Site;

/// RMSNorm over rows of `width`: x / rms(x), multiplied by 1 + w, w or nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    weight: Option<Id<Weight>>,
    one_plus: bool,
    width: usize,
    eps: f32,
}

impl Norm {
    /// Makes a norm with the weight `<name>.weight`, in the form of the model's norms.
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

    /// Returns y and the statistics that backward needs in addition to x.
    pub(crate) fn forward<Y: Element, X: Element>(&self, run: &Run<'_>, x: &[X]) -> Result<(Vec<Y>, Saved)> {
        let (mut y, mut saved) = (zeros(x.len()), Saved::default());
        let keep = Some(&mut saved);
        match self.weight {
            None => rms_norm_forward(&mut y, keep, x, Gamma::<f32>::Weightless, self.eps, self.width)?,
            Some(weight) => with_storage!(Weight, run.weight(weight), |w| {
                let gamma = if self.one_plus { Gamma::OnePlus(w) } else { Gamma::Plain(w) };
                rms_norm_forward(&mut y, keep, x, gamma, self.eps, self.width)?;
            }),
        }
        lower(&mut y, run.precision.site(Site::Norms));
        Ok((y, saved))
    }

    /// Returns dx in the type of x; adds the gradient of the weight.
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
            Some(weight) => with_storage!(Weight, run.weight(weight), |w| {
                let gamma = if self.one_plus { Gamma::OnePlus(w) } else { Gamma::Plain(w) };
                rms_norm_backward(&mut dx, grads.of(weight), dy, x, gamma, saved, self.width, run.scratch)?;
            }),
        }
        Ok(dx)
    }

    /// Returns the f32 elements of scratch that `rows` rows need.
    pub(crate) fn scratch(&self, rows: usize) -> usize {
        rms_norm_backward_scratch(rows, self.width)
    }
}
