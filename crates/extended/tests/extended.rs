//! Extended sockets between processes and threads of this host, in Rust and in C.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use thruway_extended::{Error, ExtendedSocket, Options, Provider, Received, Scheme, accept, connect};

/// A TCP connection within this process.
fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (connected, listener.accept().unwrap().0)
}

fn quick() -> Options {
    Options { timeout: Duration::from_secs(20), ..Options::default() }
}

fn meet(
    tcp: (&TcpStream, &TcpStream),
    one: &Options,
    other: &Options,
) -> (Result<ExtendedSocket, Error>, Result<ExtendedSocket, Error>) {
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| connect(tcp.0, one));
        let accepted = accept(tcp.1, other);
        (connecting.join().unwrap(), accepted)
    })
}

fn limit() -> Option<Instant> {
    Some(Instant::now() + Duration::from_secs(20))
}

#[test]
fn two_ends_meet_and_leave_the_tcp_connection_alone() {
    for (provider, by) in [(Provider::Auto, "shm"), (Provider::Shm, "shm"), (Provider::Iwarp, "iwarp")] {
        for scheme in Scheme::ALL {
            let options = Options { provider, scheme, ..quick() };
            let (mut a, mut b) = tcp();
            a.write_all(b"before").unwrap();
            b.read_exact(&mut [0; 6]).unwrap();
            let (one, other) = meet((&a, &b), &options, &options);
            let (one, other) = (one.unwrap(), other.unwrap());
            assert_eq!((one.provider(), other.provider()), (by, by));
            one.send(b"by the fast way", limit()).unwrap();
            let mut got = [0; 100];
            assert_eq!(other.recv(&mut got, limit()).unwrap(), 15);
            b.write_all(b"by the old one").unwrap();
            let mut old = [0; 14];
            a.read_exact(&mut old).unwrap();
            assert_eq!(&old, b"by the old one");
            one.close(limit()).unwrap();
            assert_eq!(other.recv(&mut got, limit()).unwrap(), 0);
            b.write_all(b"after").unwrap();
            a.read_exact(&mut [0; 5]).unwrap();
        }
    }
}

/// Sockets of programs with event loops do not block.
#[test]
fn sockets_that_do_not_block_meet_too() {
    let (a, b) = tcp();
    a.set_nonblocking(true).unwrap();
    b.set_nonblocking(true).unwrap();
    let (one, other) = meet((&a, &b), &quick(), &quick());
    one.unwrap().send(b"hello", limit()).unwrap();
    assert_eq!(other.unwrap().recv(&mut [0; 5], limit()).unwrap(), 5);
}

#[test]
fn messages_of_any_length() {
    let options = Options { messages: true, ..quick() };
    let (a, b) = tcp();
    let (one, other) = meet((&a, &b), &options, &options);
    let (one, other) = (one.unwrap(), other.unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for len in [0, 1, 1000, 100_000, 5_000_000] {
                one.send(&vec![len as u8; len], limit()).unwrap();
            }
        });
        let mut to = vec![0; 5_000_000];
        for len in [0, 1, 1000, 100_000, 5_000_000] {
            let received = other.recv_message(&mut to, limit()).unwrap();
            assert_eq!(received, Some(Received { len, truncated: false }));
            assert!(to[..len].iter().all(|&byte| byte == len as u8));
        }
    });
}

#[test]
fn ends_that_cannot_meet_say_why() {
    let expect = |one: &Options, other: &Options, why: &str| {
        let (a, b) = tcp();
        let (first, second) = meet((&a, &b), one, other);
        let (first, second) = (first.err().expect("no socket"), second.err().expect("no socket"));
        let told = format!("{first} / {second}");
        assert!(told.contains(why), "{told}");
        assert!(first.errno() > 0 && second.errno() > 0);
    };
    let messages = Options { messages: true, ..quick() };
    expect(&messages, &quick(), "one end wants messages");
    let (shm, iwarp) =
        (Options { provider: Provider::Shm, ..quick() }, Options { provider: Provider::Iwarp, ..quick() });
    expect(&shm, &iwarp, "no way to the peer");
    let verbs = Options { provider: Provider::Verbs, ..quick() };
    expect(&quick(), &verbs, "RDMA device: ");

    let (a, b) = tcp();
    let both = std::thread::scope(|scope| {
        let other = scope.spawn(|| connect(&b, &quick()));
        (connect(&a, &quick()), other.join().unwrap())
    });
    assert!(matches!(both, (Err(Error::Mismatch(_)), Err(Error::Mismatch(_)))));

    // A peer that knows nothing of it.
    let (a, mut b) = tcp();
    b.write_all(b"HTTP/1.1 400 Bad Request\r\n").unwrap();
    assert!(matches!(connect(&a, &quick()), Err(Error::NotExtended)));
    let (a, b) = tcp();
    drop(b);
    assert!(matches!(connect(&a, &quick()), Err(Error::Closed | Error::Tcp(_))));
    let (a, _b) = tcp();
    let short = Options { timeout: Duration::from_millis(30), ..quick() };
    assert!(matches!(accept(&a, &short), Err(Error::TimedOut)));
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(matches!(connect(&file, &quick()), Err(Error::Socket(_))));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    assert!(matches!(connect(&listener, &quick()), Err(Error::Socket(_))));
}

/// A peer that sends anything as an answer is an error, not a panic and not a wait.
#[test]
fn frames_that_lie_are_refused() {
    for seed in 0..300 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (a, mut b) = tcp();
        let peer = std::thread::spawn(move || {
            let mut hello = [0; 64];
            b.read_exact(&mut hello).unwrap();
            // The peer's own greeting, as a connecting end's, and something changed in it or in what follows.
            hello[10] = 2;
            let mut second = hello;
            second[9] = rng.u8(1..6);
            second[10] = rng.u8(0..4);
            let mut frames = [hello, second].concat();
            for _ in 0..rng.usize(0..3) {
                let at = rng.usize(..frames.len());
                frames[at] = rng.u8(..);
            }
            let _ = b.write_all(&frames);
        });
        let options = Options { timeout: Duration::from_secs(2), ..quick() };
        assert!(connect(&a, &options).is_err(), "seed {seed}");
        peer.join().unwrap();
    }
}

/// Directory of the profile, as `target/debug`. Where Cargo puts this test below it depends on its version.
fn target() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let has_examples = |directory: &&Path| directory.join("examples/counter").exists();
    test.ancestors().find(has_examples).expect("the examples are built").to_owned()
}

/// The library for C: that which was built with this test, or by `cargo build`.
fn library() -> PathBuf {
    let candidates = ["deps/libthruway_extended.so", "libthruway_extended.so"].map(|name| target().join(name));
    candidates.into_iter().find(|library| library.exists()).expect("the library is built")
}

/// Builds the example in C as its first lines say, of what `cargo xtask install-extended` installs.
fn c_example(prefix: &Path) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let libraries = prefix.join("lib");
    std::fs::create_dir(&libraries).unwrap();
    std::os::unix::fs::symlink(root.join("include"), prefix.join("include")).unwrap();
    for name in ["libthruway_extended.so", "libthruway_extended.so.0"] {
        std::os::unix::fs::symlink(library(), libraries.join(name)).unwrap();
    }
    let template = std::fs::read_to_string(root.join("thruway-extended.pc.in")).unwrap();
    let text = template.replace("@PREFIX@", prefix.to_str().unwrap()).replace("@VERSION@", "1");
    std::fs::write(libraries.join("thruway-extended.pc"), text).unwrap();
    let mut pkg_config = Command::new("pkg-config");
    pkg_config.args(["--cflags", "--libs", "thruway-extended"]).env("PKG_CONFIG_PATH", &libraries);
    let flags = pkg_config.output().expect("pkg-config");
    assert!(flags.status.success(), "{}", String::from_utf8_lossy(&flags.stderr));
    let flags = String::from_utf8(flags.stdout).unwrap();
    let program = prefix.join("counter");
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]);
    // The library has to find AddressSanitizer's functions in the program.
    compiler.args(std::env::var_os("THRUWAY_SANITIZED").map(|_| "-fsanitize=address"));
    compiler.arg(root.join("examples/counter.c")).arg("-o").arg(&program).args(flags.split_whitespace());
    assert!(compiler.status().expect("a C compiler").success());
    program
}

fn run(program: &Path, arguments: &[&str], libraries: &Path) -> Child {
    let mut command = Command::new(program);
    command.args(arguments).env("LD_LIBRARY_PATH", libraries).stdout(Stdio::piped()).spawn().unwrap()
}

/// Servers and clients in both languages.
#[test]
fn the_examples_count_together() {
    let directory = tempfile::tempdir().unwrap();
    let in_c = c_example(directory.path());
    let in_rust = target().join("examples/counter");
    let libraries = directory.path().join("lib");
    for (server, client) in [(&in_c, &in_c), (&in_c, &in_rust), (&in_rust, &in_c), (&in_rust, &in_rust)] {
        let address = |at: &'static str, program: &PathBuf, port: u16| match program == &in_c {
            true => vec![at.to_owned(), port.to_string()],
            false => vec![format!("{at}:{port}")],
        };
        let arguments = |what: &str, program: &PathBuf, port: u16, times: &str| {
            [vec![what.to_owned()], address("127.0.0.1", program, port), vec![times.to_owned()]].concat()
        };
        let start = |program: &PathBuf, arguments: Vec<String>| {
            run(program, &arguments.iter().map(String::as_str).collect::<Vec<_>>(), &libraries)
        };
        let mut serving = start(server, arguments("serve", server, 0, "3"));
        let mut output = BufReader::new(serving.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let port: u16 = line.trim().rsplit(' ').next().unwrap().parse().expect("a port");
        let mut last = 0;
        for _ in 0..3 {
            let counted = start(client, arguments("count", client, port, "500")).wait_with_output().unwrap();
            let text = String::from_utf8(counted.stdout).unwrap();
            assert!(counted.status.success(), "{text}");
            last = text.split(' ').next().unwrap().parse::<u64>().expect("a count");
            assert!(text.trim().ends_with("by shm"), "{text}");
        }
        assert_eq!(last, 1500);
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();
        assert_eq!(rest.trim(), "counted to 1500");
        assert!(serving.wait().unwrap().success());
    }
}
