//! Attributes of files in version 4 (`fattr4`): decoding those of a server, and encoding those to be set.

use crate::client::{ClientError, Handle, Result};
use crate::v4::attributes::number::*;
use crate::v4::bitmap::Bitmap;
use thruway_rpc::xdr::{DecodeError, Decoder, Encoder};
use thruway_vfs::{Attributes, Kind, SetAttributes, SetTime, Time, Usage};

/// Longest handle of version 4.
pub(super) const HANDLE_MAX: u32 = 128;

/// Longest name of an owner.
const OWNER_MAX: u32 = 1024;

/// User and group of files with unknown owners.
const NOBODY: u32 = 65_534;

/// Requested attributes of a file.
pub(super) fn of_files() -> Bitmap {
    Bitmap::of(&[
        TYPE,
        CHANGE,
        SIZE,
        FSID,
        FILEID,
        MODE,
        NUMLINKS,
        OWNER,
        OWNER_GROUP,
        RAWDEV,
        SPACE_USED,
        TIME_ACCESS,
        TIME_METADATA,
        TIME_MODIFY,
        MOUNTED_ON_FILEID,
    ])
}

/// Requested attributes of an entry of a directory.
pub(super) fn of_entries(with_files: bool) -> Bitmap {
    let mut wanted = if with_files { of_files() } else { Bitmap::of(&[FILEID, MOUNTED_ON_FILEID]) };
    if with_files {
        wanted.insert(FILEHANDLE);
    }
    // Without this one, an entry whose attributes cannot be read fails the whole listing.
    wanted.insert(RDATTR_ERROR);
    wanted
}

/// Requested attributes of a file system.
pub(super) fn of_usage() -> Bitmap {
    Bitmap::of(&[FILES_AVAIL, FILES_FREE, FILES_TOTAL, SPACE_AVAIL, SPACE_FREE, SPACE_TOTAL])
}

/// A user or a group: its number, or its name without the domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Owner {
    Number(u32),
    Name(Box<str>),
}

impl Owner {
    fn decode(d: &mut Decoder<'_>) -> Result<Owner> {
        let name = String::from_utf8_lossy(d.opaque(OWNER_MAX)?);
        let name = name.split('@').next().unwrap_or_default();
        Ok(match name.parse() {
            Ok(u32::MAX) => Owner::Number(NOBODY),
            Ok(number) => Owner::Number(number),
            Err(_) => Owner::Name(name.into()),
        })
    }

    /// Its number; that of nobody if it is a name.
    fn number(&self) -> u32 {
        if let Owner::Number(number) = self { *number } else { NOBODY }
    }
}

/// Decoded attributes of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Described {
    /// Without the numbers of the file system, and with owners that are numbers.
    pub attributes: Attributes,
    pub owner: Owner,
    pub group: Owner,
    /// Number of the file system on the server.
    pub fsid: (u64, u64),
    pub handle: Option<Handle>,
    /// Status instead of attributes.
    pub error: Option<u32>,
    pub usage: Usage,
    /// Lease time of the server, in seconds.
    pub lease_seconds: u32,
}

fn get_time(d: &mut Decoder<'_>) -> Result<Time> {
    let (seconds, nanoseconds) = (d.i64()?, d.u32()?);
    match nanoseconds {
        0..1_000_000_000 => Ok(Time { seconds, nanoseconds }),
        value => Err(DecodeError::Invalid { value }.into()),
    }
}

fn get_kind(d: &mut Decoder<'_>) -> Result<Kind> {
    Ok(match d.u32()? {
        1 => Kind::Regular,
        2 => Kind::Directory,
        3 => Kind::BlockDevice,
        4 => Kind::CharacterDevice,
        5 => Kind::SymbolicLink,
        6 => Kind::Socket,
        7 => Kind::Fifo,
        value => return Err(DecodeError::Invalid { value }.into()),
    })
}

impl Described {
    /// Decodes `fattr4`.
    pub(super) fn decode(d: &mut Decoder<'_>) -> Result<Described> {
        let zero = Time::default();
        let attributes = Attributes {
            kind: Kind::Regular,
            mode: 0,
            links: 1,
            uid: NOBODY,
            gid: NOBODY,
            size: 0,
            used: 0,
            device: (0, 0),
            fsid: 0,
            subvolume: 0,
            number: 0,
            number_in_parent: 0,
            accessed: zero,
            modified: zero,
            changed: zero,
            change: 0,
        };
        let nobody = Owner::Number(NOBODY);
        let mut described = Described {
            attributes,
            owner: nobody.clone(),
            group: nobody,
            fsid: (0, 0),
            handle: None,
            error: None,
            usage: Usage::default(),
            lease_seconds: 0,
        };
        let which = Bitmap::decode(d)?;
        let mut values = Decoder::new(d.opaque(64 << 10)?);
        let mut mounted_on = None;
        for number in which.iter() {
            let (a, usage, v) = (&mut described.attributes, &mut described.usage, &mut values);
            match number {
                TYPE => a.kind = get_kind(v)?,
                CHANGE => a.change = v.u64()?,
                SIZE => a.size = v.u64()?,
                FSID => described.fsid = (v.u64()?, v.u64()?),
                LEASE_TIME => described.lease_seconds = v.u32()?,
                RDATTR_ERROR => described.error = Some(v.u32()?).filter(|status| *status != 0),
                FILEHANDLE => described.handle = Some(v.opaque(HANDLE_MAX)?.into()),
                FILEID => a.number = v.u64()?,
                FILES_AVAIL => usage.files_free = v.u64()?,
                // The same as the available ones.
                FILES_FREE => drop(v.u64()?),
                FILES_TOTAL => usage.files = v.u64()?,
                MODE => a.mode = v.u32()? & 0o7777,
                NUMLINKS => a.links = v.u32()?,
                OWNER => described.owner = Owner::decode(v)?,
                OWNER_GROUP => described.group = Owner::decode(v)?,
                RAWDEV => a.device = (v.u32()?, v.u32()?),
                SPACE_AVAIL => usage.bytes_available = v.u64()?,
                SPACE_FREE => usage.bytes_free = v.u64()?,
                SPACE_TOTAL => usage.bytes = v.u64()?,
                SPACE_USED => a.used = v.u64()?,
                TIME_ACCESS => a.accessed = get_time(v)?,
                TIME_METADATA => a.changed = get_time(v)?,
                TIME_MODIFY => a.modified = get_time(v)?,
                MOUNTED_ON_FILEID => mounted_on = Some(v.u64()?),
                // Not requested, and of unknown length.
                value => return Err(ClientError::Malformed(DecodeError::Invalid { value })),
            }
        }
        values.finish()?;
        let a = &mut described.attributes;
        a.number_in_parent = mounted_on.unwrap_or(a.number);
        (a.uid, a.gid) = (described.owner.number(), described.group.number());
        Ok(described)
    }
}

fn put_set_time(out: &mut Encoder, time: SetTime) {
    match time {
        SetTime::Now => out.u32(0),
        SetTime::To(time) => {
            out.u32(1);
            out.i64(time.seconds);
            out.u32(time.nanoseconds);
        }
    }
}

/// `fattr4` of what is to be set.
pub(super) fn put_set(out: &mut Encoder, set: &SetAttributes) {
    let (mut which, mut values) = (Bitmap::default(), Encoder::new());
    let mut put = |number, value: &mut dyn FnMut(&mut Encoder)| {
        which.insert(number);
        value(&mut values);
    };
    // In the order of their numbers.
    if let Some(size) = set.size {
        put(SIZE, &mut |out| out.u64(size));
    }
    if let Some(mode) = set.mode {
        put(MODE, &mut |out| out.u32(mode & 0o7777));
    }
    if let Some(uid) = set.uid {
        put(OWNER, &mut |out| out.opaque(uid.to_string().as_bytes()));
    }
    if let Some(gid) = set.gid {
        put(OWNER_GROUP, &mut |out| out.opaque(gid.to_string().as_bytes()));
    }
    if let Some(time) = set.accessed {
        put(TIME_ACCESS_SET, &mut |out| put_set_time(out, time));
    }
    if let Some(time) = set.modified {
        put(TIME_MODIFY_SET, &mut |out| put_set_time(out, time));
    }
    which.encode(out);
    out.opaque(&values.into_parts().0);
}

/// `fattr4` with the time of the last change, for a comparison.
pub(super) fn put_changed(out: &mut Encoder, changed: Time) {
    Bitmap::of(&[TIME_METADATA]).encode(out);
    let mut values = Encoder::new();
    values.i64(changed.seconds);
    values.u32(changed.nanoseconds);
    out.opaque(&values.into_parts().0);
}

/// `fattr4` with the type of a directory, for a comparison.
pub(super) fn put_is_directory(out: &mut Encoder) {
    Bitmap::of(&[TYPE]).encode(out);
    let mut values = Encoder::new();
    values.u32(2);
    out.opaque(&values.into_parts().0);
}
