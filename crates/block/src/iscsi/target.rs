//! Targets, their units, their sessions.

use super::chap::Secrets;
use super::login::{Directory, Identity, status};
use super::pdu::encode_lun;
use crate::scsi::{Nexus, TaskSet, Unit};
use std::collections::HashMap;
use std::fmt::Write;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use thruway_server::caller;
use thruway_tcp::Origin;
use tokio::sync::Notify;

/// Sessions at a time.
const SESSIONS_MAX: usize = 4096;

/// A target: units under numbers.
pub struct Target {
    /// Its iSCSI name.
    pub name: String,
    /// Units, by LUN.
    pub units: Vec<Arc<Unit>>,
}

impl Target {
    /// The unit of a LUN.
    pub fn unit(&self, lun: Option<u16>) -> Option<&Arc<Unit>> {
        self.units.get(usize::from(lun?))
    }

    /// Whether an initiator may use it: by the name it has proved by CHAP, or by its iSCSI name, if that is said to be its
    /// own in the file of secrets, or there is none and everybody is believed.
    fn is_open_to(&self, identity: &Identity, secrets: Option<&Secrets>) -> bool {
        let own = |iqn: &str| match secrets {
            Some(secrets) => identity.proved.as_ref().is_some_and(|name| secrets.is_bound(name, iqn)),
            None => true,
        };
        // What is no iSCSI name could be taken for one of CHAP.
        let iqn = Some(identity.initiator.as_str()).filter(|iqn| iqn.contains('.') && own(iqn));
        let names = || [iqn, identity.proved.as_deref()].into_iter().flatten();
        self.units.iter().all(|unit| unit.export.is_open_to(names()))
    }

    /// The data of REPORT LUNS (SPC-4 6.33).
    pub fn report_luns(&self) -> Vec<u8> {
        let mut data = ((self.units.len() * 8) as u32).to_be_bytes().to_vec();
        data.extend_from_slice(&[0; 4]);
        (0..self.units.len() as u16).for_each(|lun| data.extend_from_slice(&encode_lun(lun)));
        data
    }
}

/// All targets of a daemon, and who may use them.
pub struct Targets {
    targets: Vec<Arc<Target>>,
    secrets: Option<Secrets>,
    /// Names of initiators; empty if any may come.
    allowed: Vec<String>,
    sessions: Mutex<Sessions>,
    next_nexus: AtomicU64,
}

#[derive(Default)]
struct Sessions {
    by_handle: HashMap<u16, Arc<Session>>,
    last: u16,
    claims: Claims,
}

/// iSCSI names, and the CHAP name that each belongs to: sessions and reservations are an iSCSI name's, and whoever
/// knows one secret must not have another's.
#[derive(Default)]
struct Claims {
    by_iqn: HashMap<String, String>,
}

impl Claims {
    /// Most iSCSI names of a CHAP name that has none of its own in the file.
    const MAX: usize = 64;

    fn claim(&mut self, name: &str, iqn: &str, secrets: &Secrets) -> Result<(), u16> {
        let iqn = iqn.to_ascii_lowercase();
        let own = secrets.initiators.get(name).map_or(&[][..], |known| &known.iqns);
        let listed = |iqns: &[String]| iqns.contains(&iqn);
        if !own.is_empty() {
            return if listed(own) { Ok(()) } else { Err(refused(name, &iqn, "it has others of its own")) };
        }
        if secrets.initiators.values().any(|known| listed(&known.iqns)) {
            return Err(refused(name, &iqn, "it is another's"));
        }
        if let Some(owner) = self.by_iqn.get(&iqn) {
            return if owner == name { Ok(()) } else { Err(refused(name, &iqn, "another has used it first")) };
        }
        if self.by_iqn.values().filter(|owner| *owner == name).count() >= Claims::MAX {
            return Err(refused(name, &iqn, "it has used too many others"));
        }
        self.by_iqn.insert(iqn, name.to_owned());
        Ok(())
    }
}

impl Identity {
    /// Owner of registrations: the CHAP name. Without CHAP, the host, because an initiator can claim any iSCSI name.
    fn owner(&self) -> String {
        match (&self.proved, caller::current()) {
            (Some(name), _) => format!("chap:{name}"),
            (None, Some(Origin::Host(address))) => format!("host:{address}"),
            (None, _) => format!("initiator:{}", self.initiator),
        }
    }
}

fn refused(name: &str, iqn: &str, why: &'static str) -> u16 {
    tracing::warn!(name, iqn, why, "an initiator may not use this iSCSI name");
    status::AUTHORIZATION
}

/// A session in full feature phase.
pub struct Session {
    /// Target session identifying handle.
    pub handle: u16,
    /// Who, and with what; `None` for discovery.
    pub target: Option<Arc<Target>>,
    /// The initiator as its units know it.
    pub nexus: Nexus,
    /// What it does with each unit, by LUN.
    pub units: Vec<Arc<TaskSet>>,
    /// The same of sessions that this one has taken the place of.
    replaces: Vec<Arc<TaskSet>>,
    identity: Identity,
    /// Told when the session must end, because the initiator has come again.
    pub replaced: Notify,
}

impl Targets {
    /// Targets, for initiators that know a secret (if there are any) and have one of these names (if any are
    /// given).
    pub fn new(targets: Vec<Target>, secrets: Option<Secrets>, allowed: Vec<String>) -> Targets {
        Targets {
            targets: targets.into_iter().map(Arc::new).collect(),
            secrets,
            allowed,
            sessions: Mutex::default(),
            next_nexus: AtomicU64::new(1),
        }
    }

    /// The targets.
    pub fn all(&self) -> &[Arc<Target>] {
        &self.targets
    }

    /// The data of a SendTargets response (RFC 7143 appendix C) for a portal.
    pub fn send_targets(&self, which: &str, session: &Session, portal: &str) -> Option<String> {
        let own = session.target.as_ref().map(|t| t.name.as_str());
        let wanted = |target: &&Arc<Target>| match which {
            "All" => own.is_none(),
            "" => own == Some(&target.name),
            name => target.name == name.to_ascii_lowercase() && own.is_none_or(|own| own == target.name),
        };
        if which == "All" && own.is_some() {
            return None;
        }
        let mut text = String::new();
        for target in self
            .targets
            .iter()
            .filter(wanted)
            .filter(|target| target.is_open_to(&session.identity, self.secrets.as_ref()))
        {
            let _ = write!(text, "TargetName={}\0TargetAddress={portal},1\0", target.name);
        }
        Some(text)
    }

    /// Makes a session of a login, in place of one that the same initiator port had.
    ///
    /// # Errors
    /// The status to refuse with.
    pub fn open(&self, identity: Identity) -> Result<Arc<Session>, u16> {
        let target = match &identity.target {
            None => None,
            Some(name) => Some(self.find(name).ok_or(status::NOT_FOUND)?),
        };
        if target.as_ref().is_some_and(|target| !target.is_open_to(&identity, self.secrets.as_ref())) {
            return Err(status::AUTHORIZATION);
        }
        let mut sessions = self.sessions.lock().expect("no panics under the lock");
        if let (Some(secrets), Some(name)) = (&self.secrets, &identity.proved) {
            sessions.claims.claim(name, &identity.initiator, secrets)?;
        }
        if identity.tsih != 0 {
            // A second connection of a session, or an old one of it in a new guise: there is one only.
            let known = sessions.by_handle.contains_key(&identity.tsih);
            return Err(if known { status::TOO_MANY_CONNECTIONS } else { status::NO_SESSION });
        }
        if sessions.by_handle.len() >= SESSIONS_MAX {
            return Err(status::OUT_OF_RESOURCES);
        }
        let same = |s: &Arc<Session>| {
            let old = &s.identity;
            target.is_some()
                && (&old.initiator, &old.isid, &old.target) == (&identity.initiator, &identity.isid, &identity.target)
                && old.proved == identity.proved
        };
        let old: Vec<u16> = sessions.by_handle.values().filter(|s| same(s)).map(|s| s.handle).collect();
        let mut replaces = Vec::new();
        for handle in old {
            if let Some(old) = sessions.by_handle.remove(&handle) {
                old.end();
                // Those before it only if they have not come to their end yet: an initiator may come again and again.
                let earlier = old.replaces.iter().filter(|attached| !attached.is_idle());
                replaces.extend(old.units.iter().chain(earlier).cloned());
            }
        }
        let handle = loop {
            sessions.last = sessions.last.wrapping_add(1).max(1);
            if !sessions.by_handle.contains_key(&sessions.last) {
                break sessions.last;
            }
        };
        let isid = data_encoding::HEXLOWER.encode(&identity.isid);
        let port = format!("{},i,0x{isid}", identity.initiator);
        let owner = identity.owner().into();
        let nexus = Nexus { id: self.next_nexus.fetch_add(1, Ordering::Relaxed), port: port.into(), owner };
        let all = target.iter().flat_map(|target| &target.units);
        let units = all.map(|unit| unit.attach(&nexus)).collect();
        let replaced = Notify::new();
        let session = Arc::new(Session { handle, target, nexus, units, replaces, identity, replaced });
        sessions.by_handle.insert(handle, Arc::clone(&session));
        Ok(session)
    }

    /// A session has ended.
    pub fn close(&self, session: &Arc<Session>) {
        let mut sessions = self.sessions.lock().expect("no panics under the lock");
        if sessions.by_handle.get(&session.handle).is_some_and(|s| Arc::ptr_eq(s, session)) {
            sessions.by_handle.remove(&session.handle);
            session.end();
        }
    }

    /// Ends the sessions of a target but for one (TARGET COLD RESET).
    pub fn close_others(&self, session: &Arc<Session>) {
        let sessions = self.sessions.lock().expect("no panics under the lock");
        for other in sessions.by_handle.values() {
            let same = other.identity.target == session.identity.target;
            if same && !Arc::ptr_eq(other, session) {
                other.replaced.notify_one();
            }
        }
    }

    fn find(&self, name: &str) -> Option<Arc<Target>> {
        self.targets.iter().find(|t| t.name == name).cloned()
    }
}

impl Session {
    fn end(&self) {
        if let Some(target) = &self.target {
            target.units.iter().for_each(|unit| unit.detach(&self.nexus));
        }
        self.replaced.notify_one();
    }

    /// Waits for the end of what sessions have begun that this one has taken the place of: what they wrote must not
    /// reach the disk after what this one writes.
    ///
    /// # Errors
    /// If this one must end before, because the initiator has come yet again.
    pub async fn settled(&self) -> io::Result<()> {
        tokio::select! {
            _ = futures_util::future::join_all(self.replaces.iter().map(|attached| attached.clear())) => Ok(()),
            () = self.replaced.notified() => Err(io::Error::other("the initiator has logged in again")),
        }
    }

    /// The initiator's name.
    pub fn initiator(&self) -> &str {
        &self.identity.initiator
    }

    /// Initiator session identifier, as the login had it.
    pub fn cid(&self) -> u16 {
        self.identity.cid
    }
}

impl Directory for Targets {
    fn secrets(&self, _target: Option<&str>) -> Option<&Secrets> {
        self.secrets.as_ref()
    }

    fn admit(&self, initiator: &str, target: Option<&str>) -> Result<(), u16> {
        if !self.allowed.is_empty() && !self.allowed.iter().any(|a| a.eq_ignore_ascii_case(initiator)) {
            return Err(status::AUTHORIZATION);
        }
        match target {
            Some(name) if self.find(name).is_none() => Err(status::NOT_FOUND),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::Spec;
    use futures_util::FutureExt;

    #[test]
    fn who_comes_again_waits_for_what_it_had_begun() {
        let export = Spec::parse("d=mem:1M").unwrap().open(None).unwrap();
        let unit = Arc::new(Unit::new(Arc::new(export), 512));
        let targets = Targets::new(vec![Target { name: "iqn.t".into(), units: vec![unit] }], None, Vec::new());
        let identity = || Identity {
            initiator: "iqn.i".into(),
            isid: [1, 2, 3, 4, 5, 6],
            target: Some("iqn.t".into()),
            proved: None,
            tsih: 0,
            cid: 0,
        };
        let first = targets.open(identity()).unwrap();
        let under_way = first.units[0].begin();
        let second = targets.open(identity()).unwrap();
        let mut settled = Box::pin(second.settled());
        assert!((&mut settled).now_or_never().is_none());
        assert!(under_way.is_draining());
        // And one that comes in the place of that one, before it has settled.
        let third = targets.open(identity()).unwrap();
        drop(settled);
        let mut settled = Box::pin(third.settled());
        assert!((&mut settled).now_or_never().is_none());
        drop(under_way);
        assert!((&mut settled).now_or_never().is_some());
        // However often it comes, what has come to its end is not kept.
        let last = (0..50).map(|_| targets.open(identity()).unwrap()).last().unwrap();
        assert_eq!(last.replaces.len(), 1);
    }

    fn named(initiator: &str, proved: &str) -> Identity {
        Identity {
            initiator: initiator.into(),
            isid: [1, 2, 3, 4, 5, 6],
            target: Some("iqn.t".into()),
            proved: Some(proved.into()),
            tsih: 0,
            cid: 0,
        }
    }

    fn targets(export: &str, chap: &str) -> Targets {
        let unit = Arc::new(Unit::new(Arc::new(Spec::parse(export).unwrap().open(None).unwrap()), 512));
        let secrets = Secrets::parse(chap).unwrap();
        Targets::new(vec![Target { name: "iqn.t".into(), units: vec![unit] }], Some(secrets), Vec::new())
    }

    #[test]
    fn whoever_knows_one_secret_cannot_take_anothers_session() {
        let targets = targets(
            "d=mem:1M",
            "initiator a secret-of-a-12\ninitiator b secret-of-b-12\n\
             initiator c secret-of-c-12 iqn.c,iqn.C2\n",
        );
        let first = targets.open(named("iqn.b", "b")).unwrap();
        for stolen in ["iqn.b", "IQN.B", "iqn.c", "iqn.c2"] {
            assert_eq!(targets.open(named(stolen, "a")).err(), Some(status::AUTHORIZATION), "{stolen}");
        }
        assert!(first.replaced.notified().now_or_never().is_none(), "it goes on");
        assert_eq!(targets.open(named("iqn.a", "c")).err(), Some(status::AUTHORIZATION), "c has names of its own");
        for (own, name) in [("iqn.b", "b"), ("iqn.a", "a"), ("iqn.a2", "a"), ("iqn.c2", "c")] {
            assert!(targets.open(named(own, name)).is_ok(), "{own}");
        }
    }

    /// The owner of registrations.
    #[test]
    fn an_initiator_is_one_owner_whatever_its_ports_are_called() {
        let host = |number: u8| Origin::of_host([10, 0, 0, number].into());
        let owner = |targets: &Targets, identity: Identity, number| {
            let open = async { targets.open(identity).unwrap() };
            caller::on_behalf_of(host(number), open).now_or_never().expect("nothing to wait for").nexus.owner.clone()
        };
        let secrets = targets("d=mem:1M", "initiator a secret-of-a-12\ninitiator b secret-of-b-12\n");
        let first = owner(&secrets, named("iqn.a", "a"), 1);
        let other_isid = Identity { isid: [2; 6], ..named("iqn.a", "a") };
        assert_eq!(owner(&secrets, other_isid, 2), first);
        assert_eq!(owner(&secrets, named("iqn.a2", "a"), 2), first);
        assert_ne!(owner(&secrets, named("iqn.b", "b"), 1), first);
        // Without CHAP, it can claim any iSCSI name.
        let unit = Arc::new(Unit::new(Arc::new(Spec::parse("d=mem:1M").unwrap().open(None).unwrap()), 512));
        let open = Targets::new(vec![Target { name: "iqn.t".into(), units: vec![unit] }], None, Vec::new());
        let unproved = |iqn: &str| Identity { proved: None, ..named(iqn, "") };
        let first = owner(&open, unproved("iqn.a"), 1);
        assert_eq!(owner(&open, unproved("iqn.b"), 1), first);
        assert_ne!(owner(&open, unproved("iqn.a"), 2), first);
    }

    #[test]
    fn a_disk_is_open_to_those_it_names_only() {
        let chap = "initiator a secret-of-a-12\ninitiator b secret-of-b-12\ninitiator c secret-of-c-12 iqn.c\n";
        let targets = targets("d=mem:1M,allow=b|iqn.C|iqn.d", chap);
        for (iqn, name) in [("iqn.a", "a"), ("b", "a"), ("iqn.d", "a")] {
            assert_eq!(targets.open(named(iqn, name)).err(), Some(status::AUTHORIZATION), "{iqn}");
        }
        assert!(targets.open(named("iqn.b", "b")).is_ok());
        assert!(targets.open(named("iqn.c", "c")).is_ok());
        let discover = |name: &str| {
            let session = targets.open(Identity { target: None, ..named(&format!("iqn.{name}"), name) }).unwrap();
            targets.send_targets("All", &session, "portal").unwrap()
        };
        assert_eq!((discover("a").as_str(), discover("b").is_empty()), ("", false));
    }
}
