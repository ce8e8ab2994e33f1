//! PERSISTENT RESERVE IN and OUT (SPC-4 6.15, 6.16).

use super::reservation::{Holder, Registration, Type};
use super::unit::{Attention, State};
use super::{Nexus, Outcome, Sense, Status, be16, be32, be64};
use std::sync::Arc;

/// PERSISTENT RESERVE IN.
pub(super) fn read(state: &mut State, cdb: &[u8; 16]) -> Outcome {
    let all = &state.reservations;
    let mut data = all.generation.to_be_bytes().to_vec();
    let mut list = Vec::new();
    match cdb[1] & 0x1f {
        0 => all.registrations.iter().for_each(|r| list.extend_from_slice(&r.key.to_be_bytes())),
        1 => {
            if let Some(holder) = &all.holder {
                let key = if holder.kind.held_by_all() { 0 } else { all.key_of(&holder.port).unwrap_or(0) };
                list.extend_from_slice(&key.to_be_bytes());
                list.extend_from_slice(&[0, 0, 0, 0, 0, holder.kind.0, 0, 0]);
            }
        }
        2 => {
            // ATP_C: a registration holds for all target ports, of which there is one. PTPL_C and PTPL_A where they can
            // last, and do. Not SIP_C, CRH. The mask says which types there are: all of them.
            data = vec![0, 8, 0x04 | u8::from(all.can_last), 0x80 | u8::from(all.lasts), 0xea, 0x01, 0, 0];
            return Outcome::data(data, be16(cdb, 7).into());
        }
        3 => {
            for r in &all.registrations {
                list.extend_from_slice(&r.key.to_be_bytes());
                let holds = all.holds(&r.port);
                let kind = if holds { all.holder.as_ref().map_or(0, |h| h.kind.0) } else { 0 };
                list.extend_from_slice(&[0, 0, 0, 0, u8::from(holds), kind, 0, 0, 0, 0, 0, 1]);
                let id = transport_id(&r.port);
                list.extend_from_slice(&(id.len() as u32).to_be_bytes());
                list.extend(id);
            }
        }
        _ => return Sense::invalid_field(1).into(),
    }
    data.extend_from_slice(&(list.len() as u32).to_be_bytes());
    data.extend(list);
    Outcome::data(data, be16(cdb, 7).into())
}

/// TransportID of an iSCSI initiator port (SPC-4 7.6.4.6): its name and session identifier.
fn transport_id(port: &str) -> Vec<u8> {
    let mut name = port.as_bytes().to_vec();
    name.push(0);
    name.resize(name.len().next_multiple_of(4).max(20), 0);
    let mut id = vec![0x45, 0, (name.len() >> 8) as u8, name.len() as u8];
    id.extend(name);
    id
}

/// PERSISTENT RESERVE OUT. With the outcome, the ports whose commands are to be aborted before it is told.
pub(super) fn out(state: &mut State, nexus: &Nexus, cdb: &[u8; 16], list: &[u8]) -> (Outcome, Vec<Arc<str>>) {
    const PREEMPT_AND_ABORT: u8 = 5;
    let mut preempted = Vec::new();
    let outcome = change(state, nexus, cdb, list, &mut preempted);
    if cdb[1] & 0x1f != PREEMPT_AND_ABORT {
        preempted.clear();
    }
    (outcome, preempted)
}

fn change(state: &mut State, nexus: &Nexus, cdb: &[u8; 16], list: &[u8], preempted: &mut Vec<Arc<str>>) -> Outcome {
    let action = cdb[1] & 0x1f;
    if action > 6 {
        return Sense::invalid_field(1).into();
    }
    if be32(cdb, 5) != 24 || list.len() != 24 {
        return Sense::PARAMETER_LENGTH.into();
    }
    let (key, new_key, flags) = (be64(list, 0), be64(list, 8), list[20]);
    let registers = action == 0 || action == 6;
    // SPEC_I_PT; and APTPL, which means nothing but where one registers, if there is no place to keep it.
    let asks_too_much = registers && flags & 1 != 0 && !state.reservations.can_last;
    if flags & 0x08 != 0 || asks_too_much {
        return Sense::invalid_parameter(20).into();
    }
    let port = &nexus.port;
    let registered = state.reservations.key_of(port);
    if registers {
        if action == 0 && registered.unwrap_or(0) != key {
            return Outcome::status(Status::ReservationConflict);
        }
        let outcome = register(state, nexus, new_key);
        if outcome.status == Status::Good {
            state.reservations.lasts = flags & 1 != 0;
        }
        return outcome;
    }
    if registered != Some(key) {
        return Outcome::status(Status::ReservationConflict);
    }
    let kind = Type::of(cdb[2] & 0x0f).filter(|_| cdb[2] >> 4 == 0);
    match action {
        1 => reserve(state, port, kind),
        2 => release(state, nexus, kind),
        3 => clear(state, nexus),
        _ => preempt(state, nexus, kind, new_key, preempted),
    }
}

fn register(state: &mut State, nexus: &Nexus, key: u64) -> Outcome {
    let all = &mut state.reservations;
    let has_room = all.has_room_for(&nexus.owner);
    let (port, owner) = (&nexus.port, &nexus.owner);
    match all.registrations.iter_mut().find(|r| r.port == nexus.port) {
        Some(_) if key == 0 => {
            unregister(state, nexus);
        }
        Some(registration) => (registration.key, registration.owner) = (key, Arc::clone(owner)),
        None if key == 0 => {}
        None if !has_room => return Sense::NO_REGISTRATIONS.into(),
        None => all.registrations.push(Registration { port: Arc::clone(port), key, owner: Arc::clone(owner) }),
    }
    state.reservations.generation = state.reservations.generation.wrapping_add(1);
    Outcome::good()
}

/// A registration ends; a reservation that its port held alone ends with it.
fn unregister(state: &mut State, nexus: &Nexus) {
    let all = &mut state.reservations;
    all.remove(&nexus.port);
    let Some(holder) = all.holder.clone() else { return };
    let last = holder.kind.held_by_all() && all.registrations.is_empty();
    if last || (!holder.kind.held_by_all() && holder.port == nexus.port) {
        all.holder = None;
        if holder.kind.admits_registrants() {
            tell_registrants(state, nexus, Attention::Released);
        }
    }
}

fn tell_registrants(state: &mut State, except: &Nexus, what: Attention) {
    let ports: Vec<Arc<str>> = state.reservations.registrations.iter().map(|r| Arc::clone(&r.port)).collect();
    for port in ports {
        if port != except.port {
            state.tell_port(&port, except.id, what);
        }
    }
}

fn reserve(state: &mut State, port: &Arc<str>, kind: Option<Type>) -> Outcome {
    let Some(kind) = kind else { return Sense::invalid_field(2).into() };
    let all = &mut state.reservations;
    match &all.holder {
        None => all.holder = Some(Holder { port: Arc::clone(port), kind }),
        Some(holder) if holder.kind == kind && all.holds(port) => {}
        Some(_) => return Outcome::status(Status::ReservationConflict),
    }
    Outcome::good()
}

fn release(state: &mut State, nexus: &Nexus, kind: Option<Type>) -> Outcome {
    let all = &mut state.reservations;
    let Some(holder) = all.holder.clone() else { return Outcome::good() };
    if !all.holds(&nexus.port) {
        return Outcome::good();
    }
    if kind != Some(holder.kind) {
        return Sense::INVALID_RELEASE.into();
    }
    all.holder = None;
    if holder.kind.admits_registrants() {
        tell_registrants(state, nexus, Attention::Released);
    }
    Outcome::good()
}

fn clear(state: &mut State, nexus: &Nexus) -> Outcome {
    tell_registrants(state, nexus, Attention::Preempted);
    let all = &mut state.reservations;
    all.registrations.clear();
    all.holder = None;
    all.generation = all.generation.wrapping_add(1);
    Outcome::good()
}

fn preempt(state: &mut State, nexus: &Nexus, kind: Option<Type>, key: u64, preempted: &mut Vec<Arc<str>>) -> Outcome {
    let all = &mut state.reservations;
    let holder = all.holder.clone();
    let takes = match &holder {
        Some(h) if h.kind.held_by_all() => key == 0,
        Some(h) => all.key_of(&h.port) == Some(key),
        None => false,
    };
    if takes && kind.is_none() {
        return Sense::invalid_field(2).into();
    }
    if key == 0 && !takes {
        return Sense::invalid_parameter(8).into();
    }
    let removed: Vec<Arc<str>> = all
        .registrations
        .iter()
        .filter(|r| r.port != nexus.port && (r.key == key || (takes && key == 0)))
        .map(|r| Arc::clone(&r.port))
        .collect();
    if removed.is_empty() && !takes {
        return Outcome::status(Status::ReservationConflict);
    }
    for port in &removed {
        all.remove(port);
    }
    all.generation = all.generation.wrapping_add(1);
    if takes && let (Some(kind), Some(old)) = (kind, holder) {
        all.holder = Some(Holder { port: Arc::clone(&nexus.port), kind });
        if old.kind != kind && old.kind.admits_registrants() {
            tell_registrants(state, nexus, Attention::Released);
        }
    }
    for port in &removed {
        state.tell_port(port, nexus.id, Attention::RegistrationsPreempted);
    }
    *preempted = removed;
    Outcome::good()
}

#[cfg(test)]
mod tests {
    use super::super::reservation::*;
    use super::*;
    use proptest::prelude::*;

    const REGISTER: u8 = 0;
    const RESERVE: u8 = 1;
    const RELEASE: u8 = 2;
    const CLEAR: u8 = 3;
    const PREEMPT: u8 = 4;
    const PREEMPT_AND_ABORT: u8 = 5;
    const TYPES: [u8; 6] = [1, 3, 5, 6, 7, 8];

    fn nexus(port: &str) -> Nexus {
        // Several ports of one owner: `a1`, `a2`.
        let owner = &port[..1];
        Nexus { id: u64::from(port.as_bytes()[0]), port: port.into(), owner: owner.into() }
    }

    /// A command of this port; its status and whose commands are to be aborted.
    fn out(state: &mut State, port: &str, (action, kind): (u8, u8), keys: (u64, u64)) -> (Status, Vec<String>) {
        let mut cdb = [0; 16];
        (cdb[0], cdb[1], cdb[2], cdb[8]) = (0x5f, action, kind, 24);
        let mut list = [0; 24];
        list[..8].copy_from_slice(&keys.0.to_be_bytes());
        list[8..16].copy_from_slice(&keys.1.to_be_bytes());
        let (outcome, aborted) = super::out(state, &nexus(port), &cdb, &list);
        (outcome.status, aborted.iter().map(|port| port.to_string()).collect())
    }

    /// Ports `a`, `b` and `c` with the keys 1, 2 and 2; `a` has reserved the unit.
    fn reserved(kind: u8) -> State {
        let mut state = State::default();
        for (port, key) in [("a", 1), ("b", 2), ("c", 2)] {
            assert_eq!(out(&mut state, port, (REGISTER, 0), (0, key)).0, Status::Good);
        }
        assert_eq!(out(&mut state, "a", (RESERVE, kind), (1, 0)).0, Status::Good);
        state
    }

    fn registered(state: &State) -> Vec<&str> {
        state.reservations.registrations.iter().map(|r| &*r.port).collect()
    }

    /// Who holds the unit, and by which type.
    fn holder(state: &State) -> (Vec<&str>, u8) {
        let all = &state.reservations;
        let holders = ["a", "b", "c", "d"].into_iter().filter(|port| all.holds(port)).collect();
        (holders, all.holder.as_ref().map_or(0, |holder| holder.kind.0))
    }

    /// SPC-4 5.12.11.4, with the type as it was and with another.
    #[test]
    fn who_preempts_takes_what_the_key_says() {
        for (kind, new) in TYPES.into_iter().flat_map(|kind| TYPES.map(|new| (kind, new))) {
            let is_all = kind >= 7;
            let all_if = |new: u8, port| if new >= 7 { vec!["b", "c"] } else { vec![port] };
            for action in [PREEMPT, PREEMPT_AND_ABORT] {
                let told = |ports: &[&str]| match action {
                    PREEMPT_AND_ABORT => ports.iter().map(|port| port.to_string()).collect(),
                    _ => Vec::new(),
                };
                // The holder's key: the reservation is the preempting port's; where all hold it, only its registration goes.
                let mut state = reserved(kind);
                assert_eq!(out(&mut state, "b", (action, new), (2, 1)), (Status::Good, told(&["a"])));
                assert_eq!(registered(&state), ["b", "c"]);
                let holds = if is_all { (vec!["b", "c"], kind) } else { (all_if(new, "b"), new) };
                assert_eq!(holder(&state), holds, "type {kind}, then {new}");
                // Another's key: the reservation stays, and the preempting port keeps its registration.
                let mut state = reserved(kind);
                assert_eq!(out(&mut state, "b", (action, new), (2, 2)), (Status::Good, told(&["c"])));
                assert_eq!(registered(&state), ["a", "b"]);
                assert_eq!(holder(&state), (if is_all { vec!["a", "b"] } else { vec!["a"] }, kind));
                // No key: all others', if all hold it.
                let mut state = reserved(kind);
                let (status, aborted) = out(&mut state, "b", (action, new), (2, 0));
                if is_all {
                    assert_eq!((status, aborted), (Status::Good, told(&["a", "c"])));
                    assert_eq!((registered(&state), holder(&state)), (vec!["b"], (vec!["b"], new)));
                } else {
                    assert_eq!((status, aborted), (Status::CheckCondition, Vec::new()));
                    assert_eq!((registered(&state), holder(&state)), (vec!["a", "b", "c"], (vec!["a"], kind)));
                }
                // A key that no port has, a key that is not the sender's, and a sender without one.
                for (port, keys) in [("b", (2, 9)), ("b", (1, 1)), ("d", (0, 1))] {
                    let mut state = reserved(kind);
                    assert_eq!(out(&mut state, port, (action, new), keys), (Status::ReservationConflict, Vec::new()));
                    assert_eq!(registered(&state), ["a", "b", "c"]);
                }
            }
        }
        assert_eq!(out(&mut reserved(1), "b", (PREEMPT, 2), (2, 1)).0, Status::CheckCondition, "there is no type 2");
    }

    #[test]
    fn a_reservation_ends_with_its_holders_and_with_nobody_else() {
        for kind in TYPES {
            let is_all = kind >= 7;
            let mut state = reserved(kind);
            // Only who holds it releases it, and by its type.
            let other = if kind == 1 { 3 } else { 1 };
            assert_eq!(out(&mut state, "a", (RELEASE, other), (1, 0)).0, Status::CheckCondition);
            assert_eq!(out(&mut state, "b", (RELEASE, kind), (2, 0)).0, Status::Good);
            assert_eq!(holder(&state).1, if is_all { 0 } else { kind });
            let mut state = reserved(kind);
            assert_eq!(out(&mut state, "b", (RESERVE, kind), (2, 0)).0 == Status::Good, is_all);
            assert_eq!(out(&mut state, "a", (RESERVE, other), (1, 0)).0, Status::ReservationConflict);
            assert_eq!(out(&mut state, "a", (RELEASE, kind), (1, 0)).0, Status::Good);
            assert_eq!((holder(&state).1, registered(&state)), (0, vec!["a", "b", "c"]));
            // A registration that ends takes with it what it held alone.
            let mut state = reserved(kind);
            for (port, key, left) in [("b", 2, kind), ("a", 1, if is_all { kind } else { 0 }), ("c", 2, 0)] {
                assert_eq!(out(&mut state, port, (REGISTER, 0), (key, 0)).0, Status::Good);
                assert_eq!(holder(&state).1, left, "type {kind}, without {port}");
            }
            let mut state = reserved(kind);
            assert_eq!(out(&mut state, "c", (CLEAR, 0), (2, 0)).0, Status::Good);
            assert_eq!((holder(&state).1, registered(&state).len()), (0, 0));
        }
    }

    #[test]
    fn kept_reservations_are_refused_where_they_are_cut_off_or_changed() {
        let mut state = reserved(5);
        (state.reservations.can_last, state.reservations.lasts) = (true, true);
        let kept = state.reservations.kept().unwrap();
        let read =
            |text: &str| Reservations::lasting(Some(text)).map(|all| (all.registrations.len(), all.holder.is_some()));
        assert_eq!(read(&kept), Ok((3, true)));
        for len in (0..kept.len()).filter(|len| kept.is_char_boundary(*len)) {
            assert!(read(&kept[..len]).is_err(), "cut off after {len} bytes");
        }
        for at in 0..kept.len() {
            let mut changed = kept.clone().into_bytes();
            changed[at] ^= 1;
            assert!(read(&String::from_utf8(changed).unwrap()).is_err(), "byte {at}");
        }
        assert!(read(&(kept.clone() + "x")).is_err() && read(&(kept.clone() + &kept)).is_err());
    }

    #[test]
    fn kept_reservations_of_earlier_versions_count_for_their_iscsi_names() {
        let lines = "registration 0000000000000007 iqn.a,i,0x1\nholder 5 iqn.a,i,0x1\n";
        let first = format!("{FIRST_LINE_OF_1}\n{lines}");
        let second = format!("{FIRST_LINE_OF_2}\n{lines}");
        let second = format!("{second}{END}{}\n", checksum(&second));
        for kept in [first, second] {
            let all = Reservations::lasting(Some(&kept)).unwrap();
            assert_eq!((&*all.registrations[0].owner, all.holder.is_some()), ("iqn.a", true));
            // What is written from now on names the owner.
            let kept = all.kept().unwrap();
            assert!(kept.starts_with(FIRST_LINE) && kept.contains("iqn.a,i,0x1 iqn.a\n"), "{kept}");
            assert_eq!(&*Reservations::lasting(Some(&kept)).unwrap().registrations[0].owner, "iqn.a");
        }
    }

    #[test]
    fn one_initiator_leaves_registrations_to_the_others() {
        let mut state = State::default();
        (state.reservations.can_last, state.reservations.lasts) = (true, true);
        let register = |state: &mut State, owner: &str, ports: usize| {
            let all = (0..ports).map(|n| out(state, &format!("{owner}{n}"), (REGISTER, 0), (0, 7)).0);
            all.filter(|status| *status == Status::Good).count()
        };
        assert_eq!(register(&mut state, "e", REGISTRATIONS_MAX), 228);
        // A restart of the daemon gives it no more.
        state.reservations.lasts = true;
        let kept = state.reservations.kept().unwrap();
        state.reservations = Reservations::lasting(Some(&kept)).unwrap();
        assert_eq!(out(&mut state, "e228", (REGISTER, 0), (0, 7)).0, Status::CheckCondition);
        assert_eq!(out(&mut state, "e0", (REGISTER, 0), (7, 8)).0, Status::Good, "another key for the same port");
        // A host with 16 paths, and others with two.
        assert_eq!(register(&mut state, "a", 16), 16);
        for owner in ["b", "c", "d"] {
            assert_eq!(register(&mut state, owner, 2), 2, "{owner}");
        }
        // A registration that has ended can be taken again.
        assert_eq!(out(&mut state, "e1", (REGISTER, 0), (7, 0)).0, Status::Good);
        assert_eq!(out(&mut state, "a0", (CLEAR, 0), (7, 0)).0, Status::Good);
        assert_eq!(out(&mut state, "e228", (REGISTER, 0), (0, 7)).0, Status::Good);
    }

    /// SPC-4 table 66.
    #[test]
    fn who_may_read_and_write() {
        let (test, read, write) = ([0; 16], cdb_of(0x28), cdb_of(0x2a));
        for kind in TYPES {
            let state = reserved(kind);
            let may = |port, cdb| state.reservations.admits(&nexus(port), cdb) == Access::Granted;
            let (readers, registrants) = (matches!(kind, 1 | 5 | 7), kind >= 5);
            for (port, reads, writes) in
                [("a", true, true), ("b", registrants || readers, registrants), ("d", readers, false)]
            {
                assert!(may(port, &test), "type {kind}, {port}");
                assert_eq!((may(port, &read), may(port, &write)), (reads, writes), "type {kind}, {port}");
            }
        }
    }

    fn cdb_of(operation: u8) -> [u8; 16] {
        let mut cdb = [0; 16];
        cdb[0] = operation;
        cdb
    }

    proptest! {
        #[test]
        fn a_ports_name_is_one_word_of_a_file(port in ".{0,40}") {
            let word = written(&port);
            prop_assert!(word.bytes().all(|b| b.is_ascii_graphic()), "{}", word);
            prop_assert_eq!(read_name(&word), Some(port));
        }
    }
}
