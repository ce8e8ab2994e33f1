//! POSIX access control lists, as the kernel keeps them in extended attributes (`system.posix_acl_access`,
//! `system.posix_acl_default`; include/uapi/linux/posix_acl_xattr.h).

/// Whom an entry is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    /// The file's owner.
    Owner,
    /// A user.
    User(u32),
    /// The file's group.
    OwningGroup,
    /// A group.
    Group(u32),
    /// The most that all but the owner and others get.
    Mask,
    /// Everybody else.
    Others,
}

/// What somebody may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Whom.
    pub who: Who,
    /// The three bits of a mode: 4 to read, 2 to write, 1 to execute or search.
    pub permissions: u8,
}

/// An access control list, valid as the kernel understands it: its entries are in order and complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acl(Vec<Entry>);

/// Why something is not an access control list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AclError {
    /// The bytes are none.
    #[error("not an access control list: {0}")]
    Malformed(&'static str),
    /// An entry for the owner, the owning group or others is missing, or there are two; or there is a named entry and no mask.
    #[error("incomplete access control list: {0}")]
    Incomplete(&'static str),
}

const VERSION: u32 = 2;
const HEADER_LEN: usize = 4;
const ENTRY_LEN: usize = 8;
/// The id of an entry without one.
const UNDEFINED_ID: u32 = u32::MAX;

impl Who {
    fn tag(self) -> (u16, u32) {
        match self {
            Who::Owner => (0x01, UNDEFINED_ID),
            Who::User(id) => (0x02, id),
            Who::OwningGroup => (0x04, UNDEFINED_ID),
            Who::Group(id) => (0x08, id),
            Who::Mask => (0x10, UNDEFINED_ID),
            Who::Others => (0x20, UNDEFINED_ID),
        }
    }

    fn from_tag(tag: u16, id: u32) -> Option<Who> {
        match tag {
            0x01 => Some(Who::Owner),
            0x02 => Some(Who::User(id)),
            0x04 => Some(Who::OwningGroup),
            0x08 => Some(Who::Group(id)),
            0x10 => Some(Who::Mask),
            0x20 => Some(Who::Others),
            _ => None,
        }
    }
}

impl Acl {
    /// A list of these entries, in any order.
    ///
    /// # Errors
    /// [`AclError::Incomplete`]; [`AclError::Malformed`] for permissions that are none, and for two entries for the same user, group or class.
    pub fn new(mut entries: Vec<Entry>) -> Result<Acl, AclError> {
        entries.sort_by_key(|entry| entry.who);
        if entries.iter().any(|entry| entry.permissions > 7) {
            return Err(AclError::Malformed("permissions beyond read, write and execute"));
        }
        if entries.windows(2).any(|pair| pair[0].who == pair[1].who) {
            return Err(AclError::Malformed("two entries for the same user, group or class"));
        }
        let has = |who| entries.iter().any(|entry| entry.who == who);
        for (who, missing) in [
            (Who::Owner, "no entry for the owner"),
            (Who::OwningGroup, "no entry for the owning group"),
            (Who::Others, "no entry for others"),
        ] {
            if !has(who) {
                return Err(AclError::Incomplete(missing));
            }
        }
        let named = entries.iter().any(|entry| matches!(entry.who, Who::User(_) | Who::Group(_)));
        if named && !has(Who::Mask) {
            return Err(AclError::Incomplete("a named user or group and no mask"));
        }
        Ok(Acl(entries))
    }

    /// What a mode says.
    pub fn from_mode(mode: u32) -> Acl {
        let entry = |who, shift: u32| Entry { who, permissions: (mode >> shift & 7) as u8 };
        Acl(vec![entry(Who::Owner, 6), entry(Who::OwningGroup, 3), entry(Who::Others, 0)])
    }

    /// The permission bits that the file's mode has with this list; and whether they say all that the list says.
    pub fn mode(&self) -> (u32, bool) {
        let of = |who| self.0.iter().find(|entry| entry.who == who).map(|entry| u32::from(entry.permissions));
        let group = of(Who::Mask).or(of(Who::OwningGroup));
        let mode = of(Who::Owner).unwrap_or(0) << 6 | group.unwrap_or(0) << 3 | of(Who::Others).unwrap_or(0);
        (mode, self.0.len() == 3)
    }

    /// The list of a new entry below a directory with this default list, made with a mode: each class has at most the rights of both
    /// (acl(5), "Object creation and default ACLs").
    pub fn limited(&self, mode: u32) -> Acl {
        let has_mask = self.0.iter().any(|entry| entry.who == Who::Mask);
        let limit = |entry: &Entry| {
            let shift = match entry.who {
                Who::Owner => 6,
                Who::Mask => 3,
                Who::OwningGroup if !has_mask => 3,
                Who::Others => 0,
                _ => return *entry,
            };
            Entry { permissions: entry.permissions & (mode >> shift & 7) as u8, ..*entry }
        };
        Acl(self.0.iter().map(limit).collect())
    }

    /// Returns the mode for an entry without this list, so that no user gains rights. With the list, the group bits of `mode` are the mask,
    /// and the list can deny rights to users that others have.
    pub fn mode_without_list(&self, mode: u32) -> u32 {
        let of = |who| self.0.iter().find(|entry| entry.who == who).map(|entry| u32::from(entry.permissions));
        let mask = of(Who::Mask).unwrap_or(7);
        let is_named = |entry: &&Entry| matches!(entry.who, Who::User(_) | Who::Group(_));
        let least = self.0.iter().filter(is_named).fold(7, |least, entry| least & u32::from(entry.permissions) & mask);
        let group = of(Who::OwningGroup).unwrap_or(0) & mask & least;
        let others = of(Who::Others).unwrap_or(0) & least;
        mode & (!0o077 | group << 3 | others)
    }

    /// The list without rights of the owning group.
    pub fn without_group(&self) -> Acl {
        let without = |entry: &Entry| match entry.who {
            Who::OwningGroup => Entry { permissions: 0, ..*entry },
            _ => *entry,
        };
        Acl(self.0.iter().map(without).collect())
    }

    /// The entries: the owner, users, the owning group, groups, the mask, others.
    pub fn entries(&self) -> &[Entry] {
        &self.0
    }

    /// Reads the value of an attribute.
    ///
    /// # Errors
    /// As [`Acl::new`].
    pub fn decode(value: &[u8]) -> Result<Acl, AclError> {
        let (header, rest) = value.split_at_checked(HEADER_LEN).ok_or(AclError::Malformed("too short"))?;
        if header != VERSION.to_le_bytes() {
            return Err(AclError::Malformed("unknown version"));
        }
        let (entries, []) = rest.as_chunks::<ENTRY_LEN>() else {
            return Err(AclError::Malformed("ends inside an entry"));
        };
        let decode = |[t0, t1, p0, p1, id @ ..]: &[u8; ENTRY_LEN]| {
            let who = Who::from_tag(u16::from_le_bytes([*t0, *t1]), u32::from_le_bytes(*id));
            let permissions = u8::try_from(u16::from_le_bytes([*p0, *p1])).unwrap_or(u8::MAX);
            Some(Entry { who: who?, permissions })
        };
        let entries: Option<Vec<Entry>> = entries.iter().map(decode).collect();
        Acl::new(entries.ok_or(AclError::Malformed("an entry with an unknown tag"))?)
    }

    /// The value of an attribute.
    pub fn encode(&self) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for Entry { who, permissions } in &self.0 {
            let (tag, id) = who.tag();
            value.extend_from_slice(&tag.to_le_bytes());
            value.extend_from_slice(&u16::from(*permissions).to_le_bytes());
            value.extend_from_slice(&id.to_le_bytes());
        }
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;

    const ACCESS: &[u8] = b"system.posix_acl_access";

    #[test]
    fn without_its_list_nobody_has_more_rights() {
        let entry = |who, permissions| Entry { who, permissions };
        let of = |owning_group, more: &[Entry]| {
            let usual = [(Who::Owner, 6), (Who::OwningGroup, owning_group), (Who::Mask, 6), (Who::Others, 4)];
            let usual = usual.map(|(who, permissions)| entry(who, permissions));
            Acl::new(usual.iter().chain(more).copied().collect()).unwrap().mode_without_list(0o100_664)
        };
        assert_eq!(of(7, &[entry(Who::User(7), 7)]), 0o100_664);
        // The group has no rights, although the mask has.
        assert_eq!(of(0, &[entry(Who::User(7), 7)]), 0o100_604);
        assert_eq!(of(6, &[entry(Who::User(7), 6), entry(Who::Group(8), 0)]), 0o100_600);
    }

    #[test]
    fn the_kernel_takes_and_tells_the_same_list() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = std::fs::File::create(&path).unwrap();
        let entry = |who, permissions| Entry { who, permissions };
        let acl = Acl::new(vec![
            entry(Who::Others, 0),
            entry(Who::Group(77), 5),
            entry(Who::Owner, 6),
            entry(Who::User(1234), 7),
            entry(Who::User(5), 1),
            entry(Who::OwningGroup, 4),
            entry(Who::Mask, 5),
        ])
        .unwrap();
        crate::xattr::write(file.as_fd(), ACCESS, &acl.encode()).unwrap();
        let attributes = crate::xattr::read_open(file.as_fd()).unwrap();
        let (_, value) = attributes.iter().find(|(name, _)| name == ACCESS).unwrap();
        assert_eq!(Acl::decode(value), Ok(acl.clone()));
        let mode = std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode, false), acl.mode());
        // A list that says no more than a mode becomes one.
        crate::xattr::write(file.as_fd(), ACCESS, &Acl::from_mode(0o640).encode()).unwrap();
        assert!(crate::xattr::read_open(file.as_fd()).unwrap().is_empty());
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
    }

    #[test]
    fn a_default_list_limits_modes_as_the_kernel_does() {
        let entry = |who, permissions| Entry { who, permissions };
        for (others, extra) in [(0, &[][..]), (5, &[entry(Who::User(1234), 7), entry(Who::Mask, 4)]), (2, &[])] {
            let base = [entry(Who::Owner, 7), entry(Who::OwningGroup, 5), entry(Who::Others, others)];
            let list = Acl::new([&base[..], extra].concat()).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let fd = std::fs::File::open(dir.path()).unwrap();
            crate::xattr::write(fd.as_fd(), b"system.posix_acl_default", &list.encode()).unwrap();
            assert_eq!(crate::xattr::default_acl(fd.as_fd()).unwrap(), Some(list.clone()));
            for mode in [0o777, 0o644, 0o600, 0o420] {
                let name = format!("{mode:o}");
                let flags = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::RDWR;
                let made = rustix::fs::openat(&fd, &name, flags, rustix::fs::Mode::from_raw_mode(mode)).unwrap();
                let (bits, is_mode) = list.limited(mode).mode();
                assert_eq!(rustix::fs::fstat(&made).unwrap().st_mode & 0o777, bits, "{list:?} {mode:o}");
                let kept = crate::xattr::read_open(made.as_fd()).unwrap();
                let kept = kept.iter().find(|(name, _)| name == ACCESS).map(|(_, value)| Acl::decode(value).unwrap());
                assert_eq!(kept, (!is_mode).then(|| list.limited(mode)), "{mode:o}");
            }
        }
    }

    #[test]
    fn what_is_no_list_is_refused() {
        let of = |entries: &[(Who, u8)]| {
            let entries = entries.iter().map(|(who, permissions)| Entry { who: *who, permissions: *permissions });
            Acl::new(entries.collect())
        };
        let base = [(Who::Owner, 7), (Who::OwningGroup, 5), (Who::Others, 5)];
        assert_eq!(of(&base), Ok(Acl::from_mode(0o755)));
        assert!(matches!(of(&base[1..]), Err(AclError::Incomplete(_))));
        assert!(matches!(of(&[&base[..], &[(Who::User(1), 7)]].concat()), Err(AclError::Incomplete(_))));
        assert!(matches!(of(&[&base[..], &base[..1]].concat()), Err(AclError::Malformed(_))));
        assert!(matches!(of(&[base[0], base[1], (Who::Others, 8)]), Err(AclError::Malformed(_))));
        assert!(matches!(Acl::decode(b"\x01\0\0\0"), Err(AclError::Malformed(_))));
        assert!(matches!(Acl::decode(b"\x02\0\0\0"), Err(AclError::Incomplete(_))));
        assert!(matches!(Acl::decode(b"\x02\0\0\0\x01"), Err(AclError::Malformed(_))));
    }

    proptest! {
        #[test]
        fn bytes_are_a_list_or_an_error(value in prop::collection::vec(any::<u8>(), 0..60)) {
            if let Ok(acl) = Acl::decode(&value) {
                prop_assert_eq!(Acl::decode(&acl.encode()), Ok(acl));
            }
        }

        #[test]
        fn modes_are_lists_and_back(mode in 0u32..0o1000) {
            let acl = Acl::from_mode(mode);
            prop_assert_eq!(acl.mode(), (mode, true));
            prop_assert_eq!(Acl::decode(&acl.encode()), Ok(acl));
        }
    }
}
