//! Formatters for counts, bytes, durations, numbers and percentages, for terminals and pages alike.
//!
//! Crates for sizes or durations (humansize, indicatif's `HumanBytes`) are not used: each formats one kind, with
//! different digits, and would be the only dependency of this crate.

#![forbid(unsafe_code)]

/// Formats a whole number with thousands separators: `1,234,567`. A value beyond `u64` is shown as
/// `u64::MAX`.
pub fn count(value: impl TryInto<u64>) -> String {
    let digits = value.try_into().unwrap_or(u64::MAX).to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a count with its noun: `1 step`, `2,000 steps`.
pub fn plural(value: impl TryInto<u64>, noun: &str) -> String {
    let value = value.try_into().unwrap_or(u64::MAX);
    format!("{} {noun}{}", count(value), if value == 1 { "" } else { "s" })
}

/// Formats a number of bytes in binary units: `17 B`, `353.1 KiB`, `1.5 GiB`.
pub fn bytes(value: u64) -> String {
    let (unit, name) = byte_unit(value);
    if unit == 1.0 { format!("{value} B") } else { format!("{:.1} {name}", value as f64 / unit) }
}

/// Formats a shortage of memory or disk space: `12.3 GiB needed, 2.9 GiB available`. If both figures would look the
/// same, their exact bytes follow.
pub fn shortage(needed: u64, available: u64) -> String {
    let (need, have) = (bytes(needed), bytes(available));
    if need == have {
        return format!(
            "{need} ({} bytes) needed, {have} ({} bytes) available",
            count(needed),
            count(available)
        );
    }
    format!("{need} needed, {have} available")
}

/// Returns the largest binary unit in which a number of bytes, rounded to one decimal, is at least 1.
pub fn byte_unit(value: u64) -> (f64, &'static str) {
    let mut unit = 1.0;
    for name in ["B", "KiB", "MiB", "GiB"] {
        // 1023.95 and more is written as 1024.0.
        if (value as f64) < if unit == 1.0 { 1024.0 } else { 1023.95 * unit } {
            return (unit, name);
        }
        unit *= 1024.0;
    }
    (unit, "TiB")
}

/// Formats a measured duration: `0.52 s`, `31.5 s`, `2 min 5 s`, `3 h 12 min`.
pub fn duration(seconds: f64) -> String {
    match seconds {
        _ if seconds >= 59.95 => minutes(seconds),
        _ if seconds >= 9.995 => format!("{seconds:.1} s"),
        _ => format!("{seconds:.2} s"),
    }
}

/// Formats an estimated duration in whole seconds or more: `5 s`, `2 min 5 s`, `3 h 12 min`.
pub fn estimate(seconds: f64) -> String {
    if seconds >= 59.5 { minutes(seconds) } else { format!("{seconds:.0} s") }
}

fn minutes(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match (whole / 3600, whole / 60 % 60, whole % 60) {
        (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (hours, minutes, _) => format!("{} h {minutes} min", count(hours)),
    }
}

/// Formats a number with three significant digits: `5.55`, `0.123`, `1,234`, `1.2e-5`.
pub fn number(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if !value.is_finite() => NON_FINITE.into(),
        0.0 => "0".into(),
        _ if size <= 1e-3 || size >= 1e7 => exponent(value),
        _ if size >= 1000.0 => {
            format!("{}{}", if value < 0.0 { "-" } else { "" }, count(size.round() as u64))
        }
        _ => format!("{value:.*}", (2 - size.log10().floor() as i32).max(0) as usize),
    }
}

/// NaN and infinities in words.
const NON_FINITE: &str = "non-finite";

/// Formats a difference with its sign: `+0.500`, `-0.500`.
pub fn signed(value: f64) -> String {
    let sign = if value > 0.0 && value.is_finite() { "+" } else { "" };
    format!("{sign}{}", number(value))
}

/// Formats the label of an axis tick at a multiple of `step`, with enough decimals to differ from its
/// neighbors.
pub fn tick(value: f64, step: f64) -> String {
    let size = value.abs();
    let decimals = |step: f64| (-(step * 1.0001).log10().floor()).clamp(0.0, 9.0) as usize;
    match size {
        _ if size < step * 1e-6 && !(1e-3..1.0).contains(&step) => "0".into(),
        _ if size < step * 1e-6 => format!("{:.*}", decimals(step), 0.0),
        _ if size >= 1e15 || (step < 1e-3 && (size < 10.0 * step || size < 1e-3)) => exponent(value),
        _ => {
            let (unit, name) = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]
                .into_iter()
                .find(|(unit, _)| size >= *unit && size >= 1e4)
                .unwrap_or((1.0, ""));
            let text = format!("{:.*}", decimals(step / unit), value / unit);
            text + name
        }
    }
}

fn exponent(value: f64) -> String {
    let text = format!("{value:.2e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let digits =
        if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { digits };
    format!("{digits}e{exponent}")
}

/// Formats a fraction as a percentage with one decimal: `12.3 %`.
pub fn percent(fraction: f64) -> String {
    format!("{:.1} %", 100.0 * fraction)
}

/// Formats a fraction as a percentage with enough decimals to differ from 0 and from 100 %: `12.3 %`, `99.97
/// %`, `0.004 %`, `100 %`.
pub fn exact_percent(fraction: f64) -> String {
    let from_end = 100.0 * fraction.min(1.0 - fraction);
    match from_end {
        _ if !fraction.is_finite() => NON_FINITE.into(),
        0.0 => format!("{:.0} %", 100.0 * fraction),
        _ if from_end < 0.0 => percent(fraction),
        _ => format!("{:.*} %", (-from_end.log10().floor()).clamp(1.0, 9.0) as usize, 100.0 * fraction),
    }
}

/// Replaces every part of a dotted name that is a number by a star: `layers.*.mlp.router`.
pub fn name_pattern(name: &str) -> String {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let star = |part| if is_number(part) { "*" } else { part };
    name.split('.').map(star).collect::<Vec<_>>().join(".")
}

/// Joins clauses with semicolons into a sentence with a capital letter and a full stop; empty without
/// clauses.
pub fn sentence(clauses: &[Option<String>]) -> String {
    let clauses: Vec<&str> = clauses.iter().flatten().map(|clause| &clause[..]).collect();
    if clauses.is_empty() {
        return String::new();
    }
    capitalized(&clauses.join("; ")) + "."
}

/// Returns the text with its first letter in upper case.
pub fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// The examples of README.md, run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_digits_a_person_needs() {
        let cases = [
            (5.5512, "5.55"),
            (0.12345, "0.123"),
            (123.4, "123"),
            (12345.6, "12,346"),
            (0.0, "0"),
            (-1234.0, "-1,234"),
            (1e-5, "1e-5"),
            (1.234e20, "1.23e20"),
            (0.00951, "0.00951"),
        ];
        for (value, text) in cases {
            assert_eq!(number(value), text);
        }
        assert_eq!(number(f64::NAN), "non-finite");
        assert_eq!(
            (bytes(0), bytes(1023), bytes(3 << 29)),
            ("0 B".into(), "1023 B".into(), "1.5 GiB".into())
        );
        assert_eq!(
            (count(999), count(1000), count(1234567)),
            ("999".into(), "1,000".into(), "1,234,567".into())
        );
        assert_eq!(
            (duration(0.5), duration(125.0), duration(11520.0)),
            ("0.50 s".into(), "2 min 5 s".into(), "3 h 12 min".into())
        );
        assert_eq!((plural(1, "step"), plural(2000, "step")), ("1 step".into(), "2,000 steps".into()));
    }

    #[test]
    fn bytes_never_read_1024_of_a_unit_and_estimates_have_no_fractions() {
        assert_eq!([361_574, (1 << 20) - 1, u64::MAX].map(bytes), ["353.1 KiB", "1.0 MiB", "16777216.0 TiB"]);
        assert_eq!(
            [0.4, 59.6, 125.4, 11_520.0].map(estimate),
            ["0 s", "1 min 0 s", "2 min 5 s", "3 h 12 min"]
        );
        assert_eq!(sentence(&[Some("a is b".into()), None, Some("c".into())]), "A is b; c.");
        assert_eq!(sentence(&[None]), "");
    }

    #[test]
    fn a_shortage_shows_exact_bytes_only_where_the_units_hide_it() {
        assert_eq!(shortage(3 << 30, 1 << 29), "3.0 GiB needed, 512.0 MiB available");
        assert_eq!(
            shortage((1 << 30) + 1, 1 << 30),
            "1.0 GiB (1,073,741,825 bytes) needed, 1.0 GiB (1,073,741,824 bytes) available"
        );
    }

    #[test]
    fn a_share_is_told_from_nothing_and_from_everything() {
        let cases = [
            (0.0, "0 %"),
            (1.0, "100 %"),
            (0.1234, "12.3 %"),
            (0.9997, "99.97 %"),
            (0.999_997, "99.9997 %"),
            (4e-5, "0.004 %"),
            (1.5, "150.0 %"),
            (f64::NAN, "non-finite"),
        ];
        for (value, text) in cases {
            assert_eq!(exact_percent(value), text);
        }
    }

    #[test]
    fn numbers_in_names_fold_into_stars() {
        assert_eq!(name_pattern("layers.12.mlp.experts.3.up"), "layers.*.mlp.experts.*.up");
        assert_eq!(name_pattern("conv1d.a2"), "conv1d.a2");
        assert_eq!(name_pattern(".."), "..");
    }
}
