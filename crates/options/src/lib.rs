//! One definition of each option of an item, such as a disk, a share or a rule.
//!
//! An item is written in two ways: as words on the command line (`data=/srv,ro,sec=krb5:krb5i`), and as a table of a TOML file
//! (`read-only = true`, `sec = ["krb5", "krb5i"]`). A [`Schema`] lists its options. From that list come the parser of the words, that of
//! the table, the messages about unknown options, the help, the reference, and the comparison of two states of an item.

#![forbid(unsafe_code)]

use std::fmt::Write;

mod error;
mod help;

pub use error::OptionError;
pub use help::{Row, describe};

/// The options of an item that `T` describes.
pub struct Schema<T: 'static> {
    /// Name of the item in messages, without an article: `share`.
    pub what: &'static str,
    /// Keys that each item has in the configuration file. The item's own parser reads their values.
    pub required: &'static [Required],
    /// The options.
    pub options: &'static [OptionKind<T>],
    /// Words of other programs, and what to write instead.
    pub hints: &'static [(&'static str, &'static str)],
}

/// A key that each item has in the configuration file.
pub struct Required {
    /// The key.
    pub key: &'static str,
    /// Its meaning: a sentence or two without the last full stop.
    pub about: &'static str,
}

/// An option.
pub struct OptionKind<T: 'static> {
    /// Its name on the command line. The word that turns on a flag.
    pub name: &'static str,
    /// Its key in the configuration file.
    pub key: &'static str,
    /// Type of its value.
    pub set: Set<T>,
    /// Its value, as on the command line: for a flag `true` or `false`; empty if it has none.
    pub get: fn(&T) -> String,
    /// The value if none is given, in the form of [`OptionKind::get`]. Empty: none, or see `about`.
    pub default: &'static str,
    /// Its meaning: a sentence or two without the last full stop.
    pub about: &'static str,
    /// A running daemon applies a change. False: a change takes effect at the next start.
    pub is_reloaded: bool,
}

/// A value and the function that sets it.
pub type Choice<T> = (&'static str, fn(&mut T));
/// Sets an option from its value.
pub type SetText<T> = fn(&mut T, &str) -> Result<(), OptionError>;
/// Sets an option from the values of its list.
pub type SetList<T> = fn(&mut T, &[&str]) -> Result<(), OptionError>;

/// The type of an option's value, and the function that sets it.
pub enum Set<T: 'static> {
    /// On or off. On the command line: the option's name, and this word for off.
    Flag {
        /// Sets it.
        set: fn(&mut T, bool),
        /// Turns it off on the command line.
        off: Option<&'static str>,
    },
    /// One of these values.
    Choice(&'static [Choice<T>]),
    /// A text or a number.
    Text {
        /// Stands for the value in help: `SIZE`.
        value: &'static str,
        /// Sets it.
        set: SetText<T>,
    },
    /// A list.
    List {
        /// Stands for one value in help.
        value: &'static str,
        /// Between values on the command line. In the configuration file, a value may contain it.
        separator: char,
        /// Sets it from all its values.
        set: SetList<T>,
    },
}

/// A value of the configuration file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// `true` or `false`.
    Flag(bool),
    /// A text or a number.
    Text(String),
    /// A list of texts.
    List(Vec<String>),
}

impl<T> OptionKind<T> {
    /// Syntax on the command line: `mode=direct|cached`.
    pub fn syntax(&self) -> String {
        let name = self.name;
        match &self.set {
            Set::Flag { off: None, .. } => name.into(),
            Set::Flag { off: Some(off), .. } => format!("{name}|{off}"),
            Set::Choice(values) => format!("{name}={}", names(values).join("|")),
            Set::Text { value, .. } => format!("{name}={value}"),
            Set::List { value, separator, .. } => format!("{name}={value}[{separator}{value}...]"),
        }
    }

    /// The word for its value in an item, if that is not the default.
    fn word(&self, item: &T) -> Option<String> {
        let value = (self.get)(item);
        match (&self.set, value.as_str()) {
            (_, value) if value.is_empty() || value == self.default => None,
            (Set::Flag { .. }, "true") => Some(self.name.into()),
            (Set::Flag { off, .. }, _) => off.map(String::from),
            _ => Some(format!("{}={value}", self.name)),
        }
    }

    fn choose(&self, item: &mut T, values: &[Choice<T>], value: &str) -> Result<(), OptionError> {
        let found = values.iter().find(|(name, _)| *name == value);
        let (_, set) = found.ok_or_else(|| OptionError::invalid(self.name, value, one_of(&names(values))))?;
        set(item);
        Ok(())
    }

    /// Sets it from the text behind `NAME=`.
    fn set_text(&self, item: &mut T, value: &str) -> Result<(), OptionError> {
        match &self.set {
            Set::Flag { .. } => Err(OptionError::invalid(self.name, value, "no value")),
            Set::Choice(values) => self.choose(item, values, value),
            Set::Text { set, .. } => set(item, value),
            Set::List { separator, set, .. } => set(item, &value.split(*separator).collect::<Vec<_>>()),
        }
    }

    /// Sets it from a value of the configuration file.
    ///
    /// # Errors
    /// [`OptionError`].
    pub fn set_value(&self, item: &mut T, value: &Value) -> Result<(), OptionError> {
        match (&self.set, value) {
            (Set::Flag { set, .. }, Value::Flag(value)) => set(item, *value),
            (Set::Choice(values), Value::Text(text)) => self.choose(item, values, text)?,
            (Set::Text { set, .. }, Value::Text(text)) => set(item, text)?,
            (Set::List { set, .. }, Value::List(values)) => {
                set(item, &values.iter().map(String::as_str).collect::<Vec<_>>())?;
            }
            _ => return Err(self.wrong_type()),
        }
        Ok(())
    }

    /// True if a value of the configuration file has the type of the option's.
    pub fn accepts(&self, value: &Value) -> bool {
        matches!(
            (&self.set, value),
            (Set::Flag { .. }, Value::Flag(_))
                | (Set::Choice(_) | Set::Text { .. }, Value::Text(_))
                | (Set::List { .. }, Value::List(_))
        )
    }

    /// The error for a value of another type.
    pub fn wrong_type(&self) -> OptionError {
        let expected = match self.set {
            Set::Flag { .. } => "true or false",
            Set::Choice(_) | Set::Text { .. } => "a text or a number",
            Set::List { .. } => "a list",
        };
        OptionError::Other(format!("{} is {expected}", self.key))
    }
}

impl<T> Schema<T> {
    /// Sets an option from a word of the command line. False if no option has this word.
    ///
    /// # Errors
    /// [`OptionError`] for its value.
    pub fn set_word(&self, item: &mut T, word: &str) -> Result<bool, OptionError> {
        let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        for option in self.options {
            match (&option.set, value) {
                (Set::Flag { set, .. }, None) if option.name == name => set(item, true),
                (Set::Flag { set, off }, None) if *off == Some(name) => set(item, false),
                _ if option.name == name => option.set_text(item, value.unwrap_or_default())?,
                _ => continue,
            }
            return Ok(true);
        }
        Ok(false)
    }

    /// As [`Schema::set_word`]. An unknown word is an error.
    ///
    /// # Errors
    /// [`OptionError`].
    pub fn set_known_word(&self, item: &mut T, word: &str) -> Result<(), OptionError> {
        match self.set_word(item, word)? {
            true => Ok(()),
            false => Err(self.unknown(word)),
        }
    }

    /// The error for an unknown word of the command line.
    pub fn unknown(&self, word: &str) -> OptionError {
        let hint = self.hints.iter().find(|(theirs, _)| *theirs == word);
        let remedy = hint.map_or_else(|| format!("expected {}", self.syntax()), |(_, ours)| format!("write {ours}"));
        OptionError::Unknown { word: word.into(), what: self.what, remedy }
    }

    /// The option with this key in the configuration file.
    pub fn with_key(&self, key: &str) -> Option<&'static OptionKind<T>> {
        self.options.iter().find(|option| option.key == key)
    }

    /// Syntax of all options on the command line, for messages.
    pub fn syntax(&self) -> String {
        self.options.iter().map(OptionKind::syntax).collect::<Vec<_>>().join(", ")
    }

    /// All keys in the configuration file.
    pub fn keys(&self) -> impl Iterator<Item = &'static str> {
        self.required.iter().map(|required| required.key).chain(self.options.iter().map(|option| option.key))
    }

    /// The words for all values that differ from the defaults.
    pub fn words(&self, item: &T) -> Vec<String> {
        self.options.iter().filter_map(|option| option.word(item)).collect()
    }

    /// The words of [`Schema::words`], each behind a separator.
    pub fn words_behind(&self, item: &T, separator: char) -> String {
        self.words(item).iter().fold(String::new(), |mut all, word| {
            let _ = write!(all, "{separator}{word}");
            all
        })
    }

    /// Keys of the options with different values in two items whose changes take effect at the next start.
    pub fn changed_for_restart(&self, one: &T, other: &T) -> impl Iterator<Item = &'static str> {
        self.options
            .iter()
            .filter(|option| !option.is_reloaded && (option.get)(one) != (option.get)(other))
            .map(|option| option.key)
    }
}

fn names<T>(values: &[Choice<T>]) -> Vec<&'static str> {
    values.iter().map(|(name, _)| *name).collect()
}

/// `a, b or c`
fn one_of(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [one] => (*one).into(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

#[cfg(test)]
mod tests;
