//! Disks for a long time under everything at once: delays, failing storage, clients that leave in the middle, a daemon
//! that is killed again and again. Nothing that a client was promised may be missing, nothing wrong may come back.
//!
//! `THRUWAY_SOAK_SECONDS` says how long (20 if it is not set).

use crate::support;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support::nbd::{FLUSH, FUA, Nbd, READ, WRITE};
use support::{Lab, THRUWAY, caches_of};

const SECTOR: usize = 4096;
const SIZE: u64 = 32 << 20;
const CLIENTS: u64 = 3;

fn duration() -> Duration {
    let seconds = std::env::var("THRUWAY_SOAK_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(20);
    Duration::from_secs(seconds)
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

/// The daemon, which comes and goes.
struct Disks {
    args: Vec<String>,
    address: Mutex<String>,
    child: Mutex<Option<Child>>,
    /// Goes up before each end of the daemon.
    lives: AtomicU64,
    over: AtomicBool,
}

impl Disks {
    fn start(args: Vec<String>) -> Arc<Disks> {
        let disks = Arc::new(Disks {
            args,
            address: Mutex::new("127.0.0.1:0".into()),
            child: Mutex::new(None),
            lives: AtomicU64::new(0),
            over: AtomicBool::new(false),
        });
        disks.again();
        disks
    }

    fn again(&self) {
        let mut address = self.address.lock().unwrap();
        let mut child = Command::new(THRUWAY)
            .args(["serve", "--json", "--nbd", &address])
            .args(&self.args)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let said: serde_json::Value = serde_json::from_str(&line).expect("the daemon starts");
        *address = said["nbd"][0].as_str().unwrap().into();
        *self.child.lock().unwrap() = Some(child);
    }

    fn kill(&self) {
        self.lives.fetch_add(1, Ordering::SeqCst);
        let mut child = self.child.lock().unwrap().take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.lock().unwrap().take() {
            let kept = caches_of(child.id());
            let _ = child.kill();
            let _ = child.wait();
            kept.iter().for_each(|file| drop(fs::remove_file(file)));
        }
    }
}

fn fill(number: u64, version: u64) -> Vec<u8> {
    let mark = if version == 0 { 0 } else { version << 20 | number };
    mark.to_le_bytes().repeat(SECTOR / 8)
}

fn version(sector: &[u8], number: u64) -> u64 {
    let mark = u64::from_le_bytes(sector[..8].try_into().unwrap());
    assert!(sector.chunks(8).all(|word| word == mark.to_le_bytes()), "sector {number} is torn");
    assert!(mark == 0 || mark & 0xfffff == number, "sector {number} holds another's bytes: {mark:x}");
    mark >> 20
}

/// What is known of a sector.
#[derive(Clone, Debug)]
struct Known {
    /// Versions that a read may show.
    now: BTreeSet<u64>,
    /// Versions that it may show when the daemon has been killed.
    later: BTreeSet<u64>,
    /// A write was left to itself: it may still be done, at any time while the daemon lives.
    loose: bool,
}

impl Default for Known {
    fn default() -> Known {
        Known { now: [0].into(), later: [0].into(), loose: false }
    }
}

#[derive(Default, Debug)]
struct Counts {
    writes: u64,
    reads: u64,
    failed: u64,
    flushes: u64,
    left: u64,
    lost: u64,
}

/// A client, whose sectors are nobody else's.
struct Client {
    disks: Arc<Disks>,
    export: &'static str,
    id: u64,
    life: u64,
    nbd: Option<Nbd>,
    random: Random,
    known: HashMap<u64, Known>,
    last: u64,
    counts: Counts,
}

impl Client {
    /// A connection to the daemon, which may have to be waited for.
    fn nbd(&mut self) -> &mut Nbd {
        while self.nbd.is_none() {
            let life = self.disks.lives.load(Ordering::SeqCst);
            let address = self.disks.address.lock().unwrap().clone();
            match Nbd::connect(&address, self.export) {
                Ok(nbd) => {
                    self.nbd = Some(nbd);
                    if life > self.life {
                        self.after_a_kill(life);
                    }
                }
                Err(_) => std::thread::yield_now(),
            }
        }
        self.nbd.as_mut().unwrap()
    }

    fn after_a_kill(&mut self, life: u64) {
        self.life = life;
        for known in self.known.values_mut() {
            known.now = known.later.clone();
            known.loose = false;
        }
    }

    /// The connection has ended: only the daemon's death may do that.
    fn lost(&mut self) {
        self.nbd = None;
        self.counts.lost += 1;
        let life = self.disks.lives.load(Ordering::SeqCst);
        assert!(life > self.life, "a connection is lost though the daemon lives");
        self.after_a_kill(life);
    }

    fn step(&mut self) {
        let number = self.random.below(SIZE / SECTOR as u64 / CLIENTS) * CLIENTS + self.id;
        let at = number * SECTOR as u64;
        match self.random.below(20) {
            0..=8 => self.write(number, at),
            9 => self.flush(),
            10 if self.random.below(20) == 0 => self.leave(number, at),
            _ => self.read(number, at),
        }
    }

    fn write(&mut self, number: u64, at: u64) {
        self.nbd();
        if self.known.entry(number).or_default().loose {
            return;
        }
        self.last += 1;
        let version = self.last;
        let durable = if self.random.below(10) == 0 { FUA } else { 0 };
        let result = self.nbd().ask((durable, WRITE), at, SECTOR as u32, &fill(number, version));
        self.counts.writes += 1;
        let known = self.known.get_mut(&number).unwrap();
        known.later.insert(version);
        match result {
            Ok(Some(_)) => {
                // It is the machine that may forget what was not flushed, not the daemon.
                known.now = [version].into();
                known.later = [version].into();
            }
            Ok(None) => {
                self.counts.failed += 1;
                known.now.insert(version);
            }
            Err(_) => self.lost(),
        }
    }

    fn flush(&mut self) {
        match self.nbd().ask((0, FLUSH), 0, 0, &[]) {
            Ok(Some(_)) => {
                self.counts.flushes += 1;
                self.known.values_mut().filter(|k| !k.loose).for_each(|known| known.later = known.now.clone());
            }
            Ok(None) => self.counts.failed += 1,
            Err(_) => self.lost(),
        }
    }

    /// Reads some sectors, of which the own ones are judged.
    fn read(&mut self, number: u64, at: u64) {
        let count = 1 + self.random.below(32).min(SIZE / SECTOR as u64 - number - 1);
        match self.nbd().ask((0, READ), at, count as u32 * SECTOR as u32, &[]) {
            Ok(Some(found)) => {
                self.counts.reads += 1;
                for (i, sector) in found.chunks(SECTOR).enumerate() {
                    self.judge(number + i as u64, sector);
                }
            }
            Ok(None) => self.counts.failed += 1,
            Err(_) => self.lost(),
        }
    }

    fn judge(&mut self, number: u64, sector: &[u8]) {
        let version = version(sector, number);
        if number % CLIENTS != self.id {
            return;
        }
        let known = self.known.entry(number).or_default();
        assert!(known.now.contains(&version), "{}: sector {number} is {version}, not {known:?}", self.export);
        if !known.loose {
            known.now = [version].into();
        }
    }

    /// Leaves in the middle of a write.
    fn leave(&mut self, number: u64, at: u64) {
        self.nbd();
        self.last += 1;
        let version = self.last;
        let data = fill(number, version);
        // All of it or a part: of a part nothing may be written.
        let whole = self.random.below(2) == 0;
        let data = if whole { &data[..] } else { &data[..SECTOR / 2] };
        let known = self.known.entry(number).or_default();
        if whole {
            known.now.insert(version);
            known.later.insert(version);
            known.loose = true;
        }
        let _ = self.nbd().send((0, WRITE), at, SECTOR as u32, data);
        self.nbd = None;
        self.counts.left += 1;
    }

    fn run(mut self, stop: Instant) -> Client {
        while Instant::now() < stop && !self.disks.over.load(Ordering::SeqCst) {
            self.step();
        }
        self
    }
}

/// Told to the others when a client has found something wrong.
struct Alarm(Arc<Disks>);

impl Drop for Alarm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.over.store(true, Ordering::SeqCst);
        }
    }
}

#[test]
fn nothing_promised_is_lost_and_nothing_wrong_comes_back() {
    let lab = Lab::new();
    let file = |name: &str| {
        let path = lab.path(name);
        fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
        path.to_str().unwrap().to_string()
    };
    let (a, b, c, d, e) = (file("a"), file("b"), file("c"), file("d"), file("e"));
    let sound = [
        ("back", format!("{a},{}cache=8M:writeback:16K", "@")),
        ("through", format!("{b},mode=direct,{}cache=4M:16K", "@")),
        ("direct", format!("{c},mode=direct,{}", "@")),
        ("stripe", format!("stripe:16K:{d}:{e},{}", "@")),
    ];
    let args = |faults: &str| -> Vec<String> {
        let spec = |(name, text): &(&str, String)| {
            let text = text.replace('@', faults);
            ["--block".to_string(), format!("{name}={}", text.trim_end_matches(','))]
        };
        sound.iter().flat_map(spec).collect()
    };
    let disks = Disks::start(args("fault=0.003,delay=200us/1ms,"));
    let stop = Instant::now() + duration();
    let client = |disks: &Arc<Disks>, export, id, known, life| Client {
        disks: Arc::clone(disks),
        export,
        id,
        life,
        nbd: None,
        random: Random((id + 1) * 0x9e37_79b9 + export.bytes().map(u64::from).sum::<u64>()),
        known,
        last: 0,
        counts: Counts::default(),
    };
    let mut running = Vec::new();
    for (export, _) in &sound {
        for id in 0..CLIENTS {
            let client = client(&disks, export, id, HashMap::new(), 0);
            let alarm = Alarm(Arc::clone(&disks));
            running.push(std::thread::spawn(move || {
                let _alarm = alarm;
                client.run(stop)
            }));
        }
    }
    let mut random = Random(42);
    let mut kills = 0;
    while !disks.over.load(Ordering::SeqCst) {
        let next = Instant::now() + Duration::from_millis(1500 + random.below(4000));
        while Instant::now() < next.min(stop) && !disks.over.load(Ordering::SeqCst) {
            std::thread::park_timeout(Duration::from_millis(50));
        }
        if Instant::now() >= stop {
            break;
        }
        disks.kill();
        kills += 1;
        disks.again();
    }
    let clients: Vec<Client> = running.into_iter().map(|thread| thread.join().expect("a client is content")).collect();
    // Flushed, killed, and looked at through disks that do not fail.
    let ended: Vec<Client> = clients
        .into_iter()
        .map(|mut client| {
            let before = client.counts.flushes;
            while client.counts.flushes == before {
                client.flush();
            }
            eprintln!("{} {}: {:?}", client.export, client.id, client.counts);
            client
        })
        .collect();
    eprintln!("{kills} kills");
    disks.kill();
    let again = Disks::start(args(""));
    for old in ended {
        let known = old.known.into_iter().map(|(n, k)| (n, Known { now: k.later.clone(), ..k })).collect();
        let mut last = client(&again, old.export, old.id, known, 0);
        for number in 0..SIZE / SECTOR as u64 {
            let found = last.nbd().ask((0, READ), number * SECTOR as u64, SECTOR as u32, &[]).unwrap().unwrap();
            last.judge(number, &found);
        }
    }
}

/// fio's own verification, over disks that are slow now and then.
#[test]
fn fio_finds_no_wrong_byte() {
    let lab = Lab::new();
    let path = lab.path("disk");
    fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    let spec = format!("d={},mode=direct,delay=100us/300us,cache=8M:writeback:16K", path.display());
    let disks = Disks::start(vec!["--block".into(), spec]);
    let uri = format!("nbd://{}/d", disks.address.lock().unwrap());
    let stop = Instant::now() + duration();
    // Again and again with other numbers: verified while it is written, fio takes overlapping blocks for wrong.
    let mut seed = 0;
    while Instant::now() < stop {
        seed += 1;
        let output = Command::new("fio")
            .args(["--name=soak", "--ioengine=nbd", "--rw=randwrite", "--bsrange=512-256k", "--bs_unaligned"])
            .args(["--iodepth=16", "--verify=crc32c", "--verify_fatal=1", "--serialize_overlap=1"])
            .arg("--verify_state_save=0")
            .args([format!("--uri={uri}"), format!("--size={SIZE}"), format!("--randseed={seed}")])
            .stdin(Stdio::null())
            .output()
            .expect("fio is installed");
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "seed {seed}: {said}");
    }
    eprintln!("{seed} rounds");
}
