//! What packs are made of: records of directories, small files, links.

use super::{Malformed, PATH_MAX};
use serde::{Deserialize, Serialize};
use thruway_fs::acl::Acl;
use thruway_fs::xattr::{ACCESS_ACL, Attributes};

/// What a file system says of an entry.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Meta {
    /// Permissions (and type, which the record's kind repeats), as `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time, seconds and nanoseconds.
    pub mtime: (i64, u32),
    /// Time of the inode's last change, which tells versions apart and is not applied.
    pub ctime: (i64, u32),
    /// Size of a file.
    pub size: u64,
    /// Bytes of a file without its holes, in a dry run.
    pub data: u64,
    /// Extended attributes, if they are to be kept: at most [`XATTRS_MAX`].
    #[serde(deserialize_with = "bounded_xattrs")]
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Some extended attributes are missing from the list: they could not be read, or there are too many.
    pub xattrs_partial: bool,
}

impl Meta {
    /// Marks the record as one without some extended attributes of the entry.
    pub(crate) fn set_partial(&mut self) {
        self.xattrs_partial = true;
        // Of an entry with an access control list, the group bits are the mask, and users in it can have fewer rights than others.
        self.mode &= !0o2077;
    }

    /// Its access control list.
    pub(crate) fn list(&self) -> Option<&[u8]> {
        self.xattrs.iter().find(|(name, _)| name == ACCESS_ACL.to_bytes()).map(|(_, value)| &value[..])
    }

    /// True if the record would have an attribute of this name if the source has it. Access control lists are the last that are left out.
    /// [`Meta::set_partial`] leaves no rights to others.
    pub(crate) fn has_all(&self, name: &[u8]) -> bool {
        let has_lists = !self.xattrs.is_empty() || self.mode & 0o2077 != 0;
        !self.xattrs_partial || has_lists && name.starts_with(b"system.")
    }

    /// Leaves only access control lists.
    pub(crate) fn drop_other_xattrs(&mut self) {
        self.xattrs.retain(|(name, _)| name.starts_with(b"system."));
        self.xattrs_partial = true;
    }

    /// The mode of an entry that does not get its access control list. It gives nobody more rights.
    pub(crate) fn mode_without_list(&self) -> u32 {
        match self.list().map(Acl::decode) {
            None => self.mode,
            Some(Ok(list)) => list.mode_without_list(self.mode & !0o2000),
            Some(Err(_)) => self.mode & !0o2077,
        }
    }
}

/// Most extended attributes of an entry. Linux lists names of at most 64 KiB.
pub const XATTRS_MAX: usize = 1024;

/// Reads extended attributes. Ends with an error before a list that is too long is in memory.
fn bounded_xattrs<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Attributes, D::Error> {
    struct Visitor;
    impl<'de> serde::de::Visitor<'de> for Visitor {
        type Value = Attributes;

        fn expecting(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(out, "at most {XATTRS_MAX} extended attributes")
        }

        fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut all = Vec::new();
            while let Some((name, value)) = seq.next_element::<(Vec<u8>, Vec<u8>)>()? {
                // Limits of Linux for a name and a value (xattr(7)).
                if all.len() == XATTRS_MAX || name.len() > 255 || value.len() > 64 << 10 {
                    return Err(serde::de::Error::custom("too many extended attributes"));
                }
                all.push((name, value));
            }
            Ok(all)
        }
    }
    from.deserialize_seq(Visitor)
}

/// A packed record. Paths are relative to the sink's root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Record {
    /// Make a directory.
    Dir {
        /// Where; empty for the root of the copy, whose attributes these are.
        path: Vec<u8>,
        /// Its attributes; applied at the end, when nothing more is put into it.
        meta: Meta,
    },
    /// A whole small file; its content follows the record.
    File {
        /// Where.
        path: Vec<u8>,
        /// Its attributes.
        meta: Meta,
    },
    /// A large file begins; its blocks follow under this number.
    Begin {
        /// Number within the session.
        file: u64,
        /// Where.
        path: Vec<u8>,
        /// Its attributes.
        meta: Meta,
        /// Verified ranges of an earlier attempt are kept.
        resume: bool,
    },
    /// A symbolic link.
    Symlink {
        /// Where.
        path: Vec<u8>,
        /// What it says.
        target: Vec<u8>,
        /// Its attributes.
        meta: Meta,
    },
    /// Another name of a file of this session.
    Link {
        /// Where.
        path: Vec<u8>,
        /// The first name, relative to the sink's root.
        target: Vec<u8>,
    },
    /// A named pipe, socket or device.
    Special {
        /// Where.
        path: Vec<u8>,
        /// Its attributes.
        meta: Meta,
        /// Device number.
        rdev: u64,
    },
    /// Names that stay in a directory when the rest is deleted.
    Keep {
        /// Which directory.
        path: Vec<u8>,
        /// Bytes of `path` that are the name the source got at the sink; what is behind them is the path
        /// that filters go by.
        below: u32,
        /// Names of entries.
        names: Vec<Vec<u8>>,
        /// What comes behind these names.
        end: KeepEnd,
    },
    /// Attributes of a file whose content is at the sink already.
    Attributes {
        /// The file.
        path: Vec<u8>,
        /// Its attributes.
        meta: Meta,
    },
}

/// How a part of a list of names ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeepEnd {
    /// More names of this directory will come.
    More,
    /// The list is complete.
    Complete,
    /// The directory could not be read to its end: nothing may be removed from it.
    Incomplete,
}

/// Bytes in front of a packed record: lengths of the record and of the content behind it.
pub const RECORD_PREFIX_LEN: usize = 8;

impl Record {
    /// The record, encoded.
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_allocvec(self).expect("plain data")
    }

    /// Path of the entry that the sink makes when it takes the record.
    pub(crate) fn makes(&self) -> Option<&[u8]> {
        match self {
            Record::Dir { path, .. }
            | Record::File { path, .. }
            | Record::Begin { path, .. }
            | Record::Symlink { path, .. }
            | Record::Special { path, .. } => Some(path),
            Record::Link { .. } | Record::Keep { .. } | Record::Attributes { .. } => None,
        }
    }

    /// The prefix for a record and a content of these lengths.
    pub fn prefix(record_len: usize, content_len: usize) -> [u8; RECORD_PREFIX_LEN] {
        let mut out = [0; RECORD_PREFIX_LEN];
        out[..4].copy_from_slice(&(record_len as u32).to_be_bytes());
        out[4..].copy_from_slice(&(content_len as u32).to_be_bytes());
        out
    }

    /// Takes the first record and its content off a pack.
    ///
    /// # Errors
    /// [`Malformed`] if the pack is cut short or holds something else.
    pub fn split_first(pack: &[u8]) -> Result<(Record, &[u8], &[u8]), Malformed> {
        let (prefix, rest) = pack.split_first_chunk::<RECORD_PREFIX_LEN>().ok_or(Malformed("pack"))?;
        let record_len = u32::from_be_bytes(prefix[..4].try_into().expect("4 bytes")) as usize;
        let content_len = u32::from_be_bytes(prefix[4..].try_into().expect("4 bytes")) as usize;
        let (record, rest) = rest.split_at_checked(record_len).ok_or(Malformed("pack"))?;
        let (content, rest) = rest.split_at_checked(content_len).ok_or(Malformed("pack"))?;
        match postcard::take_from_bytes(record) {
            Ok((record, [])) => Ok((record, content, rest)),
            _ => Err(Malformed("record")),
        }
    }
}

/// Checks that a path from a peer stays below a root: relative, without empty, `.` or `..`
/// components, without NUL, of bounded length. The empty path is the root itself.
///
/// # Errors
/// [`Malformed`] otherwise.
pub fn check_path(path: &[u8]) -> Result<(), Malformed> {
    if path.is_empty() {
        return Ok(());
    }
    let bad = |c: &[u8]| c.is_empty() || c == b"." || c == b".." || c.len() > 255;
    if path.len() > PATH_MAX || path.contains(&0) || path.split(|b| *b == b'/').any(bad) {
        return Err(Malformed("path"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_its_list_an_entry_gives_no_rights_to_its_group() {
        let mut meta = Meta { mode: 0o102_674, ..Meta::default() };
        meta.set_partial();
        assert!(meta.xattrs_partial);
        assert_eq!(meta.mode, 0o100_600);
    }

    #[test]
    fn extended_attributes_are_bounded() {
        let record = |xattrs| Record::File { path: b"f".to_vec(), meta: Meta { xattrs, ..Meta::default() } };
        let taken = |record: &Record| {
            let encoded = record.encode();
            let pack = [&Record::prefix(encoded.len(), 0)[..], &encoded].concat();
            Record::split_first(&pack).is_ok_and(|(decoded, _, _)| decoded == *record)
        };
        let one = (b"user.a".to_vec(), b"v".to_vec());
        assert!(taken(&record(vec![one.clone(); XATTRS_MAX])));
        assert!(!taken(&record(vec![one; XATTRS_MAX + 1])));
        assert!(taken(&record(vec![(vec![b'n'; 255], vec![0; 64 << 10])])));
        assert!(!taken(&record(vec![(vec![b'n'; 256], Vec::new())])));
        assert!(!taken(&record(vec![(Vec::new(), vec![0; (64 << 10) + 1])])));
    }
}
