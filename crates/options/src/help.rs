//! Help of the command line, and rows of the reference.

use crate::{OptionKind, Schema, Set};
use std::fmt::Write;

/// Columns of help.
const WIDTH: usize = 90;
/// Column at which descriptions begin.
const INDENT: usize = 6;

/// A key of the configuration file, in the reference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The key.
    pub key: &'static str,
    /// Its value.
    pub value: String,
    /// The value if none is given. Empty: none, or see `about`.
    pub default: String,
    /// Its meaning: a sentence or two without the last full stop.
    pub about: &'static str,
}

impl<T> OptionKind<T> {
    fn row(&self) -> Row {
        let quoted = |text: &str| format!("`\"{text}\"`");
        let default = match &self.set {
            _ if self.default.is_empty() => String::new(),
            Set::List { separator, .. } => {
                let values = self.default.split(*separator).map(|value| format!("\"{value}\""));
                format!("`[{}]`", values.collect::<Vec<_>>().join(", "))
            }
            _ => format!("`{}`", self.default),
        };
        let value = match &self.set {
            Set::Flag { .. } => "`true` or `false`".into(),
            Set::Choice(values) => crate::names(values).into_iter().map(quoted).collect::<Vec<_>>().join(" or "),
            Set::Text { .. } => "text".into(),
            Set::List { .. } => "list of texts".into(),
        };
        Row { key: self.key, value, default, about: self.about }
    }
}

impl<T> Schema<T> {
    /// The keys of the configuration file, in order.
    pub fn rows(&self) -> Vec<Row> {
        let required = self.required.iter().map(|required| Row {
            key: required.key,
            value: "text, required".into(),
            default: String::new(),
            about: required.about,
        });
        required.chain(self.options.iter().map(OptionKind::row)).collect()
    }

    /// The options of the command line, each with its description, in lines of at most 90 columns unless a word is longer.
    pub fn help(&self) -> String {
        let mut help = String::new();
        for option in self.options {
            let default = match option.default {
                "" | "false" => String::new(),
                default => format!(" [default: {default}]"),
            };
            describe(&mut help, &option.syntax(), &format!("{}{default}", option.about));
        }
        help
    }
}

/// Appends an entry of help: the syntax, and below it the description, in lines of at most 90 columns.
pub fn describe(out: &mut String, syntax: &str, about: &str) {
    let _ = writeln!(out, "  {syntax}");
    fill(out, &about.replace('`', ""));
}

/// Appends a paragraph in lines.
fn fill(out: &mut String, text: &str) {
    let mut column = 0;
    for word in text.split_whitespace() {
        let width = word.chars().count();
        if column == 0 || column + 1 + width > WIDTH {
            out.push_str(if column == 0 { "" } else { "\n" });
            let _ = write!(out, "{:INDENT$}", "");
            column = INDENT;
        } else {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += width;
    }
    out.push('\n');
}
