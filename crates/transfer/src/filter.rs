//! `--include` and `--exclude`.

use crate::wire::TreeOptions;
use globset::{Glob, GlobSet, GlobSetBuilder};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Most levels of braces in a pattern.
const DEPTH_MAX: usize = 16;
/// Most bytes of a pattern.
const LEN_MAX: usize = 4096;

/// A pattern that cannot be used.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FilterError {
    /// Not a pattern.
    #[error("invalid pattern '{pattern}': {}", source.kind())]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong with it.
        source: globset::Error,
    },
    /// It has no name: an unset variable of a script.
    #[error("invalid pattern '{0}' (expected a name or a path)")]
    Empty(String),
    /// Too long, or nested too deeply: the parser calls itself for each level of braces, and could use up the stack.
    #[error("a pattern has more than {DEPTH_MAX} levels of braces, or more than {LEN_MAX} bytes")]
    Size,
    /// Too many patterns, or too complicated ones.
    #[error("patterns: {0}")]
    Set(globset::Error),
}

/// Decides which entries of a tree take part.
pub struct Filter {
    include: Patterns,
    exclude: Patterns,
}

/// The patterns of one option.
struct Patterns {
    entries: GlobSet,
    /// Those that end with a slash.
    directories: GlobSet,
}

impl Patterns {
    fn new(patterns: &[String]) -> Result<Patterns, FilterError> {
        let (mut entries, mut directories) = (GlobSetBuilder::new(), GlobSetBuilder::new());
        for pattern in patterns {
            if pattern.len() > LEN_MAX || depth(pattern) > DEPTH_MAX {
                return Err(FilterError::Size);
            }
            let name = pattern.trim_end_matches('/');
            if name.is_empty() {
                return Err(FilterError::Empty(pattern.clone()));
            }
            let glob = match name.contains('/') {
                true => Glob::new(name.trim_start_matches('/')),
                false => Glob::new(&format!("**/{name}")),
            };
            let glob = glob.map_err(|source| FilterError::Pattern { pattern: pattern.clone(), source })?;
            if name.len() < pattern.len() {
                directories.add(glob)
            } else {
                entries.add(glob)
            };
        }
        let build = |builder: GlobSetBuilder| builder.build().map_err(FilterError::Set);
        Ok(Patterns { entries: build(entries)?, directories: build(directories)? })
    }

    fn matches(&self, path: &Path, is_dir: &dyn Fn() -> bool) -> bool {
        self.entries.is_match(path) || (self.directories.is_match(path) && is_dir())
    }
}

/// Levels of braces in a pattern, or more: braces may be quoted.
fn depth(pattern: &str) -> usize {
    let (mut now, mut most) = (0usize, 0);
    for byte in pattern.bytes() {
        match byte {
            b'{' => now += 1,
            b'}' => now = now.saturating_sub(1),
            _ => {}
        }
        most = most.max(now);
    }
    most
}

impl Filter {
    /// Builds the filter. A pattern with a slash before its last character matches the path below the source, one without
    /// matches names anywhere. One that ends with a slash matches directories only.
    ///
    /// # Errors
    /// [`FilterError`].
    pub fn new(options: &TreeOptions) -> Result<Filter, FilterError> {
        Ok(Filter { include: Patterns::new(&options.include)?, exclude: Patterns::new(&options.exclude)? })
    }

    /// Whether the entry at `path`, relative to the source, takes part. `is_dir` is called if that depends on the type.
    pub fn takes(&self, path: &[u8], is_dir: &dyn Fn() -> bool) -> bool {
        let path = Path::new(OsStr::from_bytes(path));
        !self.exclude.matches(path, is_dir) || self.include.matches(path, is_dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deep_patterns_are_refused_before_they_are_parsed() {
        let nested = |depth: usize| format!("{}a{}", "{".repeat(depth), "}".repeat(depth));
        let options = |exclude: String| TreeOptions { exclude: vec![exclude], ..TreeOptions::default() };
        assert!(Filter::new(&options(nested(DEPTH_MAX))).is_ok());
        for pattern in [nested(DEPTH_MAX + 1), nested(2000), "{".repeat(4000), "x".repeat(LEN_MAX + 1)] {
            // On a stack like that of a session.
            let made = std::thread::Builder::new().stack_size(512 << 10);
            let made = made.spawn(move || Filter::new(&options(pattern)).map(drop)).unwrap().join().unwrap();
            assert!(matches!(made, Err(FilterError::Size)), "{made:?}");
        }
        assert!(Filter::new(&options("{a,b}{c,d}".repeat(100))).is_ok());
    }

    #[test]
    fn names_match_anywhere_and_paths_from_the_source() {
        let options = TreeOptions {
            exclude: vec!["*.o".into(), "/target".into(), "doc/*.tmp".into()],
            include: vec!["keep.o".into()],
            ..TreeOptions::default()
        };
        let filter = Filter::new(&options).unwrap();
        for taken in [&b"a.c"[..], b"src/keep.o", b"src/target", b"a/doc/x.tmp"] {
            assert!(filter.takes(taken, &|| false), "{taken:?}");
        }
        for left in [&b"a.o"[..], b"x/y/a.o", b"target", b"doc/x.tmp"] {
            assert!(!filter.takes(left, &|| false), "{left:?}");
        }
    }

    #[test]
    fn a_slash_at_the_end_matches_directories_only() {
        let filter = |include: &str, exclude: &str| {
            let list = |pattern: &str| pattern.split_whitespace().map(String::from).collect();
            Filter::new(&TreeOptions { include: list(include), exclude: list(exclude), ..TreeOptions::default() })
                .unwrap()
        };
        let taken = |filter: &Filter, path: &str| [true, false].map(|is_dir| filter.takes(path.as_bytes(), &|| is_dir));
        let directories = filter("*/", "*");
        assert_eq!((taken(&directories, "a"), taken(&directories, "a/b")), ([true, false], [true, false]));
        let builds = filter("", "target/ /top/x/");
        assert_eq!((taken(&builds, "a/target"), taken(&builds, "target")), ([false, true], [false, true]));
        assert_eq!((taken(&builds, "top/x"), taken(&builds, "a/top/x")), ([false, true], [true, true]));
    }

    #[test]
    fn an_empty_pattern_is_refused() {
        for pattern in ["", "/", "//"] {
            let include = TreeOptions { include: vec![pattern.into()], ..TreeOptions::default() };
            let exclude = TreeOptions { exclude: vec![pattern.into()], ..TreeOptions::default() };
            for options in [include, exclude] {
                assert!(matches!(Filter::new(&options), Err(FilterError::Empty(_))), "{pattern:?}");
            }
        }
    }

    #[test]
    fn a_wrong_pattern_is_named() {
        let options = TreeOptions { exclude: vec!["a[".into()], ..TreeOptions::default() };
        assert!(matches!(Filter::new(&options), Err(FilterError::Pattern { pattern, .. }) if pattern.contains("a[")));
    }
}
