//! Sizes as people write them.

use std::time::Duration;

/// Reads a time as people write it: a whole number with `us`, `ms` or `s`.
///
/// # Errors
/// [`Invalid`].
pub fn parse_duration(text: &str) -> Result<Duration, Invalid> {
    let wrong = || Invalid::new("time", text, "a number with us, ms or s");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    match &text[digits.len()..] {
        "us" => Ok(Duration::from_micros(number)),
        "ms" => Ok(Duration::from_millis(number)),
        "s" => Ok(Duration::from_secs(number)),
        _ => Err(wrong()),
    }
}

/// A value that cannot be used, and what was expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid {what} '{value}' (expected {expected})")]
#[non_exhaustive]
pub struct Invalid {
    /// What the value stands for.
    pub what: &'static str,
    /// The value.
    pub value: String,
    /// What would be right.
    pub expected: &'static str,
}

/// Characters of a value that are repeated in a message.
const VALUE_MAX: usize = 80;

impl Invalid {
    /// A value of something, of which something else was expected.
    pub fn new(what: &'static str, value: impl Into<String>, expected: &'static str) -> Invalid {
        let mut value = value.into();
        // A message is a line, whatever it is about.
        if let Some((end, _)) = value.char_indices().nth(VALUE_MAX) {
            value.truncate(end);
            value.push_str("...");
        }
        Invalid { what, value, expected }
    }
}

/// Parses `64`, `4K`, `4KiB`, `1M`, `2G`, `1T`: binary multiples of a byte count.
///
/// # Errors
/// [`Invalid`], also if the size has more than 64 bits.
pub fn parse_size(text: &str) -> Result<u64, Invalid> {
    let text = text.trim();
    let invalid = || Invalid::new("size", text, "bytes, as in 64, 4K, 1M, 2G or 1T");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().map_err(|_| invalid())?;
    let shift = match text[digits..].to_ascii_lowercase().trim_end_matches("ib").trim_end_matches('b') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(invalid()),
    };
    number.checked_mul(1 << shift).ok_or_else(|| Invalid::new("size", text, "less than 16 EiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        for (text, value) in [("0", 0), ("64", 64), ("4K", 4096), ("4kib", 4096), ("1MB", 1 << 20), ("2G", 2 << 30)] {
            assert_eq!(parse_size(text), Ok(value));
        }
        for text in ["", "K", "4X", "-1", "99999999999T"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
