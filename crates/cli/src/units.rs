//! Sizes and rates as people write and read them.

pub use thruway_engine::units::parse_size;

/// `1.5 MiB`, `3 B`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit < UNITS.len() - 1 {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() == 0.0 || unit == 0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// `1.25 GB/s`: decimal, as networks are rated.
pub fn rate(bytes_per_second: f64) -> String {
    const UNITS: [&str; 4] = ["B/s", "kB/s", "MB/s", "GB/s"];
    let mut value = bytes_per_second;
    let mut unit = 0;
    while value >= 1000.0 && unit < UNITS.len() - 1 {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0} {}", UNITS[unit]) } else { format!("{value:.2} {}", UNITS[unit]) }
}

/// A rate with a binary unit, such as `10 MiB/s`, for display next to sizes.
pub fn binary_rate(bytes_per_second: f64) -> String {
    format!("{}/s", size(bytes_per_second as u64))
}

/// A number with a noun, such as `1 file` or `2 files`.
pub fn count(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_written_shortly() {
        assert_eq!(
            (binary_rate(2e6), count(1, "file"), count(0, "file")),
            ("1.9 MiB/s".into(), "1 file".into(), "0 files".into())
        );
        assert_eq!((size(64).as_str(), size(65536).as_str(), size(1_600_000).as_str()), ("64 B", "64 KiB", "1.5 MiB"));
    }
}
