//! Text from elsewhere, made fit to be shown.

/// Makes bytes that somebody else chose (names of files, messages of a peer) fit for a terminal and a log:
/// control characters, characters that change the direction of text, and what is not UTF-8 are shown as
/// escapes, as `ls -b` does, and a backslash as two, so that nothing is shown twice.
pub fn escape(bytes: impl AsRef<[u8]>) -> String {
    tame(bytes.as_ref(), true)
}

/// As [`escape`], for whole sentences, in which names may have been escaped already: backslashes stay single.
pub fn escape_message(text: &str) -> String {
    tame(text.as_bytes(), false)
}

fn tame(bytes: &[u8], backslash: bool) -> String {
    use std::fmt::Write;
    let mut out = String::new();
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\\' if backslash => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\t' => out.push_str("\\t"),
                '\r' => out.push_str("\\r"),
                c if c.is_ascii_control() => drop(write!(out, "\\{:03o}", c as u32)),
                c if c.is_control() || is_direction(c) => drop(write!(out, "{}", c.escape_unicode())),
                c => out.push(c),
            }
        }
        for byte in chunk.invalid() {
            let _ = write!(out, "\\{byte:03o}");
        }
    }
    out
}

/// Marks that reorder the text around them, separate lines or join characters invisibly.
fn is_direction(c: char) -> bool {
    matches!(c, '\u{061c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::escape;

    #[test]
    fn nothing_reaches_a_terminal_that_it_would_obey() {
        assert_eq!(escape("plain ü 漢 file.txt"), "plain ü 漢 file.txt");
        assert_eq!(escape(b"\x1b[2J\x07\x7f"), "\\033[2J\\007\\177");
        assert_eq!(escape("a\nb\tc\\d"), "a\\nb\\tc\\\\d");
        assert_eq!(escape([b'a', 0xff, 0xfe]), "a\\377\\376");
        assert_eq!(escape("\u{9b}2J\u{202e}txt.exe"), "\\u{9b}2J\\u{202e}txt.exe");
        assert_eq!(super::escape_message("a\\033b\x1b[m: No such file"), "a\\033b\\033[m: No such file");
        let all: Vec<u8> = (0..=255).collect();
        assert!(!escape(all).chars().any(char::is_control));
    }
}
