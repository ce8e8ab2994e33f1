//! The list of all metrics of a process.

use crate::{Buckets, Counter, Gauge, Histogram};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Name and meaning of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Description {
    /// Its name: letters, digits and `_`, at first a letter.
    pub name: &'static str,
    /// Its meaning: one sentence.
    pub help: &'static str,
}

/// A metric that cannot be registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// A name that OpenMetrics does not allow.
    #[error("'{0}': a name has letters, digits and '_', and begins with a letter")]
    Name(&'static str),
    /// Another metric has the name and these labels.
    #[error("'{name}' with labels {labels:?} is registered already")]
    Duplicate {
        /// The name.
        name: &'static str,
        /// The labels.
        labels: Vec<(&'static str, String)>,
    },
    /// Another metric has the name, and another type or meaning.
    #[error("'{0}' is registered with another type or meaning")]
    Mismatch(&'static str),
}

/// A value at a moment.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Of a counter.
    Counter(u64),
    /// Of a gauge.
    Gauge(i64),
    /// Of a histogram.
    Histogram(Buckets),
}

/// A metric at a moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Name and meaning.
    pub description: Description,
    /// Its labels, in the order of the registration.
    pub labels: Vec<(&'static str, String)>,
    /// Its value.
    pub value: Value,
}

/// Reads a value.
type Read = dyn Fn() -> Value + Send + Sync;

#[derive(Clone)]
struct Entry {
    number: u64,
    description: Description,
    kind: Kind,
    labels: Vec<(&'static str, String)>,
    read: Arc<Read>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

#[derive(Default)]
struct Entries {
    next: u64,
    all: Vec<Entry>,
}

/// All metrics of a process. Copies are the same registry.
#[derive(Clone, Default)]
pub struct Registry(Arc<Mutex<Entries>>);

/// A registered metric. Dropping this removes it.
#[must_use]
pub struct Registered {
    registry: Registry,
    number: u64,
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registered").field(&self.number).finish()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.registry.entries().all.retain(|entry| entry.number != self.number);
    }
}

/// Labels of a metric: names and values.
pub type Labels<'a> = &'a [(&'static str, &'a str)];

impl Registry {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        // The list is whole at each moment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a counter.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn counter(
        &self,
        description: Description,
        labels: Labels<'_>,
        counter: Arc<Counter>,
    ) -> Result<Registered, RegisterError> {
        self.counter_of(description, labels, move || counter.get())
    }

    /// Registers a counter that a function reads. Each reader of the registry calls it.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn counter_of(
        &self,
        description: Description,
        labels: Labels<'_>,
        read: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Result<Registered, RegisterError> {
        self.register(description, Kind::Counter, labels, Arc::new(move || Value::Counter(read())))
    }

    /// Registers a gauge.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn gauge(
        &self,
        description: Description,
        labels: Labels<'_>,
        gauge: Arc<Gauge>,
    ) -> Result<Registered, RegisterError> {
        self.gauge_of(description, labels, move || gauge.get())
    }

    /// Registers a gauge that a function reads. Each reader of the registry calls it.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn gauge_of(
        &self,
        description: Description,
        labels: Labels<'_>,
        read: impl Fn() -> i64 + Send + Sync + 'static,
    ) -> Result<Registered, RegisterError> {
        self.register(description, Kind::Gauge, labels, Arc::new(move || Value::Gauge(read())))
    }

    /// Registers a histogram.
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn histogram(
        &self,
        description: Description,
        labels: Labels<'_>,
        histogram: Arc<Histogram>,
    ) -> Result<Registered, RegisterError> {
        let read = move || Value::Histogram(histogram.get());
        self.register(description, Kind::Histogram, labels, Arc::new(read))
    }

    fn register(
        &self,
        description: Description,
        kind: Kind,
        labels: Labels<'_>,
        read: Arc<Read>,
    ) -> Result<Registered, RegisterError> {
        let names = std::iter::once(description.name).chain(labels.iter().map(|(name, _)| *name));
        if let Some(name) = names.into_iter().find(|name| !is_name(name)) {
            return Err(RegisterError::Name(name));
        }
        let labels: Vec<_> = labels.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        let mut entries = self.entries();
        for other in entries.all.iter().filter(|other| other.description.name == description.name) {
            if (other.description, other.kind) != (description, kind) {
                return Err(RegisterError::Mismatch(description.name));
            }
            if other.labels == labels {
                return Err(RegisterError::Duplicate { name: description.name, labels });
            }
        }
        let number = entries.next;
        entries.next += 1;
        entries.all.push(Entry { number, description, kind, labels, read });
        Ok(Registered { registry: self.clone(), number })
    }

    /// The values of all metrics now, by their names and labels.
    pub fn read(&self) -> Vec<Sample> {
        // A function that is called here may register another metric.
        let mut entries = self.entries().all.clone();
        entries.sort_by(|one, other| (one.description.name, &one.labels).cmp(&(other.description.name, &other.labels)));
        let read =
            |entry: Entry| Sample { description: entry.description, labels: entry.labels, value: (entry.read)() };
        entries.into_iter().map(read).collect()
    }
}

fn is_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic()) && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}
