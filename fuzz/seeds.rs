//! What the fuzzer begins with: part of the tests of each crate that has targets.

/// Holds a seed of a target against the one in the tree. `THRUWAY_WRITE_SEEDS=1` writes it there.
pub(crate) fn check(target: &str, number: usize, seed: &[u8]) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
    let file = path.join(number.to_string());
    if std::env::var_os("THRUWAY_WRITE_SEEDS").is_some() {
        std::fs::create_dir_all(path).unwrap();
        std::fs::write(&file, seed).unwrap();
    }
    let there = std::fs::read(&file).unwrap_or_default();
    assert!(there == seed, "{}: run this with THRUWAY_WRITE_SEEDS=1", file.display());
}
