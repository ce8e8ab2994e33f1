//! What a receiver lets a source do: only what was asked for.
//!
//! A source names every path that it wants written, linked or removed. A receiver that took its word
//! would let it replace `.bashrc` where a single file had been asked for.

use crate::wire::{Malformed, Record, TreeOptions, check_path};
use std::sync::atomic::{AtomicBool, Ordering};

/// What was asked of the source.
#[derive(Debug)]
pub(crate) struct Scope {
    /// Names that may be made in the root of the copy, and whether anything of them has come; `None`: any.
    names: Option<Vec<(Vec<u8>, AtomicBool)>>,
    /// Something of each is to come: no filter leaves it out.
    all: bool,
    recursive: bool,
    preserve: bool,
    delete: bool,
}

impl Scope {
    /// `names` are those the things asked for get; an empty one stands for the contents of a directory, whose names
    /// only the source knows.
    pub(crate) fn new(names: Option<&[Vec<u8>]>, options: &TreeOptions) -> Scope {
        Scope {
            names: names
                .filter(|names| names.iter().all(|n| !n.is_empty()))
                .map(|names| names.iter().map(|name| (name.clone(), AtomicBool::new(false))).collect()),
            all: options.include.is_empty() && options.exclude.is_empty(),
            recursive: options.recursive,
            preserve: options.preserve,
            delete: options.delete,
        }
    }

    /// Checks a record from the source.
    ///
    /// # Errors
    /// [`Malformed`] if it names what no path can be, or what was not asked for.
    pub(crate) fn check(&self, record: &Record) -> Result<(), Malformed> {
        match record {
            Record::Dir { path, .. } | Record::Keep { path, .. } if path.is_empty() => {
                // The root of the copy itself: where the contents of a directory were asked for.
                self.allow(self.names.is_none() && self.recursive)?;
            }
            Record::Dir { path, .. } | Record::Keep { path, .. } => {
                self.allow(self.recursive)?;
                self.path(path)?;
            }
            Record::Link { path, target } => {
                self.allow(self.preserve)?;
                self.path(path).and_then(|()| self.path(target))?;
            }
            Record::Special { path, .. } => {
                self.allow(self.preserve)?;
                self.path(path)?;
            }
            Record::Symlink { path, .. } => {
                // A source follows links that the command names. One in place of the destination would lead the next copy elsewhere.
                self.allow(self.names.is_none() || path.contains(&b'/'))?;
                self.path(path)?;
            }
            Record::File { path, .. } | Record::Begin { path, .. } | Record::Attributes { path, .. } => {
                self.path(path)?
            }
        }
        match record {
            Record::Keep { path, below, names, .. } => {
                self.allow(self.delete)?;
                let ends = |at: usize| at == 0 || at == path.len() || path.get(at) == Some(&b'/');
                if !ends(*below as usize) {
                    return Err(Malformed("where a path below its source begins"));
                }
                let plain = |n: &Vec<u8>| !n.is_empty() && !n.contains(&b'/') && check_path(n).is_ok();
                if names.iter().all(plain) { Ok(()) } else { Err(Malformed("name to keep")) }
            }
            _ => Ok(()),
        }
    }

    /// Checks a path that the source offers or ends a file with.
    ///
    /// # Errors
    /// [`Malformed`] if it was not asked for.
    pub(crate) fn path(&self, path: &[u8]) -> Result<(), Malformed> {
        check_path(path)?;
        if path.split(|b| *b == b'/').any(super::is_own_name) {
            return Err(Malformed("path: a name that only receivers give"));
        }
        let first = path.split(|b| *b == b'/').next().unwrap_or_default();
        // Several that were asked for may have one name.
        let named = |names: &Vec<(Vec<u8>, AtomicBool)>| {
            let found = names.iter().filter(|(name, _)| name == first);
            found.inspect(|(_, has_come)| has_come.store(true, Ordering::Relaxed)).count() > 0
        };
        let asked = self.names.as_ref().is_none_or(named);
        self.allow(!path.is_empty() && asked && (self.recursive || first.len() == path.len()))
    }

    /// What was asked for by its name, and has not come though nothing leaves it out.
    pub(crate) fn missing(&self) -> Option<&[u8]> {
        let mut names = self.names.iter().flatten().filter(|_| self.all);
        names.find(|(_, has_come)| !has_come.load(Ordering::Relaxed)).map(|(name, _)| &name[..])
    }

    fn allow(&self, allowed: bool) -> Result<(), Malformed> {
        if allowed { Ok(()) } else { Err(Malformed("entry: not among what was asked for")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{KeepEnd, Meta};

    fn scope(names: &[&str], set: impl Fn(&mut TreeOptions)) -> Scope {
        let mut options = TreeOptions::default();
        set(&mut options);
        let names: Vec<Vec<u8>> = names.iter().map(|n| n.as_bytes().to_vec()).collect();
        Scope::new(Some(&names), &options)
    }

    fn file(path: &str) -> Record {
        Record::File { path: path.into(), meta: Meta::default() }
    }

    fn dir(path: &str) -> Record {
        Record::Dir { path: path.into(), meta: Meta::default() }
    }

    fn keep(path: &str) -> Record {
        Record::Keep { path: path.into(), below: 0, names: vec![b"a".to_vec()], end: KeepEnd::Complete }
    }

    fn special(path: &str) -> Record {
        Record::Special { path: path.into(), meta: Meta::default(), rdev: 0 }
    }

    fn link(path: &str, target: &str) -> Record {
        Record::Link { path: path.into(), target: target.into() }
    }

    #[test]
    fn a_single_file_is_all_that_is_taken_where_one_was_asked_for() {
        let one = scope(&["wanted"], |_| ());
        assert!(one.check(&file("wanted")).is_ok());
        for path in ["", ".bashrc", "wanted/below", "wanted2", "../wanted", "/wanted"] {
            assert!(one.check(&file(path)).is_err(), "{path}");
            assert!(one.path(path.as_bytes()).is_err(), "{path}");
        }
        for record in [dir("wanted"), dir(""), keep(""), keep("wanted"), special("wanted"), link("wanted", "wanted")] {
            assert!(one.check(&record).is_err(), "{record:?}");
        }
    }

    #[test]
    fn a_source_that_the_command_names_is_no_link() {
        let symlink =
            |path: &str| Record::Symlink { path: path.into(), target: b"/etc".to_vec(), meta: Meta::default() };
        for names in [&["a"][..], &["a", "b"]] {
            let scope = scope(names, |o| o.recursive = true);
            assert!(scope.check(&symlink("a")).is_err() && scope.check(&symlink("a/b")).is_ok());
        }
        let contents = scope(&[""], |o| o.recursive = true);
        assert!(contents.check(&symlink("a")).is_ok());
    }

    #[test]
    fn kinds_and_removals_need_their_options() {
        let tree = scope(&["tree"], |o| o.recursive = true);
        for record in [file("tree/a/b"), dir("tree"), dir("tree/a")] {
            assert!(tree.check(&record).is_ok(), "{record:?}");
        }
        for record in [file("other"), dir(""), keep("tree"), special("tree/fifo"), link("tree/a", "tree/b")] {
            assert!(tree.check(&record).is_err(), "{record:?}");
        }
        let all = |o: &mut TreeOptions| (o.recursive, o.preserve, o.delete) = (true, true, true);
        let mirror = scope(&["tree"], all);
        for record in [keep("tree"), special("tree/fifo"), link("tree/a", "tree/b")] {
            assert!(mirror.check(&record).is_ok(), "{record:?}");
        }
        for record in [keep(""), keep("other"), link("tree/a", "other"), dir("")] {
            assert!(mirror.check(&record).is_err(), "{record:?}");
        }
        let contents = scope(&["tree", ""], all);
        assert!(contents.check(&keep("")).is_ok() && contents.check(&file("anything/at/all")).is_ok());
        assert!(contents.check(&dir("")).is_ok() && contents.check(&file("../x")).is_err());
    }

    #[test]
    fn what_has_not_come_is_missing_unless_a_filter_may_leave_it_out() {
        let asked = scope(&["a", "tree", "tree"], |options| options.recursive = true);
        assert_eq!(asked.missing(), Some(&b"a"[..]));
        asked.path(b"a").unwrap();
        assert_eq!(asked.missing(), Some(&b"tree"[..]));
        asked.path(b"tree/file").unwrap();
        assert_eq!(asked.missing(), None, "two of one name");
        assert_eq!(scope(&["a"], |options| options.exclude = vec!["x".into()]).missing(), None);
        assert_eq!(scope(&["a", ""], |_| ()).missing(), None, "names that only the source knows");
    }

    #[test]
    fn names_of_our_own_files_and_paths_that_end_in_mid_name_are_not_taken() {
        let tree = scope(&["tree"], |o| (o.recursive, o.delete) = (true, true));
        let own = "tree/.f.tw-0123abcd0123abcd0123abcd0123abcd";
        for record in [
            file(own),
            dir(own),
            file(&format!("{own}/f")),
            file("tree/.thruway-00112233445566778899aabbccddeeff.journal"),
        ] {
            assert!(tree.check(&record).is_err(), "{record:?}");
        }
        let keep =
            |below| Record::Keep { path: b"tree/sub".to_vec(), below, names: Vec::new(), end: KeepEnd::Complete };
        for below in [0, 4, 8] {
            assert!(tree.check(&keep(below)).is_ok());
        }
        for below in [1, 5, 9, u32::MAX] {
            assert!(tree.check(&keep(below)).is_err(), "{below}");
        }
    }

    #[test]
    fn names_to_keep_are_names() {
        let mirror = scope(&[""], |o| (o.recursive, o.delete) = (true, true));
        for name in ["", "a/b", "..", "\0"] {
            let record = Record::Keep { path: Vec::new(), below: 0, names: vec![name.into()], end: KeepEnd::Complete };
            assert!(mirror.check(&record).is_err(), "{name:?}");
        }
    }
}
