use super::*;
use std::sync::Arc;
use std::time::Duration;

const REQUESTS: Description = Description { name: "requests", help: "Requests." };

#[test]
fn a_registry_reads_what_is_registered() {
    let registry = Registry::default();
    let (counter, gauge, histogram) = (Arc::new(Counter::default()), Arc::new(Gauge::default()), Arc::default());
    let second = registry.counter_of(REQUESTS, &[("export", "b")], || 5).unwrap();
    let _first = registry.counter(REQUESTS, &[("export", "a")], Arc::clone(&counter)).unwrap();
    let connections = Description { name: "connections", help: "Connections." };
    let _gauge = registry.gauge(connections, &[], Arc::clone(&gauge)).unwrap();
    let times = Description { name: "times_seconds", help: "Times." };
    let _times = registry.histogram(times, &[], Arc::clone(&histogram)).unwrap();
    counter.add(7);
    gauge.add(3);
    gauge.add(-1);
    Histogram::record(&histogram, Duration::from_millis(2));
    let samples = registry.read();
    let names: Vec<_> = samples.iter().map(|sample| (sample.description.name, sample.labels.len())).collect();
    assert_eq!(names, [("connections", 0), ("requests", 1), ("requests", 1), ("times_seconds", 0)]);
    assert_eq!(samples[0].value, Value::Gauge(2));
    assert_eq!((&samples[1].value, samples[1].labels[0].1.as_str()), (&Value::Counter(7), "a"));
    assert_eq!(samples[2].value, Value::Counter(5));
    assert!(matches!(&samples[3].value, Value::Histogram(values) if values.count == 1));
    drop(second);
    assert_eq!(registry.read().len(), 3);
}

#[test]
fn a_name_has_one_meaning_and_each_set_of_labels_once() {
    let registry = Registry::default();
    let _one = registry.counter_of(REQUESTS, &[("export", "a")], || 0).unwrap();
    let again = registry.counter_of(REQUESTS, &[("export", "a")], || 0).unwrap_err();
    assert!(again.to_string().contains("already"), "{again}");
    assert_eq!(registry.gauge_of(REQUESTS, &[], || 0).unwrap_err(), RegisterError::Mismatch("requests"));
    let other = Description { help: "Another meaning.", ..REQUESTS };
    assert_eq!(registry.counter_of(other, &[], || 0).unwrap_err(), RegisterError::Mismatch("requests"));
    for name in ["", "1a", "a-b", "ä"] {
        let description = Description { name, ..REQUESTS };
        assert_eq!(registry.counter_of(description, &[], || 0).unwrap_err(), RegisterError::Name(name));
    }
    assert_eq!(registry.counter_of(REQUESTS, &[("a b", "")], || 0).unwrap_err(), RegisterError::Name("a b"));
}

#[test]
fn a_function_that_is_read_may_use_the_registry() {
    let registry = Registry::default();
    let inner = registry.clone();
    let other = Description { name: "other", help: "Another metric." };
    let read = move || i64::from(inner.counter_of(other, &[], || 0).is_ok());
    let _size = registry.gauge_of(REQUESTS, &[], read).unwrap();
    assert_eq!(registry.read()[0].value, Value::Gauge(1));
}
