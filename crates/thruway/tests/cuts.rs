//! Sessions of real clients, recorded, and told again to every listener: cut off anywhere, ended in every way that TCP has,
//! and with a byte changed. Whatever comes, the connection ends when its peer has ended it, nothing of it is left, others
//! are served meanwhile, and what was not named is not touched.

use crate::support;
use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support::nbd::{Nbd, READ, WRITE};
use support::{Lab, THRUWAY, noise, thruway};

/// Longest that anything may take: not a matter of speed, but of ever.
const EVER: Duration = Duration::from_secs(60);
/// Bytes of a recorded connection that are told again.
const TOLD_MAX: usize = 6000;

/// A daemon with every listener.
struct Daemon {
    child: std::process::Child,
    announced: serde_json::Value,
    lab: Lab,
}

impl Daemon {
    fn start() -> Daemon {
        let lab = Lab::new();
        let (said, served) = (fs::File::create(lab.path("said")).unwrap(), lab.mkdir("served"));
        let mut command = Command::new(THRUWAY);
        // Requests are in progress when their client ends.
        command.args([
            "serve",
            "--json",
            "--block",
            "m=mem:1M,delay=2ms",
            "--block",
            "other=mem:1M",
            "--nbd",
            "127.0.0.1:0",
        ]);
        command.args(["--iscsi", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--export"]);
        command.arg(support::export("e", &served, ""));
        let mut child = command.stdout(Stdio::piped()).stderr(said).spawn().unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut().unwrap()), &mut line).unwrap();
        let announced =
            serde_json::from_str(&line).unwrap_or_else(|_| panic!("{}", fs::read_to_string(lab.path("said")).unwrap()));
        Daemon { child, announced, lab }
    }

    fn at(&self, protocol: &str) -> String {
        self.announced[protocol][0].as_str().unwrap().to_string()
    }

    /// Descriptors and threads.
    fn holds(&self) -> (usize, usize) {
        let count = |what: &str| fs::read_dir(format!("/proc/{}/{what}", self.child.id())).unwrap().count();
        (count("fd"), count("task"))
    }

    fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    }

    /// Clients as they should be are served, by each protocol.
    fn serves_others(&self) {
        let mut nbd = Nbd::connect(&self.at("nbd"), "other").unwrap();
        assert_eq!(nbd.ask((0, READ), 0, 1 << 20, &[]).unwrap().unwrap(), noise(1 << 20, 1), "touched by a stranger");
        ok(Command::new("iscsi-ls").arg(format!("iscsi://{}/", self.at("iscsi"))));
        ok(thruway(self.lab.dir.path()).arg("ls").arg(format!("tw://{}/e/", self.at("listening"))));
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ok(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A proxy for a server that records the bytes of the clients. Returns its address.
fn recorder(server: String, said: Arc<Mutex<Vec<Vec<u8>>>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut server) = (client.unwrap(), TcpStream::connect(&server).unwrap());
            let number = {
                let mut said = said.lock().unwrap();
                said.push(Vec::new());
                said.len() - 1
            };
            let (mut back, mut to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut back, &mut to_client);
                let _ = to_client.shutdown(Shutdown::Both);
            });
            let said = Arc::clone(&said);
            std::thread::spawn(move || {
                let mut some = [0; 65536];
                while let Ok(len @ 1..) = client.read(&mut some) {
                    said.lock().unwrap()[number].extend(&some[..len]);
                    if server.write_all(&some[..len]).is_err() {
                        break;
                    }
                }
                let _ = server.shutdown(Shutdown::Write);
            });
        }
    });
    address
}

/// What the clients of one session say, each connection.
fn record(server: String, session: impl FnOnce(&str)) -> Vec<Vec<u8>> {
    let said = Arc::default();
    session(&recorder(server, Arc::clone(&said)));
    let mut said = said.lock().unwrap().clone();
    said.retain(|connection| !connection.is_empty());
    said.iter_mut().for_each(|connection| connection.truncate(TOLD_MAX));
    assert!(!said.is_empty());
    said
}

/// How a stranger ends.
#[derive(Debug, Clone, Copy)]
enum End {
    /// It says that nothing more comes, and reads what there is.
    Half,
    /// It closes.
    Closed,
    /// It is gone: whatever is sent to it is answered by a reset, and it sends one.
    Reset,
}

/// Tells something and ends. A server that does not end what its peer has ended fails the test.
fn tell(address: &str, words: &[u8], end: End) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(EVER)).unwrap();
    stream.set_write_timeout(Some(EVER)).unwrap();
    // It may have heard enough before the end.
    let _ = stream.write_all(words);
    match end {
        End::Half => {
            let _ = stream.shutdown(Shutdown::Write);
            let mut some = [0; 65536];
            loop {
                match stream.read(&mut some) {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
                        panic!(
                            "{address} does not end after {} bytes: {:02x?}",
                            words.len(),
                            &words[..words.len().min(600)]
                        );
                    }
                    Err(_) => break,
                }
            }
        }
        End::Closed => {}
        End::Reset => rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap(),
    }
}

/// All lengths at the beginning, where the agreement is, and some behind.
fn places(len: usize) -> impl Iterator<Item = usize> {
    (0..len.min(300)).chain((300..len).step_by(53))
}

#[test]
fn a_session_may_be_cut_anywhere_and_say_anything() {
    let daemon = Daemon::start();
    let mut owner = Nbd::connect(&daemon.at("nbd"), "other").unwrap();
    owner.ask((0, WRITE), 0, 1 << 20, &noise(1 << 20, 1)).unwrap().unwrap();
    drop(owner);
    let nbd = record(daemon.at("nbd"), |address| {
        let script = "import nbd, sys\nh = nbd.NBD()\nh.add_meta_context('base:allocation')\nh.connect_uri(sys.argv[1])\n\
            h.pread(512, 0)\nh.pwrite(b'x' * 700, 512)\nh.flush()\nh.zero(4096, 8192)\nh.trim(4096, 8192)\n\
            h.cache(4096, 0)\nh.block_status(65536, 0, lambda *a: None)\nh.shutdown()\n";
        ok(Command::new("/usr/bin/python3").args(["-c", script, &format!("nbd://{address}/m")]));
    });
    let iscsi = record(daemon.at("iscsi"), |address| {
        let url = format!("iscsi://{address}/iqn.2026-11.org.thruway:m/0");
        for test in ["SCSI.Write10.Simple", "SCSI.Read16.Simple"] {
            // What it finds is not our matter here.
            let _ = Command::new("iscsi-test-cu").args(["-d", "-s", "-n", "-t", test, &url]).output().unwrap();
        }
    });
    let rftp = record(daemon.at("listening"), |address| {
        fs::write(daemon.lab.path("file"), noise(3000, 2)).unwrap();
        let url = format!("tw://{address}/e/");
        ok(thruway(daemon.lab.dir.path()).args(["cp".as_ref(), daemon.lab.path("file").as_os_str(), OsStr::new(&url)]));
    });
    daemon.serves_others();
    let (held, memory) = (daemon.holds(), daemon.memory());

    for (protocol, recorded, connections) in [("nbd", nbd, 1), ("iscsi", iscsi, 4), ("listening", rftp, 2)] {
        let address = daemon.at(protocol);
        for words in recorded.iter().take(connections) {
            // Some who say no more and stay, while all others come and go.
            let stalled: Vec<TcpStream> = (1..=4)
                .map(|part| {
                    let mut stream = TcpStream::connect(&address).unwrap();
                    stream.write_all(&words[..words.len() * part / 5]).unwrap();
                    stream
                })
                .collect();
            for cut in places(words.len()) {
                for end in [End::Half, End::Closed, End::Reset] {
                    tell(&address, &words[..cut], end);
                }
            }
            daemon.serves_others();
            let mut changed = words.clone();
            for place in places(words.len()) {
                for value in [0, 0xff, words[place] ^ 1, words[place] ^ 0x80] {
                    changed[place] = value;
                    tell(&address, &changed, End::Half);
                }
                changed[place] = words[place];
            }
            daemon.serves_others();
            drop(stalled);
        }
    }

    let start = Instant::now();
    loop {
        let holds = daemon.holds();
        if holds.0 <= held.0 && holds.1 <= held.1 {
            break;
        }
        assert!(start.elapsed() < EVER, "{held:?} descriptors and threads before, {holds:?} now");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let now = daemon.memory();
    assert!(now < memory + (128 << 20), "{} MiB more", (now - memory) >> 20);
    let said = fs::read_to_string(daemon.lab.path("said")).unwrap();
    assert!(!said.contains("panicked"), "{said}");
}
