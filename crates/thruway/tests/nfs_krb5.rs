//! Users who prove who they are, by Debian's MIT Kerberos: what they may, and what those get who only pretend to.

use crate::support;
use std::cell::RefCell;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use support::Lab;
use support::THRUWAY;
use support::disks::{Disks, ok, run};
use thruway_rpc::client::{Client, GssSession, Procedure};
use thruway_rpc::gss::{SEQUENCE_MAX, Service, Window};
use thruway_rpc::message::{AuthError, Incoming, Refusal};
use thruway_rpc::xdr::{Decoder, Encoder};

/// A realm `TEST` with its key distribution centre; ends when dropped.
struct Realm {
    centre: Child,
    lab: Lab,
}

impl Drop for Realm {
    fn drop(&mut self) {
        let _ = self.centre.kill();
        let _ = self.centre.wait();
    }
}

/// Names what the programs and the library are to use, in the environment of a command.
fn environment(command: &mut Command, dir: &Path) {
    command
        .env("KRB5_CONFIG", dir.join("krb5.conf"))
        .env("KRB5_KDC_PROFILE", dir.join("kdc.conf"))
        .env("KRB5CCNAME", format!("FILE:{}", dir.join("tickets").display()))
        .env("KRB5RCACHENAME", format!("file2:{}", dir.join("replays").display()));
}

impl Realm {
    /// A realm in which `daemon` and `stranger` have keys, and of whom the first has a ticket.
    fn start() -> Realm {
        let lab = Lab::new();
        let dir = lab.dir.path();
        let at = |name: &str| dir.join(name).display().to_string();
        let in_realm = |program: &str, args: &[&str]| {
            let mut command = Command::new(program);
            environment(&mut command, dir);
            let out = command.args(args).stdin(Stdio::null()).output().unwrap_or_else(|e| panic!("{program}: {e}"));
            assert!(out.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&out.stderr));
        };
        // Between the choice of a port and its use, another program may take it.
        let centre = (0..10).find_map(|_| {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            fs::write(
                at("krb5.conf"),
                format!(
                    "[libdefaults]\ndefault_realm = TEST\ndns_lookup_kdc = false\ndns_canonicalize_hostname = false\nrdns = false\n\
                     udp_preference_limit = 1\n[realms]\nTEST = {{\nkdc = 127.0.0.1:{port}\n}}\n[domain_realm]\nlocalhost = TEST\n"
                ),
            )
            .unwrap();
            fs::write(
                at("kdc.conf"),
                format!(
                    "[kdcdefaults]\nkdc_listen = \"\"\nkdc_tcp_listen = 127.0.0.1:{port}\n[realms]\nTEST = {{\ndatabase_name = {}\n\
                     key_stash_file = {}\nacl_file = {}\n}}\n",
                    at("principal"),
                    at("stash"),
                    at("acl")
                ),
            )
            .unwrap();
            if !dir.join("principal").exists() {
                in_realm("kdb5_util", &["create", "-s", "-r", "TEST", "-P", "master"]);
                for name in ["nfs/localhost", "host/localhost", "daemon", "stranger"] {
                    in_realm("kadmin.local", &["-q", &format!("addprinc -randkey {name}")]);
                }
                in_realm("kadmin.local", &["-q", &format!("ktadd -k {} nfs/localhost", at("nfs.keytab"))]);
                in_realm("kadmin.local", &["-q", &format!("ktadd -k {} host/localhost", at("host.keytab"))]);
                in_realm("kadmin.local", &["-q", &format!("ktadd -k {} daemon stranger", at("users.keytab"))]);
            }
            let mut command = Command::new("krb5kdc");
            environment(&mut command, dir);
            let mut centre = command.arg("-n").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            loop {
                match centre.try_wait().unwrap() {
                    Some(_) => return None,
                    None if TcpStream::connect(("127.0.0.1", port)).is_ok() => return Some(centre),
                    None => std::thread::yield_now(),
                }
            }
        });
        in_realm("kinit", &["-k", "-t", &at("users.keytab"), "daemon"]);
        Realm { centre: centre.expect("a key distribution centre starts"), lab }
    }
}

/// Runs this test again, with the environment of a realm: the library reads it when it is used first.
fn in_a_realm(test: &str) -> bool {
    if std::env::var_os("THRUWAY_TEST_REALM").is_some() {
        return true;
    }
    let realm = Realm::start();
    let mut again = Command::new(std::env::current_exe().unwrap());
    environment(&mut again, realm.lab.dir.path());
    let test = format!("nfs_krb5::{test}");
    again.args([&test, "--exact", "--nocapture"]).env("THRUWAY_TEST_REALM", realm.lab.dir.path());
    let done = again.output().unwrap();
    let output = String::from_utf8_lossy(&done.stdout);
    assert!(
        done.status.success() && output.contains("1 passed"),
        "{output}\n{}",
        String::from_utf8_lossy(&done.stderr)
    );
    false
}

/// A daemon that shares memory as `proven`, to users who prove who they are, and as `open`.
fn serve() -> (Disks, SocketAddr) {
    let realm = std::env::var("THRUWAY_TEST_REALM").unwrap();
    let (keytab, state) = (format!("{realm}/nfs.keytab"), format!("{realm}/state"));
    let shares = ["--share", "proven=mem:64M,squash=none,sec=krb5p:krb5i", "--share", "open=mem:1M"];
    let rest = ["--quiet", "--nfs", "127.0.0.1:0", "--nfs-keytab", &keytab, "--state", &state];
    let daemon = Disks::serve(&[&shares[..], &rest].concat());
    let at = daemon.at("nfs").parse().unwrap();
    (daemon, at)
}

#[test]
fn users_get_what_they_may_when_they_prove_who_they_are() {
    if !in_a_realm("users_get_what_they_may_when_they_prove_who_they_are") {
        return;
    }
    let (_daemon, at) = serve();
    let port = at.port();
    let ls = |sec: &str, share: &str| run(THRUWAY, &["ls", "--sec", sec, &format!("nfs://localhost:{port}/{share}")]);
    for sec in ["krb5i", "krb5p"] {
        let listed = ls(sec, "proven");
        assert!(listed.status.success(), "{sec}: {}", String::from_utf8_lossy(&listed.stderr));
    }
    // What is signed less than the share wants, and not at all.
    for sec in ["sys", "krb5"] {
        let said = String::from_utf8_lossy(&ls(sec, "proven").stderr).into_owned();
        assert!(said.contains("NFS4ERR_WRONGSEC"), "{sec}: {said}");
    }
    assert!(ls("sys", "open").status.success() && !ls("krb5p", "open").status.success());
    // The root of all shares is everybody's.
    for sec in ["sys", "krb5", "krb5p"] {
        let names = String::from_utf8_lossy(&ls(sec, "").stdout).into_owned();
        assert!(names.contains("open") && names.contains("proven"), "{sec}: {names}");
    }
    for (version, sec) in [("3", "krb5i"), ("3", "krb5p"), ("4.1", "krb5i"), ("4.1", "krb5p")] {
        let options =
            ["--vers", version, "--sec", sec, "--op", "read,write,create", "--seconds", "0.2", "--size", "256K"];
        let server = ["--connect", &format!("localhost:{port}"), "--share", "proven", "--file-size", "4M"];
        let rows = ok(THRUWAY, &[&["bench", "nfs", "--json"], &server[..], &options].concat());
        let rows: serde_json::Value = serde_json::from_str(&rows).unwrap();
        assert!(rows.as_array().unwrap().iter().all(|row| row["operations"].as_u64() > Some(0)), "{rows}");
    }
    // Without a ticket.
    let none = Command::new(THRUWAY)
        .args(["ls", "--sec", "krb5p", &format!("nfs://localhost:{port}/proven")])
        .env("KRB5CCNAME", "FILE:/nonexistent/tickets")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&none.stderr).into_owned();
    assert!(!none.status.success() && said.contains("Kerberos"), "{said}");
    // Another host's service, of which there is no key.
    let other = run(THRUWAY, &["ls", "--sec", "krb5p", &format!("nfs://127.0.0.1:{port}/proven")]);
    assert!(!other.status.success());
}

#[test]
fn a_daemon_says_what_is_wrong_with_its_keys() {
    if !in_a_realm("a_daemon_says_what_is_wrong_with_its_keys") {
        return;
    }
    let realm = std::env::var("THRUWAY_TEST_REALM").unwrap();
    let refused = |share: &str, options: &[&str]| {
        let state = format!("{realm}/other");
        let args = ["serve", "--quiet", "--share", share, "--nfs", "127.0.0.1:0", "--state", &state];
        let out = run(THRUWAY, &[&args[..], options].concat());
        assert!(!out.status.success());
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    let keytab = |name: &str| format!("{realm}/{name}");
    let proven = "m=mem:1M,sec=krb5p";
    let said = refused(proven, &[]);
    assert!(said.contains("sec=krb5p requires --nfs-keytab"), "{said}");
    let said = refused("m=mem:1M", &["--nfs-keytab", &keytab("nfs.keytab")]);
    assert!(said.contains("without effect"), "{said}");
    let said = refused("m=mem:1M,sec=krb6", &[]);
    assert!(said.contains("'krb6': unknown security flavor"), "{said}");
    for wrong in ["none.keytab", "host.keytab", "krb5.conf"] {
        let said = refused(proven, &["--nfs-keytab", &keytab(wrong)]);
        assert!(said.contains(wrong) && said.len() > 40, "{said}");
    }
    // Who proves who calls may come from anywhere.
    let state = format!("{realm}/third");
    let keytab = keytab("nfs.keytab");
    let options = ["--nfs", "0.0.0.0:0", "--nfs-keytab", &keytab, "--state", &state];
    drop(Disks::serve(&[&["--quiet", "--share", proven], &options[..]].concat()));
    let said = refused("m=mem:1M,sec=krb5p:sys", &["--nfs", "0.0.0.0:0", "--nfs-keytab", &keytab]);
    assert!(said.contains("refusing to serve NFS"), "{said}");
}

const NULL: Procedure = Procedure { program: 100_003, version: 4, procedure: 0 };
const COMPOUND: Procedure = Procedure { procedure: 1, ..NULL };

/// A connection by which whatever one likes can be said.
struct Raw {
    stream: TcpStream,
    next: u32,
}

/// What came back: results, or why there are none.
#[derive(Debug, PartialEq)]
enum Said {
    Results,
    Refused(Refusal),
}

impl Raw {
    fn connect(at: SocketAddr) -> Raw {
        let stream = TcpStream::connect(at).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Raw { stream, next: 1 }
    }

    fn send(&mut self, message: &[u8]) {
        let marker = (0x8000_0000 | message.len() as u32).to_be_bytes();
        self.stream.write_all(&[&marker[..], message].concat()).unwrap();
    }

    fn receive(&mut self) -> (u32, Said) {
        let mut marker = [0; 4];
        self.stream.read_exact(&mut marker).expect("a reply");
        let mut reply = vec![0; (u32::from_be_bytes(marker) & 0x7fff_ffff) as usize];
        self.stream.read_exact(&mut reply).unwrap();
        match Incoming::decode(&mut Decoder::new(&reply)).unwrap() {
            Incoming::Reply(header) => (header.xid, header.refusal.map_or(Said::Results, Said::Refused)),
            other => panic!("{other:?}"),
        }
    }

    /// The reply to a message with this number, which is the next that comes.
    fn ask(&mut self, xid: u32, message: &[u8]) -> Said {
        self.send(message);
        let (replied, said) = self.receive();
        assert_eq!(replied, xid);
        said
    }

    fn xid(&mut self) -> u32 {
        self.next += 1;
        self.next
    }
}

/// A compound without operations.
fn nothing() -> Encoder {
    let mut out = Encoder::new();
    [0, 1, 0].into_iter().for_each(|word: u32| out.u32(word));
    out
}

fn local<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test)
}

async fn session(at: SocketAddr, service: Service) -> GssSession {
    let client = Client::connect(at, Duration::from_secs(60)).await.unwrap();
    GssSession::begin(&client, NULL, "nfs@localhost", service).await.unwrap()
}

#[test]
fn what_is_not_as_it_was_sent_is_not_done() {
    if !in_a_realm("what_is_not_as_it_was_sent_is_not_done") {
        return;
    }
    let (_daemon, at) = serve();
    let credential = Said::Refused(Refusal::Auth(AuthError::GssCredentialProblem));
    let garbage = Said::Refused(Refusal::GarbageArguments);
    for service in [Service::None, Service::Integrity, Service::Privacy] {
        let session = local(session(at, service));
        let raw = RefCell::new(Raw::connect(at));
        let ask = |xid: u32, message: &[u8]| raw.borrow_mut().ask(xid, message);
        let call = |sequence: u32| {
            let xid = raw.borrow_mut().xid();
            (xid, session.protect(xid, COMPOUND, sequence, nothing()).unwrap().to_bytes())
        };
        let (xid, message) = call(10);
        assert_eq!(ask(xid, &message), Said::Results, "{service}");

        // A replay is not answered, and neither is a number from before the window; those within it are, in any order.
        raw.borrow_mut().send(&message);
        let (xid, message) = call(9);
        assert_eq!(ask(xid, &message), Said::Results, "what comes is the reply to the next");
        let (xid, message) = call(10 + 2 * Window::SIZE);
        assert_eq!(ask(xid, &message), Said::Results);
        let old = call(10 + Window::SIZE);
        raw.borrow_mut().send(&old.1);
        let (xid, message) = call(11 + Window::SIZE);
        assert_eq!(ask(xid, &message), Said::Results, "the oldest in the window");

        // Each byte of what is signed or sealed counts.
        let mut sequence = 10_000;
        let (_, sample) = call(sequence);
        for at in (0..sample.len()).step_by(3) {
            sequence += 1;
            let (xid, mut message) = call(sequence);
            message[at] ^= 0x40;
            let xid = if at < 4 { u32::from_be_bytes(*message.first_chunk().unwrap()) } else { xid };
            // Not those that say what kind of message it is, of which program, and how long the credential and the verifier are.
            if (4..20).contains(&at) || (24..32).contains(&at) || (68..76).contains(&at) {
                continue;
            }
            let said = ask(xid, &message);
            let has_arguments_in_clear = service == Service::None && at >= sample.len() - 12;
            assert!(matches!(said, Said::Refused(_)) || has_arguments_in_clear, "byte {at} of {service}: {said:?}");
        }
        // The arguments of another call, which are signed as well.
        if service != Service::None {
            let ((_, one), (xid, two)) = (call(20_001), call(20_002));
            assert_eq!(one.len(), two.len());
            // Behind the credential and the verifier.
            let arguments = 8 * 4 + 36 + 8 + 28;
            assert_eq!(ask(xid, &[&two[..arguments], &one[arguments..]].concat()), garbage, "{service}");
        }
        // A number beyond all: the client is to make another context.
        let (xid, message) = call(SEQUENCE_MAX);
        assert_eq!(ask(xid, &message), Said::Refused(Refusal::Auth(AuthError::GssContextProblem)));
        // A token that proves nothing, and a context that nobody has.
        let (xid, mut message) = call(20_003);
        message[8 * 4 + 20] ^= 1;
        assert_eq!(ask(xid, &message), credential);
        let (xid, message) = call(20_004);
        assert_eq!(ask(xid, &message), Said::Results, "nothing of that has hurt");
    }
}

#[test]
fn one_user_makes_as_many_contexts_as_it_likes_and_keeps_the_last() {
    if !in_a_realm("one_user_makes_as_many_contexts_as_it_likes_and_keeps_the_last") {
        return;
    }
    /// Contexts that a principal has at a time.
    const OF_PRINCIPAL_MAX: usize = 1024;
    let (_daemon, at) = serve();
    let mut raw = Raw::connect(at);
    let mut ask = |session: &GssSession, sequence| {
        let xid = raw.xid();
        let message = session.protect(xid, COMPOUND, sequence, nothing()).unwrap().to_bytes();
        raw.ask(xid, &message)
    };
    local(async {
        let client = Client::connect(at, Duration::from_secs(60)).await.unwrap();
        let mut sessions = Vec::new();
        for _ in 0..OF_PRINCIPAL_MAX + 2 {
            sessions.push(GssSession::begin(&client, NULL, "nfs@localhost", Service::None).await.unwrap());
            // The first is in use all the time.
            assert_eq!(ask(&sessions[0], sessions.len() as u32), Said::Results);
        }
        let problem = Said::Refused(Refusal::Auth(AuthError::GssCredentialProblem));
        assert_eq!(ask(&sessions[1], 1), problem, "that which was used longest ago is gone");
        assert_eq!(ask(&sessions[OF_PRINCIPAL_MAX + 1], 1), Said::Results);
    });
}

#[test]
fn nonsense_makes_no_context() {
    if !in_a_realm("nonsense_makes_no_context") {
        return;
    }
    let (_daemon, at) = serve();
    let mut raw = Raw::connect(at);
    // The header of a call that makes a context (RFC 2203, section 5.2.2), and a token.
    let mut init = |action: u32, handle: &[u8], token: &[u8]| {
        let xid = raw.xid();
        let mut credential = Encoder::new();
        [1, action, 0, 1].into_iter().for_each(|word| credential.u32(word));
        credential.opaque(handle);
        let mut out = Encoder::new();
        [xid, 0, 2, 100_003, 4, 0, 6].into_iter().for_each(|word| out.u32(word));
        out.opaque(&credential.to_bytes());
        [0, 0].into_iter().for_each(|word| out.u32(word));
        out.opaque(token);
        let message = out.to_bytes();
        raw.ask(xid, &message)
    };
    // The results say so.
    for token in [&b""[..], b"nonsense", &[0x60; 3000], &[0; 65_536]] {
        assert_eq!(init(1, b"", token), Said::Results);
    }
    assert_eq!(init(1, b"", &[0; 65_540]), Said::Refused(Refusal::GarbageArguments));
    assert_eq!(init(2, b"x", b"token"), Said::Refused(Refusal::Auth(AuthError::GssCredentialProblem)));
    assert_eq!(init(4, b"", b""), Said::Refused(Refusal::Auth(AuthError::BadCredential)));
    assert_eq!(init(0, &[0; 16], b""), Said::Refused(Refusal::Auth(AuthError::GssCredentialProblem)));
    assert_eq!(init(3, &[0; 16], b""), Said::Refused(Refusal::Auth(AuthError::GssCredentialProblem)));
}
