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

/// Digits behind the point of a size.
const PART_MAX: usize = 9;

/// Parses `64`, `4K`, `4KiB`, `1.5M`, `2G`, `1T`: binary multiples of a byte count, of which a part of a byte is left out.
///
/// # Errors
/// [`Invalid`], also if the size has more than 64 bits.
pub fn parse_size(text: &str) -> Result<u64, Invalid> {
    let text = text.trim();
    let invalid = || Invalid::new("size", text, "bytes, as in 64, 4K, 1.5M, 2G or 1T");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (whole, part) = text[..digits].split_once('.').unwrap_or((&text[..digits], ""));
    let number: u64 = whole.parse().map_err(|_| invalid())?;
    if part.len() > PART_MAX || text[..digits].ends_with('.') {
        return Err(invalid());
    }
    let scale = 10_u64.pow(part.len() as u32);
    let part: u64 = if part.is_empty() { 0 } else { part.parse().map_err(|_| invalid())? };
    let shift = match text[digits..].to_ascii_lowercase().trim_end_matches("ib").trim_end_matches('b') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(invalid()),
    };
    // A half of a byte is a mistake.
    if shift == 0 && scale > 1 {
        return Err(invalid());
    }
    let part = u128::from(part) * (1 << shift) / u128::from(scale);
    let size = u128::from(number) * (1 << shift) + part;
    size.try_into().map_err(|_| Invalid::new("size", text, "less than 16 EiB"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        for (text, value) in [("0", 0), ("64", 64), ("4K", 4096), ("4kib", 4096), ("1MB", 1 << 20), ("2G", 2 << 30)] {
            assert_eq!(parse_size(text), Ok(value));
        }
        assert_eq!((parse_size("1.5M"), parse_size("0.125k")), (Ok(3 << 19), Ok(128)));
        assert_eq!(parse_size("15.999999999T"), Ok(17_592_186_043_316));
        for text in
            ["1.5", "1.", ".5M", "1..5M", "1.5.5M", "1.0000000001T", "16777216T", "", "K", "4X", "-1", "99999999999T"]
        {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
