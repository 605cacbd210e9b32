//! Integers that JSON text has and a parser would change.
//!
//! JSON has no limit for integers, and Python keeps all of their digits. serde_json keeps 64 bits and turns what
//! is larger into a float: the argument of a tool that is an identifier of 20 digits would be another one.

/// Returns the byte and the message of the first integer in JSON text that does not fit in 64 bits, if there is
/// one. Text that is not JSON may pass.
pub fn check_integers(json: &str) -> Result<(), (usize, String)> {
    let (bytes, mut at) = (json.as_bytes(), 0);
    while at < bytes.len() {
        match bytes[at] {
            b'"' => at = after_string(bytes, at),
            b'-' | b'0'..=b'9' => {
                let is_part = |byte: &u8| matches!(byte, b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9');
                let end = at + bytes[at..].iter().position(|byte| !is_part(byte)).unwrap_or(bytes.len() - at);
                let number = &json[at..end];
                let digits = number.strip_prefix('-').unwrap_or(number);
                let is_integer = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
                if is_integer && number.parse::<i64>().is_err() && number.parse::<u64>().is_err() {
                    let number = shortened(number);
                    let problem =
                        format!("the integer {number} does not fit in 64 bits; write it as a string");
                    return Err((at, problem));
                }
                at = end;
            }
            _ => at += 1,
        }
    }
    Ok(())
}

/// Position after the string that begins at `at`.
fn after_string(bytes: &[u8], at: usize) -> usize {
    let mut next = at + 1;
    while next < bytes.len() && bytes[next] != b'"' {
        next += if bytes[next] == b'\\' { 2 } else { 1 };
    }
    next + 1
}

fn shortened(number: &str) -> String {
    if number.len() <= 40 { number.into() } else { format!("{}... ({} digits)", &number[..20], number.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_64_bits_and_floats_pass_and_larger_integers_do_not() {
        let fits =
            r#"{"a": [18446744073709551615, -9223372036854775808, 1e30, 123456789012345678901.5, -0]}"#;
        check_integers(fits).unwrap();
        check_integers("{\"id\": \"99999999999999999999\", \"\\\"9\": \"\\\\\"}").unwrap();
        for number in ["18446744073709551616", "-9223372036854775809", "99999999999999999999"] {
            let (at, error) = check_integers(&format!("{{\n\"a\": {number}}}")).unwrap_err();
            assert_eq!(at, 7, "{number}");
            assert_eq!(error, format!("the integer {number} does not fit in 64 bits; write it as a string"));
        }
        let long = "1".repeat(10_000);
        assert!(check_integers(&long).unwrap_err().1.contains("1... (10000 digits)"));
    }

    #[test]
    fn text_that_is_cut_anywhere_is_harmless() {
        let text = r#"{"a\\\"é": -12.5e+3, "b": "\u00e9\\"}"#;
        for end in (0..text.len()).filter(|end| text.is_char_boundary(*end)) {
            check_integers(&text[..end]).unwrap();
        }
    }
}
