//! What can be expected of a file system, by its kind.

use rustix::fs::FsWord;
use std::os::fd::AsFd;

/// `statfs` magics of FUSE and of file systems that may stand on one.
const UNSOUND: [FsWord; 3] = [libc::FUSE_SUPER_MAGIC, libc::OVERLAYFS_SUPER_MAGIC, libc::ECRYPTFS_SUPER_MAGIC];

/// Whether io_uring can be trusted with an open file.
///
/// Not on FUSE: where the server does reads and writes itself (`FOPEN_DIRECT_IO`) and does one in part, Linux (6.18, and those before it)
/// does not tell io_uring how far it has come, and io_uring repeats the rest of it where all of it began: what was asked for
/// comes from the wrong place of the file, or goes there. Nor on overlayfs and eCryptfs, below which may be FUSE, nor where a file
/// system does not say what it is.
pub fn uring_is_sound(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|fs| !UNSOUND.contains(&fs.f_type))
}

/// `statfs` magics of file systems on disks of this host, and in its memory: ext2 to ext4, XFS, Btrfs, F2FS, bcachefs, ZFS, tmpfs, ramfs.
const OF_THIS_HOST: [FsWord; 8] = [
    libc::EXT4_SUPER_MAGIC,
    libc::XFS_SUPER_MAGIC,
    libc::BTRFS_SUPER_MAGIC,
    libc::F2FS_SUPER_MAGIC,
    BCACHEFS_SUPER_MAGIC,
    ZFS_SUPER_MAGIC,
    libc::TMPFS_MAGIC,
    RAMFS_MAGIC,
];
const BCACHEFS_SUPER_MAGIC: FsWord = 0xca45_1a4e;
const ZFS_SUPER_MAGIC: FsWord = 0x2fc1_2fc1;
const RAMFS_MAGIC: FsWord = 0x8584_58f6;

/// Whether `fsync` of a file or a directory that has just been made also brings its name to the medium, so that its directory need not
/// be synced for it, times included: ext3, ext4 and XFS log both in one transaction, and ext4 without a journal syncs the directories
/// above. Not Btrfs, which brings the name to the medium but leaves the directory's times as they were; nor ext2's own driver.
pub fn syncs_names_with_new_files(file: impl AsFd) -> bool {
    const DO: [FsWord; 2] = [libc::EXT4_SUPER_MAGIC, libc::XFS_SUPER_MAGIC];
    let file = file.as_fd();
    rustix::fs::fstatfs(file).is_ok_and(|fs| DO.contains(&fs.f_type)) && driver(file).is_some_and(|name| name != "ext2")
}

/// The name of the driver of a file system.
fn driver(file: impl AsFd) -> Option<String> {
    let device = rustix::fs::fstat(file).ok()?.st_dev;
    let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&device))?;
    Some(mount.split(" - ").nth(1)?.split(' ').next()?.into())
}

/// Whether an open file or directory is on a file system of this host that is known: its `syncfs` reaches the medium and tells
/// what was lost, and what it knows of a file it tells without asking anybody. Not FUSE, nor SMB or NFS, nor what stands on
/// another file system.
pub fn is_of_this_host(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|fs| OF_THIS_HOST.contains(&fs.f_type))
}
