//! POSIX access control lists (acl(5)), as the kernel keeps them in extended attributes.

/// Reading, writing and executing, as in a mode: 4, 2 and 1.
pub(super) type Bits = u8;

/// Who has which of the rights to read (4), write (2) and execute (1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PosixAcl {
    /// The owner.
    pub owner: u8,
    /// Users by their numbers, in that order.
    pub users: Vec<(u32, u8)>,
    /// The owning group.
    pub group: u8,
    /// Groups by their numbers, in that order.
    pub groups: Vec<(u32, u8)>,
    /// The most that these users and both kinds of groups have; there is one if there are users or groups.
    pub mask: Option<u8>,
    /// Everybody else.
    pub other: u8,
}

/// The lists of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Acl {
    /// Of the file itself.
    pub access: PosixAcl,
    /// Of a directory: what is made in it begins with this.
    pub default: Option<PosixAcl>,
}

/// What is no list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no access control list of POSIX")]
pub struct BadAcl;

/// Kinds of entries (`e_tag`, linux/posix_acl.h).
pub mod tag {
    /// The owner.
    pub const USER_OBJ: u16 = 1;
    /// A user.
    pub const USER: u16 = 2;
    /// The owning group.
    pub const GROUP_OBJ: u16 = 4;
    /// A group.
    pub const GROUP: u16 = 8;
    /// Maximum rights of all but the owner and others.
    pub const MASK: u16 = 0x10;
    /// All others.
    pub const OTHER: u16 = 0x20;
}

/// The version of the extended attribute.
const VERSION: u32 = 2;
/// The number of entries that have none.
const NO_ID: u32 = u32::MAX;

impl PosixAcl {
    /// What a mode says.
    pub fn from_mode(mode: u32) -> PosixAcl {
        let bits = |shift: u32| (mode >> shift & 7) as Bits;
        PosixAcl { owner: bits(6), users: Vec::new(), group: bits(3), groups: Vec::new(), mask: None, other: bits(0) }
    }

    /// The mode that says the same, if one does.
    pub fn as_mode(&self) -> Option<u32> {
        if !self.users.is_empty() || !self.groups.is_empty() {
            return None;
        }
        let group = self.group & self.mask.unwrap_or(7);
        Some(u32::from(self.owner) << 6 | u32::from(group) << 3 | u32::from(self.other))
    }

    /// Kind, number and rights of each entry, in the order that the kernel wants.
    pub fn entries(&self) -> Vec<(u16, u32, u8)> {
        let mut all = vec![(tag::USER_OBJ, NO_ID, self.owner)];
        all.extend(self.users.iter().map(|(id, bits)| (tag::USER, *id, *bits)));
        all.push((tag::GROUP_OBJ, NO_ID, self.group));
        all.extend(self.groups.iter().map(|(id, bits)| (tag::GROUP, *id, *bits)));
        all.extend(self.mask.map(|bits| (tag::MASK, NO_ID, bits)));
        all.push((tag::OTHER, NO_ID, self.other));
        all
    }

    /// The list with these entries, in any order.
    ///
    /// # Errors
    /// If one is missing or there twice, or has a kind or rights that there are not.
    pub fn from_entries(entries: impl IntoIterator<Item = (u16, u32, u8)>) -> Result<PosixAcl, BadAcl> {
        let (mut owner, mut group, mut mask, mut other) = (None, None, None, None);
        let (mut users, mut groups) = (Vec::new(), Vec::new());
        for (kind, id, bits) in entries {
            if bits > 7 {
                return Err(BadAcl);
            }
            let once = |place: &mut Option<Bits>| if place.replace(bits).is_some() { Err(BadAcl) } else { Ok(()) };
            match kind {
                tag::USER_OBJ => once(&mut owner)?,
                tag::GROUP_OBJ => once(&mut group)?,
                tag::MASK => once(&mut mask)?,
                tag::OTHER => once(&mut other)?,
                tag::USER if id != NO_ID => users.push((id, bits)),
                tag::GROUP if id != NO_ID => groups.push((id, bits)),
                _ => return Err(BadAcl),
            }
        }
        for named in [&mut users, &mut groups] {
            named.sort_unstable();
            if named.windows(2).any(|two| two[0].0 == two[1].0) {
                return Err(BadAcl);
            }
        }
        if mask.is_none() && !(users.is_empty() && groups.is_empty()) {
            return Err(BadAcl);
        }
        let (Some(owner), Some(group), Some(other)) = (owner, group, other) else { return Err(BadAcl) };
        Ok(PosixAcl { owner, users, group, groups, mask, other })
    }

    /// The value of `system.posix_acl_access` or `system.posix_acl_default`.
    pub(crate) fn to_xattr(&self) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for (kind, id, bits) in self.entries() {
            value.extend_from_slice(&kind.to_le_bytes());
            value.extend_from_slice(&u16::from(bits).to_le_bytes());
            value.extend_from_slice(&id.to_le_bytes());
        }
        value
    }

    /// The list that such a value is.
    ///
    /// # Errors
    /// If it is none.
    pub(crate) fn from_xattr(value: &[u8]) -> Result<PosixAcl, BadAcl> {
        let (version, entries) = value.split_first_chunk().ok_or(BadAcl)?;
        if u32::from_le_bytes(*version) != VERSION || entries.len() % 8 != 0 {
            return Err(BadAcl);
        }
        let word = |entry: &[u8], at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
        PosixAcl::from_entries(entries.chunks_exact(8).map(|entry| {
            let id = u32::from(word(entry, 4)) | u32::from(word(entry, 6)) << 16;
            // More rights than there are do not fit.
            (word(entry, 0), id, u8::try_from(word(entry, 2)).unwrap_or(u8::MAX))
        }))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    pub(crate) fn acls() -> impl Strategy<Value = PosixAcl> {
        let named = || prop::collection::btree_map(0_u32..6, 0_u8..8, 0..4);
        let rights = || 0_u8..8;
        (rights(), named(), rights(), named(), prop::option::of(rights()), rights()).prop_map(
            |(owner, users, group, groups, mask, other)| {
                let list = |named: BTreeMap<u32, u8>| named.into_iter().collect::<Vec<_>>();
                let (users, groups) = (list(users), list(groups));
                let needs_mask = !users.is_empty() || !groups.is_empty();
                PosixAcl { owner, users, group, groups, mask: mask.or(needs_mask.then_some(7)), other }
            },
        )
    }

    #[test]
    fn a_value_is_as_the_kernel_has_it() {
        let acl = PosixAcl { users: vec![(1000, 6)], mask: Some(6), ..PosixAcl::from_mode(0o640) };
        let words: [(u16, u16, u32); 5] =
            [(1, 6, u32::MAX), (2, 6, 1000), (4, 4, u32::MAX), (16, 6, u32::MAX), (32, 0, u32::MAX)];
        let mut expected = vec![2, 0, 0, 0];
        for (kind, bits, id) in words {
            expected.extend([&kind.to_le_bytes()[..], &bits.to_le_bytes(), &id.to_le_bytes()].concat());
        }
        assert_eq!(acl.to_xattr(), expected);
        for wrong in [&[][..], &[2, 0, 0, 0], &[3, 0, 0, 0], &expected[..expected.len() - 8], &expected[..9]] {
            assert_eq!(PosixAcl::from_xattr(wrong), Err(BadAcl), "{wrong:?}");
        }
        assert_eq!(PosixAcl::from_xattr(&[&expected[..], &expected[4..12]].concat()), Err(BadAcl), "twice the owner");
    }

    proptest! {
        #[test]
        fn values_come_back(acl in acls()) {
            prop_assert_eq!(PosixAcl::from_xattr(&acl.to_xattr()), Ok(acl.clone()));
            if let Some(mode) = acl.as_mode() {
                prop_assert!(mode <= 0o777);
            }
        }

        #[test]
        fn any_bytes_are_a_list_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(acl) = PosixAcl::from_xattr(&bytes) {
                prop_assert_eq!(PosixAcl::from_xattr(&acl.to_xattr()), Ok(acl));
            }
        }
    }
}
