//! Sizes as people write them.

/// Parses `64`, `4K`, `4KiB`, `1M`, `2G`: binary multiples of a byte count.
///
/// # Errors
/// A sentence naming what is wrong.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().map_err(|_| format!("'{text}' is not a size; write 64, 4K, 1M or 2G"))?;
    let shift = match text[digits..].to_ascii_lowercase().trim_end_matches("ib").trim_end_matches('b') {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        other => return Err(format!("'{other}' in '{text}' is not a unit; use K, M, G or T")),
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("'{text}' is too large a size"))
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
