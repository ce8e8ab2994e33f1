//! Trees by way of the library: what is done when the last byte has arrived.

use crate::support;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use support::Served;
use thruway_engine::digest::Algorithm;
use thruway_fabric::iwarp;
use thruway_transfer::auth::{Credentials, KeyPair};
use thruway_transfer::client::{self, Job, Local, Remote};
use thruway_transfer::link::Transport;
use thruway_transfer::session::{PipelineSet, Progress};
use thruway_transfer::wire::{Summary, TreeOptions};

/// Copies what is in `source` into the export; what came of it, and what was reported.
fn push(served: &Served, source: &Path, options: TreeOptions) -> (Summary, Vec<String>) {
    let remote = Remote {
        addr: served.addr,
        others: Vec::new(),
        label: "test".into(),
        credentials: Credentials::Keys(KeyPair::generate()),
        known_hosts: None,
        fabric: iwarp::Config::default().into(),
        transport: Transport::Tcp,
    };
    let job = Job {
        remote,
        export: "e".into(),
        path: Vec::new(),
        into_directory: true,
        sources: Vec::new(),
        renamed: false,
        made: None,
        note: None,
        local: Local::Sources(vec![(source.into(), Vec::new())]),
        id: [1; 16],
        options: TreeOptions { recursive: true, ..options },
        verify: Algorithm::Xxh3,
        encrypt: false,
        streams: None,
        block_len: 1 << 20,
        blocks: None,
        rate_limit: None,
        retries: 0,
    };
    let reports = Arc::new(std::sync::Mutex::new(Vec::new()));
    let on_report: thruway_transfer::session::OnReport = {
        let reports = Arc::clone(&reports);
        Arc::new(move |report| reports.lock().unwrap().push(report.message.clone()))
    };
    let pipelines = PipelineSet::new().unwrap();
    let finished = client::run(&job, pipelines.pick(), &Arc::new(Progress::default()), &on_report, None).unwrap();
    let reports = reports.lock().unwrap().clone();
    (finished.summary, reports)
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn links_removals_and_directories_attributes_come_after_everything_else() {
    let served = Served::with(|config| config.anonymous = true);
    let source = tempfile::tempdir().unwrap();
    let (from, to) = (source.path(), served.dir.path());
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    fs::create_dir(from.join("sub")).unwrap();
    fs::write(from.join("sub/a"), "one file").unwrap();
    fs::hard_link(from.join("sub/a"), from.join("sub/b")).unwrap();
    fs::set_permissions(from.join("sub"), fs::Permissions::from_mode(0o555)).unwrap();
    fs::File::open(from.join("sub")).unwrap().set_modified(long_ago).unwrap();
    // Of these only the copied directory's own are removed.
    for dir in ["sub", "elsewhere"] {
        fs::create_dir(to.join(dir)).unwrap();
        fs::write(to.join(dir).join("more"), "more").unwrap();
    }
    fs::create_dir_all(to.join("sub/deep/deeper")).unwrap();
    fs::write(from.join("elsewhere"), "a file, and not a directory").unwrap();
    fs::rename(to.join("elsewhere"), to.join("kept")).unwrap();

    let (summary, reports) = push(&served, from, TreeOptions { preserve: true, ..TreeOptions::default() });
    assert_eq!(reports, [""; 0]);
    assert_eq!((summary.deleted, names(to)), (0, vec!["elsewhere".into(), "kept".into(), "sub".into()]));
    assert_eq!(names(&to.join("sub")), ["a", "b", "deep", "more"]);
    let of = |name| fs::metadata(to.join(name)).unwrap();
    assert_eq!(of("sub/a").ino(), of("sub/b").ino());
    assert_eq!((of("sub").mode() & 0o777, of("sub").modified().unwrap()), (0o555, long_ago));

    let options = TreeOptions { preserve: true, delete: true, ..TreeOptions::default() };
    let (summary, reports) = push(&served, from, options);
    assert_eq!(reports, [""; 0]);
    assert_eq!(names(&to.join("sub")), ["a", "b"]);
    assert_eq!(names(to), ["elsewhere", "sub"]);
    assert_eq!(summary.deleted, 5, "two files and three directories");
    assert_eq!((of("sub").mode() & 0o777, of("sub").modified().unwrap()), (0o555, long_ago));
    assert_eq!(fs::read(to.join("sub/b")).unwrap(), b"one file");
}
