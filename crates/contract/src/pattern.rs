//! Patterns over tensor names.
//!
//! [`matches()`] matches dotted paths, for policies: `*` stands for exactly one segment, `**` for any number of
//! segments (including zero), anything else for itself. A pattern covers the whole name, so `**.linear_attn.A_log`
//! never matches `my_A_log`. In [`wildcard_matches`], `*` stands for any characters, including dots.
//!
//! The crate `globset` does not fit: its separator is `/`, its `a/**` does not match `a`, and `?`, `[` and `{` are
//! special.

/// Returns true if the dotted `pattern` matches all of `name`.
pub fn matches(pattern: &str, name: &str) -> bool {
    let pattern: Vec<&str> = pattern.split('.').collect();
    let name: Vec<&str> = name.split('.').collect();
    sequence_matches(
        &pattern,
        &name,
        |segment| *segment == "**",
        |segment, found| *segment == "*" || segment == found,
    )
}

/// Returns true if `pattern`, with `*` for any characters or none, matches all of `name`.
pub fn wildcard_matches(pattern: &str, name: &str) -> bool {
    sequence_matches(pattern.as_bytes(), name.as_bytes(), |byte| *byte == b'*', |byte, found| byte == found)
}

/// Matches `name` against `pattern`, whose items stand for any number of items if `is_star`, else for one
/// that `is_same`.
///
/// Backtracks to the last star only: at most `pattern.len() * name.len()` comparisons.
fn sequence_matches<T>(
    pattern: &[T],
    name: &[T],
    is_star: impl Fn(&T) -> bool,
    is_same: impl Fn(&T, &T) -> bool,
) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(item) if is_star(item) => {
                retry = Some((p, n));
                p += 1;
            }
            Some(item) if is_same(item, &name[n]) => {
                p += 1;
                n += 1;
            }
            _ => match retry {
                Some((star, taken)) => {
                    retry = Some((star, taken + 1));
                    p = star + 1;
                    n = taken + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(is_star)
}

#[cfg(test)]
mod tests {
    use super::{matches, wildcard_matches};

    #[test]
    fn patterns_cover_whole_segments() {
        for (pattern, name, expected) in [
            ("**.linear_attn.A_log", "model.layers.0.linear_attn.A_log", true),
            ("**.linear_attn.A_log", "linear_attn.A_log", true),
            ("**.linear_attn.A_log", "model.layers.0.linear_attn.my_A_log", false),
            ("**.linear_attn.A_log", "model.linear_attn.A_log.lora_A.weight", false),
            ("**.linear_attn.A_log", "a.linear_attn.b.linear_attn.A_log", true),
            ("layers.*.x", "layers.10.x", true),
            ("layers.*.x", "layers.1.0.x", false),
            ("layers.**", "layers", true),
            ("**", "", true),
            ("a.**.b.**.c", "a.b.b.c", true),
            ("a.**.b.**.c", "a.c", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} on {name}");
        }
    }

    #[test]
    fn many_stars_do_not_explode() {
        let pattern = vec!["**.a"; 30].join(".");
        let name = vec!["a"; 29].join(".") + ".b";
        assert!(!matches(&pattern, &name));
        assert!(!wildcard_matches(&("*a".repeat(30) + "b"), &"a".repeat(10_000)));
    }

    #[test]
    fn a_wildcard_stands_for_any_characters() {
        for (pattern, name, expected) in [
            ("layers.*.g", "layers.12.linear_attn.g", true),
            ("layers.1.*", "layers.12.out", false),
            ("*", "", true),
            ("", "a", false),
            ("a*b*c", "abcbc", true),
            ("a*b*c", "abcb", false),
            ("[a]?", "[a]?", true),
            ("*\u{e9}", "\u{e8}\u{e9}", true),
        ] {
            assert_eq!(wildcard_matches(pattern, name), expected, "{pattern} on {name}");
        }
    }
}
