//! Patterns over dotted tensor names.
//!
//! A pattern is a dotted path. `*` stands for exactly one segment, `**` for any number of segments
//! (none included), anything else for itself. A pattern always covers the whole name, so the last
//! segment of `**.linear_attn.A_log` is `A_log` and never `my_A_log`.

/// Whether `pattern` covers the whole of `name`.
pub fn matches(pattern: &str, name: &str) -> bool {
    let pattern: Vec<&str> = pattern.split('.').collect();
    let name: Vec<&str> = name.split('.').collect();
    segments_match(&pattern, &name)
}

fn segments_match(pattern: &[&str], name: &[&str]) -> bool {
    // The usual backtracking over one remembered `**`: linear in practice, never exponential.
    let (mut p, mut n) = (0, 0);
    let mut retry: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(&"**") => {
                retry = Some((p, n));
                p += 1;
            }
            Some(&segment) if segment == "*" || segment == name[n] => {
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
    pattern[p..].iter().all(|segment| *segment == "**")
}

#[cfg(test)]
mod tests {
    use super::matches;

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
    }
}
