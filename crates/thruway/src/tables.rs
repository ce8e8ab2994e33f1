//! Tables of TOML files, read by the definitions of options.

use std::ops::Range;
use std::path::Path;
use thruway_options::{Schema, Value};
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

/// An error in a file, and its place.
pub(crate) struct Diagnostic {
    /// Byte offsets.
    pub(crate) span: Range<usize>,
    /// The message.
    pub(crate) what: String,
}

/// Errors in a file.
#[derive(Default)]
pub(crate) struct Mistakes(Vec<Diagnostic>);

/// A table, and its place in the file.
pub(crate) type Placed<'d> = (Range<usize>, &'d DeTable<'d>);

impl Mistakes {
    /// Adds an error.
    pub(crate) fn add(&mut self, span: Range<usize>, what: impl Into<String>) {
        self.0.push(Diagnostic { span, what: what.into() });
    }

    /// Number of errors.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// All errors, in the order of the file.
    pub(crate) fn into_sorted(mut self) -> Vec<Diagnostic> {
        self.0.sort_by_key(|mistake| mistake.span.start);
        self.0
    }

    /// The content of a table of which there may be several. `path` is its name, for the error if it is none.
    pub(crate) fn content<'d>(&mut self, path: &str, entry: &'d Spanned<DeValue<'d>>) -> Option<Placed<'d>> {
        match entry.get_ref() {
            DeValue::Table(content) => Some((entry.span(), content)),
            _ => {
                self.add(entry.span(), format!("write [[{path}]], with two brackets"));
                None
            }
        }
    }

    /// Makes an item from a table: `new` from the values of the required keys, and the rest by the options of the schema. `other` reads the
    /// keys in `more`, and keys of the schema with another form; it returns false for a key that it leaves to the schema.
    pub(crate) fn item<T>(
        &mut self,
        schema: &Schema<T>,
        more: &[&'static str],
        (span, content): Placed<'_>,
        new: impl FnOnce(&[String]) -> Result<T, String>,
        mut other: impl FnMut(&mut Mistakes, Option<&mut T>, &str, &Spanned<DeValue<'_>>) -> bool,
    ) -> Option<T> {
        let (before, what) = (self.len(), schema.what);
        let mut values = Vec::new();
        for required in schema.required {
            match content.get(required.key).map(|value| (value.span(), scalar(value.get_ref()))) {
                Some((_, Some(text))) => values.push(text),
                Some((span, None)) => self.add(span, format!("{} is a text or a number", required.key)),
                None => self.add(span.clone(), format!("the {what}'s {} is missing", required.key)),
            }
        }
        let mut item = None;
        if values.len() == schema.required.len() {
            match new(&values) {
                Ok(new) => item = Some(new),
                Err(why) => self.add(span, why),
            }
        }
        for (key, value) in content {
            let name = key.get_ref().as_ref();
            if schema.required.iter().any(|required| required.key == name) || other(self, item.as_mut(), name, value) {
                continue;
            }
            let Some(option) = schema.with_key(name) else {
                let known: Vec<&str> = schema.keys().chain(more.iter().copied()).collect();
                let article = if what.starts_with('e') { "an" } else { "a" };
                let why = format!("unknown key '{name}' of {article} {what} (expected {})", known.join(", "));
                self.add(key.span(), why);
                continue;
            };
            let set = match (value_of(value.get_ref()), item.as_mut()) {
                (Some(value), Some(item)) => option.set_value(item, &value),
                (Some(value), None) if option.accepts(&value) => Ok(()),
                _ => Err(option.wrong_type()),
            };
            if let Err(why) = set {
                self.add(value.span(), why.to_string());
            }
        }
        item.filter(|_| self.len() == before)
    }
}

/// The errors as lines: file, line number, message.
pub(crate) fn lines(path: &Path, text: &str, mistakes: &[Diagnostic]) -> String {
    let lines = mistakes
        .iter()
        .map(|mistake| format!("{}:{}: {}", path.display(), line_of(text, mistake.span.start), mistake.what));
    lines.collect::<Vec<_>>().join("\n")
}

/// Line number, from 1, of a byte offset.
pub(crate) fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count()
}

/// A text or a number, as it would be on the command line.
pub(crate) fn scalar(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => {
            i128::from_str_radix(number.as_str(), number.radix()).ok().map(|number| number.to_string())
        }
        DeValue::Float(number) => Some(number.as_str().into()),
        _ => None,
    }
}

/// A value for an option; `None` for a table. An element of a list that is no text becomes an empty text, which no option accepts.
fn value_of(value: &DeValue<'_>) -> Option<Value> {
    match value {
        DeValue::Boolean(value) => Some(Value::Flag(*value)),
        DeValue::Array(values) => {
            let text = |value: &Spanned<DeValue<'_>>| value.get_ref().as_str().unwrap_or_default().to_owned();
            Some(Value::List(values.iter().map(text).collect()))
        }
        other => scalar(other).map(Value::Text),
    }
}

/// True if a list has no tables, numbers or lists.
pub(crate) fn has_texts_only(values: &DeArray<'_>) -> bool {
    values.iter().all(|value| value.get_ref().is_str())
}
