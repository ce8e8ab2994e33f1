//! Extended attributes of an entry named by directory and name.

use rustix::fs::XattrFlags;
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

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

/// Reads all attributes. The `system` namespace is left out, but for access control lists: the kernel maintains it.
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
        Err(rustix::io::Errno::RANGE) => {
            names.resize(TOTAL_MAX, 0);
            list(&path, &mut names)
        }
        other => other,
    };
    let len = match len {
        Ok(len) => len,
        Err(rustix::io::Errno::NOTSUP) => return Ok(Vec::new()),
        Err(e) => return Err(e.into()),
    };
    let mut out = Vec::new();
    let mut value = Vec::new();
    for attribute in names[..len].split(|b| *b == 0).filter(|n| !n.is_empty()) {
        if attribute.starts_with(b"system.") && !attribute.starts_with(b"system.posix_acl_") {
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
            Err(rustix::io::Errno::NODATA) => {}
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
        Ok(0) | Err(rustix::io::Errno::NOTSUP) => Ok(Vec::new()),
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

/// True if an open entry has an extended attribute with this value.
pub fn has(fd: BorrowedFd<'_>, attribute: &[u8], value: &[u8]) -> bool {
    let Ok(attribute) = CString::new(attribute) else { return false };
    let mut present = vec![0; value.len() + 1];
    rustix::fs::getxattr(path_of(fd, c""), &attribute, present.as_mut_slice()).is_ok_and(|len| present[..len] == *value)
}

/// Gives an open file the access control list of an entry of a directory, if that has one. Best effort.
pub fn copy_acl(dir: BorrowedFd<'_>, from: &CStr, to: BorrowedFd<'_>) {
    const ACL: &CStr = c"system.posix_acl_access";
    let mut value = vec![0; 4096];
    if let Ok(n) = rustix::fs::lgetxattr(path_of(dir, from), ACL, value.as_mut_slice()) {
        let _ = rustix::fs::setxattr(path_of(to, c""), ACL, &value[..n], XattrFlags::empty());
    }
}
