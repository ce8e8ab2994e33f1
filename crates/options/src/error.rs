//! Errors of options.

/// An option that cannot be set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionError {
    /// An invalid value.
    #[error("invalid {name} '{value}' (expected {expected})")]
    Invalid {
        /// The option.
        name: &'static str,
        /// Its value, at most 80 characters of it.
        value: String,
        /// The valid values.
        expected: String,
    },
    /// There is no such option.
    #[error("'{word}': unknown option of a {what}; {remedy}")]
    Unknown {
        /// The word.
        word: String,
        /// Name of the item.
        what: &'static str,
        /// The remedy.
        remedy: String,
    },
    /// Another error of a value.
    #[error("{0}")]
    Other(String),
}

/// Characters of a value that are repeated in a message.
const VALUE_MAX: usize = 80;

impl OptionError {
    /// A value that is not one of the expected ones.
    pub fn invalid(name: &'static str, value: impl Into<String>, expected: impl Into<String>) -> OptionError {
        let mut value = value.into();
        if let Some((end, _)) = value.char_indices().nth(VALUE_MAX) {
            value.truncate(end);
            value.push_str("...");
        }
        OptionError::Invalid { name, value, expected: expected.into() }
    }

    /// An error of the value's own parser.
    pub fn other(error: impl std::error::Error) -> OptionError {
        OptionError::Other(error.to_string())
    }
}
