//! Parses arbitrary text as a policy file, and its lines as tensor names and patterns. An accepted policy
//! protects bare and routed names alike; routing a name into the holder and stripping it again gives the
//! name.

#![no_main]

use ballast_contract::holder::{
    is_gated_delta_net_fp32_param_key, route_fp32_holder_key, strip_fp32_holder_key,
};
use ballast_contract::{Architecture, Registry, Role, pattern};
use libfuzzer_sys::fuzz_target;

/// Number of lines used as names; all pairs are tried.
const NAMES: usize = 16;

fn check_holder(key: &str) {
    let bare = strip_fp32_holder_key(key);
    assert_eq!(strip_fp32_holder_key(&bare), bare, "stripping twice strips more");
    let routed = route_fp32_holder_key(&bare);
    assert_eq!(strip_fp32_holder_key(&routed), bare, "the way back from {routed:?}");
    assert_eq!(route_fp32_holder_key(&routed), routed, "routing twice routes more");
    assert_eq!(is_gated_delta_net_fp32_param_key(&routed), is_gated_delta_net_fp32_param_key(&bare));
    assert_eq!(routed != bare, is_gated_delta_net_fp32_param_key(&bare));
}

fuzz_target!(|text: &str| {
    let names: Vec<&str> = text.lines().take(NAMES).collect();
    for name in &names {
        check_holder(name);
        Role::of(name);
        assert!(pattern::matches("**", name));
        for pattern in &names {
            pattern::matches(pattern, name);
        }
        // A name without stars matches only itself.
        if !name.split('.').any(|segment| segment.contains('*')) {
            assert!(pattern::matches(name, name));
        }
    }
    let Ok((registry, policy)) = Registry::builtin().with_policy_file(text) else { return };
    let architecture = Architecture::from_names(names.iter().copied(), &registry.families);
    let reduced = policy.for_model(&architecture, names.iter().copied());
    for name in &names {
        let bare = strip_fp32_holder_key(name);
        let id = |name: &str| reduced.rule_for(name).map(|rule| rule.id.clone());
        assert_eq!(id(name), id(&bare));
        assert_eq!(id(&route_fp32_holder_key(&bare)), id(&bare));
        for rule in &reduced.rules {
            rule.expected_beside(name);
        }
    }
});
