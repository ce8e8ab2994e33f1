//! Attributes of files (RFC 8881, section 5; RFC 7862, section 12.2; RFC 8275; RFC 8276).

use super::bitmap::Bitmap;
use crate::status::Status;
use thruway_rpc::server::BULK_MAX;
use thruway_rpc::xdr::{self, Decoder, Encoder};
use thruway_vfs::acl::{Ace, AceType, Who, flag};
use thruway_vfs::{Attributes, Kind, SetAttributes, SetTime, Time, Usage};

/// Numbers of attributes, by the names of the RFCs.
pub(crate) mod number {
    pub(crate) const SUPPORTED_ATTRS: u32 = 0;
    pub(crate) const TYPE: u32 = 1;
    pub(crate) const FH_EXPIRE_TYPE: u32 = 2;
    pub(crate) const CHANGE: u32 = 3;
    pub(crate) const SIZE: u32 = 4;
    pub(crate) const LINK_SUPPORT: u32 = 5;
    pub(crate) const SYMLINK_SUPPORT: u32 = 6;
    pub(crate) const NAMED_ATTR: u32 = 7;
    pub(crate) const FSID: u32 = 8;
    pub(crate) const UNIQUE_HANDLES: u32 = 9;
    pub(crate) const LEASE_TIME: u32 = 10;
    pub(crate) const RDATTR_ERROR: u32 = 11;
    pub(crate) const ACL: u32 = 12;
    pub(crate) const ACLSUPPORT: u32 = 13;
    pub(crate) const CANSETTIME: u32 = 15;
    pub(crate) const CASE_INSENSITIVE: u32 = 16;
    pub(crate) const CASE_PRESERVING: u32 = 17;
    pub(crate) const CHOWN_RESTRICTED: u32 = 18;
    pub(crate) const FILEHANDLE: u32 = 19;
    pub(crate) const FILEID: u32 = 20;
    pub(crate) const FILES_AVAIL: u32 = 21;
    pub(crate) const FILES_FREE: u32 = 22;
    pub(crate) const FILES_TOTAL: u32 = 23;
    pub(crate) const HOMOGENEOUS: u32 = 26;
    pub(crate) const MAXFILESIZE: u32 = 27;
    pub(crate) const MAXLINK: u32 = 28;
    pub(crate) const MAXNAME: u32 = 29;
    pub(crate) const MAXREAD: u32 = 30;
    pub(crate) const MAXWRITE: u32 = 31;
    pub(crate) const MODE: u32 = 33;
    pub(crate) const NO_TRUNC: u32 = 34;
    pub(crate) const NUMLINKS: u32 = 35;
    pub(crate) const OWNER: u32 = 36;
    pub(crate) const OWNER_GROUP: u32 = 37;
    pub(crate) const RAWDEV: u32 = 41;
    pub(crate) const SPACE_AVAIL: u32 = 42;
    pub(crate) const SPACE_FREE: u32 = 43;
    pub(crate) const SPACE_TOTAL: u32 = 44;
    pub(crate) const SPACE_USED: u32 = 45;
    pub(crate) const TIME_ACCESS: u32 = 47;
    pub(crate) const TIME_ACCESS_SET: u32 = 48;
    pub(crate) const TIME_DELTA: u32 = 51;
    pub(crate) const TIME_METADATA: u32 = 52;
    pub(crate) const TIME_MODIFY: u32 = 53;
    pub(crate) const TIME_MODIFY_SET: u32 = 54;
    pub(crate) const MOUNTED_ON_FILEID: u32 = 55;
    pub(crate) const SUPPATTR_EXCLCREAT: u32 = 75;
    pub(crate) const CLONE_BLKSIZE: u32 = 77;
    pub(crate) const XATTR_SUPPORT: u32 = 82;
}

use number::*;

/// Attributes of every minor version.
const SUPPORTED: &[u32] = &[
    SUPPORTED_ATTRS,
    TYPE,
    FH_EXPIRE_TYPE,
    CHANGE,
    SIZE,
    LINK_SUPPORT,
    SYMLINK_SUPPORT,
    NAMED_ATTR,
    FSID,
    UNIQUE_HANDLES,
    LEASE_TIME,
    RDATTR_ERROR,
    ACL,
    ACLSUPPORT,
    CANSETTIME,
    CASE_INSENSITIVE,
    CASE_PRESERVING,
    CHOWN_RESTRICTED,
    FILEHANDLE,
    FILEID,
    FILES_AVAIL,
    FILES_FREE,
    FILES_TOTAL,
    HOMOGENEOUS,
    MAXFILESIZE,
    MAXLINK,
    MAXNAME,
    MAXREAD,
    MAXWRITE,
    MODE,
    NO_TRUNC,
    NUMLINKS,
    OWNER,
    OWNER_GROUP,
    RAWDEV,
    SPACE_AVAIL,
    SPACE_FREE,
    SPACE_TOTAL,
    SPACE_USED,
    TIME_ACCESS,
    TIME_ACCESS_SET,
    TIME_DELTA,
    TIME_METADATA,
    TIME_MODIFY,
    TIME_MODIFY_SET,
    MOUNTED_ON_FILEID,
];

/// Those that can be set; access control lists not when a file is made.
const WRITABLE: &[u32] = &[SIZE, ACL, MODE, OWNER, OWNER_GROUP, TIME_ACCESS_SET, TIME_MODIFY_SET];

/// Those that tell how full the file system is, which has to be asked for.
pub(super) const STATFS_ATTRIBUTES: &[u32] =
    &[FILES_AVAIL, FILES_FREE, FILES_TOTAL, SPACE_AVAIL, SPACE_FREE, SPACE_TOTAL];

/// The attributes that a minor version has.
pub(crate) fn supported(minor: u32) -> Bitmap {
    let mut all = Bitmap::of(SUPPORTED);
    if minor >= 1 {
        all.insert(SUPPATTR_EXCLCREAT);
    }
    if minor >= 2 {
        [CLONE_BLKSIZE, XATTR_SUPPORT].into_iter().for_each(|number| all.insert(number));
    }
    all
}

/// What is told of an object.
pub(crate) struct Described<'a> {
    pub minor: u32,
    pub lease_seconds: u32,
    pub attributes: &'a Attributes,
    /// Major and minor number of its file system.
    pub fsid: (u64, u64),
    /// Its handle, if that is asked for.
    pub handle: &'a [u8],
    /// Its number in the directory that it is mounted on.
    pub mounted_on: u64,
    pub usage: Usage,
    /// Its access control list, if that is told.
    pub acl: Option<&'a [Ace]>,
}

fn put_time(out: &mut Encoder, time: Time) {
    out.i64(time.seconds);
    out.u32(time.nanoseconds);
}

fn get_time(d: &mut Decoder<'_>) -> Result<Time, Status> {
    let time = Time { seconds: d.i64()?, nanoseconds: d.u32()? };
    if time.nanoseconds < 1_000_000_000 { Ok(time) } else { Err(Status::INVAL) }
}

/// `nfs_ftype4`
pub(crate) fn number_of(kind: Kind) -> u32 {
    match kind {
        Kind::Regular => 1,
        Kind::Directory => 2,
        Kind::BlockDevice => 3,
        Kind::CharacterDevice => 4,
        Kind::SymbolicLink => 5,
        Kind::Socket => 6,
        Kind::Fifo => 7,
    }
}

fn put(out: &mut Encoder, number: u32, of: &Described<'_>) {
    let (a, usage) = (of.attributes, &of.usage);
    match number {
        SUPPORTED_ATTRS => supported(of.minor).encode(out),
        TYPE => out.u32(number_of(a.kind)),
        // Handles are good for ever.
        FH_EXPIRE_TYPE => out.u32(0),
        CHANGE => out.u64(a.change),
        SIZE => out.u64(a.size),
        LINK_SUPPORT | SYMLINK_SUPPORT | UNIQUE_HANDLES | CANSETTIME | CASE_PRESERVING | CHOWN_RESTRICTED
        | HOMOGENEOUS | NO_TRUNC | XATTR_SUPPORT => out.bool(true),
        NAMED_ATTR | CASE_INSENSITIVE => out.bool(false),
        FSID => {
            out.u64(of.fsid.0);
            out.u64(of.fsid.1);
        }
        LEASE_TIME => out.u32(of.lease_seconds),
        // No error.
        RDATTR_ERROR => out.u32(0),
        // Entries that allow, and such that deny.
        ACLSUPPORT => out.u32(3),
        ACL => out.array(of.acl.unwrap_or_default(), put_ace),
        CLONE_BLKSIZE => out.u32(4096),
        FILEHANDLE => out.opaque(of.handle),
        FILEID => out.u64(a.number),
        FILES_AVAIL | FILES_FREE => out.u64(usage.files_free),
        FILES_TOTAL => out.u64(usage.files),
        MAXFILESIZE => out.u64(i64::MAX as u64),
        MAXLINK => out.u32(32_000),
        MAXNAME => out.u32(255),
        MAXREAD | MAXWRITE => out.u64(BULK_MAX as u64),
        MODE => out.u32(a.mode),
        NUMLINKS => out.u32(a.links),
        OWNER => out.opaque(a.uid.to_string().as_bytes()),
        OWNER_GROUP => out.opaque(a.gid.to_string().as_bytes()),
        RAWDEV => {
            out.u32(a.device.0);
            out.u32(a.device.1);
        }
        SPACE_AVAIL => out.u64(usage.bytes_available),
        SPACE_FREE => out.u64(usage.bytes_free),
        SPACE_TOTAL => out.u64(usage.bytes),
        SPACE_USED => out.u64(a.used),
        TIME_ACCESS => put_time(out, a.accessed),
        TIME_DELTA => put_time(out, Time { seconds: 0, nanoseconds: 1 }),
        TIME_METADATA => put_time(out, a.changed),
        TIME_MODIFY => put_time(out, a.modified),
        MOUNTED_ON_FILEID => out.u64(of.mounted_on),
        // Times that are set cannot be told when an exclusive creation keeps its number there.
        SUPPATTR_EXCLCREAT => {
            let kept = [ACL, TIME_ACCESS_SET, TIME_MODIFY_SET];
            let all: Vec<u32> = WRITABLE.iter().copied().filter(|number| !kept.contains(number)).collect();
            Bitmap::of(&all).encode(out);
        }
        _ => unreachable!("an attribute that is said to be supported"),
    }
}

/// Attributes that can be set, but not read.
const WRITE_ONLY: [u32; 2] = [TIME_ACCESS_SET, TIME_MODIFY_SET];

/// Decodes the requested attributes. Fails with `NFS4ERR_INVAL` if any of them cannot be read (RFC 8881, section 5.5).
pub(super) fn get_readable(d: &mut Decoder<'_>) -> Result<Bitmap, Status> {
    let wanted = Bitmap::decode(d)?;
    check_readable(&wanted)?;
    Ok(wanted)
}

/// As [`get_readable`], for attributes that are already decoded.
pub(super) fn check_readable(wanted: &Bitmap) -> Result<(), Status> {
    if WRITE_ONLY.iter().any(|number| wanted.contains(*number)) { Err(Status::INVAL) } else { Ok(()) }
}

/// The wanted attributes that are supported and can be read.
pub(super) fn readable(wanted: &Bitmap, minor: u32) -> Bitmap {
    let supported = supported(minor);
    let told: Vec<u32> = wanted.iter().filter(|n| supported.contains(*n) && !WRITE_ONLY.contains(n)).collect();
    Bitmap::of(&told)
}

/// `fattr4`: those of the wanted attributes that there are.
pub(crate) fn encode(out: &mut Encoder, wanted: &Bitmap, of: &Described<'_>) {
    let told: Vec<u32> = readable(wanted, of.minor).iter().filter(|n| *n != ACL || of.acl.is_some()).collect();
    let told = Bitmap::of(&told);
    told.encode(out);
    let mut values = Encoder::new();
    told.iter().for_each(|number| put(&mut values, number, of));
    out.opaque(&values.into_parts().0);
}

/// `fattr4` of an entry of a directory about which nothing but an error can be told.
pub(super) fn encode_error(out: &mut Encoder, status: Status) {
    Bitmap::of(&[RDATTR_ERROR]).encode(out);
    let mut values = Encoder::new();
    values.u32(status.0);
    out.opaque(&values.into_parts().0);
}

/// What a client wants to set.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    pub set: SetAttributes,
    /// Which they are.
    pub which: Bitmap,
    /// The owner, if it is said by a name.
    pub owner: Option<Box<str>>,
    /// The group, if it is said by a name.
    pub group: Option<Box<str>>,
    /// The access control list, as it is said.
    pub acl: Option<Vec<SaidAce>>,
}

/// An entry of an access control list, as a client says it.
#[derive(Debug)]
pub(crate) struct SaidAce {
    kind: AceType,
    flags: u32,
    mask: u32,
    /// Whom it is about, if that is a user or a group by a name.
    pub name: Option<Box<str>>,
    who: Who,
}

/// Most entries of a list.
const ACES_MAX: u32 = 1024;

impl SaidAce {
    /// Whether its name is that of a group.
    pub(super) fn is_of_group(&self) -> bool {
        self.flags & flag::IDENTIFIER_GROUP != 0
    }

    /// With the number that its name has, if it has one.
    pub(super) fn with_number(self, number: Option<u32>) -> Ace {
        let SaidAce { kind, flags, mask, who, .. } = self;
        let who = match (number, flags & flag::IDENTIFIER_GROUP != 0) {
            (None, _) => who,
            (Some(number), true) => Who::NamedGroup(number),
            (Some(number), false) => Who::User(number),
        };
        Ace { kind, flags: flags & !flag::IDENTIFIER_GROUP, mask, who }
    }
}

/// `nfsace4`
fn put_ace(out: &mut Encoder, ace: &Ace) {
    let (who, group) = match ace.who {
        Who::Owner => ("OWNER@".into(), 0),
        Who::Group => ("GROUP@".into(), flag::IDENTIFIER_GROUP),
        Who::Everyone => ("EVERYONE@".into(), 0),
        Who::User(uid) => (uid.to_string(), 0),
        Who::NamedGroup(gid) => (gid.to_string(), flag::IDENTIFIER_GROUP),
    };
    let kind = if ace.kind == AceType::Allow { 0 } else { 1 };
    [kind, ace.flags | group, ace.mask].into_iter().for_each(|word| out.u32(word));
    out.opaque(who.as_bytes());
}

fn get_ace(d: &mut Decoder<'_>) -> Result<SaidAce, Status> {
    let kind = match d.u32()? {
        0 => AceType::Allow,
        1 => AceType::Deny,
        // To be logged, or to set off an alarm.
        2 | 3 => return Err(Status::ATTRNOTSUPP),
        _ => return Err(Status::BADXDR),
    };
    let (flags, mask, who) = (d.u32()?, d.u32()?, d.opaque(OWNER_MAX)?);
    let said = |who, name| Ok(SaidAce { kind, flags, mask, name, who });
    match who {
        b"OWNER@" => return said(Who::Owner, None),
        b"GROUP@" => return said(Who::Group, None),
        b"EVERYONE@" => return said(Who::Everyone, None),
        _ => {}
    }
    match (named(who)?, flags & flag::IDENTIFIER_GROUP != 0) {
        (Ok(number), true) => said(Who::NamedGroup(number), None),
        (Ok(number), false) => said(Who::User(number), None),
        // Until it has been looked up, which it is before it means anything.
        (Err(name), _) => said(Who::Everyone, Some(name)),
    }
}

/// `fattr4_acl`
fn get_acl(d: &mut Decoder<'_>) -> Result<Vec<SaidAce>, Status> {
    (0..d.len(ACES_MAX)?).map(|_| get_ace(d)).collect()
}

/// Longest name of an owner.
const OWNER_MAX: u32 = 1024;

/// A user or a group: its number, `1000` or `1000@anywhere`, or its name on this host, whatever domain the client is in.
fn get_owner(d: &mut Decoder<'_>) -> Result<Result<u32, Box<str>>, Status> {
    named(d.opaque(OWNER_MAX)?)
}

fn named(name: &[u8]) -> Result<Result<u32, Box<str>>, Status> {
    let name = std::str::from_utf8(name).map_err(|_| Status::BADOWNER)?;
    let name = name.split('@').next().expect("there is a first part");
    match name.parse() {
        // All ones mean no owner to the kernel.
        Ok(u32::MAX) => Err(Status::BADOWNER),
        Ok(number) => Ok(Ok(number)),
        Err(_) => Ok(Err(name.into())),
    }
}

fn get_set_time(d: &mut Decoder<'_>) -> Result<SetTime, Status> {
    match d.u32()? {
        0 => Ok(SetTime::Now),
        1 => Ok(SetTime::To(get_time(d)?)),
        _ => Err(Status::BADXDR),
    }
}

/// Decodes `fattr4` of a SETATTR, OPEN or CREATE, of which names of users and groups are still to be looked up.
pub(crate) fn decode(d: &mut Decoder<'_>, minor: u32) -> Result<Wanted, Status> {
    let which = Bitmap::decode(d)?;
    let values = d.opaque(64 << 10)?;
    let (mut values, mut set, mut owner, mut group) = (Decoder::new(values), SetAttributes::default(), None, None);
    let mut acl = None;
    let supported = supported(minor);
    for number in which.iter() {
        if !supported.contains(number) {
            return Err(Status::ATTRNOTSUPP);
        }
        if !WRITABLE.contains(&number) {
            return Err(Status::INVAL);
        }
        match number {
            SIZE => set.size = Some(values.u64()?),
            ACL => acl = Some(get_acl(&mut values)?),
            MODE => set.mode = Some(get_mode(&mut values)?),
            OWNER => match get_owner(&mut values)? {
                Ok(uid) => set.uid = Some(uid),
                Err(name) => owner = Some(name),
            },
            OWNER_GROUP => match get_owner(&mut values)? {
                Ok(gid) => set.gid = Some(gid),
                Err(name) => group = Some(name),
            },
            TIME_ACCESS_SET => set.accessed = Some(get_set_time(&mut values)?),
            TIME_MODIFY_SET => set.modified = Some(get_set_time(&mut values)?),
            _ => unreachable!("an attribute that can be set"),
        }
    }
    if set.size.is_some_and(|size| size > i64::MAX as u64) {
        return Err(Status::FBIG);
    }
    values.finish()?;
    Ok(Wanted { set, which, owner, group, acl })
}

fn get_mode(d: &mut Decoder<'_>) -> Result<u32, Status> {
    let mode = d.u32()?;
    if mode & !0o7777 == 0 { Ok(mode) } else { Err(Status::INVAL) }
}

/// Bytes of `fattr4` as they are, for a comparison (VERIFY).
pub(super) fn get_raw<'a>(d: &mut Decoder<'a>) -> xdr::Result<(Bitmap, &'a [u8])> {
    Ok((Bitmap::decode(d)?, d.opaque(64 << 10)?))
}
