//! Whole jobs on invented machines: processes are killed, power is lost, networks are cut and
//! corrupt, disks fill up, files change in between, and the same job is tried again until it is
//! done. The state machines, the codec, the journal and the order of commits are the real ones;
//! network, storage and scheduling are invented. Every run is a function of its seed.

mod disk;
mod ends;

use crate::sink::journal::Version;
use crate::wire::{BlockHeader, BlockKind, COMPLETION_LEN, Control, Credit};
use disk::Shared;
use ends::{SinkEnd, SourceEnd, check_names, expect};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use thruway_engine::integrity::Algorithm;

const SESSION: u32 = 7;
const BLOCK: usize = 256;
const VERIFY: Algorithm = Algorithm::Xxh3;

type Content = Arc<[u8]>;

pub(super) struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

#[derive(Clone)]
struct SourceFile {
    path: String,
    content: Content,
    mtime: i64,
}

/// The session has failed.
#[derive(Debug)]
struct Failed(#[expect(dead_code, reason = "shown by Debug")] String);

type Write = (Credit, Vec<u8>, [u8; COMPLETION_LEN]);

/// Streams between the two ends: each keeps its order, none keeps step with another.
struct Network {
    to_sink: VecDeque<Vec<u8>>,
    to_source: VecDeque<Vec<u8>>,
    data: Vec<VecDeque<Write>>,
    /// The write with this number is damaged on its way.
    corrupt: Option<u64>,
    rng: Rng,
}

impl Network {
    fn say_to_sink(&mut self, message: &Control) {
        self.to_sink.push_back(message.encode(0));
    }

    fn say_to_source(&mut self, message: &Control) {
        self.to_source.push_back(message.encode(0));
    }

    fn write(&mut self, credit: Credit, mut bytes: Vec<u8>, notice: [u8; COMPLETION_LEN]) {
        if let Some(left) = &mut self.corrupt {
            if *left == 0 {
                let at = self.rng.below(bytes.len() as u64) as usize;
                bytes[at] ^= 1 << self.rng.below(8);
            }
            self.corrupt = left.checked_sub(1);
        }
        let channel = self.rng.below(self.data.len() as u64) as usize;
        self.data[channel].push_back((credit, bytes, notice));
    }
}

/// What the test knows, whoever dies.
#[derive(Default)]
pub(super) struct World {
    /// Ranges recorded by earlier attempts, and in this one.
    before: HashMap<(String, i64), HashSet<(u64, u32)>>,
    now: HashMap<(String, i64), HashSet<(u64, u32)>>,
    finished_before: HashSet<(String, i64)>,
    finished: HashSet<(String, i64)>,
    numbers: HashMap<u64, (String, i64)>,
}

impl World {
    fn begun(&mut self, number: u64, name: &str, version: Version) {
        let file = (name.to_string(), version.mtime.0);
        assert!(!self.finished_before.contains(&file), "{name} was in place and is sent again");
        self.numbers.insert(number, file);
    }

    fn recorded(&mut self, name: &str, version: Version, offset: u64, len: u32) {
        self.now.entry((name.into(), version.mtime.0)).or_default().insert((offset, len));
    }

    fn done(&mut self, name: &str, version: Version) {
        self.finished.insert((name.into(), version.mtime.0));
    }

    fn check_not_sent_before(&self, header: &BlockHeader) {
        if header.kind != BlockKind::Data {
            return;
        }
        if let Some(ranges) = self.numbers.get(&header.file).and_then(|file| self.before.get(file)) {
            let piece = (header.offset, header.len);
            let file = &self.numbers[&header.file];
            assert!(!ranges.contains(&piece), "{piece:?} of {file:?} was verified and is sent again");
        }
    }

    /// An attempt is over. What was recorded is kept, unless the disk may have lost it.
    fn turn(&mut self, kept: bool) {
        self.numbers.clear();
        if !kept {
            (self.before, self.finished_before) = Default::default();
            (self.now, self.finished) = Default::default();
            return;
        }
        for (file, ranges) in std::mem::take(&mut self.now) {
            self.before.entry(file).or_default().extend(ranges);
        }
        self.finished_before.extend(std::mem::take(&mut self.finished));
    }
}

/// What goes wrong in an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The source is killed, or the network cut, after so many steps.
    Cut(u64),
    /// The sink is killed at this operation on its disk.
    Kill(u64),
    /// The sink's machine loses power at this operation.
    PowerLoss(u64),
    /// A bit of this write changes on its way.
    Corrupt(u64),
    /// The disk takes only so many bytes more.
    Full(u64),
    /// After so many operations the disk fails to write out something that the cache had; whether
    /// the sink is ever told of it is left to chance.
    Writeback(u64),
}

fn fault(rng: &mut Rng) -> Fault {
    let n = rng.below(400);
    match rng.below(8) {
        0 => Fault::Cut(n * 2),
        1 | 2 => Fault::Kill(n),
        3 => Fault::PowerLoss(n),
        4 => Fault::Corrupt(n / 8),
        5 | 6 => Fault::Writeback(n),
        _ => Fault::Full(n * 64),
    }
}

fn content(rng: &mut Rng, len: usize) -> Content {
    (0..len).map(|_| rng.next() as u8 | 1).collect()
}

fn size(rng: &mut Rng) -> usize {
    match rng.below(4) {
        0 => rng.below(BLOCK as u64 / 4) as usize,
        1 => BLOCK * rng.below(5) as usize,
        _ => rng.below(20 * BLOCK as u64) as usize,
    }
}

/// One attempt at the job. `Ok` if both ends agree that it is done.
fn attempt(rng: &mut Rng, files: &[SourceFile], disk: &Shared, fault: Fault, world: &mut World) -> Result<(), Failed> {
    match fault {
        Fault::Writeback(n) => disk.lock().fail_writeback(n, Rng(rng.next())),
        Fault::Kill(n) | Fault::PowerLoss(n) => disk.lock().light_fuse(n),
        Fault::Full(room) => disk.lock().room = Some(room),
        _ => {}
    }
    let failed = |e: std::io::Error| Failed(e.to_string());
    let (blocks, window) = (1 + rng.below(12) as u32, 1 + rng.below(16) as usize);
    let mut sink = SinkEnd::new(disk, blocks, window).map_err(failed)?;
    let mut source = SourceEnd::new(files.to_vec(), sink.wants_offers(), 1 + rng.below(8) as usize);
    let channels = 1 + rng.below(3);
    let mut net = Network {
        to_sink: VecDeque::new(),
        to_source: VecDeque::new(),
        data: (0..channels).map(|_| VecDeque::new()).collect(),
        corrupt: None,
        rng: Rng(rng.next()),
    };
    if let Fault::Corrupt(n) = fault {
        net.corrupt = Some(n);
    }
    let result = run(rng, &mut source, &mut sink, &mut net, disk, fault, world);
    if result.is_err() {
        // The session is over; workers finish some of what they have.
        for _ in 0..rng.below(8) {
            if sink.can_work() {
                let _ = sink.work(world, rng);
            }
            if sink.can_commit() {
                let _ = sink.commit(world, rng);
            }
        }
    }
    result
}

fn run(
    rng: &mut Rng,
    source: &mut SourceEnd,
    sink: &mut SinkEnd,
    net: &mut Network,
    disk: &Shared,
    fault: Fault,
    world: &mut World,
) -> Result<(), Failed> {
    for step in 0u64.. {
        if matches!(fault, Fault::Cut(at) if at == step) {
            return Err(Failed("cut".into()));
        }
        if disk.lock().is_dead() {
            return Err(Failed("killed".into()));
        }
        let eager = rng.below(8) > 0;
        source.pump(net, world, eager);
        sink.check_end(net)?;
        if let Some(summary) = source.summary {
            assert_eq!((summary.files, summary.failed), (source.files() as u64, 0));
            sink.parted();
            return Ok(());
        }
        if !(eager || source.can_issue() || source.can_load() || sink.can_work() || sink.can_commit()) {
            continue;
        }
        let mut enabled: Vec<u8> = Vec::new();
        let mut offer = |event, may: bool| enabled.extend(may.then_some(event));
        offer(0, source.can_walk());
        offer(1, source.can_issue());
        offer(2, source.can_load());
        offer(3, !net.to_sink.is_empty());
        offer(4, !net.to_source.is_empty());
        offer(5, net.data.iter().any(|c| !c.is_empty()));
        offer(6, sink.can_work());
        offer(7, sink.can_commit());
        offer(8, sink.is_owed());
        assert!(!enabled.is_empty(), "everybody waits for somebody else, at step {step}");
        assert!(step < 200_000, "no end");
        match enabled[rng.below(enabled.len() as u64) as usize] {
            0 => source.walk(net, rng),
            1 => source.issue(),
            2 => source.load(rng),
            3 => {
                let bytes = net.to_sink.pop_front().expect("enabled");
                sink.hear(&bytes, net)?;
            }
            4 => source.hear(&net.to_source.pop_front().expect("enabled"))?,
            5 => {
                let ready: Vec<usize> = (0..net.data.len()).filter(|c| !net.data[*c].is_empty()).collect();
                let channel = ready[rng.below(ready.len() as u64) as usize];
                let (credit, bytes, notice) = net.data[channel].pop_front().expect("enabled");
                source.free += 1;
                sink.arrive(&credit, &bytes, &notice)?;
                sink.grant(net);
            }
            6 => sink.work(world, rng)?,
            7 => sink.commit(world, rng)?,
            _ => sink.grant(net),
        }
        if rng.below(24) == 0 {
            sink.sync()?;
        }
    }
    unreachable!("the loop above ends by returning")
}

/// A job, tried until it is done.
fn job(seed: u64) {
    let rng = &mut Rng(seed);
    let disk = Shared::default();
    let mut world = World::default();
    let mut ever: HashMap<String, Vec<Content>> = HashMap::new();
    let mut files: Vec<SourceFile> = (0..1 + rng.below(12))
        .map(|n| {
            let len = size(rng);
            SourceFile { path: format!("f{n}"), content: content(rng, len), mtime: 0 }
        })
        .collect();
    for file in &files {
        // Some are there already in an older version.
        let versions = ever.entry(file.path.clone()).or_default();
        if rng.below(4) == 0 {
            let len = size(rng);
            let old = content(rng, len);
            let inode = disk.lock().open(&file.path).unwrap();
            disk.lock().write(inode, 0, &old).unwrap();
            versions.push(old);
        }
        versions.push(Arc::clone(&file.content));
    }
    disk.lock().sync_all().unwrap();
    let mut clock = 0;
    for round in 0..20 {
        let fault = if round < 1 + seed % 7 { fault(rng) } else { Fault::None };
        let error_left = disk.lock().has_error();
        if matches!(fault, Fault::Writeback(_)) || error_left {
            // What was recorded may be lost, or not be believed.
            (world.before, world.finished_before) = Default::default();
        }
        let result = attempt(rng, &files, &disk, fault, &mut world);
        if std::env::var_os("THRUWAY_SIMULATION_TRACE").is_some() {
            eprintln!(
                "seed {seed} round {round}: {fault:?}, {result:?}, {:?}",
                disk.lock().names().collect::<Vec<_>>()
            );
        }
        let full = disk.lock().was_full;
        disk.lock().revive();
        (disk.lock().room, disk.lock().was_full) = (None, false);
        // Success is told when all is on the medium: power that goes after it takes nothing.
        let power_lost = match fault {
            Fault::PowerLoss(_) => true,
            // A file system that is shut down and mounted again, while the machine goes on.
            Fault::Kill(_) | Fault::Writeback(_) | Fault::None => rng.below(4) == 0,
            _ => false,
        };
        if power_lost {
            disk.lock().lose_power(rng);
        }
        if rng.below(3) == 0 {
            // Whoever else looked at the disk was told of its errors instead of us.
            disk.lock().forget_errors();
        }
        world.turn(!power_lost && !full && !error_left && !matches!(fault, Fault::Writeback(_)));
        check_names(&disk, &ever);
        match result {
            Ok(()) => {
                expect(&disk, &files, power_lost || !matches!(fault, Fault::None));
                if matches!(fault, Fault::None) {
                    return;
                }
                // Done in spite of the fault; the next round is a new job over the same target.
                world = World::default();
            }
            Err(failure) => assert!(fault != Fault::None || error_left, "failed without a cause: {failure:?}"),
        }
        if rng.below(8) == 0 {
            // Somebody changes a file at the destination, keeping its size.
            let index = rng.below(files.len() as u64) as usize;
            let path = &files[index].path;
            let found = disk.lock().content(path).map(<[u8]>::len);
            if let Some(len) = found.filter(|len| *len > 0) {
                let strange = content(rng, len);
                let mut disk = disk.lock();
                let inode = disk.inode(path).expect("just there");
                disk.write(inode, 0, &strange).unwrap();
                disk.sync(inode).unwrap();
                ever.get_mut(path).expect("known").push(strange);
                world.finished_before.retain(|(name, _)| name != path);
                world.before.retain(|(name, _), _| name != path);
            }
        }
        if rng.below(6) == 0 {
            // A file changes in between, perhaps keeping its size.
            clock += 1;
            let index = rng.below(files.len() as u64) as usize;
            let len = if rng.below(2) == 0 { files[index].content.len() } else { size(rng) };
            let changed = content(rng, len);
            ever.get_mut(&files[index].path).expect("known").push(Arc::clone(&changed));
            files[index].content = changed;
            files[index].mtime = clock;
        }
    }
    panic!("never done");
}

#[test]
fn every_job_is_done_in_the_end_and_nothing_wrong_is_ever_under_its_name() {
    let jobs = std::env::var("THRUWAY_SIMULATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(2000);
    let first = std::env::var("THRUWAY_SIMULATION_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    for seed in first..jobs {
        if let Err(panic) = std::panic::catch_unwind(|| job(seed)) {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
