//! Text keys (RFC 7143 section 6): `key=value`, each ended by a zero byte.

use data_encoding::{BASE64_NOPAD, HEXLOWER, HEXLOWER_PERMISSIVE};

/// Keys and values in their order.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Keys(pub Vec<(String, String)>);

/// Keys in one negotiation.
const KEYS_MAX: usize = 128;

impl Keys {
    /// Reads keys; `None` if they are not as they should be.
    pub fn decode(data: &[u8]) -> Option<Keys> {
        let mut keys = Vec::new();
        for part in data.split(|byte| *byte == 0).filter(|part| !part.is_empty()) {
            let text = std::str::from_utf8(part).ok()?;
            let (key, value) = text.split_once('=')?;
            if key.is_empty() || key.len() > 63 || keys.len() == KEYS_MAX {
                return None;
            }
            keys.push((key.to_owned(), value.to_owned()));
        }
        Some(Keys(keys))
    }

    /// The bytes.
    pub fn encode(&self) -> Vec<u8> {
        self.0.iter().flat_map(|(key, value)| format!("{key}={value}\0").into_bytes()).collect()
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }

    /// Adds a key.
    pub fn push(&mut self, key: &str, value: impl ToString) {
        self.0.push((key.to_owned(), value.to_string()));
    }
}

/// A number, decimal or hexadecimal (RFC 7143 6.1).
pub fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Bytes in hexadecimal or base 64 (RFC 7143 6.1).
pub fn binary(text: &str) -> Option<Vec<u8>> {
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        let padded = if hex.len() % 2 == 1 { format!("0{hex}") } else { hex.to_owned() };
        return HEXLOWER_PERMISSIVE.decode(padded.as_bytes()).ok();
    }
    let text = text.strip_prefix("0b").or_else(|| text.strip_prefix("0B"))?;
    BASE64_NOPAD.decode(text.trim_end_matches('=').as_bytes()).ok()
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    format!("0x{}", HEXLOWER.encode(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_and_written() {
        let bytes = b"A=1\0B=two,three\0\0C=\0";
        let keys = Keys::decode(bytes).unwrap();
        assert_eq!((keys.get("B"), keys.get("C"), keys.get("D")), (Some("two,three"), Some(""), None));
        assert_eq!(keys.encode(), b"A=1\0B=two,three\0C=\0");
        assert!(Keys::decode(b"novalue\0").is_none() && Keys::decode(b"=x\0").is_none());
    }

    proptest::proptest! {
        #[test]
        fn keys_that_were_written_are_read(pairs in proptest::collection::vec(("[A-Z][A-Za-z]{0,20}", "[ -<>-~]{0,40}"), 0..10)) {
            let mut keys = Keys::default();
            pairs.iter().for_each(|(key, value)| keys.push(key, value));
            let again = Keys::decode(&keys.encode());
            proptest::prop_assert_eq!(again.map(|keys| keys.0), Some(keys.0));
        }

        #[test]
        fn bytes_survive_hexadecimal(bytes: Vec<u8>) {
            proptest::prop_assert_eq!(binary(&hex(&bytes)), Some(bytes));
        }
    }

    #[test]
    fn bytes_are_read_in_both_forms() {
        assert_eq!(binary("0x0aff"), Some(vec![0x0a, 0xff]));
        assert_eq!(binary("0xaff"), Some(vec![0x0a, 0xff]));
        assert_eq!(binary("0bCv8="), Some(vec![0x0a, 0xff]));
        assert_eq!(binary("0b*"), None);
        assert_eq!(binary("0xé"), None);
        assert_eq!(hex(&[0x0a, 0xff]), "0x0aff");
    }
}
