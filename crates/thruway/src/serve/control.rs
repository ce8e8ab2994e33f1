//! The control socket of the daemon.
//!
//! A Unix socket for programs of the daemon's user and of root. Each line from a client is a request, and each line to it is the reply to the next
//! one: JSON objects with a `version`. A connection with a request that is not understood goes on with the next line.

use rustix::fs::Mode;
use rustix::net::sockopt::socket_peercred;
use serde::Deserialize;
use serde_json::{Value as Json, json};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use thruway_metrics::{Registry, Sample, Value};
use thruway_server::{Address, Listener};

/// Version of requests and replies.
const VERSION: u64 = 1;
/// Longest request, in bytes.
const REQUEST_MAX: usize = 64 << 10;
/// Connections that are served at a time.
const CONNECTIONS_MAX: usize = 16;
/// Time for which a connection may wait for the next request.
const IDLE_MAX: Duration = Duration::from_secs(300);
/// Time in which a client has to take a part of a reply.
const TAKE_MAX: Duration = Duration::from_secs(5);

/// A request, without its version.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    version: u64,
    verb: String,
}

/// The verbs.
const VERBS: &str = "statistics, stop";

/// The socket. It is removed when this is dropped.
pub(super) struct Control {
    path: PathBuf,
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// What requests act on.
struct Shared {
    registry: Registry,
    /// Stops the daemon.
    stop: Box<dyn Fn() + Send + Sync>,
    connections: AtomicUsize,
}

/// A bound socket, on which no request has been answered yet.
pub(super) struct Bound {
    listener: UnixListener,
    control: Control,
}

impl Bound {
    /// Binds the socket. A socket of a daemon that has ended is replaced. Called before another thread is started, because the file's rights come
    /// from the umask. With `changes_user`, all users may connect, and [`Shared::begin`] refuses those that may not.
    ///
    /// # Errors
    /// A sentence.
    pub(super) fn new(path: &Path, changes_user: bool) -> Result<Bound, String> {
        let failed = |error: &dyn std::fmt::Display| format!("--control {}: {error}", path.display());
        let mask = if changes_user { Mode::empty() } else { Mode::RWXG | Mode::RWXO };
        let before = rustix::process::umask(mask | Mode::XUSR | Mode::XGRP | Mode::XOTH);
        let listener = Listener::bind(&Address::Unix(path.into()));
        rustix::process::umask(before);
        let listener = listener.map_err(|error| match error.source.kind() {
            ErrorKind::AddrInUse => failed(&"another daemon listens on it, or it is a file; choose another path"),
            _ => failed(&error.source),
        })?;
        let Listener::Unix(listener, path) = listener else { unreachable!("a Unix socket was bound") };
        listener.set_nonblocking(false).map_err(|error| failed(&error))?;
        Ok(Bound { listener, control: Control { path } })
    }

    /// Begins to answer. `stop` is called by the verb of this name.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(super) fn serve(self, registry: Registry, stop: impl Fn() + Send + Sync + 'static) -> Result<Control, String> {
        let shared = Arc::new(Shared { registry, stop: Box::new(stop), connections: AtomicUsize::new(0) });
        let listener = self.listener;
        start("control", move || {
            loop {
                match listener.accept() {
                    Ok((stream, _)) => shared.begin(stream),
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection to the control socket");
                        std::thread::sleep(Duration::from_millis(50));
                    }
                }
            }
        })?;
        Ok(self.control)
    }
}

/// Starts a thread that nothing waits for.
fn start(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let started = std::thread::Builder::new().name(name.into()).spawn(run);
    started.map(drop).map_err(|error| format!("cannot start a thread for the control socket: {error}"))
}

impl Shared {
    /// Serves a connection by a thread of its own, if it may be served.
    fn begin(self: &Arc<Self>, stream: UnixStream) {
        let this = Counted::new(Arc::clone(self));
        let allowed =
            socket_peercred(&stream).is_ok_and(|peer| peer.uid.is_root() || peer.uid == rustix::process::geteuid());
        let refusal = if !allowed {
            Some(error("not-allowed", "only root and the user of the daemon may use its control socket"))
        } else if self.connections.load(Ordering::SeqCst) > CONNECTIONS_MAX {
            Some(error("busy", &format!("{CONNECTIONS_MAX} clients are connected, as many as may be")))
        } else {
            None
        };
        let _ = stream.set_write_timeout(Some(TAKE_MAX));
        if let Some(refusal) = refusal {
            let _ = reply(&stream, &refusal);
            return;
        }
        if let Err(error) = start("control client", move || this.0.serve(&stream)) {
            tracing::warn!("{error}");
        }
    }

    fn serve(&self, stream: &UnixStream) {
        if stream.set_read_timeout(Some(IDLE_MAX)).is_err() {
            return;
        }
        let mut reader = BufReader::new(stream);
        loop {
            let mut line = Vec::new();
            match (&mut reader).take(REQUEST_MAX as u64 + 1).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            if line.len() > REQUEST_MAX {
                // Where the next request begins is unknown.
                let _ = reply(stream, &error("too-long", &format!("a request has at most {REQUEST_MAX} bytes")));
                return;
            }
            let (answer, stops) = self.answer(&line);
            let is_sent = reply(stream, &answer).is_ok();
            if stops {
                (self.stop)();
            }
            if !is_sent {
                return;
            }
        }
    }

    /// The reply, and whether the daemon is to stop.
    fn answer(&self, line: &[u8]) -> (Json, bool) {
        let request: Request = match serde_json::from_slice(line) {
            Ok(request) => request,
            Err(why) => {
                let expected = format!(r#"expected a line like {{"version":{VERSION},"verb":"statistics"}}"#);
                return (error("malformed", &format!("{why}; {expected}")), false);
            }
        };
        if request.version != VERSION {
            let why = format!("version {} is unknown; this daemon has version {VERSION}", request.version);
            return (error("version", &why), false);
        }
        match request.verb.as_str() {
            "statistics" => {
                let samples: Vec<Json> = self.registry.read().iter().map(sample).collect();
                (json!({ "version": VERSION, "statistics": samples }), false)
            }
            "stop" => (json!({ "version": VERSION, "stopping": true }), true),
            other => (error("verb", &format!("'{}': unknown verb (expected {VERBS})", other.escape_debug())), false),
        }
    }
}

/// A connection that counts.
struct Counted(Arc<Shared>);

impl Counted {
    fn new(shared: Arc<Shared>) -> Counted {
        shared.connections.fetch_add(1, Ordering::SeqCst);
        Counted(shared)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::SeqCst);
    }
}

fn error(code: &str, message: &str) -> Json {
    json!({ "version": VERSION, "error": { "code": code, "message": message } })
}

fn reply(mut stream: &UnixStream, answer: &Json) -> std::io::Result<()> {
    let mut line = answer.to_string();
    line.push('\n');
    stream.write_all(line.as_bytes())
}

/// A metric as JSON.
fn sample(sample: &Sample) -> Json {
    let Sample { description, labels, value } = sample;
    let labels: serde_json::Map<String, Json> =
        labels.iter().map(|(name, value)| ((*name).into(), value.as_str().into())).collect();
    let mut object = json!({ "name": description.name, "help": description.help, "labels": labels });
    let (kind, values) = match value {
        Value::Counter(value) => ("counter", json!({ "value": value })),
        Value::Gauge(value) => ("gauge", json!({ "value": value })),
        Value::Histogram(buckets) => {
            let seconds = |time: &Duration| time.as_secs_f64();
            let list: Vec<Json> =
                buckets.buckets.iter().map(|(bound, count)| json!([bound.as_ref().map(seconds), count])).collect();
            ("histogram", json!({ "count": buckets.count, "sum": seconds(&buckets.sum), "buckets": list }))
        }
    };
    object["type"] = kind.into();
    if let (Json::Object(object), Json::Object(values)) = (&mut object, values) {
        object.extend(values);
    }
    object
}
