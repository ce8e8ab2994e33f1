//! Names that sinks give to files of their own: temporary ones, and journals.

use rustix::fs::{AtFlags, FileType, Stat};
use std::ffi::{CStr, CString};
use std::os::fd::OwnedFd;

/// What temporary files of ours are called: `.NAME.tw-` and [`TAG_LEN`] hexadecimal digits.
const TEMP_MARK: &[u8] = b".tw-";
/// Long enough that names of different jobs do not collide.
const TAG_LEN: usize = 32;
/// How journals are called: `.thruway-JOB.journal`.
pub(crate) const JOURNAL_PREFIX: &[u8] = b".thruway-";
pub(crate) const JOURNAL_SUFFIX: &[u8] = b".journal";
/// A file of ours that a job may still be writing is not removed before this age.
pub(crate) const OWN_AGE_MAX_S: i64 = 24 * 3600;

/// Whether a name is one that sinks give to their own files.
pub(crate) fn is_own_name(name: &[u8]) -> bool {
    let job = name.strip_prefix(JOURNAL_PREFIX).and_then(|rest| rest.strip_suffix(JOURNAL_SUFFIX));
    temporary_of(name).is_some() || job.is_some_and(|job| job.len() == TAG_LEN && job.iter().all(u8::is_ascii_hexdigit))
}

/// Final name of the file with this temporary name; only the beginning of a long one. `None` for names that are not temporary.
pub(crate) fn temporary_of(name: &[u8]) -> Option<&[u8]> {
    let (rest, tag) = name.split_at_checked(name.len().checked_sub(TAG_LEN)?)?;
    let rest = rest.strip_suffix(TEMP_MARK)?.strip_prefix(b".")?;
    (!rest.is_empty() && tag.iter().all(u8::is_ascii_hexdigit)).then_some(rest)
}

/// Whether a name is of a file that another job may be working on.
pub(super) fn is_fresh_own(dir: &OwnedFd, name: &CStr) -> bool {
    if !is_own_name(name.to_bytes()) {
        return false;
    }
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
    // Directories of such names are not of a job.
    let is_job_file = |s: &Stat| !FileType::from_raw_mode(s.st_mode).is_dir();
    stat.is_ok_and(|s| is_job_file(&s) && now.saturating_sub(s.st_mtime.max(s.st_ctime)) < OWN_AGE_MAX_S)
}

/// The temporary name of a file of a job.
pub(crate) fn temp_name(name: &CStr, job: &[u8; 16], key: &[u8; 16]) -> CString {
    // Names have at most 255 bytes.
    const KEPT: usize = 255 - 1 - TEMP_MARK.len() - TAG_LEN;
    let bytes = name.to_bytes();
    let tag = blake3::Hasher::new().update(job).update(key).finalize();
    let mut out = vec![b'.'];
    out.extend_from_slice(&bytes[..bytes.len().min(KEPT)]);
    out.extend_from_slice(TEMP_MARK);
    out.extend_from_slice(crate::auth::to_hex(&tag.as_bytes()[..TAG_LEN / 2]).as_bytes());
    CString::new(out).expect("made of names and digits")
}
