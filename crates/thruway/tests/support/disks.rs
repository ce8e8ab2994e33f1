//! A daemon that serves disks, and the programs that use them.
#![allow(dead_code)]

use super::{Lab, THRUWAY, caches_of};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// A daemon that serves disks; killed when dropped.
pub(crate) struct Disks {
    pub child: Child,
    pub announced: serde_json::Value,
}

impl Disks {
    pub(crate) fn serve(args: &[&str]) -> Disks {
        Disks::serve_by(&mut Command::new(THRUWAY), args)
    }

    /// As [`Disks::serve`]; the command ends with the program.
    pub(crate) fn serve_by(command: &mut Command, args: &[&str]) -> Disks {
        let mut child = command.args(["serve", "--json"]).args(args).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        Disks { child, announced: serde_json::from_str(&line).expect("the daemon says where it listens") }
    }

    pub(crate) fn at(&self, protocol: &str) -> String {
        self.announced[protocol][0].as_str().unwrap().to_string()
    }

    pub(crate) fn nbd(&self, export: &str) -> String {
        format!("nbd://{}/{export}", self.at("nbd"))
    }

    pub(crate) fn stop(mut self) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        let kept = caches_of(self.child.id());
        let _ = self.child.kill();
        let _ = self.child.wait();
        // What nobody will come back for.
        kept.iter().for_each(|file| drop(fs::remove_file(file)));
    }
}

pub(crate) fn run(program: &str, args: &[&str]) -> Output {
    Command::new(program).args(args).stdin(Stdio::null()).output().unwrap_or_else(|e| panic!("{program}: {e}"))
}

/// Runs a program that must succeed. Returns its output.
pub(crate) fn ok(program: &str, args: &[&str]) -> String {
    let output = run(program, args);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{program} {args:?}\n{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// A script for libnbd's Python binding, with the URI of the export as its argument.
pub(crate) fn libnbd(uri: &str, script: &str) -> String {
    let script = format!("import nbd, sys, errno\nh = nbd.NBD()\nuri = sys.argv[1]\n{script}");
    ok("/usr/bin/python3", &["-c", &script, uri])
}

/// A file of 40 MiB, half of it bytes that cannot be guessed, half of it a hole.
pub(crate) fn image(lab: &Lab, name: &str) -> PathBuf {
    let path = lab.path(name);
    let mut bytes = vec![0; 20 << 20];
    fs::File::open("/dev/urandom").unwrap().read_exact(&mut bytes).unwrap();
    let mut file = fs::File::create(&path).unwrap();
    file.write_all(&bytes).unwrap();
    file.set_len(40 << 20).unwrap();
    path
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A loop device over a file; gone when dropped.
pub(crate) struct LoopDevice(pub String);

impl LoopDevice {
    pub(crate) fn over(file: &Path) -> LoopDevice {
        LoopDevice(ok("losetup", &["--find", "--show", text(file)]).trim().to_string())
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        run("losetup", &["--detach", &self.0]);
    }
}

/// A directory with an authority (`ca-cert.pem`), the key and certificate of a server on this host (`server-key.pem`,
/// `server-cert.pem`), and those of clients with these DNS names (`NAME-key.pem`, `NAME-cert.pem`).
pub(crate) fn certificates(lab: &Lab, clients: &[&str]) -> PathBuf {
    let dir = lab.mkdir("pki");
    let file = |name: String| text(&dir.join(name)).to_string();
    let make = |name: &str, args: &[&str]| {
        let (key, out) = (file(format!("{name}-key.pem")), file(format!("{name}-cert.pem")));
        let subject = format!("/CN={name}");
        let mut all = vec!["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
        all.extend(["-keyout", &key, "-out", &out, "-days", "30", "-subj", &subject]);
        all.extend(args);
        ok("openssl", &all);
    };
    make("ca", &["-addext", "basicConstraints=critical,CA:TRUE"]);
    let (ca, ca_key) = (file("ca-cert.pem".into()), file("ca-key.pem".into()));
    let signed = ["-CA", &ca, "-CAkey", &ca_key, "-addext", "basicConstraints=CA:FALSE"];
    make("server", &[&signed[..], &["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]].concat());
    for name in clients {
        make(name, &[&signed[..], &["-addext", &format!("subjectAltName=DNS:{name}")]].concat());
    }
    dir
}
