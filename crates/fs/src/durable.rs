//! Small files that are replaced as a whole: when a call has returned, what it did survives a loss of power.

use rustix::fs::{Mode, OFlags};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Behind the name of a file that is about to take another's place.
pub const NEW_SUFFIX: &str = ".new";

/// Puts a file with this content in place of the one at `path`, if there is one; missing directories are made.
///
/// # Errors
/// If something fails. The old or the new file is there then, whole.
pub fn replace(path: &Path, content: &[u8], mode: Mode) -> io::Result<()> {
    let parent = parent(path);
    create_directories(parent)?;
    let temp = new_name(path);
    match std::fs::remove_file(&temp) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::open(&temp, flags, mode)?);
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&temp, path)?;
    File::open(parent)?.sync_all()
}

/// Holds a directory for this process, by a lock on a file in it, until what is returned is dropped or the process ends; `None` if
/// another process holds it. Missing directories are made.
///
/// # Errors
/// If something fails.
pub fn hold(dir: &Path, name: &str) -> io::Result<Option<File>> {
    create_directories(dir)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    let file = rustix::fs::open(dir.join(name), flags, Mode::RUSR | Mode::WUSR)?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        other => other.map(|()| Some(File::from(file))).map_err(io::Error::from),
    }
}

/// Removes a file, if it is there.
///
/// # Errors
/// If something fails. The file may be there then or not.
pub fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    }
    File::open(parent(path))?.sync_all()
}

/// Makes what is missing of a path.
///
/// # Errors
/// If something fails.
pub fn create_directories(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    let above = parent(path);
    create_directories(above)?;
    match std::fs::create_dir(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    File::open(above)?.sync_all()
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn new_name(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(NEW_SUFFIX);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_held_by_one() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("a/b");
        let held = hold(&dir, "lock").unwrap().expect("it is free");
        assert!(hold(&dir, "lock").unwrap().is_none());
        drop(held);
        assert!(hold(&dir, "lock").unwrap().is_some());
    }

    #[test]
    fn a_file_is_replaced_and_removed_whatever_is_left_of_earlier_attempts() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("a/b/file");
        remove(&top.path().join("nothing")).unwrap();
        for content in ["one", "two"] {
            replace(&path, content.as_bytes(), Mode::RUSR | Mode::WUSR).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
            std::fs::write(new_name(&path), "left by a crash").unwrap();
        }
        remove(&path).unwrap();
        assert!(!path.exists());
        std::fs::create_dir(&path).unwrap();
        assert!(replace(&path, b"", Mode::RUSR).is_err(), "a directory is in its place");
    }
}
