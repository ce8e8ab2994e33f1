//! `--include` and `--exclude`.

use crate::wire::TreeOptions;
use globset::{Glob, GlobSet, GlobSetBuilder};

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
    /// Too many patterns, or too complicated ones.
    #[error("patterns: {0}")]
    Set(globset::Error),
}

/// Decides which entries of a tree take part.
pub struct Filter {
    include: GlobSet,
    exclude: GlobSet,
}

impl Filter {
    /// Builds the filter. A pattern with a slash matches the path below the source, one without
    /// matches names anywhere.
    ///
    /// # Errors
    /// [`FilterError`].
    pub fn new(options: &TreeOptions) -> Result<Filter, FilterError> {
        let set = |patterns: &[String]| {
            let mut builder = GlobSetBuilder::new();
            for pattern in patterns {
                let anywhere = if pattern.contains('/') {
                    pattern.trim_start_matches('/').to_string()
                } else {
                    format!("**/{pattern}")
                };
                let glob = Glob::new(anywhere.trim_end_matches('/'));
                builder.add(glob.map_err(|source| FilterError::Pattern { pattern: pattern.clone(), source })?);
            }
            builder.build().map_err(FilterError::Set)
        };
        Ok(Filter { include: set(&options.include)?, exclude: set(&options.exclude)? })
    }

    /// Whether the entry at `path`, relative to the source, takes part.
    pub fn takes(&self, path: &[u8]) -> bool {
        use std::os::unix::ffi::OsStrExt;
        let path = std::path::Path::new(std::ffi::OsStr::from_bytes(path));
        !self.exclude.is_match(path) || self.include.is_match(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_anywhere_and_paths_from_the_source() {
        let options = TreeOptions {
            exclude: vec!["*.o".into(), "/target".into(), "doc/*.tmp".into()],
            include: vec!["keep.o".into()],
            ..TreeOptions::default()
        };
        let filter = Filter::new(&options).unwrap();
        for taken in [&b"a.c"[..], b"src/keep.o", b"src/target", b"a/doc/x.tmp"] {
            assert!(filter.takes(taken), "{taken:?}");
        }
        for left in [&b"a.o"[..], b"x/y/a.o", b"target", b"doc/x.tmp"] {
            assert!(!filter.takes(left), "{left:?}");
        }
    }

    #[test]
    fn a_wrong_pattern_is_named() {
        let options = TreeOptions { exclude: vec!["a[".into()], ..TreeOptions::default() };
        assert!(matches!(Filter::new(&options), Err(FilterError::Pattern { pattern, .. }) if pattern.contains("a[")));
    }
}
