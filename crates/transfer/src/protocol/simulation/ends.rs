//! The two programs: drivers of the same state machines as the real ones, on invented storage.

use super::disk::{JOURNAL, Shared, SimulatedJournal};
use super::{BLOCK, Content, Failed, Network, SESSION, SourceFile, VERIFY, World};
use crate::protocol::extents::{split_extent, subtract_extents};
use crate::protocol::offers::{AHEAD, Offers};
use crate::protocol::reassembly::{Ended, Known, Reassembly};
use crate::protocol::{sink, source};
use crate::sink::commit::{Commit, commit};
use crate::sink::journal::{Earlier, Journal, Key, Present, Range, ResumeDecision, Unfinished, Version, join, key_of};
use crate::wire::{
    Answer, BlockHeader, BlockKind, Completion, Control, Credit, FileStatus, HEADER_LEN, Meta, OfferEntry, Record,
    Summary,
};
use fastrand::Rng;
use std::collections::{HashMap, HashSet, VecDeque};
use thruway_fs::Identity;

fn meta(file: &SourceFile) -> Meta {
    Meta { size: file.content.len() as u64, mtime: (file.mtime, 0), ctime: (file.mtime, 0), ..Meta::default() }
}

/// A block that waits to be loaded.
enum Load {
    Pack(Vec<u8>),
    Piece { number: u64, file: usize, at: u64, len: u32, after: u32 },
}

pub(super) struct SourceEnd {
    core: source::Source<Vec<u8>>,
    files: Vec<SourceFile>,
    /// Next file to walk to.
    walk: usize,
    with_offers: bool,
    offers: Offers<usize>,
    verdicts: VecDeque<Vec<Answer>>,
    pack: Vec<u8>,
    planned: VecDeque<Load>,
    loading: Vec<(BlockHeader, Vec<u8>, Option<u32>)>,
    /// Pieces of each large file not loaded, and pieces in all.
    open: HashMap<u64, (u32, u32)>,
    next_sequence: u32,
    next_number: u64,
    walked: bool,
    pub(super) free: usize,
    pub(super) summary: Option<Summary>,
}

impl SourceEnd {
    pub(super) fn new(files: Vec<SourceFile>, with_offers: bool, blocks: usize) -> SourceEnd {
        SourceEnd {
            core: source::Source::new(SESSION, true),
            files,
            walk: 0,
            with_offers,
            offers: Offers::default(),
            verdicts: VecDeque::new(),
            pack: Vec::new(),
            planned: VecDeque::new(),
            loading: Vec::new(),
            open: HashMap::new(),
            next_sequence: 0,
            next_number: 1,
            walked: false,
            free: blocks,
            summary: None,
        }
    }

    pub(super) fn files(&self) -> usize {
        self.files.len()
    }

    pub(super) fn can_walk(&self) -> bool {
        let waits = self.offers.open() > AHEAD || (self.walk == self.files.len() && self.offers.open() > 0);
        !self.walked && self.planned.is_empty() && (!waits || !self.verdicts.is_empty())
    }

    pub(super) fn can_issue(&self) -> bool {
        !self.planned.is_empty() && self.free > 0
    }

    pub(super) fn can_load(&self) -> bool {
        !self.loading.is_empty()
    }

    pub(super) fn walk(&mut self, net: &mut Network, rng: &mut Rng) {
        if let Some(answers) = self.verdicts.pop_front() {
            for (file, answer) in self.offers.answered(answers) {
                match answer {
                    Answer::Skip | Answer::Newer | Answer::Attributes => {}
                    Answer::Send => self.send(file, &[]),
                    Answer::Except(have) => self.send(file, &have),
                }
            }
            return;
        }
        if self.walk < self.files.len() {
            let file = self.walk;
            self.walk += 1;
            if !self.with_offers {
                return self.send(file, &[]);
            }
            let SourceFile { path, content, mtime } = &self.files[file];
            let entry = OfferEntry {
                path: path.clone().into(),
                size: content.len() as u64,
                mtime: (*mtime, 0),
                ctime: (*mtime, 0),
                owner: 0,
                group: 0,
                mode: 0,
                capabilities: 0,
                linked: false,
            };
            self.offers.push(entry, file);
            if rng.u64(..3) == 0 || self.walk == self.files.len() {
                let (batch, entries) = self.offers.send().unwrap();
                self.core.offered();
                net.say_to_sink(&Control::Offer { batch, entries });
            }
            return;
        }
        self.flush();
        if self.planned.is_empty() && self.open.is_empty() {
            self.walked = true;
            self.core.walked(self.next_sequence);
        }
    }

    fn send(&mut self, index: usize, have: &[(u64, u64)]) {
        let file = self.files[index].clone();
        let path = file.path.clone().into_bytes();
        if file.content.len() <= BLOCK / 4 && have.is_empty() {
            return self.append(&Record::File { path, meta: meta(&file) }, &file.content);
        }
        let number = self.next_number;
        self.next_number += 1;
        self.append(&Record::Begin { file: number, path, meta: meta(&file), resume: !have.is_empty() }, &[]);
        self.flush();
        let after = self.next_sequence + self.planned.len() as u32 - 1;
        assert!(matches!(self.planned.back(), Some(Load::Pack(_))));
        let missing = subtract_extents(vec![(0, file.content.len() as u64)], have);
        let pieces: Vec<(u64, u32)> =
            missing.into_iter().flat_map(|e| split_extent(e, BLOCK as u32, || BLOCK as u32, false)).collect();
        // Even of no pieces an end is told.
        self.open.insert(number, (pieces.len() as u32, pieces.len() as u32));
        self.planned.extend(pieces.into_iter().map(|(at, len)| Load::Piece { number, file: index, at, len, after }));
    }

    fn append(&mut self, record: &Record, content: &[u8]) {
        let encoded = record.encode();
        let whole = [&Record::prefix(encoded.len(), content.len())[..], &encoded, content].concat();
        assert!(whole.len() <= BLOCK);
        if self.pack.len() + whole.len() > BLOCK {
            self.flush();
        }
        self.pack.extend_from_slice(&whole);
    }

    fn flush(&mut self) {
        if !self.pack.is_empty() {
            self.planned.push_back(Load::Pack(std::mem::take(&mut self.pack)));
        }
    }

    /// Takes a block for the next thing that is to be loaded.
    pub(super) fn issue(&mut self) {
        self.free -= 1;
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let (kind, file, offset, payload, after) = match self.planned.pop_front().unwrap() {
            Load::Pack(pack) => (BlockKind::Pack, 0, 0, pack, None),
            Load::Piece { number, file, at, len, after } => {
                let payload = self.files[file].content[at as usize..at as usize + len as usize].to_vec();
                (BlockKind::Data, number, at, payload, Some(after))
            }
        };
        let (session, len) = (SESSION, payload.len() as u32);
        let plain = [0; 16];
        let header =
            BlockHeader { session, sequence, offset, len, kind, sealed: false, file, tag: plain, digest: plain };
        self.loading.push((header, payload, after));
    }

    /// Storage has delivered one of the blocks asked for, in any order.
    pub(super) fn load(&mut self, rng: &mut Rng) {
        let (mut header, payload, after) = self.loading.swap_remove(rng.u64(..self.loading.len() as u64) as usize);
        header.digest = header.bind(VERIFY, VERIFY.digest(&payload));
        if header.kind == BlockKind::Data {
            self.open.get_mut(&header.file).unwrap().0 -= 1;
        }
        self.core.loaded(payload, header, after);
    }

    /// Does what the state machine asks for.
    pub(super) fn pump(&mut self, net: &mut Network, world: &World, eager: bool) {
        let ended: Vec<u64> = self.open.iter().filter(|(_, (left, _))| *left == 0).map(|(n, _)| *n).collect();
        for file in ended {
            // Pieces not issued yet are counted as not loaded.
            let (_, blocks) = self.open.remove(&file).unwrap();
            net.say_to_sink(&Control::FileEnd { file, blocks, status: FileStatus::Unchanged });
        }
        while let Some(step) = self.core.next(eager) {
            match step {
                source::Step::Say(message) => net.say_to_sink(&message),
                source::Step::Write(payload, header, credit, notice) => {
                    world.check_not_sent_before(&header);
                    let mut bytes = vec![0; HEADER_LEN];
                    header.encode(&mut bytes);
                    bytes.extend_from_slice(&payload);
                    net.write(credit, bytes, notice.encode());
                }
                source::Step::Stream(..) => unreachable!("this source works by credit"),
            }
        }
    }

    pub(super) fn hear(&mut self, bytes: &[u8]) -> Result<(), Failed> {
        let (message, _) = Control::decode(bytes).unwrap();
        match self.core.take(message).map_err(|e| Failed(e.to_string()))? {
            source::Heard::Nothing => {}
            source::Heard::Verdict(answers) => self.verdicts.push_back(answers),
            source::Heard::Report(report) => return Err(Failed(report.message)),
            source::Heard::Done(summary) => self.summary = Some(summary),
            source::Heard::Aborted(_, why) => return Err(Failed(why)),
        }
        Ok(())
    }
}

#[derive(Clone)]
struct Target {
    inode: usize,
    identity: Identity,
    size: u64,
    name: String,
    key: Key,
    version: Version,
}

impl Target {
    fn temp(&self) -> String {
        temp(&self.name)
    }
}

impl Commit for Target {
    fn named(&self) -> (&Key, &Version, Identity) {
        (&self.key, &self.version, self.identity)
    }

    fn is_lacking(&self) -> bool {
        lacks(&self.name)
    }
}

/// Whether the disk refuses some attribute of this file, which whoever succeeds in the end must have heard.
fn lacks(name: &str) -> bool {
    name.bytes().last().is_some_and(|b| b % 2 == 1)
}

fn temp(name: &str) -> String {
    format!(".{name}.tw")
}

pub(super) struct SinkEnd {
    core: sink::Sink<u32>,
    disk: Shared,
    journal: Journal,
    earlier: Earlier,
    files: Reassembly<Target, (u32, BlockHeader, Vec<u8>)>,
    /// Blocks the source may write to: number, key.
    exposed: HashMap<u32, u32>,
    blocks: usize,
    free: Vec<u32>,
    next_key: u32,
    tasks: Vec<(u32, BlockHeader, Vec<u8>)>,
    commits: VecDeque<Target>,
    dealt: u64,
    summary: Summary,
    pub(super) concluded: bool,
    /// A sync has failed.
    lost: bool,
    /// Files of which the user has heard, in this attempt, that some attribute is lacking.
    told: HashSet<String>,
}

impl SinkEnd {
    pub(super) fn new(disk: &Shared, blocks: u32, window: usize) -> std::io::Result<SinkEnd> {
        let (journal, earlier) = Journal::over(Box::new(SimulatedJournal::open(disk)?), [0; 32])?;
        Ok(SinkEnd {
            core: sink::Sink::new(SESSION, false, 1, window),
            disk: disk.clone(),
            journal,
            earlier,
            files: Reassembly::default(),
            exposed: HashMap::new(),
            blocks: blocks as usize,
            free: (0..blocks).collect(),
            next_key: 1,
            tasks: Vec::new(),
            commits: VecDeque::new(),
            dealt: 0,
            summary: Summary::default(),
            concluded: false,
            lost: false,
            told: HashSet::new(),
        })
    }

    pub(super) fn wants_offers(&self) -> bool {
        !self.earlier.is_empty()
    }

    pub(super) fn can_work(&self) -> bool {
        !self.tasks.is_empty()
    }

    pub(super) fn can_commit(&self) -> bool {
        !self.commits.is_empty()
    }

    pub(super) fn hear(&mut self, bytes: &[u8], net: &mut Network) -> Result<(), Failed> {
        let (message, _) = Control::decode(bytes).unwrap();
        match self.core.take(message).map_err(|e| Failed(e.to_string()))? {
            sink::Heard::Nothing | sink::Heard::MoreChannels(_) => {}
            sink::Heard::FileEnd { file, blocks, status } => {
                self.files.end(file, blocks, status).map_err(|e| Failed(e.to_string()))?;
                self.check_file(file);
            }
            sink::Heard::Offer { batch, entries } => {
                let answers = entries.iter().map(|e| self.judge(e)).collect();
                net.say_to_source(&Control::Verdict { batch, answers });
            }
            sink::Heard::Report(report) => return Err(Failed(report.message)),
            sink::Heard::Aborted(_, why) => return Err(Failed(why)),
        }
        Ok(())
    }

    fn judge(&mut self, entry: &OfferEntry) -> Answer {
        let name = String::from_utf8_lossy(&entry.path).into_owned();
        let key = key_of(&entry.path);
        let version = Version { size: entry.size, mtime: entry.mtime, ctime: entry.ctime };
        let disk = self.disk.lock();
        let same = |name: &str| disk.content(name).is_some_and(|c| c.len() as u64 == entry.size);
        let find = |name: &str| disk.inode(name).filter(|_| same(name));
        let present = find(&name).map(|i| Present {
            identity: disk.identity(i),
            ctime: disk.changed(i),
            age: std::cmp::Ordering::Less,
        });
        let judgement =
            self.earlier.judge((&key, &version), present, false, || find(&temp(&name)).map(|i| disk.identity(i)));
        drop(disk);
        let begun = temp(&name);
        let done = |summary: &mut Summary| {
            // What was begun in its place is not needed.
            let _ = self.disk.lock().unlink(&begun);
            summary.files += 1;
            summary.resumed_bytes += entry.size;
            Answer::Skip
        };
        match judgement {
            ResumeDecision::Placed { lacking } => {
                // Its attributes are sent again, and refused again.
                assert_eq!(lacking, lacks(&name));
                self.told.extend(lacking.then_some(name));
                done(&mut self.summary)
            }
            ResumeDecision::UpToDate { .. } => unreachable!("nobody asked for an update"),
            ResumeDecision::CheckInPlace(unfinished) => match self.read_back(&name, &key, &unfinished) {
                good if good == [(0, entry.size)] => {
                    self.told.extend(lacks(&name).then_some(name));
                    done(&mut self.summary)
                }
                _ => Answer::Send,
            },
            ResumeDecision::CheckTemporary(unfinished) => {
                let mut good = self.read_back(&temp(&name), &key, &unfinished);
                good.truncate(300);
                self.summary.resumed_bytes += good.iter().map(|r| r.1).sum::<u64>();
                if good.is_empty() { Answer::Send } else { Answer::Except(good) }
            }
            ResumeDecision::Missing => Answer::Send,
        }
    }

    /// The recorded ranges that the medium has.
    fn read_back(&self, name: &str, key: &Key, unfinished: &Unfinished) -> Vec<(u64, u64)> {
        let mut good = Vec::new();
        let inode = self.disk.lock().inode(name).expect("found");
        if self.disk.lock().drop_cache(inode).is_err() {
            return good;
        }
        let content = self.disk.lock().content(name).expect("found").to_vec();
        let check = |range: Range| {
            let part = content.get(range.offset as usize..range.offset as usize + range.len as usize);
            if part.is_some_and(|part| VERIFY.digest(part) == range.digest) {
                good.push((range.offset, range.len.into()));
            }
        };
        // The journal may lie on pages that were lost.
        let read = self.journal.ranges(key, unfinished, check);
        if read.is_err() { Vec::new() } else { join(good) }
    }

    /// A write and its notification have come.
    pub(super) fn arrive(&mut self, credit: &Credit, bytes: &[u8], notice: &[u8]) -> Result<(), Failed> {
        let failed = |e: &dyn std::fmt::Display| Failed(e.to_string());
        if self.exposed.remove(&credit.block) != Some(credit.rkey) {
            // The fabric ends the connection.
            return Err(Failed("written without a right to".into()));
        }
        let completion = Completion::decode(notice).map_err(|e| failed(&e))?;
        let block = self.core.arrived(&completion).map_err(|e| failed(&e))?;
        let header = BlockHeader::decode(&bytes[..HEADER_LEN], BLOCK).map_err(|e| failed(&e))?;
        self.core.accept(&header, Some(completion.sequence)).map_err(|e| failed(&e))?;
        self.tasks.push((block, header, bytes[HEADER_LEN..].to_vec()));
        Ok(())
    }

    pub(super) fn grant(&mut self, net: &mut Network) {
        let mut granted = Vec::new();
        for _ in 0..self.core.credits_to_grant(self.blocks - self.free.len()) {
            let Some(block) = self.free.pop() else { break };
            let rkey = self.next_key;
            self.next_key += 1;
            self.exposed.insert(block, rkey);
            granted.push((Credit { block, channel: 0, addr: 0, rkey }, block));
        }
        if let Some(message) = self.core.grant(granted) {
            net.say_to_source(&message);
        }
    }

    pub(super) fn can_grant(&self) -> bool {
        self.core.is_owed() && !self.free.is_empty() && self.core.credits_to_grant(self.blocks - self.free.len()) > 0
    }

    /// A worker verifies a block and puts what it holds where it belongs.
    pub(super) fn work(&mut self, world: &mut World, rng: &mut Rng) -> Result<(), Failed> {
        let (block, header, payload) = self.tasks.swap_remove(rng.u64(..self.tasks.len() as u64) as usize);
        let failed = |e: &dyn std::fmt::Display| Failed(e.to_string());
        let digest = VERIFY.digest(&payload);
        if header.bind(VERIFY, digest) != header.digest {
            return Err(Failed("damaged".into()));
        }
        match header.kind {
            BlockKind::Void => unreachable!("nothing fails to load here"),
            BlockKind::Data => match self
                .files
                .come(header.file)
                .and_then(|()| self.files.lookup(header.file))
                .map_err(|e| failed(&e))?
            {
                Known::Open(target) => self.piece(&target, (block, header, payload), world)?,
                Known::NotYet => self.files.park(header.file, (block, header, payload)).map_err(|e| failed(&e))?,
                Known::Nowhere => unreachable!("every file can be opened"),
            },
            BlockKind::Pack => {
                let mut rest = &payload[..];
                while !rest.is_empty() {
                    let (record, content, after) = Record::split_first(rest).map_err(|e| failed(&e))?;
                    rest = after;
                    self.record(record, content, world)?;
                }
                self.free.push(block);
                self.dealt += 1;
            }
        }
        Ok(())
    }

    fn record(&mut self, record: Record, content: &[u8], world: &mut World) -> Result<(), Failed> {
        let (number, path, meta, resume) = match record {
            Record::File { path, meta } => (None, path, meta, false),
            Record::Begin { file, path, meta, resume } => (Some(file), path, meta, resume),
            _ => unreachable!("only files here"),
        };
        let name = String::from_utf8_lossy(&path).into_owned();
        let version = Version { size: meta.size, mtime: meta.mtime, ctime: meta.ctime };
        let mut disk = self.disk.lock();
        if !resume && disk.inode(&temp(&name)).is_some() {
            disk.unlink(&temp(&name)).map_err(|e| Failed(e.to_string()))?;
        }
        let inode = disk.open(&temp(&name)).map_err(|e| Failed(e.to_string()))?;
        let target =
            Target { inode, identity: disk.identity(inode), size: meta.size, name, key: key_of(&path), version };
        let Some(number) = number else {
            disk.write(inode, 0, content).map_err(|e| Failed(e.to_string()))?;
            drop(disk);
            self.summary.bytes += content.len() as u64;
            self.finished(target);
            return Ok(());
        };
        drop(disk);
        if !resume {
            self.journal.begun(&target.key, &target.version, target.identity);
            self.disk.lock().set_len(inode, meta.size as usize).map_err(|e| Failed(e.to_string()))?;
        }
        world.begun(number, &target.name, target.version);
        let early = self.files.begin(number, Some(target.clone())).map_err(|e| Failed(e.to_string()))?;
        for piece in early {
            self.piece(&target, piece, world)?;
        }
        self.check_file(number);
        Ok(())
    }

    fn piece(
        &mut self,
        target: &Target,
        (block, header, payload): (u32, BlockHeader, Vec<u8>),
        world: &mut World,
    ) -> Result<(), Failed> {
        assert!(header.offset + u64::from(header.len) <= target.size);
        let written = self.disk.lock().write(target.inode, header.offset as usize, &payload);
        written.map_err(|e| Failed(e.to_string()))?;
        self.summary.bytes += payload.len() as u64;
        let range = Range { offset: header.offset, len: header.len, digest: VERIFY.digest(&payload) };
        self.journal.range(&target.key, &target.version, target.identity, &range);
        if !self.disk.lock().is_dead() {
            world.recorded(&target.name, target.version, header.offset, header.len);
        }
        self.files.dealt(header.file).map_err(|e| Failed(e.to_string()))?;
        self.check_file(header.file);
        self.free.push(block);
        self.dealt += 1;
        Ok(())
    }

    fn check_file(&mut self, number: u64) {
        if let Ok(Some(Ended { file: Some(target), whole: true })) = self.files.take_ended(number) {
            self.journal.whole(&target.key, &target.version, target.identity);
            self.finished(target);
        }
    }

    fn finished(&mut self, target: Target) {
        self.told.extend(target.is_lacking().then(|| target.name.clone()));
        self.commits.push_back(target);
    }

    /// The commit stage takes a group.
    pub(super) fn commit(&mut self, world: &mut World, rng: &mut Rng) -> Result<(), Failed> {
        if self.lost {
            return Err(Failed("an earlier write did not reach the medium".into()));
        }
        let n = 1 + rng.u64(..self.commits.len() as u64) as usize;
        let group: Vec<Target> = self.commits.drain(..n).collect();
        let disk = &self.disk;
        let durable = |group: &[Target]| match group {
            few if few.len() <= 2 => few.iter().try_for_each(|file| disk.lock().sync(file.inode)),
            _ => disk.lock().sync_all(),
        };
        let place = |file: &Target| {
            disk.lock().rename(&file.temp(), &file.name)?;
            Ok(disk.lock().changed(file.inode))
        };
        let outcomes = commit(&group, Some(&self.journal), durable, place).map_err(|e| {
            self.lost = true;
            Failed(e.to_string())
        })?;
        let dead = self.disk.lock().is_dead();
        for (target, outcome) in group.iter().zip(outcomes) {
            outcome.map_err(|e| Failed(e.to_string()))?;
            self.summary.files += 1;
            if !dead {
                world.done(&target.name, target.version);
            }
        }
        Ok(())
    }

    /// What is written so far is synced in the background, while others go on writing.
    pub(super) fn sync(&mut self) -> Result<(), Failed> {
        let synced = self.disk.lock().sync_all();
        synced.map_err(|e| {
            self.lost = true;
            self.journal.void();
            Failed(e.to_string())
        })
    }

    /// The source has heard that everything is in place, and said so.
    pub(super) fn parted(&mut self) {
        self.journal.remove();
    }

    pub(super) fn check_end(&mut self, net: &mut Network) -> Result<(), Failed> {
        let complete = self.core.is_complete(self.dealt, self.files.parked(), self.files.unfinished());
        if complete.map_err(|e| Failed(e.to_string()))? && self.commits.is_empty() && !self.concluded {
            self.concluded = true;
            if self.lost {
                return Err(Failed("an earlier write did not reach the medium".into()));
            }
            let synced = if self.summary.files.is_multiple_of(2) {
                self.sync()
            } else {
                self.disk.lock().sync_names().map_err(|e| Failed(e.to_string()))
            };
            synced?;
            let disk = self.disk.lock();
            let silent = disk.names().find(|name| *name != JOURNAL && lacks(name) && !self.told.contains(*name));
            assert!(silent.is_none() || disk.is_dead(), "{silent:?} is lacking something and nobody was told");
            drop(disk);
            net.say_to_source(&Control::DataSetReply(self.summary));
        }
        Ok(())
    }
}

/// Everything is there, and nothing else; but a sink that died at the very end leaves its journal.
pub(super) fn expect(disk: &Shared, files: &[SourceFile], or_journal: bool) {
    let disk = disk.lock();
    for SourceFile { path, content, .. } in files {
        assert!(disk.content(path) == Some(&content[..]), "{path} is missing or wrong");
    }
    let names: Vec<&String> = disk.names().filter(|n| !or_journal || *n != JOURNAL).collect();
    assert_eq!(names.len(), files.len(), "something is left behind: {names:?}");
}

/// Whatever has its final name has a content that the source once had.
pub(super) fn check_names(disk: &Shared, ever: &HashMap<String, Vec<Content>>) {
    let disk = disk.lock();
    for (path, contents) in ever {
        if let Some(found) = disk.content(path) {
            assert!(contents.iter().any(|c| c[..] == *found), "{path} is under its name and wrong");
        }
    }
}
