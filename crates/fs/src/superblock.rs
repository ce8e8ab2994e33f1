//! Identity of mounted file systems.

#![allow(unsafe_code, reason = "rustix has no safe form of this ioctl")]

use crate::handle::Handle;
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, opcode};
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

/// A mounted file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Number that is unique among the file systems mounted on this host. It may differ after a restart of the host or another mount:
    /// then another file system may have the old number. The subvolumes of one file system have the same number.
    pub device: u64,
    /// UUID stored in the file system; a copy of the file system has the same one. If it is absent or cannot be read: `f_fsid` of
    /// `statvfs(3)`. If that is 0: the device number and the boot ID of the host.
    pub uuid: Box<[u8]>,
}

impl Superblock {
    /// File system of an open file or directory.
    ///
    /// # Errors
    /// Those of `fstat(2)` and `fstatvfs(2)`.
    pub fn of(file: impl AsFd) -> io::Result<Superblock> {
        let file = file.as_fd();
        let device = rustix::fs::fstat(file)?.st_dev;
        let id = rustix::fs::fstatvfs(file)?.f_fsid;
        let uuid = uuid_by_ioctl(file).or_else(|| uuid_by_link(device));
        let handle = Handle::of(file, c"").ok().map(|(handle, _)| handle).filter(Handle::is_of_btrfs);
        let Some(subvolume) = handle.and_then(|handle| handle.subvolume()) else {
            let uuid = match uuid {
                Some(uuid) => uuid,
                None if id != 0 => id.to_le_bytes().into(),
                None => format!("{device} in boot {}", std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?)
                    .into_bytes()
                    .into(),
            };
            return Ok(Superblock { device, uuid });
        };
        // Each Btrfs subvolume has its own device number. Its `f_fsid` is that of the file system XOR the subvolume's number
        // (`btrfs_statfs`).
        let whole = id ^ (subvolume >> 32) ^ (subvolume << 32);
        // Device numbers never have this bit, because the kernel's major numbers have 12 bits.
        Ok(Superblock { device: whole | 1 << 63, uuid: uuid.unwrap_or_else(|| whole.to_le_bytes().into()) })
    }
}

/// `struct fsuuid2` of the kernel.
#[repr(C)]
#[derive(Default)]
struct FsUuid {
    len: u8,
    uuid: [u8; 16],
}

/// The ioctl `FS_IOC_GETFSUUID` of Linux 6.9 and later.
struct GetFsUuid(FsUuid);

// SAFETY: the opcode contains the size of `struct fsuuid2`; the kernel writes one such structure to the pointer, and nothing else.
unsafe impl Ioctl for GetFsUuid {
    type Output = FsUuid;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        opcode::read::<FsUuid>(0x15, 0)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut self.0).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, ptr: *mut c_void) -> rustix::io::Result<FsUuid> {
        // SAFETY: `ptr` is the pointer to `self.0` that `as_ptr` returned, and the kernel has filled that structure.
        Ok(unsafe { ptr.cast::<FsUuid>().read() })
    }
}

fn uuid_by_ioctl(file: BorrowedFd<'_>) -> Option<Box<[u8]>> {
    // An `O_PATH` descriptor accepts no `ioctl`, so a directory is opened again for reading.
    let open = rustix::fs::openat(file, c".", rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC, 0.into());
    let open = match open {
        Err(Errno::NOTDIR) => None,
        open => Some(open.ok()?),
    };
    let file = open.as_ref().map_or(file, AsFd::as_fd);
    // SAFETY: the implementation of `Ioctl` passes a structure of the size that the opcode contains.
    let found = unsafe { rustix::ioctl::ioctl(file, GetFsUuid(FsUuid::default())) }.ok()?;
    found.uuid.get(..found.len.into()).filter(|uuid| !uuid.is_empty()).map(Into::into)
}

/// UUID by the link in `/dev/disk/by-uuid` (made by udev) to the device of a file system.
fn uuid_by_link(device: u64) -> Option<Box<[u8]>> {
    let links = std::fs::read_dir("/dev/disk/by-uuid").ok()?;
    let found =
        links.flatten().find(|link| std::fs::metadata(link.path()).is_ok_and(|found| found.rdev() == device))?;
    Some(found.file_name().into_encoded_bytes().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, proc) = (std::fs::File::open(dir.path()).unwrap(), std::fs::File::open("/proc").unwrap());
        std::fs::write(dir.path().join("f"), "").unwrap();
        let file = std::fs::File::open(dir.path().join("f")).unwrap();
        let superblock = Superblock::of(&inside).unwrap();
        assert_eq!(Superblock::of(&file).unwrap(), superblock);
        assert_ne!(Superblock::of(&proc).unwrap().device, superblock.device);
    }
}
