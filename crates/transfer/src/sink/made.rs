//! Directories that a job has made, and how it recognises them: somebody else may have made another one under the same path since.

use rustix::fs::Statx;
use thruway_fs::Identity;

/// Longest time from the record of a directory to its birth, nanoseconds.
const BIRTH_DELAY_MAX: i64 = 2_000_000_000;

/// A directory of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Made {
    /// About to be made at this time, in nanoseconds since 1970. The attempt ended before it recorded the identity.
    Begun(i64),
    /// Made, with this fingerprint of its identity.
    Done(u64),
}

impl Made {
    /// True for the directory that was made. Without its identity, true for a directory of this user with a birth within
    /// [`BIRTH_DELAY_MAX`] of the record.
    pub(crate) fn is(&self, identity: Identity, stat: &Statx) -> bool {
        match *self {
            Made::Done(fingerprint) => identity.fingerprint() == fingerprint,
            Made::Begun(at) => {
                let is_own = stat.stx_uid == rustix::process::geteuid().as_raw();
                is_own && identity.born.abs_diff(at) <= BIRTH_DELAY_MAX.unsigned_abs()
            }
        }
    }

    /// The time for [`Made::Begun`], from the clock that file systems use.
    pub(crate) fn now() -> i64 {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        now.tv_sec.wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_without_a_recorded_identity_is_recognised_by_its_birth() {
        let dir = tempfile::tempdir().unwrap();
        let before = Made::Begun(Made::now());
        std::fs::create_dir(dir.path().join("d")).unwrap();
        let opened = std::fs::File::open(dir.path().join("d")).unwrap();
        let (identity, stat) = Identity::of(&opened, c"").unwrap();
        assert!(matches!(before, Made::Begun(at) if at <= identity.born), "one clock");
        let before = Made::Begun(identity.born);
        let at = |offset: i64| Made::Begun(identity.born + offset).is(identity, &stat);
        assert!(at(BIRTH_DELAY_MAX) && !at(BIRTH_DELAY_MAX + 1) && !at(-BIRTH_DELAY_MAX - 1));
        let mut foreign = stat;
        foreign.stx_uid += 1;
        assert!(!before.is(identity, &foreign));
    }
}
