//! `Content-Range`: which part of a file an answer has.

/// The value of a `Content-Range` header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContentRange {
    /// First byte and number of bytes; `None` in an answer 416.
    pub part: Option<(u64, u64)>,
    /// Size of the whole file; `None` if the server does not say.
    pub total: Option<u64>,
}

impl ContentRange {
    /// Returns the `Range` header that asks for `length` bytes from byte `at`.
    pub fn request(at: u64, length: u64) -> String {
        format!("bytes={at}-{}", at.saturating_add(length.saturating_sub(1)))
    }

    /// Parses `bytes 0-99/1000`, `bytes 0-99/*` or `bytes */1000`.
    pub fn parse(text: &str) -> Result<ContentRange, String> {
        let fail = || format!("Content-Range {text:?} is not valid");
        // `parse` alone would also take a sign.
        let number = |text: &str| -> Option<u64> {
            text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
        };
        let rest = text.trim().strip_prefix("bytes ").ok_or_else(fail)?;
        let (part, total) = rest.split_once('/').ok_or_else(fail)?;
        let total = match total {
            "*" => None,
            total => Some(number(total).ok_or_else(fail)?),
        };
        let part = match part.split_once('-') {
            None if part == "*" => None,
            None => return Err(fail()),
            Some((first, last)) => {
                let (first, last) = (number(first).ok_or_else(fail)?, number(last).ok_or_else(fail)?);
                let length = last.checked_sub(first).and_then(|n| n.checked_add(1)).ok_or_else(fail)?;
                if total.is_some_and(|total| last >= total) {
                    return Err(fail());
                }
                Some((first, length))
            }
        };
        Ok(ContentRange { part, total })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_range_has_a_first_byte_a_length_and_a_total() {
        let parse = |text| ContentRange::parse(text).ok().map(|r| (r.part, r.total));
        assert_eq!(parse("bytes 0-99/1000"), Some((Some((0, 100)), Some(1000))));
        assert_eq!(parse("bytes 5-5/*"), Some((Some((5, 1)), None)));
        assert_eq!(parse("bytes */0"), Some((None, Some(0))));
        for bad in [
            "",
            "bytes",
            "bytes 0-99",
            "bytes 9-8/10",
            "bytes 0-10/10",
            "items 0-1/2",
            "bytes +0-1/2",
            "bytes 0--1/2",
            "bytes 0-18446744073709551615/*",
            "bytes 0-99999999999999999999/*",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        assert_eq!(ContentRange::request(10, 5), "bytes=10-14");
    }

    proptest! {
        #[test]
        fn any_text_is_a_range_or_an_error(text in "(bytes )?[0-9*/ -]{0,30}") {
            if let Ok(ContentRange { part: Some((first, length)), total: Some(total) }) = ContentRange::parse(&text) {
                prop_assert!(length > 0 && first + length <= total);
            }
        }
    }
}
