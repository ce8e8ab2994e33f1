//! What tells a disk from every other, on every host, for as long as it is the same disk.
//!
//! Initiators take two paths with one identity for two ways to one disk, and write to both in turn; and a disk
//! whose identity changes is another one to them. So the name of an export, and the path of its file, which hosts with the
//! same configuration share, are not what it is made of.
//!
//! - A file carries a random number in an extended attribute, together with its inode number, so that a copy,
//!   attributes and all, is another disk.
//! - A block device is what its own identifier says (`wwid`, or the UUID of a mapped or array device).
//! - Memory is a new disk every time.
//! - Where none of this is to be had, it is the machine's identifier, with the path.
//!
//! An export's `uuid=` stands above all of them.

use crate::source::Source;
use rustix::fs::{AtFlags, FileType, StatxFlags, XattrFlags};
use std::fs::File;
use std::io;
use std::path::Path;
use thruway_engine::units::Invalid;

/// 128 bits.
pub(crate) type Identity = [u8; 16];

const ATTRIBUTE: &str = "user.thruway.disk";

/// Reads what `uuid=` says: 32 hexadecimal digits, with dashes or without.
///
/// # Errors
/// [`Invalid`].
pub(crate) fn parse(text: &str) -> Result<Identity, Invalid> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    let wrong = || Invalid::new("UUID", text, "32 hexadecimal digits, as uuidgen prints them");
    if digits.len() != 32 || !digits.is_ascii() {
        return Err(wrong());
    }
    let mut id = [0; 16];
    for (byte, pair) in id.iter_mut().zip(digits.as_bytes().chunks(2)) {
        let pair = std::str::from_utf8(pair).map_err(|_| wrong())?;
        *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
    }
    Ok(id)
}

/// The identity of what an export is made of.
pub(crate) fn of(source: &Source) -> Identity {
    match source {
        Source::Memory(_) => thruway_engine::random::random(),
        Source::Stripe { chunk, members } => {
            let members: Vec<Identity> = members.iter().map(of).collect();
            digest(&[b"stripe", &chunk.to_be_bytes(), &members.concat()])
        }
        Source::Path(path) => of_path(path).unwrap_or_else(|error| {
            tracing::warn!(path = %path.display(), %error, "no lasting identity; give the disk one with uuid=");
            of_place(path)
        }),
    }
}

/// Tells what is at the source's paths now from what was there before, where the identity is made of the path.
pub(crate) fn stamp(source: &Source) -> Identity {
    match source {
        Source::Memory(_) => [0; 16],
        Source::Stripe { members, .. } => {
            let members: Vec<Identity> = members.iter().map(stamp).collect();
            digest(&[b"stamps", &members.concat()])
        }
        Source::Path(path) => {
            let Ok(file) = File::open(path) else { return [0; 16] };
            let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
            let Ok(stat) = rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH, mask) else { return [0; 16] };
            if FileType::from_raw_mode(stat.stx_mode.into()) == FileType::BlockDevice {
                let device = format!("/sys/dev/block/{}:{}", stat.stx_rdev_major, stat.stx_rdev_minor);
                // Counted up whenever a device gets another medium, or another gets its name.
                let read = |what: &str| std::fs::read(format!("{device}/{what}"));
                let sequence = read("diskseq").or_else(|_| read("../diskseq")).unwrap_or_default();
                let backing = read("loop/backing_file").unwrap_or_default();
                return digest(&[b"device", device.as_bytes(), &sequence, &backing]);
            }
            let birth = stat.stx_btime;
            let numbers = [stat.stx_ino, birth.tv_sec.cast_unsigned(), birth.tv_nsec.into()];
            digest(&[b"file", &numbers.map(u64::to_be_bytes).concat()])
        }
    }
}

fn of_path(path: &Path) -> io::Result<Identity> {
    let file = File::open(path)?;
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        return of_device(&format!("/sys/dev/block/{major}:{minor}"))
            .ok_or_else(|| io::Error::other("the device has no identifier"));
    }
    of_file(&file)
}

/// The attribute holds a number and the inode that it was made for.
fn of_file(file: &File) -> io::Result<Identity> {
    let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, mask)?;
    let inode = [stat.stx_ino.to_be_bytes(), stat.stx_btime.tv_sec.to_be_bytes()].concat();
    for _ in 0..2 {
        let mut value = [0; 64];
        let known = rustix::fs::fgetxattr(file, ATTRIBUTE, &mut value);
        if let Ok(32) = known
            && value[16..32] == inode
        {
            return Ok(value[..16].try_into().expect("16 of 32"));
        }
        // Of two that make one at the same time, the first wins; that of a file this one was copied from goes.
        let flags = if known.is_ok() { XattrFlags::REPLACE } else { XattrFlags::CREATE };
        let id: Identity = thruway_engine::random::random();
        match rustix::fs::fsetxattr(file, ATTRIBUTE, &[&id[..], &inode].concat(), flags) {
            Ok(()) => return Ok(id),
            Err(rustix::io::Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Err(io::Error::other("its identity changes while it is read"))
}

/// What the kernel knows a device by; of a partition, what it knows the disk by, and which it is.
fn of_device(sysfs: &str) -> Option<Identity> {
    let read = |name: &str| {
        let text = std::fs::read_to_string(format!("{sysfs}/{name}")).ok()?;
        Some(text.trim().to_string()).filter(|text| !text.is_empty())
    };
    let known = |of: &str| {
        ["dm/uuid", "md/uuid", "wwid", "device/wwid", "uuid", "serial"]
            .iter()
            .find_map(|name| read(&format!("{of}{name}")))
    };
    match read("partition") {
        Some(number) => known("../").map(|disk| digest(&[disk.as_bytes(), number.as_bytes()])),
        None => known("").map(|disk| digest(&[disk.as_bytes()])),
    }
}

fn of_place(path: &Path) -> Identity {
    use std::os::unix::ffi::OsStrExt;
    let machine = std::fs::read("/etc/machine-id").unwrap_or_default();
    let host = rustix::system::uname();
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
    digest(&[&machine, host.nodename().to_bytes(), real.as_os_str().as_bytes()])
}

fn digest(fields: &[&[u8]]) -> Identity {
    let mut context = ring::digest::Context::new(&ring::digest::SHA256);
    for field in fields {
        context.update(&(field.len() as u64).to_be_bytes());
        context.update(field);
    }
    context.finish().as_ref()[..16].try_into().expect("16 of 32")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(path: &Path) -> Source {
        Source::Path(path.into())
    }

    #[test]
    fn a_file_is_the_same_disk_wherever_it_is_moved_and_a_copy_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b, copy) = (dir.path().join("a"), dir.path().join("b"), dir.path().join("copy"));
        std::fs::write(&a, "").unwrap();
        let id = of(&path(&a));
        assert_eq!(of(&path(&a)), id);
        std::fs::rename(&a, &b).unwrap();
        assert_eq!(of(&path(&b)), id);
        // A copy with its attributes, as backups and clones are made.
        std::fs::write(&copy, "").unwrap();
        let mut value = [0; 64];
        let n = rustix::fs::getxattr(&b, ATTRIBUTE, &mut value).unwrap();
        rustix::fs::setxattr(&copy, ATTRIBUTE, &value[..n], XattrFlags::CREATE).unwrap();
        let other = of(&path(&copy));
        assert_ne!(other, id);
        assert_eq!(of(&path(&copy)), other);
        let striped = |first: &Path, second: &Path| {
            of(&Source::Stripe { chunk: 65536, members: vec![path(first), path(second)] })
        };
        assert_eq!(striped(&b, &copy), striped(&b, &copy));
        assert_ne!(striped(&b, &copy), striped(&copy, &b));
    }

    #[test]
    fn two_disks_in_memory_are_two_disks() {
        assert_ne!(of(&Source::Memory(1 << 20)), of(&Source::Memory(1 << 20)));
    }

    #[test]
    fn an_identity_can_be_given() {
        let id = parse("6b29fc40-ca47-1067-b31d-00dd010662da").unwrap();
        assert_eq!((id[0], id[15]), (0x6b, 0xda));
        assert_eq!(parse("6B29FC40CA471067B31D00DD010662DA"), Ok(id));
        for wrong in ["", "6b29", "6b29fc40-ca47-1067-b31d-00dd010662dg", "ü"] {
            assert!(parse(wrong).is_err());
        }
    }
}
