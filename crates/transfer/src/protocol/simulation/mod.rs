//! Whole jobs on invented machines: processes are killed, power is lost, networks are cut and
//! corrupt, disks fill up, files change in between, and the same job is tried again until it is
//! done. The state machines, the codec, the journal and the order of commits are the real ones;
//! network, storage and scheduling are invented. Every run is a function of its seed.

mod disk;
mod ends;

use crate::sink::journal::Version;
use crate::wire::{BlockHeader, BlockKind, COMPLETION_LEN, Control, Credit};
use disk::{JOURNAL, Shared};
use ends::{SinkEnd, SourceEnd, check_names, expect};
use fastrand::Rng;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use thruway_engine::digest::Algorithm;

const SESSION: u32 = 7;
const BLOCK: usize = 256;
const VERIFY: Algorithm = Algorithm::Xxh3;

type Content = Arc<[u8]>;

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
    /// The peer lies from this message on, counted with writes; `None` if it never does.
    lies: Option<u64>,
    rng: Rng,
}

impl Network {
    fn say_to_sink(&mut self, message: &Control) {
        if !self.is_a_lie() {
            return self.to_sink.push_back(message.encode(0));
        }
        lie(&mut self.to_sink, message, &mut self.rng);
    }

    fn say_to_source(&mut self, message: &Control) {
        if !self.is_a_lie() {
            return self.to_source.push_back(message.encode(0));
        }
        lie(&mut self.to_source, message, &mut self.rng);
    }

    fn is_a_lie(&mut self) -> bool {
        match &mut self.lies {
            None => false,
            Some(0) => self.rng.u8(..4) == 0,
            Some(left) => {
                *left -= 1;
                false
            }
        }
    }

    fn write(&mut self, credit: Credit, mut bytes: Vec<u8>, mut notice: [u8; COMPLETION_LEN]) {
        if let Some(left) = &mut self.corrupt {
            if *left == 0 {
                let at = self.rng.u64(..bytes.len() as u64) as usize;
                bytes[at] ^= 1 << self.rng.u64(..8);
            }
            self.corrupt = left.checked_sub(1);
        }
        let channel = self.rng.usize(..self.data.len());
        if self.is_a_lie() {
            match self.rng.u8(..4) {
                0 => return,
                1 => self.data[channel].push_back((credit, bytes.clone(), notice)),
                2 => {
                    let other = self.rng.usize(..self.data.len());
                    let earlier = self.data[other].back().map(|(_, bytes, _)| bytes.clone());
                    bytes = earlier.unwrap_or(bytes);
                }
                _ => {
                    // What follows counts on it.
                    let at = self.rng.usize(..notice.len());
                    notice[at] ^= 1 << self.rng.u8(..8);
                }
            }
        }
        self.data[channel].push_back((credit, bytes, notice));
    }
}

/// Says something else, or nothing, or says it again, or before what was said earlier.
fn lie(queue: &mut VecDeque<Vec<u8>>, message: &Control, rng: &mut Rng) {
    let encoded = message.encode(0);
    match rng.u8(..4) {
        0 => {}
        1 => queue.extend([encoded.clone(), encoded]),
        2 => queue.push_front(encoded),
        _ => {
            let changed = (0..100).find_map(|_| {
                let mut other = encoded.clone();
                let at = rng.usize(..other.len());
                other[at] = rng.u8(..);
                (other != encoded && Control::decode(&other).is_ok()).then_some(other)
            });
            queue.push_back(changed.unwrap_or(encoded));
        }
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
    /// After so many steps what one end says does not arrive any more (the sink's, if true), and the other's does.
    HalfCut(u64, bool),
    /// The sink is killed at this operation on its disk.
    Kill(u64),
    /// The sink's machine loses power at this operation.
    PowerLoss(u64),
    /// A bit of this write changes on its way.
    Corrupt(u64),
    /// The disk takes only so many bytes more.
    Full(u64),
    /// After so many messages, one of the ends lies: it repeats, leaves out, changes, or says too early what it should say.
    Lie(u64),
    /// After so many operations the disk fails to write out something that the cache had; whether
    /// the sink is ever told of it is left to chance.
    Writeback(u64),
}

fn fault(rng: &mut Rng) -> Fault {
    let n = rng.u64(..400);
    match rng.u64(..9) {
        8 => Fault::HalfCut(n * 2, rng.bool()),
        0 => Fault::Cut(n * 2),
        1 | 2 => Fault::Kill(n),
        3 => Fault::PowerLoss(n),
        4 => Fault::Corrupt(n / 8),
        5 | 6 => Fault::Writeback(n),
        _ => Fault::Full(n * 64),
    }
}

fn content(rng: &mut Rng, len: usize) -> Content {
    (0..len).map(|_| rng.u64(..) as u8 | 1).collect()
}

fn size(rng: &mut Rng) -> usize {
    match rng.u64(..4) {
        0 => rng.u64(..BLOCK as u64 / 4) as usize,
        1 => BLOCK * rng.u64(..5) as usize,
        _ => rng.u64(..20 * BLOCK as u64) as usize,
    }
}

/// One attempt at the job. `Ok` if both ends agree that it is done.
fn attempt(rng: &mut Rng, files: &[SourceFile], disk: &Shared, fault: Fault, world: &mut World) -> Result<(), Failed> {
    match fault {
        Fault::Writeback(n) => disk.lock().fail_writeback(n),
        Fault::Kill(n) | Fault::PowerLoss(n) => disk.lock().light_fuse(n),
        Fault::Full(room) => disk.lock().room = Some(room),
        _ => {}
    }
    let failed = |e: std::io::Error| Failed(e.to_string());
    let (blocks, window) = (1 + rng.u64(..12) as u32, 1 + rng.u64(..16) as usize);
    let mut sink = SinkEnd::new(disk, blocks, window).map_err(failed)?;
    let mut source = SourceEnd::new(files.to_vec(), sink.wants_offers(), 1 + rng.u64(..8) as usize);
    let channels = 1 + rng.u64(..3);
    let mut net = Network {
        to_sink: VecDeque::new(),
        to_source: VecDeque::new(),
        data: (0..channels).map(|_| VecDeque::new()).collect(),
        corrupt: None,
        lies: None,
        rng: rng.fork(),
    };
    if let Fault::Lie(n) = fault {
        net.lies = Some(n);
    }
    if let Fault::Corrupt(n) = fault {
        net.corrupt = Some(n);
    }
    let result = run(rng, &mut source, &mut sink, &mut net, disk, fault, world);
    if result.is_err() {
        // The session is over; workers finish some of what they have.
        for _ in 0..rng.u64(..8) {
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
        let eager = rng.u64(..8) > 0;
        source.pump(net, world, eager);
        sink.check_end(net)?;
        if let Some(summary) = source.summary {
            let right = (summary.files, summary.failed) == (source.files() as u64, 0);
            assert!(right || net.lies.is_some(), "{summary:?}");
            sink.parted();
            return if right { Ok(()) } else { Err(Failed(format!("{summary:?}"))) };
        }
        if !(eager || source.can_issue() || source.can_load() || sink.can_work() || sink.can_commit()) {
            continue;
        }
        let mut enabled: Vec<u8> = Vec::new();
        let mut offer = |event, may: bool| enabled.extend(may.then_some(event));
        offer(0, source.can_walk());
        offer(1, source.can_issue());
        offer(2, source.can_load());
        let (source_speaks, sink_speaks) = match fault {
            Fault::HalfCut(at, sinks) if at <= step => (sinks, !sinks),
            _ => (true, true),
        };
        offer(3, source_speaks && !net.to_sink.is_empty());
        offer(4, sink_speaks && !net.to_source.is_empty());
        offer(5, source_speaks && net.data.iter().any(|c| !c.is_empty()));
        offer(6, sink.can_work());
        offer(7, sink.can_commit());
        offer(8, sink.can_grant());
        if enabled.is_empty() && (net.lies.is_some() || matches!(fault, Fault::HalfCut(..))) {
            // Until somebody has had enough.
            return Err(Failed("silence".into()));
        }
        assert!(!enabled.is_empty(), "everybody waits for somebody else, at step {step}");
        assert!(step < 200_000, "no end");
        match enabled[rng.u64(..enabled.len() as u64) as usize] {
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
                let channel = ready[rng.u64(..ready.len() as u64) as usize];
                let (credit, bytes, notice) = net.data[channel].pop_front().expect("enabled");
                source.free += 1;
                sink.arrive(&credit, &bytes, &notice)?;
                sink.grant(net);
            }
            6 => sink.work(world, rng)?,
            7 => sink.commit(world, rng)?,
            _ => sink.grant(net),
        }
        if rng.u64(..24) == 0 {
            sink.sync()?;
        }
    }
    unreachable!("the loop above ends by returning")
}

/// What a job copies, and all that its names have ever stood for, some on the disk already.
fn begin(rng: &mut Rng, disk: &Shared) -> (Vec<SourceFile>, HashMap<String, Vec<Content>>) {
    let mut ever: HashMap<String, Vec<Content>> = HashMap::new();
    let files: Vec<SourceFile> = (0..1 + rng.u64(..12))
        .map(|n| {
            let len = size(rng);
            SourceFile { path: format!("f{n}"), content: content(rng, len), mtime: 0 }
        })
        .collect();
    for file in &files {
        // Some are there already in an older version.
        let versions = ever.entry(file.path.clone()).or_default();
        if rng.u64(..4) == 0 {
            let len = size(rng);
            let old = content(rng, len);
            let inode = disk.lock().open(&file.path).unwrap();
            disk.lock().write(inode, 0, &old).unwrap();
            versions.push(old);
        }
        versions.push(Arc::clone(&file.content));
    }
    disk.lock().sync_all().unwrap();
    (files, ever)
}

/// A job, tried until it is done.
fn job(seed: u64) {
    let rng = &mut Rng::with_seed(seed);
    let disk = Shared::new(rng.fork());
    let mut world = World::default();
    let (mut files, mut ever) = begin(rng, &disk);
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
            Fault::Kill(_) | Fault::Writeback(_) | Fault::None => rng.u64(..4) == 0,
            _ => false,
        };
        if power_lost {
            disk.lock().lose_power();
        }
        if rng.u64(..3) == 0 {
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
        if rng.u64(..8) == 0 {
            // Somebody changes a file at the destination, keeping its size.
            let index = rng.u64(..files.len() as u64) as usize;
            let path = &files[index].path;
            let found = disk.lock().content(path).map(<[u8]>::len);
            if let Some(len) = found.filter(|len| *len > 0) {
                let strange = content(rng, len);
                let mut disk = disk.lock();
                let inode = disk.inode(path).expect("just there");
                disk.change(inode, &strange);
                ever.get_mut(path).expect("known").push(strange);
                world.finished_before.retain(|(name, _)| name != path);
                world.before.retain(|(name, _), _| name != path);
            }
        }
        if rng.u64(..6) == 0 {
            // A file changes in between, perhaps keeping its size.
            clock += 1;
            let index = rng.u64(..files.len() as u64) as usize;
            let len = if rng.u64(..2) == 0 { files[index].content.len() } else { size(rng) };
            let changed = content(rng, len);
            ever.get_mut(&files[index].path).expect("known").push(Arc::clone(&changed));
            files[index].content = changed;
            files[index].mtime = clock;
        }
    }
    panic!("never done");
}

/// An end that lies ends its session, or is as good as an honest one. What it was not asked for it does not reach.
fn lied_to(seed: u64) {
    let rng = &mut Rng::with_seed(seed);
    let disk = Shared::new(rng.fork());
    let (files, _) = begin(rng, &disk);
    let other = disk.lock().open("other").unwrap();
    disk.lock().change(other, b"as it was");
    for _ in 0..1 + rng.u64(..3) {
        // What it has recorded of lies is its own affair.
        let mut world = World::default();
        let fault = Fault::Lie(rng.u64(..50));
        let _ = attempt(rng, &files, &disk, fault, &mut world);
    }
    let disk = disk.lock();
    assert_eq!(disk.content("other"), Some(&b"as it was"[..]));
    let known = |name: &str| files.iter().any(|file| name.trim_start_matches('.').trim_end_matches(".tw") == file.path);
    let strange = disk.names().find(|name| !known(name) && !["other", JOURNAL].contains(&name.as_str()));
    assert_eq!(strange, None);
}

fn simulate(what: fn(u64)) {
    let number = |name: &str| std::env::var(name).ok().and_then(|n| n.parse().ok());
    let first: u64 = number("THRUWAY_SIMULATION_SEED").unwrap_or(0);
    for seed in first..number("THRUWAY_SIMULATIONS").unwrap_or(2000) {
        if let Err(panic) = std::panic::catch_unwind(|| what(seed)) {
            eprintln!("seed {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn every_job_is_done_in_the_end_and_nothing_wrong_is_ever_under_its_name() {
    simulate(job);
}

#[test]
fn lies_end_the_session_or_change_nothing() {
    simulate(lied_to);
}
