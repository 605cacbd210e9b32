//! Probes: observe named tensors while a model runs.
//!
//! Probe sites are named after the module that computes them: `embed`, `layers.3.linear_attn.g`,
//! `layers.7.self_attn.logits`, `layers.7.out`, `logits`; the gradient of a site has the prefix `d.`. A
//! parameter is the site `param.<name>`, such as `param.layers.3.linear_attn.A_log`; the probe sees it at its
//! first use in the run, with the type and values that are used. A probe sees tensors in the order of their
//! computation. Without a probe, no name is formatted and no tensor is copied.

use ballast_contract::pattern::wildcard_matches;

/// Observes tensors of a run.
pub trait Probe: Send {
    /// Returns true if the probe wants a copy of the site. Attention logits are computed only for a probe
    /// that wants them.
    fn wants(&self, site: &str) -> bool;

    /// Receives a tensor converted to f32; `dtype` is its storage type.
    fn see(&mut self, site: &str, dtype: &'static str, shape: &[usize], values: &[f32]);
}

/// A recorded tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Name of the probe site.
    pub site: String,
    /// Storage type.
    pub dtype: &'static str,
    /// Shape.
    pub shape: Vec<usize>,
    /// Values, converted to f32.
    pub values: Vec<f32>,
}

/// Records every site whose name matches, in order.
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    /// Patterns separated by commas, with `*` for any characters; `None` matches every site.
    pub pattern: Option<String>,
    /// Recorded tensors.
    pub seen: Vec<Seen>,
}

impl Probe for Recorder {
    fn wants(&self, site: &str) -> bool {
        self.pattern.as_ref().is_none_or(|pattern| matches(pattern, site))
    }

    fn see(&mut self, site: &str, dtype: &'static str, shape: &[usize], values: &[f32]) {
        self.seen.push(Seen { site: site.into(), dtype, shape: shape.to_vec(), values: values.to_vec() });
    }
}

/// Returns true if one of the patterns, separated by commas, matches; `*` stands for any characters.
fn matches(patterns: &str, name: &str) -> bool {
    patterns.split(',').any(|pattern| wildcard_matches(pattern, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_have_stars_and_commas() {
        let wants = |pattern: &str, site: &str| matches(pattern, site);
        assert!(wants("layers.*.linear_attn.g", "layers.12.linear_attn.g"));
        assert!(wants("*", "embed") && wants("logits,embed", "embed"));
        assert!(!wants("layers.1.*", "layers.12.out") && !wants("embed", "d.embed"));
    }
}
