//! Extended attributes of an entry named by directory and name.

use crate::acl::Acl;
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Access control list of an entry.
pub const ACCESS_ACL: &CStr = c"system.posix_acl_access";
/// File capabilities.
pub const CAPABILITIES: &CStr = c"security.capability";
/// Access control list that new entries of a directory inherit.
pub const DEFAULT_ACL: &CStr = c"system.posix_acl_default";

/// Attributes of one entry are kept up to this many bytes, as the kernel does.
const TOTAL_MAX: usize = 64 << 10;

/// A path that leads to the entry itself, whatever it is.
fn path_of(dir: BorrowedFd<'_>, name: &CStr) -> CString {
    let text = if name.is_empty() {
        format!("/proc/self/fd/{}", dir.as_raw_fd()).into_bytes()
    } else {
        [format!("/proc/self/fd/{}/", dir.as_raw_fd()).as_bytes(), name.to_bytes()].concat()
    };
    CString::new(text).expect("names have no NUL")
}

/// Names and values of attributes.
pub type Attributes = Vec<(Vec<u8>, Vec<u8>)>;

/// True for the form in which XFS stores access control lists. XFS shows it to root, as `trusted.SGI_ACL_FILE`. On other file systems, such
/// a copy would remain after the removal of the list, and restore the list when it is copied back to XFS.
fn is_internal(attribute: &[u8]) -> bool {
    attribute.starts_with(b"trusted.SGI_ACL_")
}

/// Reads all attributes, but not the form in which XFS stores access control lists. Of the `system` namespace, which the kernel
/// maintains, it reads only access control lists.
///
/// # Errors
/// If they cannot be read; a file system without attributes has none.
pub fn read(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<Attributes> {
    let path = path_of(dir, name);
    let follow = name.is_empty();
    let mut names = vec![0u8; 4096];
    let list = |path: &CStr, buffer: &mut [u8]| {
        if follow { rustix::fs::listxattr(path, buffer) } else { rustix::fs::llistxattr(path, buffer) }
    };
    let len = match list(&path, &mut names) {
        Err(Errno::RANGE) => {
            names.resize(TOTAL_MAX, 0);
            list(&path, &mut names)
        }
        other => other,
    };
    let len = match len {
        Ok(len) => len,
        Err(Errno::NOTSUP) => return Ok(Vec::new()),
        Err(e) => return Err(e.into()),
    };
    let mut out = Vec::new();
    let mut value = Vec::new();
    for attribute in names[..len].split(|b| *b == 0).filter(|n| !n.is_empty()) {
        if attribute.starts_with(b"system.") && !attribute.starts_with(b"system.posix_acl_") || is_internal(attribute) {
            continue;
        }
        let attribute_name = CString::new(attribute).expect("split at NUL");
        value.resize(TOTAL_MAX, 0);
        let got = if follow {
            rustix::fs::getxattr(&path, &attribute_name, value.as_mut_slice())
        } else {
            rustix::fs::lgetxattr(&path, &attribute_name, value.as_mut_slice())
        };
        match got {
            Ok(n) => out.push((attribute.to_vec(), value[..n].to_vec())),
            Err(Errno::NODATA) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(out)
}

/// As [`read`], of an open file: the same without walking a path.
///
/// # Errors
/// As [`read`].
pub fn read_open(file: BorrowedFd<'_>) -> io::Result<Attributes> {
    let mut names = [0u8; 256];
    match rustix::fs::flistxattr(file, &mut names) {
        Ok(0) | Err(Errno::NOTSUP) => Ok(Vec::new()),
        _ => read(file, c""),
    }
}

/// Sets an attribute of what is open, a symbolic link opened as a path included.
///
/// # Errors
/// As `setxattr(2)`.
pub fn write(fd: BorrowedFd<'_>, attribute: &[u8], value: &[u8]) -> io::Result<()> {
    let attribute = CString::new(attribute)?;
    Ok(rustix::fs::setxattr(path_of(fd, c""), &attribute, value, XattrFlags::empty())?)
}

/// Names of all attributes of an open entry, an entry opened as a path included.
///
/// # Errors
/// As `listxattr(2)`; a file system without attributes has none.
pub fn names(fd: BorrowedFd<'_>) -> io::Result<Vec<CString>> {
    let list = |buffer: &mut [u8]| match rustix::fs::flistxattr(fd, &mut *buffer) {
        // The descriptor is a path.
        Err(Errno::BADF) => rustix::fs::listxattr(path_of(fd, c""), buffer),
        other => other,
    };
    let mut few = [0; 256];
    let mut many = Vec::new();
    let names = match list(&mut few) {
        Err(Errno::RANGE) => {
            many.resize(TOTAL_MAX, 0);
            list(&mut many).map(|len| &many[..len])
        }
        other => other.map(|len| &few[..len]),
    };
    match names {
        Ok(names) => {
            let names = names.split(|b| *b == 0).filter(|name| !name.is_empty());
            Ok(names.map(|name| CString::new(name).expect("split at NUL")).collect())
        }
        Err(Errno::NOTSUP) => Ok(Vec::new()),
        Err(e) => Err(e.into()),
    }
}

/// Removes an attribute of an open entry. Succeeds if the attribute is missing.
///
/// # Errors
/// As `removexattr(2)`.
pub fn remove(fd: BorrowedFd<'_>, attribute: &CStr) -> io::Result<()> {
    match rustix::fs::removexattr(path_of(fd, c""), attribute) {
        Ok(()) | Err(Errno::NODATA | Errno::NOTSUP) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Replaces the access control list of an open entry by permission bits. No user has more rights in between: the kernel changes the
/// mode in the same step.
///
/// # Errors
/// As `setxattr(2)`.
pub fn replace_acl(fd: BorrowedFd<'_>, mode: u32) -> io::Result<()> {
    write(fd, ACCESS_ACL.to_bytes(), &Acl::from_mode(mode).encode())
}

/// True if an open entry has an access control list.
pub fn has_access_acl(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::getxattr(path_of(fd, c""), ACCESS_ACL, &mut [0; 0][..]).is_ok()
}

/// True if new entries of a directory inherit an access control list; `None` if its file system has no such lists.
pub fn has_default_acl(dir: BorrowedFd<'_>) -> Option<bool> {
    let mut none = [0; 0];
    let len = match rustix::fs::fgetxattr(dir, DEFAULT_ACL, &mut none[..]) {
        // The descriptor is a path.
        Err(Errno::BADF) => rustix::fs::getxattr(path_of(dir, c""), DEFAULT_ACL, &mut none[..]),
        other => other,
    };
    match len {
        Ok(_) => Some(true),
        Err(Errno::NOTSUP) => None,
        Err(_) => Some(false),
    }
}

/// The access control list that new entries of a directory inherit.
///
/// # Errors
/// If it cannot be read.
pub fn default_acl(dir: BorrowedFd<'_>) -> io::Result<Option<Acl>> {
    let read = |value: &mut [u8]| match rustix::fs::fgetxattr(dir, DEFAULT_ACL, &mut *value) {
        // The descriptor is a path.
        Err(Errno::BADF) => rustix::fs::getxattr(path_of(dir, c""), DEFAULT_ACL, value),
        other => other,
    };
    match get(read) {
        Ok(list) => Ok(Some(Acl::decode(&list).map_err(io::Error::other)?)),
        Err(Errno::NODATA | Errno::NOTSUP) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// The value that `read` reads into a buffer.
fn get(read: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> rustix::io::Result<Vec<u8>> {
    let mut value = vec![0; 1024];
    let len = match read(&mut value) {
        Err(Errno::RANGE) => {
            value.resize(TOTAL_MAX, 0);
            read(&mut value)?
        }
        other => other?,
    };
    value.truncate(len);
    Ok(value)
}

/// True if an open entry has an extended attribute with this value.
pub fn has(fd: BorrowedFd<'_>, attribute: &[u8], value: &[u8]) -> bool {
    let Ok(attribute) = CString::new(attribute) else { return false };
    let mut present = vec![0; value.len() + 1];
    rustix::fs::getxattr(path_of(fd, c""), &attribute, present.as_mut_slice()).is_ok_and(|len| present[..len] == *value)
}

/// Gives an open file the access control list of another one. If that has none, its permission bits `mode` replace a list that the file
/// has inherited. Without `with_group`, the owning group gets no rights. Both may be opened as paths. Returns the mode of the file.
///
/// # Errors
/// If the list cannot be read or set, or is malformed. The file then has the one that it had.
pub fn copy_acl(from: BorrowedFd<'_>, mode: u32, to: BorrowedFd<'_>, with_group: bool) -> io::Result<u32> {
    let from = path_of(from, c"");
    match get(|value| rustix::fs::getxattr(&from, ACCESS_ACL, value)) {
        Ok(list) => {
            let list = Acl::decode(&list).map_err(io::Error::other)?;
            let list = if with_group { list } else { list.without_group() };
            write(to, ACCESS_ACL.to_bytes(), &list.encode())?;
            return Ok(mode & !0o777 | list.mode().0);
        }
        Err(Errno::NODATA | Errno::NOTSUP) => {}
        Err(e) => return Err(e.into()),
    }
    let mode = if with_group { mode } else { mode & !0o070 };
    if has_access_acl(to) {
        replace_acl(to, mode)?;
    }
    Ok(mode)
}

/// The file capabilities of the entry of this name in a directory, or of an open file with an empty name. Empty if there are none.
pub fn capabilities(dir: BorrowedFd<'_>, name: &CStr) -> Vec<u8> {
    let path = path_of(dir, name);
    let read = |value: &mut [u8]| match name.is_empty() {
        true => rustix::fs::getxattr(&path, CAPABILITIES, value),
        false => rustix::fs::lgetxattr(&path, CAPABILITIES, value),
    };
    get(read).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    /// Needs root.
    #[test]
    fn the_internal_form_of_lists_is_not_read() {
        let file = tempfile::tempfile().unwrap();
        for name in ["trusted.SGI_ACL_FILE", "trusted.SGI_ACL_DEFAULT", "trusted.other"] {
            write(file.as_fd(), name.as_bytes(), b"1").unwrap();
        }
        let expected: Attributes = vec![(b"trusted.other".to_vec(), b"1".to_vec())];
        assert_eq!(read_open(file.as_fd()).unwrap(), expected);
    }
}
