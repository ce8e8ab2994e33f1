//! Reservations: RESERVE(6) (SPC-2) and persistent reservations (SPC-4 5.12). `persistent_reserve.rs` has the commands.
//!
//! Registrations belong to initiator ports and outlive their sessions; they outlive the daemon too if the last registration asked
//! for that (APTPL).

use super::Nexus;
use crate::fence::Closed;
use data_encoding::HEXLOWER;
use std::sync::Arc;
use thruway_engine::quota::is_fair;

/// Registrations of a unit; more are refused. An owner may have eight times the remaining number ([`is_fair`]).
pub(super) const REGISTRATIONS_MAX: usize = 256;

/// Whether a command may be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Granted,
    Conflict,
}

/// Types of persistent reservations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Type(pub(super) u8);

impl Type {
    pub(super) fn of(number: u8) -> Option<Type> {
        matches!(number, 1 | 3 | 5 | 6 | 7 | 8).then_some(Type(number))
    }

    pub(super) fn excludes_readers(self) -> bool {
        matches!(self.0, 3 | 6 | 8)
    }

    pub(super) fn admits_registrants(self) -> bool {
        matches!(self.0, 5..=8)
    }

    pub(super) fn held_by_all(self) -> bool {
        matches!(self.0, 7 | 8)
    }
}

#[derive(Clone)]
pub(super) struct Registration {
    pub(super) port: Arc<str>,
    pub(super) key: u64,
    /// [`Nexus::owner`]
    pub(super) owner: Arc<str>,
}

#[derive(Clone)]
pub(super) struct Holder {
    pub(super) port: Arc<str>,
    pub(super) kind: Type,
}

/// The reservations of a unit.
#[derive(Default)]
pub(super) struct Reservations {
    /// RESERVE(6): the session that has the unit.
    pub(super) unit: Option<u64>,
    pub(super) registrations: Vec<Registration>,
    pub(super) holder: Option<Holder>,
    pub(super) generation: u32,
    /// There is a place to keep them.
    pub(super) can_last: bool,
    /// They are to be kept (APTPL).
    pub(super) lasts: bool,
}

/// What outlives a change that could not be kept.
pub(super) struct Before {
    registrations: Vec<Registration>,
    holder: Option<Holder>,
    lasts: bool,
}

pub(super) const FIRST_LINE: &str = "thruway reservations 3";
/// First line of format 2, which names no owners of registrations. It is still read.
pub(super) const FIRST_LINE_OF_2: &str = "thruway reservations 2";
/// First line of format 1, which also has no last line with a checksum. It is still read.
pub(super) const FIRST_LINE_OF_1: &str = "thruway reservations 1";
/// Prefix of the last line; the checksum of all lines before it follows.
pub(super) const END: &str = "end ";

/// Text of kept reservations that cannot be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeptError {
    /// Something else, or of another version.
    #[error("it does not begin with '{FIRST_LINE}'")]
    FirstLine,
    /// This line.
    #[error("invalid line '{0}'")]
    Line(String),
    /// The file is truncated or damaged.
    #[error("its last line is not '{END}' and the checksum of the lines before it: the file is truncated or damaged")]
    End,
}

impl Reservations {
    /// With a place to keep them, and what is there.
    ///
    /// # Errors
    /// [`KeptError`].
    pub(super) fn lasting(kept: Option<&str>) -> Result<Reservations, KeptError> {
        let mut all = Reservations { can_last: true, lasts: kept.is_some(), ..Reservations::default() };
        let Some(kept) = kept else { return Ok(all) };
        let has_owners = kept.starts_with(FIRST_LINE);
        for line in checked(kept)?.lines() {
            let wrong = || KeptError::Line(line.into());
            let mut words = line.split(' ');
            let [Some(what), Some(number), Some(port)] = [(); 3].map(|()| words.next()) else {
                return Err(wrong());
            };
            let port = &*read_name(port).ok_or_else(wrong)?;
            let owner = match words.next() {
                Some(owner) if has_owners && what == "registration" => read_name(owner).ok_or_else(wrong)?,
                None if !has_owners || what != "registration" => initiator_of(port).into(),
                _ => return Err(wrong()),
            };
            if words.next().is_some() {
                return Err(wrong());
            }
            match what {
                "registration" if all.registrations.len() < REGISTRATIONS_MAX && all.key_of(port).is_none() => {
                    let key = u64::from_str_radix(number, 16).map_err(|_| wrong())?;
                    all.registrations.push(Registration { port: port.into(), key, owner: owner.into() });
                }
                "holder" if all.holder.is_none() && all.key_of(port).is_some() => {
                    let kind = number.parse().ok().and_then(Type::of).ok_or_else(wrong)?;
                    all.holder = Some(Holder { port: port.into(), kind });
                }
                _ => return Err(wrong()),
            }
        }
        Ok(all)
    }

    /// What is to be kept, a line each; `None` if nothing is.
    pub(super) fn kept(&self) -> Option<String> {
        if !self.lasts || self.registrations.is_empty() {
            return None;
        }
        let mut text = format!("{FIRST_LINE}\n");
        for Registration { port, key, owner } in &self.registrations {
            text += &format!("registration {key:016x} {} {}\n", written(port), written(owner));
        }
        if let Some(Holder { port, kind }) = &self.holder {
            text += &format!("holder {} {}\n", kind.0, written(port));
        }
        let end = format!("{END}{}\n", checksum(&text));
        Some(text + &end)
    }

    pub(super) fn before(&self) -> Before {
        Before { registrations: self.registrations.clone(), holder: self.holder.clone(), lasts: self.lasts }
    }

    /// A change is as if it had not been.
    pub(super) fn undo(&mut self, before: Before) {
        let Before { registrations, holder, lasts } = before;
        (self.registrations, self.holder, self.lasts) = (registrations, holder, lasts);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.unit.is_none() && self.registrations.is_empty()
    }

    /// RESERVE(6).
    pub(super) fn reserve_unit(&mut self, nexus: u64) -> bool {
        if self.unit.is_some_and(|holder| holder != nexus) {
            return false;
        }
        self.unit = Some(nexus);
        true
    }

    /// RELEASE(6), or the session ends.
    pub(super) fn release_unit(&mut self, nexus: u64) {
        self.unit.take_if(|holder| *holder == nexus);
    }

    /// A reset.
    pub(super) fn release_all_units(&mut self) {
        self.unit = None;
    }

    /// What the unit is closed to for those who have no registration.
    pub(super) fn closed_to_others(&self) -> Closed {
        match &self.holder {
            _ if self.unit.is_some() => Closed::ToAll,
            Some(holder) if holder.kind.excludes_readers() => Closed::ToAll,
            Some(_) => Closed::ToChanges,
            None => Closed::Open,
        }
    }

    pub(super) fn key_of(&self, port: &str) -> Option<u64> {
        self.registrations.iter().find(|r| &*r.port == port).map(|r| r.key)
    }

    /// True if the quota of this owner has room for another registration.
    pub(super) fn has_room_for(&self, owner: &str) -> bool {
        let theirs = self.registrations.iter().filter(|r| &*r.owner == owner).count();
        is_fair(theirs, REGISTRATIONS_MAX.saturating_sub(self.registrations.len()))
    }

    pub(super) fn holds(&self, port: &str) -> bool {
        self.holder
            .as_ref()
            .is_some_and(|h| if h.kind.held_by_all() { self.key_of(port).is_some() } else { &*h.port == port })
    }

    /// Whether a command of this initiator may be done.
    pub(super) fn admits(&self, nexus: &Nexus, cdb: &[u8; 16]) -> Access {
        let use_of = classify(cdb);
        let granted = |yes| if yes { Access::Granted } else { Access::Conflict };
        if let Some(holder) = self.unit {
            let exempt = matches!(cdb[0], 0x03 | 0x12 | 0x17 | 0x57 | 0xa0);
            return granted(holder == nexus.id || exempt);
        }
        // The older kind does not mix with the newer.
        if matches!(cdb[0], 0x16 | 0x17 | 0x56 | 0x57) {
            return granted(self.registrations.is_empty());
        }
        let Some(holder) = &self.holder else { return Access::Granted };
        if self.holds(&nexus.port) || (holder.kind.admits_registrants() && self.key_of(&nexus.port).is_some()) {
            return Access::Granted;
        }
        granted(match use_of {
            Use::Always => true,
            Use::Reads => !holder.kind.excludes_readers(),
            Use::Changes => false,
        })
    }

    pub(super) fn remove(&mut self, port: &str) {
        self.registrations.retain(|r| &*r.port != port);
    }
}

/// Checks the first line and the checksum of kept reservations. Returns the lines between the first and the last one.
pub(super) fn checked(kept: &str) -> Result<&str, KeptError> {
    let (first, rest) = kept.split_once('\n').unwrap_or((kept, ""));
    match first {
        FIRST_LINE_OF_1 => return Ok(rest),
        FIRST_LINE | FIRST_LINE_OF_2 => {}
        _ => return Err(KeptError::FirstLine),
    }
    let text = kept.strip_suffix('\n').ok_or(KeptError::End)?;
    let end = text.rfind('\n').map_or(0, |at| at + 1);
    if text[end..].strip_prefix(END) != Some(&checksum(&kept[..end])) {
        return Err(KeptError::End);
    }
    kept.get(first.len() + 1..end).ok_or(KeptError::End)
}

/// SHA-256 of a text, as hexadecimal digits.
pub(super) fn checksum(text: &str) -> String {
    HEXLOWER.encode(ring::digest::digest(&ring::digest::SHA256, text.as_bytes()).as_ref())
}

/// The iSCSI name in the name of a port.
pub(super) fn initiator_of(port: &str) -> &str {
    port.split_once(",i,").map_or(port, |(name, _)| name)
}

/// A port's name as one word, whatever is in it: what a line is made of cannot be said by a name.
pub(super) fn written(port: &str) -> String {
    let plain = |b: u8| b.is_ascii_graphic() && b != b'%';
    port.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02x}") }).collect()
}

pub(super) fn read_name(word: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = word.as_bytes();
    while let Some((first, later)) = rest.split_first() {
        rest = later;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = std::str::from_utf8(rest.get(..2)?).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).ok()
}

/// What a command does to the medium, as reservations see it (SPC-4 table 66, SBC-3 table 13).
enum Use {
    Always,
    Reads,
    Changes,
}

fn classify(cdb: &[u8; 16]) -> Use {
    match cdb[0] {
        // TEST UNIT READY, REQUEST SENSE, INQUIRY, READ CAPACITY, LOG SENSE, PERSISTENT RESERVE, REPORT LUNS.
        0x00 | 0x03 | 0x12 | 0x25 | 0x4d | 0x5e | 0x5f | 0xa0 => Use::Always,
        0x9e if cdb[1] & 0x1f == 0x10 => Use::Always,
        0xa3 => Use::Always,
        // START STOP UNIT, if it starts; PREVENT ALLOW, if it allows.
        0x1b if cdb[4] & 0xf1 == 1 => Use::Always,
        0x1e if cdb[4] & 1 == 0 => Use::Always,
        0x08 | 0x28 | 0xa8 | 0x88 | 0x2f | 0xaf | 0x8f | 0x34 | 0x90 | 0x37 | 0xb7 | 0x9e | 0x1a | 0x5a => Use::Reads,
        _ => Use::Changes,
    }
}
