//! Access control lists of NFS version 4 (RFC 8881, section 6), and which of them say what a POSIX list says.

use super::posix::{Acl, Bits, PosixAcl};
use std::collections::BTreeMap;

/// Whether an entry grants rights or denies them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AceType {
    /// It grants them, if none before has denied them.
    Allow,
    /// It denies them, if none before has granted them.
    Deny,
}

/// Whom an entry is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// The owner of the file (`OWNER@`).
    Owner,
    /// Members of the owning group (`GROUP@`).
    Group,
    /// Everybody, the owner included (`EVERYONE@`).
    Everyone,
    /// A user.
    User(u32),
    /// Members of a group.
    NamedGroup(u32),
}

/// An entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ace {
    /// What it does.
    pub kind: AceType,
    /// `aceflag4`, but for that of a group.
    pub flags: u32,
    /// `acemask4`
    pub mask: u32,
    /// Whom it is about.
    pub who: Who,
}

/// Why a POSIX list cannot say what a list of version 4 says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Inexact {
    /// Of writing and appending, one is said of somebody and the other is not.
    #[error("writing and appending are one right")]
    Writing,
    /// What somebody may depends on which other entries are about the same user.
    #[error("what a user may would depend on the user's groups, or on being the owner")]
    Overlapping,
    /// Entries are inherited by files or by directories only, or not further than one level.
    #[error("entries are inherited by all that is made in a directory, and by what is made in that")]
    Inheritance,
    /// Something that is no directory has entries that are inherited.
    #[error("only what is made in directories inherits")]
    NoDirectory,
}

/// Bits of `acemask4`.
pub(crate) mod mask {
    pub(crate) const READ_DATA: u32 = 1;
    pub(crate) const WRITE_DATA: u32 = 2;
    pub(crate) const APPEND_DATA: u32 = 4;
    pub(crate) const EXECUTE: u32 = 0x20;
    pub(crate) const DELETE_CHILD: u32 = 0x40;
    pub(crate) const READ_ATTRIBUTES: u32 = 0x80;
    pub(crate) const WRITE_ATTRIBUTES: u32 = 0x100;
    pub(crate) const READ_ACL: u32 = 0x2_0000;
    pub(crate) const WRITE_ACL: u32 = 0x4_0000;
    pub(crate) const SYNCHRONIZE: u32 = 0x10_0000;
}

/// Bits of `aceflag4`.
pub mod flag {
    /// New files of the directory inherit the entry.
    pub const FILE_INHERIT: u32 = 1;
    /// New directories in the directory inherit the entry.
    pub const DIRECTORY_INHERIT: u32 = 2;
    /// What inherits the entry does not pass it on.
    pub const NO_PROPAGATE_INHERIT: u32 = 4;
    /// The entry does not apply to the directory itself.
    pub const INHERIT_ONLY: u32 = 8;
    /// The entry is of a group.
    pub const IDENTIFIER_GROUP: u32 = 0x40;
}

/// What everybody may who finds the file, whatever its list.
const ANYONE: u32 = mask::READ_ATTRIBUTES | mask::READ_ACL | mask::SYNCHRONIZE;
/// And its owner.
const OWNER: u32 = mask::WRITE_ATTRIBUTES | mask::WRITE_ACL;
const INHERITED: u32 = flag::FILE_INHERIT | flag::DIRECTORY_INHERIT;

fn to_mask(bits: Bits, is_directory: bool) -> u32 {
    let mut all = 0;
    if bits & 4 != 0 {
        all |= mask::READ_DATA;
    }
    if bits & 2 != 0 {
        all |= mask::WRITE_DATA | mask::APPEND_DATA | if is_directory { mask::DELETE_CHILD } else { 0 };
    }
    if bits & 1 != 0 {
        all |= mask::EXECUTE;
    }
    all
}

fn to_bits(all: u32) -> Result<Bits, Inexact> {
    const WRITING: u32 = mask::WRITE_DATA | mask::APPEND_DATA;
    let writing = match all & WRITING {
        0 => 0,
        WRITING => 2,
        _ => return Err(Inexact::Writing),
    };
    let bit = |right, bit| if all & right != 0 { bit } else { 0 };
    Ok(bit(mask::READ_DATA, 4) | writing | bit(mask::EXECUTE, 1))
}

/// One entry for reading, writing and executing.
#[derive(Clone, Copy)]
struct Simple {
    kind: AceType,
    bits: Bits,
    who: Who,
}

/// The entries that say what a POSIX list says: allowed first, and denied what a later entry would grant.
fn simple(acl: &PosixAcl) -> Vec<Simple> {
    let masked = |bits: Bits| bits & acl.mask.unwrap_or(7);
    let allow = |who, bits| Simple { kind: AceType::Allow, bits, who };
    let group_class: Vec<(Who, Bits)> = std::iter::once((Who::Group, masked(acl.group)))
        .chain(acl.groups.iter().map(|(id, bits)| (Who::NamedGroup(*id), masked(*bits))))
        .collect();
    let of_groups = group_class.iter().fold(0, |all, (_, bits)| all | bits);
    let of_users = acl.users.iter().fold(0, |all, (_, bits)| all | masked(*bits));
    let mut list = Vec::new();
    // Denies what entries behind would grant.
    let deny = |list: &mut Vec<Simple>, who, bits: Bits, behind: Bits| {
        if behind & !bits != 0 {
            list.push(Simple { kind: AceType::Deny, bits: behind & !bits, who });
        }
    };
    list.push(allow(Who::Owner, acl.owner));
    deny(&mut list, Who::Owner, acl.owner, of_users | of_groups | acl.other);
    for (id, bits) in &acl.users {
        let (who, bits) = (Who::User(*id), masked(*bits));
        list.push(allow(who, bits));
        deny(&mut list, who, bits, of_groups | acl.other);
    }
    group_class.iter().for_each(|(who, bits)| list.push(allow(*who, *bits)));
    group_class.iter().for_each(|(who, bits)| deny(&mut list, *who, *bits, acl.other));
    list.push(allow(Who::Everyone, acl.other));
    list
}

/// What the lists of a file say.
pub fn to_aces(acl: &Acl, is_directory: bool) -> Vec<Ace> {
    let entries = |acl, flags| {
        let ace = move |entry: Simple| {
            let always = match (entry.kind, entry.who) {
                (AceType::Allow, Who::Owner) => ANYONE | OWNER,
                (AceType::Allow, _) => ANYONE,
                (AceType::Deny, _) => 0,
            };
            Ace { kind: entry.kind, flags, mask: to_mask(entry.bits, is_directory) | always, who: entry.who }
        };
        simple(acl).into_iter().map(ace)
    };
    let default = acl.default.iter().flat_map(|acl| entries(acl, INHERITED | flag::INHERIT_ONLY));
    entries(&acl.access, 0).chain(default).collect()
}

/// Positions of the first entries of each kind that have a right, by right. Of entries about the same somebody, the first one with a
/// right decides.
#[derive(Clone, Copy)]
struct Firsts {
    allow: [usize; RIGHTS],
    deny: [usize; RIGHTS],
}

/// Number of rights: reading, writing, executing.
const RIGHTS: usize = 3;

impl Firsts {
    /// No entries.
    const NONE: Firsts = Firsts { allow: [usize::MAX; RIGHTS], deny: [usize::MAX; RIGHTS] };

    fn note(&mut self, at: usize, entry: Simple) {
        let of_kind = match entry.kind {
            AceType::Allow => &mut self.allow,
            AceType::Deny => &mut self.deny,
        };
        for (right, first) in of_kind.iter_mut().enumerate() {
            if entry.bits >> right & 1 == 1 {
                *first = at.min(*first);
            }
        }
    }

    /// The first entries of both.
    fn and(&self, other: &Firsts) -> Firsts {
        let earlier = |a: [usize; RIGHTS], b: [usize; RIGHTS]| std::array::from_fn(|right| a[right].min(b[right]));
        Firsts { allow: earlier(self.allow, other.allow), deny: earlier(self.deny, other.deny) }
    }

    /// Rights that the entries grant.
    fn granted(&self) -> Bits {
        let is_granted = |right: &usize| self.allow[*right] < self.deny[*right];
        (0..RIGHTS).filter(is_granted).fold(0, |all, right| all | 1 << right)
    }

    /// Rights that the entries grant to a user, if the entries in `others` may apply to the user as well. `None` if these change the result.
    fn granted_with(&self, others: &Firsts) -> Option<Bits> {
        // The most and the least: with all that may grant, or deny, something.
        let most = self.and(&Firsts { deny: Firsts::NONE.deny, ..*others }).granted();
        let least = self.and(&Firsts { allow: Firsts::NONE.allow, ..*others }).granted();
        (most == least).then_some(most)
    }

    /// Rights that the entries of a group grant to its members. Membership of other groups adds rights by both kinds of lists; it must not
    /// remove any.
    fn granted_to_group(&self, of_groups: &Firsts) -> Option<Bits> {
        self.granted_with(&Firsts { allow: Firsts::NONE.allow, ..*of_groups })
    }
}

/// Converts entries to the POSIX list with the same rights, in one pass.
fn from_simple(list: impl IntoIterator<Item = Simple>) -> Result<PosixAcl, Inexact> {
    let (mut users, mut groups) = (BTreeMap::<u32, Firsts>::new(), BTreeMap::<u32, Firsts>::new());
    let (mut owner, mut group, mut everyone) = (Firsts::NONE, Firsts::NONE, Firsts::NONE);
    let (mut of_groups, mut but_owner) = (Firsts::NONE, Firsts::NONE);
    for (at, entry) in list.into_iter().enumerate() {
        match entry.who {
            Who::Owner => owner.note(at, entry),
            Who::Group => group.note(at, entry),
            Who::Everyone => everyone.note(at, entry),
            Who::User(id) => users.entry(id).or_insert(Firsts::NONE).note(at, entry),
            Who::NamedGroup(id) => groups.entry(id).or_insert(Firsts::NONE).note(at, entry),
        }
        if matches!(entry.who, Who::Group | Who::NamedGroup(_)) {
            of_groups.note(at, entry);
        }
        if entry.who != Who::Owner {
            but_owner.note(at, entry);
        }
    }
    let exact = |bits: Option<Bits>| bits.ok_or(Inexact::Overlapping);
    let of_user = |(id, firsts): (u32, Firsts)| Ok((id, exact(firsts.and(&everyone).granted_with(&of_groups))?));
    let users: Vec<(u32, Bits)> = users.into_iter().map(of_user).collect::<Result<_, Inexact>>()?;
    let of_group = |firsts: Firsts| exact(firsts.and(&everyone).granted_to_group(&of_groups));
    let groups = groups.into_iter().map(|(id, firsts)| Ok((id, of_group(firsts)?)));
    let groups: Vec<(u32, Bits)> = groups.collect::<Result<_, Inexact>>()?;
    let owner = exact(owner.and(&everyone).granted_with(&but_owner))?;
    let (group, other) = (of_group(group)?, everyone.granted());
    let most = users.iter().chain(&groups).fold(group, |all, (_, bits)| all | bits);
    let mask = (!users.is_empty() || !groups.is_empty()).then_some(most);
    Ok(PosixAcl { owner, users, group, groups, mask, other })
}

/// The lists that say what these entries say.
///
/// # Errors
/// [`Inexact`], if there are none.
pub fn from_aces(aces: &[Ace], is_directory: bool) -> Result<Acl, Inexact> {
    let (mut access, mut default) = (Vec::new(), Vec::new());
    for ace in aces {
        let entry = Simple { kind: ace.kind, bits: to_bits(ace.mask)?, who: ace.who };
        let inherited = ace.flags & INHERITED;
        if inherited != 0 {
            if !is_directory {
                return Err(Inexact::NoDirectory);
            }
            if inherited != INHERITED || ace.flags & flag::NO_PROPAGATE_INHERIT != 0 {
                return Err(Inexact::Inheritance);
            }
            default.push(entry);
        }
        if ace.flags & flag::INHERIT_ONLY == 0 {
            access.push(entry);
        }
    }
    let default = (!default.is_empty()).then(|| from_simple(default)).transpose()?;
    Ok(Acl { access: from_simple(access)?, default })
}

#[cfg(test)]
mod tests {
    use super::super::posix::tests::acls;
    use super::*;
    use proptest::prelude::*;

    fn ace(kind: AceType, who: Who, bits: Bits) -> Ace {
        Ace { kind, flags: 0, mask: to_mask(bits, false), who }
    }

    /// As POSIX grants it (acl(5), "Access check algorithm").
    fn by_posix(acl: &PosixAcl, is_owner: bool, user: u32, groups: &[Who], wanted: Bits) -> bool {
        let mask = acl.mask.unwrap_or(7);
        let has = |bits: Bits| bits & wanted == wanted;
        if is_owner {
            return has(acl.owner);
        }
        if let Some((_, bits)) = acl.users.iter().find(|(id, _)| *id == user) {
            return has(bits & mask);
        }
        let of_groups: Vec<Bits> = groups
            .iter()
            .filter_map(|group| match group {
                Who::Group => Some(acl.group),
                Who::NamedGroup(id) => acl.groups.iter().find(|(known, _)| known == id).map(|(_, bits)| *bits),
                _ => None,
            })
            .collect();
        if of_groups.is_empty() { has(acl.other) } else { of_groups.iter().any(|bits| has(bits & mask)) }
    }

    /// As version 4 grants it (RFC 8881, section 6.2.1).
    fn by_nfs4(aces: &[Ace], is_owner: bool, user: u32, groups: &[Who], wanted: Bits) -> bool {
        let mut left = wanted;
        for ace in aces.iter().filter(|ace| ace.flags & flag::INHERIT_ONLY == 0) {
            let is_about = match ace.who {
                Who::Owner => is_owner,
                Who::Everyone => true,
                Who::User(id) => id == user,
                group => groups.contains(&group),
            };
            let bits = to_bits(ace.mask).unwrap();
            match ace.kind {
                AceType::Allow if is_about => left &= !bits,
                AceType::Deny if is_about && left & bits != 0 => return false,
                _ => {}
            }
        }
        left == 0
    }

    #[test]
    fn a_mode_is_a_list_without_denials() {
        let list = |mode| to_aces(&Acl { access: PosixAcl::from_mode(mode), default: None }, false);
        assert!(list(0o754).iter().all(|ace| ace.kind == AceType::Allow));
        // The owner and the group may less than others.
        let denials: Vec<Who> = list(0o017).iter().filter(|a| a.kind == AceType::Deny).map(|a| a.who).collect();
        assert_eq!(denials, [Who::Owner, Who::Group]);
    }

    #[test]
    fn what_posix_cannot_say_is_refused() {
        use AceType::{Allow, Deny};
        let of = |aces: &[Ace]| from_aces(aces, false).map(|acl| acl.access);
        let user = Who::User(7);
        let whole = |more: &[Ace]| {
            [more, &[ace(Allow, Who::Owner, 6), ace(Allow, Who::Group, 4), ace(Allow, Who::Everyone, 4)]].concat()
        };
        let one_more = of(&whole(&[ace(Allow, user, 6)])).unwrap();
        assert_eq!((one_more.users, one_more.mask), (vec![(7, 6)], Some(6)));
        let less = of(&whole(&[ace(Deny, user, 7)]));
        // The owner may be that user.
        assert_eq!(less, Err(Inexact::Overlapping));
        let owner_first = [&[ace(Allow, Who::Owner, 6)][..], &whole(&[ace(Deny, user, 7)])].concat();
        assert_eq!(of(&owner_first).unwrap().users, [(7, 0)]);
        assert_eq!(of(&whole(&[ace(Allow, user, 7)])), Err(Inexact::Overlapping), "the owner might execute it");
        assert_eq!(
            of(&whole(&[ace(Deny, Who::NamedGroup(3), 4)])),
            Err(Inexact::Overlapping),
            "of the group's members"
        );
        let appending = Ace { mask: mask::APPEND_DATA, ..ace(Allow, user, 0) };
        assert_eq!(of(&whole(&[appending])), Err(Inexact::Writing));
        let inherited = |flags| Ace { flags, ..ace(Allow, Who::Everyone, 4) };
        assert_eq!(from_aces(&[inherited(INHERITED)], false), Err(Inexact::NoDirectory));
        assert_eq!(from_aces(&[inherited(flag::FILE_INHERIT)], true), Err(Inexact::Inheritance));
        let both = from_aces(&[inherited(INHERITED)], true).unwrap();
        assert_eq!((both.access.other, both.default.map(|acl| acl.other)), (4, Some(4)));
        assert_eq!(of(&[]).unwrap().as_mode(), Some(0), "nobody may anything");
    }

    /// As [`from_simple`], by a search through all entries for each user and each group.
    mod search {
        use super::super::*;

        /// Rights that the entries grant to a user. `is_about` selects the entries that apply to the user, `may_be_about` those that may apply.
        /// `None` if the latter change the result.
        fn granted(
            list: &[Simple],
            is_about: impl Fn(Who) -> bool,
            may_be_about: impl Fn(Who) -> bool,
        ) -> Option<Bits> {
            // The most and the least: with all that may grant, or deny, something.
            let evaluate = |of_others: AceType| {
                let (mut allowed, mut denied) = (0, 0);
                for entry in list {
                    let counts = is_about(entry.who) || (may_be_about(entry.who) && entry.kind == of_others);
                    match entry.kind {
                        AceType::Allow if counts => allowed |= entry.bits & !denied,
                        AceType::Deny if counts => denied |= entry.bits & !allowed,
                        _ => {}
                    }
                }
                allowed
            };
            let (most, least) = (evaluate(AceType::Allow), evaluate(AceType::Deny));
            (most == least).then_some(most)
        }

        /// Converts entries to the POSIX list with the same rights.
        pub(super) fn by_each(list: &[Simple]) -> Result<PosixAcl, Inexact> {
            const EVERYONE: Who = Who::Everyone;
            let is_group = |who| matches!(who, Who::Group | Who::NamedGroup(_));
            let exact = |bits: Option<Bits>| bits.ok_or(Inexact::Overlapping);
            let (mut users, mut groups) = (Vec::new(), Vec::new());
            for entry in list {
                match entry.who {
                    Who::User(id) if users.iter().all(|(known, _)| *known != id) => {
                        let is_about = |who| who == entry.who || who == EVERYONE;
                        users.push((id, exact(granted(list, is_about, is_group))?));
                    }
                    Who::NamedGroup(id) if groups.iter().all(|(known, _)| *known != id) => {
                        groups.push((id, of_group(list, entry.who)?));
                    }
                    _ => {}
                }
            }
            let owner = exact(granted(list, |who| who == Who::Owner || who == EVERYONE, |who| who != Who::Owner))?;
            let group = of_group(list, Who::Group)?;
            let other = exact(granted(list, |who| who == EVERYONE, |_| false))?;
            users.sort_unstable();
            groups.sort_unstable();
            let most = users.iter().chain(&groups).fold(group, |all, (_, bits)| all | bits);
            let mask = (!users.is_empty() || !groups.is_empty()).then_some(most);
            Ok(PosixAcl { owner, users, group, groups, mask, other })
        }

        /// What members of a group may. That they may be members of others as well grants them more by both kinds of lists; it must
        /// not take anything from them.
        fn of_group(list: &[Simple], group: Who) -> Result<Bits, Inexact> {
            let is_about = |who| who == group || who == Who::Everyone;
            let alone = granted(list, is_about, |_| false).expect("nothing else is about them");
            let (mut allowed, mut denied) = (0, 0);
            for entry in list {
                let is_of_groups = matches!(entry.who, Who::Group | Who::NamedGroup(_));
                match entry.kind {
                    AceType::Allow if is_about(entry.who) => allowed |= entry.bits & !denied,
                    AceType::Deny if is_about(entry.who) || is_of_groups => denied |= entry.bits & !allowed,
                    _ => {}
                }
            }
            if allowed == alone { Ok(alone) } else { Err(Inexact::Overlapping) }
        }
    }

    /// Counts the entries that are taken of a list.
    struct Counted<'a>(std::slice::Iter<'a, Simple>, &'a std::cell::Cell<usize>);

    impl Iterator for Counted<'_> {
        type Item = Simple;

        fn next(&mut self) -> Option<Simple> {
            self.1.set(self.1.get() + 1);
            self.0.next().copied()
        }
    }

    #[test]
    fn each_entry_is_looked_at_once() {
        let named = (0..1000).map(|id| Simple {
            kind: AceType::Allow,
            bits: 4,
            who: if id % 2 == 0 { Who::User(id) } else { Who::NamedGroup(id) },
        });
        let whole = [Who::Owner, Who::Group, Who::Everyone].map(|who| Simple { kind: AceType::Allow, bits: 4, who });
        let list: Vec<Simple> = named.chain(whole).collect();
        let looked_at = std::cell::Cell::new(0);
        let acl = from_simple(Counted(list.iter(), &looked_at)).unwrap();
        assert_eq!((acl.users.len(), acl.groups.len(), acl.other), (500, 500, 4));
        assert_eq!(looked_at.get(), list.len() + 1);
    }

    fn requesters() -> impl Strategy<Value = (bool, u32, Vec<Who>)> {
        let group = prop_oneof![Just(Who::Group), (0_u32..6).prop_map(Who::NamedGroup)];
        (any::<bool>(), 0_u32..8, prop::collection::vec(group, 0..3))
    }

    fn aces() -> impl Strategy<Value = Vec<Ace>> {
        let who = prop_oneof![
            Just(Who::Owner),
            Just(Who::Group),
            Just(Who::Everyone),
            (0_u32..3).prop_map(Who::User),
            (0_u32..3).prop_map(Who::NamedGroup)
        ];
        let kind = prop_oneof![3 => Just(AceType::Allow), 1 => Just(AceType::Deny)];
        prop::collection::vec((kind, who, 0_u8..8).prop_map(|(kind, who, bits)| ace(kind, who, bits)), 0..7)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn lists_come_back(access in acls(), default in prop::option::of(acls())) {
            let acl = Acl { access, default };
            let back = from_aces(&to_aces(&acl, true), true).unwrap();
            // What is masked is not told.
            let effective = |acl: &PosixAcl| {
                let masked = |bits: u8| bits & acl.mask.unwrap_or(7);
                let named = |list: &[(u32, u8)]| list.iter().map(|(id, bits)| (*id, masked(*bits))).collect::<Vec<_>>();
                (acl.owner, named(&acl.users), masked(acl.group), named(&acl.groups), acl.other)
            };
            prop_assert_eq!(effective(&back.access), effective(&acl.access));
            prop_assert_eq!(back.default.as_ref().map(effective), acl.default.as_ref().map(effective));
        }

        #[test]
        fn lists_are_as_by_a_search_for_each(aces in aces()) {
            let of = |ace: &Ace| Simple { kind: ace.kind, bits: to_bits(ace.mask).unwrap(), who: ace.who };
            let list: Vec<Simple> = aces.iter().map(of).collect();
            prop_assert_eq!(from_simple(list.clone()), search::by_each(&list));
        }

        #[test]
        fn both_kinds_of_lists_grant_the_same_single_rights(acl in acls(), who in requesters()) {
            let (is_owner, user, groups) = who;
            let aces = to_aces(&Acl { access: acl.clone(), default: None }, false);
            for right in [1, 2, 4] {
                let (posix, nfs4) =
                    (by_posix(&acl, is_owner, user, &groups, right), by_nfs4(&aces, is_owner, user, &groups, right));
                prop_assert_eq!(posix, nfs4, "{} for {:?}", right, (is_owner, user, &groups));
            }
        }

        #[test]
        fn what_is_not_refused_is_meant(aces in aces(), who in requesters()) {
            let (is_owner, user, groups) = who;
            let Ok(Acl { access, .. }) = from_aces(&aces, false) else { return Ok(()) };
            for right in [1, 2, 4] {
                let (posix, nfs4) =
                    (by_posix(&access, is_owner, user, &groups, right), by_nfs4(&aces, is_owner, user, &groups, right));
                prop_assert_eq!(posix, nfs4, "{} for {:?} by {:?}", right, (is_owner, user, &groups), access);
            }
        }
    }
}
