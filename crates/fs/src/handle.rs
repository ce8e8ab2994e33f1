//! File handles: names of files that outlive renames and restarts (`name_to_handle_at(2)`).
//!
//! A handle opens a file whatever the permissions of the directories above it: the caller has to check that it leads where the peer that
//! sent it may go, and must not give it to a peer that could change it (see [`crate::beneath`] for paths).

#![allow(unsafe_code, reason = "rustix has no safe form of these two calls")]

use rustix::fs::OFlags;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Most bytes of a handle (`MAX_HANDLE_SZ`).
pub const LEN_MAX: usize = 128;

/// How often a handle is opened again whose inode number is being reused.
const REUSED_TRIES: u32 = 20;

/// What a file system calls a file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Handle {
    kind: i32,
    bytes: Vec<u8>,
}

/// `struct file_handle` with room for every handle.
#[repr(C)]
struct RawHandle {
    handle_bytes: u32,
    handle_type: i32,
    f_handle: [u8; LEN_MAX],
}

impl Handle {
    /// The handle of an entry of a directory, or, without a name, of what is open; and the number of its mount. Never
    /// follows a symbolic link.
    ///
    /// # Errors
    /// Of kind [`io::ErrorKind::Unsupported`] where the file system has no handles; else those of `name_to_handle_at(2)`.
    pub fn of(dir: impl AsFd, name: &CStr) -> io::Result<(Handle, i32)> {
        let mut raw = RawHandle { handle_bytes: LEN_MAX as u32, handle_type: 0, f_handle: [0; LEN_MAX] };
        let mut mount = 0;
        let flags = if name.is_empty() { libc::AT_EMPTY_PATH } else { 0 };
        // SAFETY: the name ends with its NUL; the structure has the room that it says, and it and `mount` outlive the call.
        let rc = unsafe {
            libc::name_to_handle_at(
                dir.as_fd().as_raw_fd(),
                name.as_ptr(),
                (&raw mut raw).cast(),
                &raw mut mount,
                flags,
            )
        };
        if rc != 0 {
            return Err(io::Error::last_os_error());
        }
        let bytes = raw.f_handle.get(..raw.handle_bytes as usize).unwrap_or_default().to_vec();
        Ok((Handle { kind: raw.handle_type, bytes }, mount))
    }

    /// Opens the file on the file system that `mount` is an open file or directory of. Needs `CAP_DAC_READ_SEARCH`.
    ///
    /// # Errors
    /// `ESTALE` when the file is gone; else those of `open_by_handle_at(2)`.
    pub fn open(&self, mount: impl AsFd, flags: OFlags) -> io::Result<OwnedFd> {
        let mut tries = 0;
        loop {
            match self.try_open(mount.as_fd(), flags) {
                // While the inode number of a file that is gone is given to a new one, Linux's `iget_locked` finds an
                // inode that is not ready (`I_CREATING`), and ext4 and others make this error of it.
                Err(e) if e.raw_os_error() == Some(libc::ENOMEM) && tries < REUSED_TRIES => {
                    tries += 1;
                    std::thread::sleep(std::time::Duration::from_micros(100));
                }
                result => return result,
            }
        }
    }

    fn try_open(&self, mount: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
        let mut raw =
            RawHandle { handle_bytes: self.bytes.len() as u32, handle_type: self.kind, f_handle: [0; LEN_MAX] };
        raw.f_handle[..self.bytes.len()].copy_from_slice(&self.bytes);
        let flags = (flags | OFlags::CLOEXEC).bits().cast_signed();
        // SAFETY: the structure holds as many bytes as it says, and outlives the call.
        let fd = unsafe { libc::open_by_handle_at(mount.as_raw_fd(), (&raw mut raw).cast(), flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call has just returned it, so it has no other owner.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Number of the file's subvolume; `None` on file systems without subvolumes. Inode numbers are unique within a subvolume.
    pub fn subvolume(&self) -> Option<u64> {
        // The numbers are values of the kernel's `enum fid_type`. `struct btrfs_fid` of Btrfs has two 64-bit numbers, inode and
        // subvolume. `struct bcachefs_fid` of bcachefs has a 64-bit inode number and a 32-bit subvolume.
        match self.kind {
            _ if self.is_of_btrfs() => Some(u64::from_ne_bytes(*self.bytes.get(8..)?.first_chunk()?)),
            0xb1 | 0xb2 => Some(u32::from_ne_bytes(*self.bytes.get(8..)?.first_chunk()?).into()),
            _ => None,
        }
    }

    pub(crate) fn is_of_btrfs(&self) -> bool {
        (0x4d..=0x4f).contains(&self.kind)
    }

    /// The handle as bytes: its type, little-endian, and what the file system wrote.
    pub fn encode(&self) -> Vec<u8> {
        [&self.kind.to_le_bytes()[..], &self.bytes].concat()
    }

    /// Reads bytes that [`Handle::encode`] made. `None` if it cannot have been.
    pub fn decode(bytes: &[u8]) -> Option<Handle> {
        let (kind, bytes) = bytes.split_first_chunk()?;
        (bytes.len() <= LEN_MAX).then(|| Handle { kind: i32::from_le_bytes(*kind), bytes: bytes.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs;

    #[test]
    fn a_handle_outlives_a_rename_and_not_its_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a"), "content").unwrap();
        let root = fs::File::open(dir.path()).unwrap();
        let (handle, mount) = Handle::of(&root, c"a").unwrap();
        assert_eq!(Handle::of(fs::File::open(dir.path().join("a")).unwrap(), c"").unwrap(), (handle.clone(), mount));
        assert_ne!(Handle::of(&root, c"").unwrap().0, handle);
        fs::rename(dir.path().join("a"), dir.path().join("b")).unwrap();
        let handle = Handle::decode(&handle.encode()).unwrap();
        if !rustix::process::geteuid().is_root() {
            assert_eq!(handle.open(&root, OFlags::RDONLY).unwrap_err().raw_os_error(), Some(libc::EPERM));
            return;
        }
        let open = fs::File::from(handle.open(&root, OFlags::RDONLY).unwrap());
        assert_eq!(io::read_to_string(open).unwrap(), "content");
        fs::remove_file(dir.path().join("b")).unwrap();
        assert_eq!(handle.open(&root, OFlags::RDONLY).unwrap_err().raw_os_error(), Some(libc::ESTALE));
    }

    /// Inode numbers that are reused while their old handles are opened: a lost file is stale, never anything else.
    #[test]
    fn a_handle_whose_inode_number_is_reused_is_stale() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let root = fs::File::open(dir.path()).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let name = dir.path().join("other");
                    fs::write(&name, "").unwrap();
                    fs::remove_file(name).unwrap();
                }
            });
            let mut errors = std::collections::BTreeSet::new();
            for _ in 0..2000 {
                fs::write(dir.path().join("a"), "").unwrap();
                let (handle, _) = Handle::of(&root, c"a").unwrap();
                fs::remove_file(dir.path().join("a")).unwrap();
                errors.extend((0..5).map(|_| handle.open(&root, OFlags::RDONLY).unwrap_err().raw_os_error()));
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(errors.into_iter().collect::<Vec<_>>(), [Some(libc::ESTALE)]);
        });
    }

    #[test]
    fn what_has_no_handle_says_so() {
        let proc = fs::File::open("/proc/self").unwrap();
        assert_eq!(Handle::of(&proc, c"status").unwrap_err().kind(), io::ErrorKind::Unsupported);
    }

    proptest! {
        #[test]
        fn bytes_of_any_length_are_a_handle_or_none(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            match Handle::decode(&bytes) {
                Some(handle) => {
                    prop_assert_eq!(handle.encode(), bytes);
                    let root = fs::File::open("/tmp").unwrap();
                    // The file system looks into it: an error, or a file of its own.
                    let _ = handle.open(&root, OFlags::PATH);
                }
                None => prop_assert!(bytes.len() < 4 || bytes.len() > 4 + LEN_MAX),
            }
        }
    }
}
