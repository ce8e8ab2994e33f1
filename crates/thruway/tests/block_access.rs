//! Who may use a disk: certificates, secrets, names, users of the machine.

use crate::support;
use std::collections::VecDeque;
use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use support::disks::{Disks, certificates, libnbd, ok, run, text};
use support::{Lab, THRUWAY};

#[test]
fn tls_lets_in_only_clients_with_a_certificate() {
    let lab = Lab::new();
    let dir = certificates(&lab, &["alice.example"]);
    let file = |name: &str| text(&dir.join(name)).to_string();
    let ca = file("ca-cert.pem");
    fs::rename(dir.join("alice.example-cert.pem"), dir.join("client-cert.pem")).unwrap();
    fs::rename(dir.join("alice.example-key.pem"), dir.join("client-key.pem")).unwrap();
    let (cert, key) = (file("server-cert.pem"), file("server-key.pem"));
    let tls = ["--tls-cert", &cert, "--tls-key", &key, "--tls-ca", &ca];
    let disks = Disks::serve(&[&["--block", "m=mem:4M", "--nbd", "127.0.0.1:0"][..], &tls].concat());
    let at = disks.at("nbd");
    let uri = format!("nbds://{at}/m?tls-certificates={}", text(&dir));
    // libnbd finds its certificate by name in the directory.
    libnbd(
        &uri,
        "h.set_uri_allow_local_file(True)\nh.connect_uri(uri)\nh.pwrite(b'secret' * 100000, 77)\n\
         assert h.pread(600000, 77) == b'secret' * 100000\nh.shutdown()\n",
    );
    // What is another's is neither shown nor served; what is its own is.
    let blocks = ["--block", "hers=mem:1M,allow=carol|bob.example", "--block", "his=mem:2M,allow=alice.example"];
    let named = Disks::serve(&[&blocks[..], &["--nbd", "127.0.0.1:0"], &tls].concat());
    let by_name = |name: &str| format!("nbds://{}/{name}?tls-certificates={}", named.at("nbd"), text(&dir));
    libnbd(
        &by_name(""),
        "h.set_uri_allow_local_file(True)\nh.set_opt_mode(True)\nh.connect_uri(uri)\nnames = []\n\
         h.opt_list(lambda name, what: names.append(name))\nassert names == ['his'], names\nh.opt_go()\n\
         assert h.get_size() == 2 << 20\n",
    );
    let refused = "h.set_uri_allow_local_file(True)\n\
        try: h.connect_uri(uri)\n\
        except nbd.Error: pass\n\
        else: raise AssertionError('it should be refused')\n";
    libnbd(&by_name("hers"), refused);
    libnbd(&format!("nbd://{at}/m"), refused);
    fs::remove_file(dir.join("client-cert.pem")).unwrap();
    fs::remove_file(dir.join("client-key.pem")).unwrap();
    libnbd(&uri, refused);
}

#[test]
fn another_user_of_the_machine_is_not_served_unless_everybody_is() {
    let serve = |more: &[&str]| {
        Disks::serve(&[&["--block", "m=mem:1M", "--nbd", "127.0.0.1:0", "--iscsi", "127.0.0.1:0"][..], more].concat())
    };
    let as_nobody = |program: &str, args: &[&str]| {
        let user = ["--reuid=65534", "--regid=65534", "--clear-groups", program];
        run("setpriv", &[&user[..], args].concat()).status.success()
    };
    for (more, expected) in [(&[][..], false), (&["--anonymous"], true)] {
        let disks = serve(more);
        let url = format!("iscsi://{}/iqn.2026-11.org.thruway:m/0", disks.at("iscsi"));
        assert_eq!(as_nobody("nbdinfo", &["--size", &disks.nbd("m")]), expected, "NBD {more:?}");
        assert_eq!(as_nobody("iscsi-inq", &[&url]), expected, "iSCSI {more:?}");
        ok("nbdinfo", &["--size", &disks.nbd("m")]);
        ok("iscsi-inq", &[&url]);
    }
}

#[test]
fn what_could_be_used_by_anybody_is_not_served() {
    for (args, named) in [
        (&["--nbd", "0.0.0.0:0"][..], "--tls-ca"),
        (&["--iscsi", "0.0.0.0:0"], "--chap"),
        (&["--iser", "0.0.0.0:0"], "--chap"),
        (&["--nbd", "127.0.0.1:0", "--block", "m=mem:2M"], "two block exports"),
    ] {
        let output = run(THRUWAY, &[&["serve", "--block", "m=mem:1M"], args].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(named), "{args:?}: {said}");
    }
}

#[test]
fn chap_lets_in_only_who_knows_the_secret() {
    let lab = Lab::new();
    let secrets = lab.path("chap");
    fs::write(&secrets, "initiator alice wonderland-12\ntarget server looking-glass\n").unwrap();
    let disks = Disks::serve(&["--block", "m=mem:1M", "--iscsi", "127.0.0.1:0", "--chap", text(&secrets)]);
    let at = disks.at("iscsi");
    let login = |who: &str| run("iscsi-inq", &[&format!("iscsi://{who}{at}/iqn.2026-11.org.thruway:m/0")]);
    assert!(login("alice%wonderland-12@").status.success());
    assert!(!login("alice%wonderland-13@").status.success());
    assert!(!login("bob%wonderland-12@").status.success());
    assert!(!login("").status.success());
}

#[test]
fn a_secret_opens_its_owners_disks_and_names_only() {
    let lab = Lab::new();
    let secrets = lab.path("chap");
    fs::write(&secrets, "initiator alice wonderland-12 iqn.a\ninitiator bob looking-glass-1\n").unwrap();
    let blocks = ["--block", "hers=mem:1M,allow=alice", "--block", "his=mem:1M,allow=bob", "--block", "m=mem:1M"];
    let disks = Disks::serve(&[&blocks[..], &["--iscsi", "127.0.0.1:0", "--chap", text(&secrets)]].concat());
    let at = disks.at("iscsi");
    let login = |who: &str, iqn: &str, disk: &str| {
        run("iscsi-inq", &["-i", iqn, &format!("iscsi://{who}@{at}/iqn.2026-11.org.thruway:{disk}/0")]).status.success()
    };
    let (alice, bob) = ("alice%wonderland-12", "bob%looking-glass-1");
    for (who, iqn, disk, expected) in [
        (alice, "iqn.a", "hers", true),
        (alice, "iqn.a", "m", true),
        (alice, "iqn.a", "his", false),
        (alice, "iqn.other", "hers", false),
        (bob, "iqn.a", "his", false),
        (bob, "iqn.b", "his", true),
        (bob, "iqn.b", "hers", false),
        (bob, "alice", "hers", false),
    ] {
        assert_eq!(login(who, iqn, disk), expected, "{who} as {iqn} at {disk}");
    }
    let seen = ok("iscsi-ls", &["-i", "iqn.b", &format!("iscsi://{bob}@{at}")]);
    assert!(seen.contains(":his") && seen.contains(":m") && !seen.contains(":hers"), "{seen}");
}

#[test]
fn only_initiators_on_the_list_are_let_in() {
    let disks =
        Disks::serve(&["--block", "m=mem:1M", "--iscsi", "127.0.0.1:0", "--initiator", "iqn.2026-11.org.example:good"]);
    let url = format!("iscsi://{}/iqn.2026-11.org.thruway:m/0", disks.at("iscsi"));
    assert!(run("iscsi-inq", &["-i", "iqn.2026-11.org.example:good", &url]).status.success());
    assert!(!run("iscsi-inq", &["-i", "iqn.2026-11.org.example:bad", &url]).status.success());
}

#[test]
fn connections_in_set_up_leave_descriptors_to_the_others() {
    let mut limited = Command::new("prlimit");
    limited.args(["--nofile=512:512", THRUWAY]);
    let options = ["--block", "m=mem:1M", "--nbd", "127.0.0.1:0", "--iser", "127.0.0.1:0"];
    let disks = Disks::serve_by(&mut limited, &options);
    // More than there are descriptors, again and again, that begin a request and never end it.
    let (iser, over) = (disks.at("iser"), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut unfinished = VecDeque::new();
            while !over.load(Ordering::Relaxed) {
                let Ok(mut stream) = TcpStream::connect(&iser) else { continue };
                let _ = stream.write_all(b"MPA ");
                unfinished.push_back(stream);
                if unfinished.len() > 2000 {
                    unfinished.pop_front();
                    // This is about descriptors, and not about who gets the processor.
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        let failed = (0..20)
            .map(|_| run("timeout", &["60", "nbdinfo", &disks.nbd("m")]))
            .find(|listed| !listed.status.success());
        over.store(true, Ordering::Relaxed);
        assert!(failed.is_none(), "{failed:?}");
    });
}

/// A peer that is refused again and again does not fill the disk with what is logged of it.
#[test]
fn lines_about_peers_are_bounded() {
    let lab = Lab::new();
    let log = lab.path("log");
    let mut logging = Command::new(THRUWAY);
    logging.stderr(std::fs::File::create(&log).unwrap());
    let disks = Disks::serve_by(&mut logging, &["-v", "--block", "m=mem:1M", "--nbd", "127.0.0.1:0"]);
    let is_bounded = || fs::read_to_string(&log).unwrap().contains("lines like the last in");
    for _ in 0..10_000 {
        if is_bounded() {
            break;
        }
        let mut stream = TcpStream::connect(disks.at("nbd")).unwrap();
        stream.write_all(&[0xff; 64]).unwrap();
        // Until the daemon has closed it.
        let _ = std::io::copy(&mut stream, &mut std::io::sink());
    }
    assert!(is_bounded());
    disks.stop();
}
