//! Directories of other NFS servers as file systems, and as shares.

use crate::support;
use crate::support::nfs_python;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use support::disks::{Disks, ok, run, text};
use support::{Lab, THRUWAY};
use thruway_engine::{Reactors, Segment, Segments};
use thruway_fabric::iwarp;
use thruway_nfs::client::{NfsFileSystem, NfsOptions};
use thruway_rpc::client::RdmaOptions;
use thruway_server::rdma::Registration;
use thruway_vfs::conformance;
use thruway_vfs::{As, Credentials, FileSystem, Make, Rights, Room, SetAttributes, Stability};

/// Starts a daemon that serves this share, with a state directory of its own.
fn serve(lab: &Lab, state: &str, share: &str) -> Disks {
    let state = lab.path(state);
    Disks::serve(&["--quiet", "--nfs", "127.0.0.1:0", "--nfs-lease", "10", "--state", text(&state), "--share", share])
}

fn options(server: &str, path: &str) -> NfsOptions {
    NfsOptions {
        servers: vec![server.parse().unwrap()],
        rdma: None,
        path: path.split('/').map(|name| name.as_bytes().to_vec()).collect(),
        owner: b"a test".to_vec(),
        delegations: true,
        handles: None,
    }
}

fn over_rdma(server: &str) -> NfsOptions {
    let choose = |_: SocketAddr| {
        Ok(RdmaOptions { provider: iwarp::Config::default().into(), registration: Registration::Windows, credits: 16 })
    };
    NfsOptions { rdma: Some(Arc::new(choose)), ..options(server, "d") }
}

/// Needs root, to act as others.
#[test]
fn a_directory_of_another_server_keeps_the_contract_of_file_systems() {
    let lab = Lab::new();
    let dir = lab.mkdir("shared");
    let state = lab.path("state");
    for share in [format!("d={},squash=none", text(&dir)), "d=mem:64M,squash=none".into()] {
        let ends = ["--nfs", "127.0.0.1:0", "--nfs-rdma", "127.0.0.1:0"];
        let daemon = Disks::serve(&[&["--quiet", "--state", text(&state), "--share", &share], &ends[..]].concat());
        for options in [options(&daemon.at("nfs"), "d"), over_rdma(&daemon.at("nfs_rdma"))] {
            conformance::check(NfsFileSystem::open(options).unwrap(), &[]);
            empty(&daemon.at("nfs"));
        }
        daemon.stop();
    }
}

/// Empties the share `d`, whose directories contain files only.
fn empty(at: &str) {
    let options = options(at, "d");
    on_reactor(move || async move {
        let files = NfsFileSystem::open(options).unwrap();
        let root = Credentials { uid: 0, gid: 0, groups: Vec::new() };
        let room = Room { bytes: 64 << 10, entry: 64 };
        for entry in files.list(&root, &files.root(), 0, room, true).await.unwrap().entries {
            let (dir, _) = entry.file.unwrap();
            if entry.name.starts_with(b".") {
                continue;
            }
            loop {
                let below = files.list(&root, &dir, 2, room, false).await.unwrap();
                for entry in &below.entries {
                    files.remove(&root, &dir, &entry.name, false).await.unwrap();
                }
                if below.is_end {
                    break;
                }
            }
            files.remove(&root, &files.root(), &entry.name, true).await.unwrap();
        }
    });
}

/// A proxy that cuts each connection after a random number of bytes. Returns its address.
fn cutting_proxy(server: &str, seed: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let server = server.to_string();
    std::thread::spawn(move || {
        let mut random = fastrand::Rng::with_seed(seed);
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(&server).unwrap());
            // From some requests to some megabytes.
            let left = Arc::new(AtomicI64::new(1 << random.u32(11..23)));
            for (from, to) in [(&client, &server), (&server, &client)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                let left = Arc::clone(&left);
                std::thread::spawn(move || {
                    let mut bytes = vec![0; 16 << 10];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        let may = left.fetch_sub(count as i64, Ordering::Relaxed).clamp(0, count as i64) as usize;
                        if to.write_all(&bytes[..may]).is_err() || may < count {
                            break;
                        }
                    }
                    drop((from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both)));
                });
            }
        }
    });
    at
}

/// Connections are cut in requests and replies. The contract holds, because each request is executed once.
#[test]
fn cut_connections_are_not_noticed() {
    let lab = Lab::new();
    let daemon = serve(&lab, "state", &format!("d={},squash=none", text(&lab.mkdir("shared"))));
    for seed in support::seeds(0..2) {
        let proxy = cutting_proxy(&daemon.at("nfs"), seed);
        conformance::check(NfsFileSystem::open(options(&proxy, "d")).unwrap(), &[]);
        empty(&daemon.at("nfs"));
    }
    daemon.stop();
}

/// Address of a server that is started again at the same place: no other test uses this host's address.
fn own_address() -> String {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    static NEXT: AtomicU8 = AtomicU8::new(1);
    format!("127.{}.{high}.{low}:2049", 100 + NEXT.fetch_add(1, Ordering::Relaxed))
}

/// As [`serve`], at this address.
fn serve_at(lab: &Lab, address: &str, share: &str) -> Disks {
    let state = lab.path("state");
    Disks::serve(&["--quiet", "--nfs", address, "--nfs-lease", "3", "--state", text(&state), "--share", share])
}

fn kill(daemon: Disks) {
    ok("kill", &["-KILL", &daemon.child.id().to_string()]);
    drop(daemon);
}

/// Runs operations on a reactor, and returns what they return.
fn on_reactor<T: Send + 'static, F: Future<Output = T> + 'static>(make: impl FnOnce() -> F + Send + 'static) -> T {
    let reactors = Reactors::start(Some(1)).unwrap();
    let (done, is_done) = mpsc::channel();
    reactors.handles()[0].spawn(move || async move { done.send(make().await).unwrap() });
    is_done.recv().expect("an operation has failed: its message is above")
}

async fn segment(bytes: &[u8]) -> Segment {
    let segments = Segments::new(1, bytes.len().next_multiple_of(4096)).unwrap();
    let mut segment = segments.reserve(1).await.segment(bytes.len());
    segment.as_mut_slice().copy_from_slice(bytes);
    segment
}

/// The server is killed again and again while an open file is written. No data is lost, and the file stays open.
#[test]
fn what_is_open_survives_kills_of_the_server() {
    const BLOCK: usize = 8192;
    const ROUNDS: u64 = 4;
    let lab = Lab::new();
    let share = format!("d={},squash=none", text(&lab.mkdir("shared")));
    let address = own_address();
    let daemon = serve_at(&lab, &address, &share);
    let files = Arc::new(NfsFileSystem::open(options(&address, "d")).unwrap());
    let (progress, seen) = mpsc::channel();
    let (stop, is_stopped) = (Arc::new(AtomicBool::new(false)), Arc::clone(&files));
    let is_over = Arc::clone(&stop);
    let writing = std::thread::spawn(move || {
        let files = is_stopped;
        on_reactor(move || async move {
            let who = Credentials { uid: 1000, gid: 1000, groups: Vec::new() };
            let root = Credentials { uid: 0, gid: 0, groups: Vec::new() };
            let set = SetAttributes { uid: Some(1000), ..SetAttributes::default() };
            files.set_attributes(As { who: &root, is_open: false }, &files.root(), set, None).await.unwrap();
            let set = SetAttributes { mode: Some(0o600), ..SetAttributes::default() };
            let (file, _) = files.make(&who, &files.root(), b"file", Make::NewFile, set).await.unwrap();
            let (guard, _) = files.open(&who, &file, Rights { read: true, write: true, execute: false }).await.unwrap();
            let user = As { who: &who, is_open: true };
            let mut written = 0_u64;
            while !is_over.load(Ordering::Relaxed) {
                let block = vec![(written % 251) as u8; BLOCK];
                // As a client does it: what was not durable when the verifier changed is written again.
                loop {
                    let verifier = files.write_verifier();
                    files
                        .write(user, &file, written * BLOCK as u64, segment(&block).await, Stability::Unstable)
                        .await
                        .unwrap();
                    files.flush(&file).await.unwrap();
                    if files.write_verifier() == verifier {
                        break;
                    }
                }
                written += 1;
                progress.send(written).ok();
            }
            // Its name may go: it is open.
            for n in 0..written {
                let read = files.read(user, &file, n * BLOCK as u64, segment(&[0; BLOCK]).await).await.unwrap();
                assert!(read.segment.as_slice() == [(n % 251) as u8; BLOCK], "block {n} of {written}");
            }
            let entries = files.list(&who, &files.root(), 0, Room { bytes: 4096, entry: 64 }, true).await.unwrap();
            assert_eq!(entries.entries.len(), 3, "each creation happens once");
            drop(guard);
            written
        })
    });
    let mut daemon = Some(daemon);
    for _ in 0..ROUNDS {
        let from = seen.iter().next().expect("it goes on");
        // Some more, so that the kill meets a write.
        seen.iter().find(|n| *n >= from + 20).expect("it goes on");
        kill(daemon.take().expect("it runs"));
        daemon = Some(serve_at(&lab, &address, &share));
        while seen.try_recv().is_ok() {}
    }
    seen.iter().next().expect("it goes on after the last kill");
    stop.store(true, Ordering::Relaxed);
    assert!(writing.join().unwrap() > 20 * ROUNDS);
    drop(files);
    daemon.expect("it runs").stop();
}

/// Starts a daemon that must fail. Returns its error output.
fn refused(lab: &Lab, share: &str) -> String {
    let state = lab.path("refused");
    let out = run(THRUWAY, &["serve", "--nfs", "127.0.0.1:0", "--state", text(&state), "--share", share]);
    assert!(!out.status.success(), "{share}");
    support::stderr(&out)
}

#[test]
fn a_server_or_directory_that_is_not_there_is_named() {
    let lab = Lab::new();
    let daemon = serve(&lab, "state", &format!("d={}", text(&lab.mkdir("shared"))));
    std::fs::write(lab.path("shared/file"), "").unwrap();
    let at = daemon.at("nfs");
    let missing = refused(&lab, &format!("r=nfs://{at}/d/missing"));
    assert!(missing.contains("share 'r'") && missing.contains("/d/missing: LOOKUP: No such file"), "{missing}");
    let file = refused(&lab, &format!("r=nfs://{at}/d/file"));
    assert!(file.contains("/d/file: not a directory"), "{file}");
    daemon.stop();
    let gone = refused(&lab, &format!("r=nfs://{at}/d"));
    assert!(gone.contains(&format!("nfs://{at}/d: ")) && gone.contains("refused"), "{gone}");
}

/// Clients of versions 3 and 4 use a share whose directory is reached over RDMA.
#[test]
fn a_share_is_shared_again_over_rdma() {
    let lab = Lab::new();
    let dir = lab.mkdir("shared");
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o777)).unwrap();
    let state = lab.path("first");
    let share = format!("d={},squash=none", text(&dir));
    let ends = ["--nfs", "127.0.0.1:0", "--nfs-rdma", "127.0.0.1:0"];
    let first = Disks::serve(&[&["--quiet", "--state", text(&state), "--share", &share], &ends[..]].concat());
    let again = format!("d=nfs://{}/d,proto=rdma,squash=none", first.at("nfs_rdma"));
    let second = serve(&lab, "second", &again);
    let script = r#"
import hashlib
client = Client(at, b"client", uid=1000, gid=1000)
share = client.handle(b"d")
status, stateid, file, _ = client.create(share, b"file")
assert status == OK
data = bytes(n * n % 251 for n in range(32 << 10))
assert client.write(file, stateid, data) == OK
print(hashlib.sha256(data).hexdigest())
"#;
    let digest = nfs_python::python(&second.at("nfs"), script, &[]);
    let here = ok("sha256sum", &[text(&dir.join("file"))]);
    assert!(here.starts_with(digest.trim()), "{here} {digest}");
    let at = second.at("nfs");
    for version in ["3", "4.1"] {
        for operation in ["read", "write", "create", "mkdir", "lookup", "getattr"] {
            let to = ["bench", "nfs", "--connect", &at, "--share", "d", "--vers", version, "--op", operation];
            let how = ["--seconds", "0.1", "--size", "1M", "--file-size", "4M", "--depth", "8"];
            let mount: &[&str] = if version == "3" { &["--mount", &at] } else { &[] };
            ok(THRUWAY, &[&to[..], &how, mount].concat());
        }
    }
    second.stop();
    first.stop();
}

/// Guests run this with other servers. `THRUWAY_NFS_SERVER` is HOST:PORT, `THRUWAY_NFS_PATH` an empty directory there that belongs to
/// root, and `THRUWAY_NFS_LACKS` the cases that fail.
#[test]
#[ignore = "needs another server: run by testbed/tests/nfs_reexport.sh"]
fn another_server_keeps_the_contract_but_for_what_it_lacks() {
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"));
    let lacks = variable("THRUWAY_NFS_LACKS");
    let lacks: Vec<&str> = lacks.split_whitespace().collect();
    let mut options = options(&variable("THRUWAY_NFS_SERVER"), &variable("THRUWAY_NFS_PATH"));
    options.path.retain(|name| !name.is_empty());
    conformance::check(NfsFileSystem::open(options).unwrap(), &lacks);
}

/// The connection by which the server calls the client is cut. A recall arrives by the next one: no delegation is revoked.
#[test]
fn recalls_arrive_after_a_cut() {
    let lab = Lab::new();
    let log = lab.path("log");
    let share = format!("d={},squash=none", text(&lab.mkdir("shared")));
    let state = lab.path("state");
    let args = ["--quiet", "--nfs", "127.0.0.1:0", "--nfs-lease", "60", "--state", text(&state), "--share", &share];
    let mut command = std::process::Command::new(THRUWAY);
    command.stderr(std::process::Stdio::from(std::fs::File::create(&log).unwrap()));
    let daemon = Disks::serve_by(&mut command, &args);
    std::fs::write(lab.path("shared/file"), "old").unwrap();
    let at = daemon.at("nfs");
    let connections = Arc::new(Mutex::new(Vec::<TcpStream>::new()));
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let through = proxy.local_addr().unwrap().to_string();
    let (server, kept) = (at.clone(), Arc::clone(&connections));
    std::thread::spawn(move || {
        for client in proxy.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(&server).unwrap());
            kept.lock().unwrap().push(client.try_clone().unwrap());
            for (from, to) in [(&client, &server), (&server, &client)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                std::thread::spawn(move || {
                    drop(std::io::copy(&mut from, &mut to));
                    drop((from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both)));
                });
            }
        }
    });
    on_reactor(move || async move {
        let who = Credentials { uid: 0, gid: 0, groups: Vec::new() };
        let files = NfsFileSystem::open(options(&through, "d")).unwrap();
        let (file, _) = files.look_up(&who, &files.root(), b"file").await.unwrap();
        let (_guard, _) = files.open(&who, &file, Rights { read: true, ..Rights::default() }).await.unwrap();
        let (recalled, is_recalled) = mpsc::channel();
        let lease = files.lease(&file, Box::new(move || recalled.send(()).unwrap_or_default())).await.unwrap();
        // Both the thread's connection and this reactor's.
        connections.lock().unwrap().drain(..).for_each(|connection| drop(connection.shutdown(Shutdown::Both)));
        let writing = std::thread::spawn(move || {
            on_reactor(move || async move {
                let who = Credentials { uid: 0, gid: 0, groups: Vec::new() };
                let other =
                    NfsFileSystem::open(NfsOptions { owner: b"another".to_vec(), ..options(&at, "d") }).unwrap();
                let (file, _) = other.look_up(&who, &other.root(), b"file").await.unwrap();
                let user = As { who: &who, is_open: false };
                other.write(user, &file, 0, segment(b"new").await, Stability::File).await.unwrap();
            });
        });
        let heard = tokio::task::spawn_blocking(move || is_recalled.recv());
        heard.await.unwrap().expect("it is recalled");
        drop(lease);
        tokio::task::spawn_blocking(move || writing.join().unwrap()).await.unwrap();
        let read = files.read(As { who: &who, is_open: true }, &file, 0, segment(&[0; 8]).await).await.unwrap();
        assert_eq!(read.segment.as_slice(), b"new");
    });
    daemon.stop();
    let said = std::fs::read_to_string(&log).unwrap();
    assert!(!said.contains("it is revoked"), "{said}");
}

/// Servers that close each connection, or reply with nonsense, end the start of the daemon with an error.
#[test]
fn a_server_that_talks_nonsense_is_refused() {
    let record = |body: &[u8]| [&(0x8000_0000 | body.len() as u32).to_be_bytes()[..], body].concat();
    // The first word of the last two is the number of the call: a reply with a status only, and one with results that end early.
    type Reply = fn(&[u8]) -> Vec<u8>;
    let replies: [Reply; 4] = [
        |_| Vec::new(),
        |_| vec![0xff; 100],
        |xid| [xid, &1_u32.to_be_bytes(), &[0; 16]].concat(),
        |xid| [xid, &1_u32.to_be_bytes(), &[0; 24], &1_u32.to_be_bytes(), &42_u32.to_be_bytes(), &[0; 7]].concat(),
    ];
    for (n, reply) in replies.into_iter().enumerate() {
        let lab = Lab::new();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let mut client = client.unwrap();
                let mut call = [0; 4096];
                let count = client.read(&mut call).unwrap_or(0);
                let body = reply(call.get(4..8).filter(|_| count >= 8).unwrap_or_default());
                let sent = if n < 2 { body } else { record(&body) };
                // The client may have gone.
                let _ = client.write_all(&sent);
            }
        });
        let said = refused(&lab, &format!("r=nfs://{at}/d"));
        assert!(said.contains(&format!("share 'r': nfs://{at}/d: ")), "{n}: {said}");
    }
}
