//! Looking at named tensors while a model runs.
//!
//! Sites are named by the module that makes them: `embed`, `layers.3.linear_attn.g`, `layers.7.self_attn.logits`,
//! `layers.7.out`, `logits`; the gradient of a site has its name with a `d.` in front. A parameter is the site
//! `param.<its name>`, such as `param.layers.3.linear_attn.A_log`, and is seen when the run first uses it, in the type and
//! with the values that are used. A probe sees them in the order in which they come to be. Without one, no name is made and
//! no tensor is touched.

use ballast_contract::pattern::wildcard_matches;

/// Something that looks.
pub trait Probe: Send {
    /// Whether the site is worth making a copy of; attention logits exist only if somebody wants them.
    fn wants(&self, site: &str) -> bool;

    /// A tensor, widened to f32; `dtype` is what it is stored in.
    fn see(&mut self, site: &str, dtype: &'static str, shape: &[usize], values: &[f32]);
}

/// A tensor that was seen.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    /// Its name.
    pub site: String,
    /// What it is stored in.
    pub dtype: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its values.
    pub values: Vec<f32>,
}

/// Keeps every site whose name matches, in order.
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    /// A pattern of `*` (any characters); `None` is everything.
    pub pattern: Option<String>,
    /// What was seen.
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
