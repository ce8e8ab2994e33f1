//! Answers to offers: which files, or parts of files, are here already.
//!
//! On a thread of its own: what is recorded is read back before it is believed, which takes as long as reading
//! that much from the disk.

use super::SessionEvent;
use super::attributes::{Grants, Unopened};
use super::files::Files;
use super::journal::{Key, Present, ResumeDecision, Version, key_of};
use super::promises::Promise;
use super::readback::{Checked, Readback};
use super::tree::{Place, temp_name};
use crate::session::Progress;
use crate::wire::{Answer, OfferEntry, capabilities_hash};
use rustix::fs::{AtFlags, Statx, unlinkat};
use std::ffi::CStr;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use thruway_fs::Identity;
use thruway_fs::beneath::split;
use thruway_fs::identity::nanoseconds;

/// Verified ranges told to the source in one answer; the rest is sent again.
const RANGES_MAX: usize = 300;
/// Offers that wait for their answer; a source makes fewer.
const WAITING_MAX: usize = 64;

/// Offers on their way to be answered.
pub(super) struct Judge(SyncSender<(u32, Vec<OfferEntry>)>);

impl Judge {
    /// Starts the thread, which ends with the last sender.
    pub(super) fn start(files: &Arc<Files>) -> io::Result<Judge> {
        let (sender, receiver) = sync_channel(WAITING_MAX);
        let files = Arc::clone(files);
        let run = move || judge_all(&files, &receiver);
        let thread = std::thread::Builder::new().name("judge".into()).stack_size(256 << 10).spawn(run);
        thread.map_err(|error| thruway_engine::limits::thread_error(&error))?;
        Ok(Judge(sender))
    }

    /// Hands over a batch of offers; false if there are more than any source makes.
    pub(super) fn submit(&self, batch: u32, entries: Vec<OfferEntry>) -> bool {
        self.0.try_send((batch, entries)).is_ok()
    }
}

fn judge_all(files: &Files, offers: &Receiver<(u32, Vec<OfferEntry>)>) {
    while let Ok((batch, entries)) = offers.recv() {
        // An answer must fit a control message; each range takes up to 20 bytes.
        let mut room = RANGES_MAX;
        let answers = entries.iter().map(|entry| files.judge(entry, &mut room)).collect();
        files.events.send(SessionEvent::Judged { batch, answers });
    }
}

impl Files {
    fn judge(&self, entry: &OfferEntry, room: &mut usize) -> Answer {
        if self.over.load(Ordering::SeqCst) {
            return Answer::Send;
        }
        let key = key_of(&entry.path);
        let version = Version { size: entry.size, mtime: entry.mtime, ctime: entry.ctime };
        let found = match self.params.options.dry_run {
            true => self.tree.find(&entry.path),
            false => self.tree.find_to_write(&entry.path),
        };
        let Ok(place) = found else { return Answer::Send };
        let find = |name: &CStr| {
            let (identity, s) = Identity::of(&place.dir, name).ok()?;
            let is_file = u32::from(s.stx_mode) & 0o170_000 == 0o100_000 && s.stx_size == entry.size;
            is_file.then_some((identity, s))
        };
        let found = find(&place.name);
        let present = found.as_ref().map(|(identity, s)| Present {
            identity: *identity,
            ctime: nanoseconds(s.stx_ctime),
            age: (s.stx_mtime.tv_sec, s.stx_mtime.tv_nsec).cmp(&entry.mtime),
        });
        let update = self.params.options.update;
        if entry.linked {
            // Nothing of it is sent, so nothing is promised.
            let is_newer = update && present.is_some_and(|present| present.age.is_gt());
            return if is_newer { self.skipped(Answer::Newer) } else { Answer::Send };
        }
        let temp = temp_name(&place.name, &self.job, &key);
        let look = || find(&temp).filter(|(_, s)| s.stx_nlink == 1).map(|(identity, _)| identity);
        let decision = self.earlier.judge((&key, &version), present, update, look);
        match (decision, found) {
            (ResumeDecision::Placed { lacking }, Some(found)) => {
                self.resumed((&entry.path, &place), key, found, Some(lacking))
            }
            (ResumeDecision::UpToDate { is_newer }, Some((identity, stat))) => {
                if !self.earlier.is_empty() {
                    self.remove_begun(&place, &key);
                }
                // A file of another user would get the owner, the set-id bits and the further names of the source's file.
                let is_trusted = self.tree.is_of_owner(stat.stx_uid, entry.owner);
                let OfferEntry { owner, group, mode, capabilities, .. } = *entry;
                let grants = Grants { owner, group, mode, capabilities };
                let may_get = || self.tree.may_get(&stat, || capabilities_of(&place, identity), &grants);
                if !is_newer && !may_get() {
                    return Answer::Send;
                }
                // A newer file keeps its attributes, and so does any file without the right to replace it.
                let preserve = self.params.options.preserve && !is_newer && self.tree.may_replace().is_ok();
                if !is_newer && is_trusted {
                    self.tree.remember_linkable(identity, &stat);
                }
                let changed = nanoseconds(stat.stx_ctime);
                if preserve && !self.promise(key, Promise::Attributes { identity, ours: false, changed }) {
                    return Answer::Send;
                }
                self.skipped(match (is_newer, preserve) {
                    (true, _) => Answer::Newer,
                    (false, true) => Answer::Attributes,
                    (false, false) => Answer::Skip,
                })
            }
            (ResumeDecision::CheckInPlace(unfinished), Some(found)) => {
                match self.read_back(&place, &place.name, &key, &unfinished) {
                    Some((readback, checked))
                        if readback.identity().is_ok_and(|identity| identity == found.0)
                            && checked.complete
                            && readback.is_hole_outside(&checked.good, entry.size) =>
                    {
                        // Whether all attributes could be kept was not recorded any more, nor whether its owner has changed it since.
                        self.resumed((&entry.path, &place), key, found, None)
                    }
                    _ => Answer::Send,
                }
            }
            (ResumeDecision::CheckTemporary(unfinished), _) => {
                let Some((readback, Checked { mut good, complete })) = self.read_back(&place, &temp, &key, &unfinished)
                else {
                    return Answer::Send;
                };
                // What was read back is what is written on.
                let Ok(identity) = readback.identity() else { return Answer::Send };
                if unfinished.is_whole() && complete && readback.is_hole_outside(&good, entry.size) {
                    good = vec![(0, entry.size)];
                }
                good.truncate(*room);
                if good.is_empty() {
                    return Answer::Send;
                }
                *room -= good.len();
                let have: u64 = good.iter().map(|r| r.1).sum();
                if !self.promise(key, Promise::Resume(identity)) {
                    return Answer::Send;
                }
                self.has_got_on(have);
                Answer::Except(good)
            }
            (ResumeDecision::Missing | ResumeDecision::Placed { .. } | ResumeDecision::UpToDate { .. }, _)
            | (ResumeDecision::CheckInPlace(_), None) => Answer::Send,
        }
    }

    /// Counts a file that `--update` skips.
    fn skipped(&self, answer: Answer) -> Answer {
        self.counters.files.fetch_add(1, Ordering::Relaxed);
        self.counters.skipped.fetch_add(1, Ordering::Relaxed);
        answer
    }

    /// This file was put in place by an earlier attempt, and not changed since; `lacking` if some of its attributes may not be there. If that
    /// is not known, only a source with all rights may set them, or make links to the file.
    fn resumed(
        &self,
        (path, place): (&[u8], &Place),
        key: Key,
        (identity, stat): (Identity, Statx),
        lacking: Option<bool>,
    ) -> Answer {
        let is_left = lacking.is_some() || self.tree.has_all_rights();
        // Without -p, it may have the permissions of a file that it has replaced.
        let lacking = lacking.unwrap_or(is_left && self.params.options.preserve);
        // The promise can wait for long, and the name mean another file then.
        let changed = nanoseconds(stat.stx_ctime);
        if self.tree.sync_later(split(path).0, &place.dir).is_err()
            || (lacking && !self.promise(key, Promise::Attributes { identity, ours: true, changed }))
        {
            return Answer::Send;
        }
        match is_left {
            true => self.tree.remember_identity(identity, &stat),
            false => self.tree.remember_linkable(identity, &stat),
        }
        // An attempt that could not read it back may have begun to send it again.
        self.remove_begun(place, &key);
        self.has_got_on(stat.stx_size);
        self.counters.files.fetch_add(1, Ordering::Relaxed);
        if lacking { Answer::Attributes } else { Answer::Skip }
    }

    /// What an earlier attempt had begun of a file is not needed any more.
    fn remove_begun(&self, place: &Place, key: &Key) {
        if !self.params.options.dry_run {
            let _ = unlinkat(&place.dir, temp_name(&place.name, &self.job, key), AtFlags::empty());
        }
    }

    fn has_got_on(&self, bytes: u64) {
        self.counters.resumed_bytes.fetch_add(bytes, Ordering::Relaxed);
        Progress::add(&self.progress.resumed, 1 + bytes);
    }

    /// The recorded ranges of a file that are really there.
    fn read_back(
        &self,
        place: &Place,
        name: &CStr,
        key: &Key,
        unfinished: &super::journal::Unfinished,
    ) -> Option<(Readback, Checked)> {
        let journal = self.journal.as_ref()?;
        let readback = Readback::open(&place.dir, name, self.params.verify).ok()?;
        let checked = readback.check(journal, key, unfinished, || !self.over.load(Ordering::SeqCst)).ok()?;
        Some((readback, checked))
    }
}

/// A hash of the file capabilities of this file; 0 if it has none, or if another one has the name.
fn capabilities_of(place: &Place, identity: Identity) -> u64 {
    let Ok(entry) = Unopened::look(&place.dir, &place.name) else { return 0 };
    let is_same = Identity::of(&entry, c"").is_ok_and(|(found, _)| found == identity);
    if is_same { capabilities_hash(&thruway_fs::xattr::capabilities(entry.as_fd(), c"")) } else { 0 }
}
