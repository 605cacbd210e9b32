//! Numbers as a person reads them.

/// Three digits: `5.55`, `0.123`, `1,234`, `1.2e-5`.
pub fn number(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if !value.is_finite() => "not finite".into(),
        0.0 => "0".into(),
        _ if size <= 1e-3 || size >= 1e7 => exponent(value),
        _ if size >= 1000.0 => {
            format!("{}{}", if value < 0.0 { "-" } else { "" }, count(size.round() as u64))
        }
        _ => format!("{value:.*}", (2 - size.log10().floor() as i32).max(0) as usize),
    }
}

/// A difference, with its sign.
pub fn signed(value: f64) -> String {
    let sign = if value > 0.0 && value.is_finite() { "+" } else { "" };
    format!("{sign}{}", number(value))
}

/// The label of a tick that lies on multiples of `step`.
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

/// `1,234,567`.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 step`, `2 steps`.
pub fn counted(value: u64, noun: &str) -> String {
    format!("{} {noun}{}", count(value), if value == 1 { "" } else { "s" })
}

/// `1.25 GiB`.
pub fn bytes(value: u64) -> String {
    let (unit, name) = byte_unit(value);
    if unit == 1.0 { format!("{value} B") } else { format!("{:.2} {name}", value as f64 / unit) }
}

/// The largest unit that a number of bytes has at least one of.
pub fn byte_unit(value: u64) -> (f64, &'static str) {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = (value.max(1).ilog2() / 10).min(units.len() as u32 - 1);
    ((1_u64 << (10 * power)) as f64, units[power as usize])
}

/// `12.3 %`.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// A share with as many decimals as tell it from nothing and from everything: `12.3 %`, `99.97 %`, `0.004 %`, `100 %`.
pub fn share(share: f64) -> String {
    let from_end = 100.0 * share.min(1.0 - share);
    match from_end {
        _ if !share.is_finite() => "not finite".into(),
        0.0 => format!("{:.0} %", 100.0 * share),
        _ if from_end < 0.0 => percent(share),
        _ => format!("{:.*} %", (-from_end.log10().floor()).clamp(1.0, 9.0) as usize, 100.0 * share),
    }
}

/// The name with a star for every part that is a number: `layers.*.mlp.router`.
pub fn pattern(name: &str) -> String {
    let star = |part| match part {
        "" => part,
        part if part.bytes().all(|byte| byte.is_ascii_digit()) => "*",
        part => part,
    };
    name.split('.').map(star).collect::<Vec<_>>().join(".")
}

/// What there is to say, as one sentence.
pub fn sentence(parts: &[Option<String>]) -> String {
    let parts: Vec<&str> = parts.iter().flatten().map(|part| &part[..]).collect();
    if parts.is_empty() {
        return String::new();
    }
    let text = parts.join("; ");
    let mut characters = text.chars();
    let first: String = characters.next().into_iter().flat_map(char::to_uppercase).collect();
    format!("{first}{}.", characters.as_str())
}

/// `0.52 s`, `2 min 5 s`, `3 h 12 min`.
pub fn duration(seconds: f64) -> String {
    if seconds.is_nan() || seconds < 59.95 {
        return if seconds < 9.995 { format!("{seconds:.2} s") } else { format!("{seconds:.1} s") };
    }
    let whole = seconds.round() as u64;
    match (whole / 3600, whole / 60 % 60, whole % 60) {
        (0, minutes, seconds) => format!("{minutes} min {seconds} s"),
        (hours, minutes, _) => format!("{} h {minutes} min", count(hours)),
    }
}

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
        assert_eq!(number(f64::NAN), "not finite");
        assert_eq!(
            (bytes(0), bytes(1023), bytes(3 << 29)),
            ("0 B".into(), "1023 B".into(), "1.50 GiB".into())
        );
        assert_eq!(
            (count(999), count(1000), count(1234567)),
            ("999".into(), "1,000".into(), "1,234,567".into())
        );
        assert_eq!(
            (duration(0.5), duration(125.0), duration(11520.0)),
            ("0.50 s".into(), "2 min 5 s".into(), "3 h 12 min".into())
        );
        assert_eq!((counted(1, "step"), counted(2000, "step")), ("1 step".into(), "2,000 steps".into()));
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
            (f64::NAN, "not finite"),
        ];
        for (value, text) in cases {
            assert_eq!(share(value), text);
        }
    }

    #[test]
    fn numbers_in_names_fold_into_stars() {
        assert_eq!(pattern("layers.12.mlp.experts.3.up"), "layers.*.mlp.experts.*.up");
        assert_eq!(pattern("conv1d.a2"), "conv1d.a2");
        assert_eq!(pattern(".."), "..");
    }
}
