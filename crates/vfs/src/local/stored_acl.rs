//! Access control lists where the kernel keeps them: in two extended attributes.

use super::super::{Kind, Result};
use crate::acl::{Acl, PosixAcl};
use rustix::fs::XattrFlags;
use rustix::io::Errno;
use std::ffi::CStr;

const ACCESS: &CStr = c"system.posix_acl_access";
const DEFAULT: &CStr = c"system.posix_acl_default";

/// Longest value of an extended attribute that the kernel has.
const VALUE_MAX: usize = 64 << 10;

/// The lists of a file: what its mode says, if it has none.
pub(super) fn read(path: &str, kind: Kind, mode: u32) -> Result<Acl> {
    let list = |name| {
        let mut value = vec![0; VALUE_MAX];
        match rustix::fs::getxattr(path, name, &mut value[..]) {
            Ok(len) => PosixAcl::from_xattr(&value[..len]).map(Some).map_err(|_| Errno::IO),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
            Err(error) => Err(error),
        }
    };
    // A symbolic link has none, whatever it leads to.
    let access = if kind == Kind::SymbolicLink { None } else { list(ACCESS)? };
    let default = if kind == Kind::Directory { list(DEFAULT)? } else { None };
    Ok(Acl { access: access.unwrap_or_else(|| PosixAcl::from_mode(mode)), default })
}

/// Sets the lists of a file, as the user that this thread counts as.
pub(super) fn write(path: &str, kind: Kind, acl: &Acl) -> Result<()> {
    let set = |name, list: &PosixAcl| rustix::fs::setxattr(path, name, &list.to_xattr(), XattrFlags::empty());
    if kind == Kind::SymbolicLink {
        return Err(Errno::OPNOTSUPP);
    }
    if acl.default.is_some() && kind != Kind::Directory {
        return Err(Errno::INVAL);
    }
    set(ACCESS, &acl.access)?;
    match &acl.default {
        Some(default) => set(DEFAULT, default),
        None if kind != Kind::Directory => Ok(()),
        None => match rustix::fs::removexattr(path, DEFAULT) {
            Err(Errno::NODATA) => Ok(()),
            done => done,
        },
    }
}
