//! Execution of commands.

use super::unit::{Nexus, Unit};
use super::{
    Outcome, Sense, Status, Transfer, be16, be32, cdb, inquiry, media, mode, opcodes, persistent_reserve, ports,
};
use std::sync::atomic::Ordering;

impl Unit {
    /// Does a command. A CDB shorter than 16 bytes is padded by zeroes.
    pub async fn execute(&self, nexus: &Nexus, cdb: &[u8; 16], transfer: &dyn Transfer) -> Outcome {
        if self.guarded.load(Ordering::Acquire)
            && let Err(outcome) = self.admit(nexus, cdb)
        {
            return outcome;
        }
        // RESERVE, PERSISTENT RESERVE OUT and MODE SELECT affect other initiators.
        if matches!(cdb[0], 0x16 | 0x56 | 0x5f | 0x15 | 0x55) && self.may_only_read() {
            return Sense::WRITE_PROTECTED.into();
        }
        // RESERVE
        if matches!(cdb[0], 0x16 | 0x56) {
            let outcome = self.answer(nexus, cdb);
            self.export.fence.settle().await;
            return outcome;
        }
        if let Some(command) = cdb::decode(cdb) {
            return match command {
                Ok(command) => media::execute(self, command, transfer).await,
                Err(sense) => sense.into(),
            };
        }
        match cdb[0] {
            0x42 => media::unmap(self, cdb, transfer).await,
            0x9e => self.service_action_in(cdb, transfer).await,
            0x15 | 0x55 => match media::parameters(transfer, mode::list_len(cdb)).await {
                Ok(list) => mode::select(self, nexus, cdb, &list),
                Err(sense) => sense.into(),
            },
            0x5f => match media::parameters(transfer, be32(cdb, 5) as usize).await {
                Ok(list) => self.reserve(nexus, cdb, &list).await,
                Err(sense) => sense.into(),
            },
            _ => self.answer(nexus, cdb),
        }
    }

    /// Commands without data from the initiator that are done at once.
    fn answer(&self, nexus: &Nexus, cdb: &[u8; 16]) -> Outcome {
        match cdb[0] {
            0x00 => {
                self.blocks();
                Outcome::good()
            }
            0x03 => request_sense(cdb),
            0x12 => inquiry::inquiry(self, cdb),
            0x16 | 0x56 => {
                let taken = self.with_state(|state| state.reservations.reserve_unit(nexus.id));
                if taken { Outcome::good() } else { Outcome::status(Status::ReservationConflict) }
            }
            0x17 | 0x57 => {
                self.with_state(|state| state.reservations.release_unit(nexus.id));
                Outcome::good()
            }
            0x1a | 0x5a => mode::sense(self, cdb),
            0x1b => self.start_stop(cdb),
            0x1e => self.prevent(nexus, cdb),
            0x25 => self.read_capacity_10(cdb),
            0x37 | 0xb7 => defect_data(cdb),
            0x5e => self.with_state(|state| persistent_reserve::read(state, cdb)),
            0xa3 => match cdb[1] & 0x1f {
                0x0a => ports::groups(cdb),
                0x0c => opcodes::report(cdb),
                0x0d => ports::task_management(cdb),
                _ => Sense::invalid_field(1).into(),
            },
            _ => Sense::INVALID_OPCODE.into(),
        }
    }

    async fn service_action_in(&self, cdb: &[u8; 16], transfer: &dyn Transfer) -> Outcome {
        match cdb[1] & 0x1f {
            0x10 => self.read_capacity_16(cdb),
            0x12 => media::lba_status(self, cdb, transfer).await,
            _ => Sense::invalid_field(1).into(),
        }
    }

    /// PERSISTENT RESERVE OUT: when it is answered, what is to last is kept, and nothing of those who have been shut out
    /// reaches the disk any more.
    async fn reserve(&self, nexus: &Nexus, cdb: &[u8; 16], list: &[u8]) -> Outcome {
        let mut kept = self.kept.lock().await;
        let before = self.with_state(|state| state.reservations.before());
        let (outcome, aborted) = self.with_state(|state| persistent_reserve::out(state, nexus, cdb, list));
        let to_keep = self.with_state(|state| state.reservations.kept());
        if let Some(lasting) = self.lasting.clone().filter(|_| kept.as_ref() != Some(&to_keep)) {
            // Until it is done, and if it is not, the old or the new may be there.
            *kept = None;
            let text = to_keep.clone();
            let saved = tokio::task::spawn_blocking(move || lasting.save(text.as_deref())).await;
            if let Err(error) = saved.map_err(std::io::Error::other).flatten() {
                tracing::error!(%error, export = self.export.name, "cannot save persistent reservations");
                self.with_state(|state| state.reservations.undo(before));
                return Sense::TARGET_FAILURE.into();
            }
            *kept = Some(to_keep);
        }
        drop(kept);
        self.export.fence.settle().await;
        if !aborted.is_empty() {
            // Who was shut out must not be heard of again.
            self.clear(|other| other.id != nexus.id && aborted.contains(&other.port)).await;
        }
        outcome
    }

    fn start_stop(&self, cdb: &[u8; 16]) -> Outcome {
        let (start, eject) = (cdb[4] & 1 != 0, cdb[4] & 2 != 0);
        // Power conditions are not changed.
        if cdb[4] >> 4 != 0 {
            return Outcome::good();
        }
        self.with_state(|state| {
            if !start && eject && !state.prevented.is_empty() {
                return Sense::REMOVAL_PREVENTED.into();
            }
            if eject {
                // The medium cannot be taken out.
                return Sense::invalid_field(4).into();
            }
            Outcome::good()
        })
    }

    fn prevent(&self, nexus: &Nexus, cdb: &[u8; 16]) -> Outcome {
        self.with_state(|state| {
            state.prevented.retain(|id| *id != nexus.id);
            if cdb[4] & 1 != 0 {
                state.prevented.push(nexus.id);
            }
        });
        Outcome::good()
    }

    fn read_capacity_10(&self, cdb: &[u8; 16]) -> Outcome {
        if cdb[8] & 1 == 0 && be32(cdb, 2) != 0 {
            return Sense::invalid_field(2).into();
        }
        let last = self.blocks().saturating_sub(1).min(u32::MAX.into()) as u32;
        Outcome::data([last.to_be_bytes(), self.block_len.to_be_bytes()].concat(), 8)
    }

    fn read_capacity_16(&self, cdb: &[u8; 16]) -> Outcome {
        let mut data = vec![0; 32];
        data[..8].copy_from_slice(&self.blocks().saturating_sub(1).to_be_bytes());
        data[8..12].copy_from_slice(&self.block_len.to_be_bytes());
        // Logical blocks in a physical one, as a power of two.
        data[13] = self.physical_exponent();
        let geometry = self.export.geometry();
        if geometry.discard {
            // LBPME; and LBPRZ where what is unmapped reads as zeroes.
            data[14] = if geometry.discard_zeroes { 0xc0 } else { 0x80 };
        }
        Outcome::data(data, be32(cdb, 10) as usize)
    }
}

fn request_sense(cdb: &[u8; 16]) -> Outcome {
    let none = Sense::new(0, 0);
    let data = if cdb[1] & 1 != 0 { none.encode_descriptors() } else { none.encode().to_vec() };
    Outcome::data(data, cdb[4].into())
}

/// READ DEFECT DATA: a disk of ours has none.
fn defect_data(cdb: &[u8; 16]) -> Outcome {
    if cdb[0] == 0x37 {
        return Outcome::data(vec![0, cdb[2] & 0x1f, 0, 0], be16(cdb, 7).into());
    }
    Outcome::data(vec![0, cdb[1] & 0x1f, 0, 0, 0, 0, 0, 0], be32(cdb, 6) as usize)
}

#[cfg(test)]
mod tests {
    use super::super::fuzzing::Given;
    use super::super::{Lasting, LastingError};
    use super::*;
    use crate::backend::{Backend, Op};
    use crate::export::Spec;
    use crate::layer::Layer;
    use futures_util::FutureExt;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;
    use thruway_engine::Segment;

    const ABORT: u8 = 5;

    fn reserve_out(action: u8) -> [u8; 16] {
        let mut cdb = [0; 16];
        // Write exclusive, registrants only.
        (cdb[0], cdb[1], cdb[2], cdb[8]) = (0x5f, action, 5, 24);
        cdb
    }

    fn keys(own: u64, other: u64) -> [u8; 24] {
        let mut list = [0; 24];
        list[..8].copy_from_slice(&own.to_be_bytes());
        list[8..16].copy_from_slice(&other.to_be_bytes());
        list
    }

    async fn done(unit: &Unit, nexus: &Nexus, cdb: &[u8; 16], data: &[u8]) {
        let outcome = unit.execute(nexus, cdb, &Given::new(data, data.len() as u64)).await;
        assert_eq!(outcome.status, Status::Good, "{cdb:?}: {:?}", outcome.sense);
    }

    /// Notes what is asked of the disk.
    struct Witness {
        below: Arc<dyn Backend>,
        seen: Mutex<Vec<&'static str>>,
    }

    impl Layer for Witness {
        fn inner(&self) -> &dyn Backend {
            &*self.below
        }

        fn write(&self, at: u64, segment: Segment, durable: bool) -> Op<'_, ()> {
            self.seen.lock().unwrap().push(if durable { "durable write" } else { "write" });
            self.below.write(at, segment, durable)
        }

        fn flush(&self) -> Op<'_, ()> {
            self.seen.lock().unwrap().push("flush");
            self.below.flush()
        }
    }

    #[test]
    fn what_an_initiator_wants_durable_the_disk_is_told_to_keep() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut export = Spec::parse("d=mem:1M").unwrap().open(None).unwrap();
            let below = Arc::clone(&export.backend) as Arc<dyn Backend>;
            let witness = Arc::new(Witness { below, seen: Mutex::default() });
            export.backend = Arc::new(crate::Served::new(Arc::clone(&witness) as _));
            let unit = Unit::new(Arc::new(export), 512);
            let nexus = Nexus { id: 1, port: "a".into(), owner: "a".into() };
            const FUA: u8 = 8;
            let write = |flags: u8| {
                let mut cdb = [0; 16];
                (cdb[0], cdb[1], cdb[8]) = (0x2a, flags, 1);
                cdb
            };
            let mut synchronize = [0; 16];
            synchronize[0] = 0x35;
            done(&unit, &nexus, &write(0), &[1; 512]).await;
            done(&unit, &nexus, &write(FUA), &[2; 512]).await;
            done(&unit, &nexus, &synchronize, &[]).await;
            assert_eq!(*witness.seen.lock().unwrap(), ["write", "durable write", "flush"]);
        });
    }

    /// A cluster that shuts a member out relies on this: what the member has begun is over.
    #[test]
    fn who_preempts_and_aborts_waits_for_writes_under_way() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let spec = Spec::parse("d=mem:1M,delay=0s/10s").unwrap();
            let unit = Unit::new(Arc::new(spec.open(None).unwrap()), 512);
            let nexus = |id, port: &str| Nexus { id, port: port.into(), owner: port.into() };
            let (a, b) = (nexus(1, "a"), nexus(2, "b"));
            let (attached, _) = (unit.attach(&a), unit.attach(&b));
            for nexus in [&a, &b] {
                let unready = unit.execute(nexus, &[0; 16], &Given::new(&[], 0)).await;
                assert_eq!(unready.status, Status::CheckCondition, "the attention of every new session");
                done(&unit, nexus, &reserve_out(0), &keys(0, nexus.id)).await;
            }
            done(&unit, &b, &reserve_out(1), &keys(2, 0)).await;

            let under_way = attached.begin();
            let mut write = [0; 16];
            (write[0], write[8]) = (0x2a, 1);
            let data = [7; 512];
            let given = Given::new(&data, 512);
            let mut writing = Box::pin(unit.execute(&a, &write, &given));
            assert!((&mut writing).now_or_never().is_none(), "the disk is slow");
            let list = keys(2, 1);
            let (cdb, given) = (reserve_out(ABORT), Given::new(&list, 24));
            let mut preempting = Box::pin(unit.execute(&b, &cdb, &given));
            let soon = tokio::time::timeout(Duration::from_secs(9), &mut preempting).await;
            assert!(soon.is_err(), "the write may still reach the disk");
            assert!(under_way.is_draining());
            writing.await;
            drop(under_way);
            assert_eq!(preempting.await.status, Status::Good);
            // Nothing more is let in.
            let told = unit.execute(&a, &write, &Given::new(&data, 512)).await;
            assert_eq!(told.sense.map(|sense| sense.code), Some(0x2a05));
            let refused = unit.execute(&a, &write, &Given::new(&data, 512)).await;
            assert_eq!(refused.status, Status::ReservationConflict);
        });
    }

    #[test]
    fn reservations_that_are_to_last_are_in_force_from_the_start() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let state = tempfile::tempdir().unwrap();
            let unit = || {
                let export = Spec::parse("d=mem:1M").unwrap().open(None).unwrap();
                Unit::new(Arc::new(export), 512).with_lasting(Lasting::of(state.path(), &[1; 16])).unwrap()
            };
            let nexus = |id, port: &str| Nexus { id, port: port.into(), owner: port.into() };
            let (a, b) = (nexus(1, "iqn.a,i,0x1"), nexus(2, "iqn.b,i,0x1"));
            let attach = async |unit: &Unit| {
                for nexus in [&a, &b] {
                    unit.attach(nexus);
                    unit.execute(nexus, &[0; 16], &Given::new(&[], 0)).await;
                }
            };
            let aptpl = |key: u64| {
                let mut list = keys(0, key);
                list[20] = 1;
                list
            };
            let mut write = [0; 16];
            (write[0], write[8]) = (0x2a, 1);
            let data = [1; 512];
            let refused = async |unit: &Unit, nexus: &Nexus| {
                unit.execute(nexus, &write, &Given::new(&data, 512)).await.status == Status::ReservationConflict
            };
            let first = unit();
            attach(&first).await;
            // Without asking for it they go.
            done(&first, &a, &reserve_out(0), &keys(0, 7)).await;
            done(&first, &a, &reserve_out(1), &keys(7, 0)).await;
            assert!(refused(&first, &b).await);
            let second = unit();
            attach(&second).await;
            assert!(!refused(&second, &b).await);
            done(&second, &a, &reserve_out(0), &aptpl(7)).await;
            done(&second, &a, &reserve_out(1), &keys(7, 0)).await;
            // APTPL means nothing but where one registers.
            done(&second, &b, &reserve_out(0), &aptpl(9)).await;
            let third = unit();
            assert!(third.export.fence.change().await.is_err(), "before any initiator is here");
            attach(&third).await;
            assert!(!refused(&third, &a).await && !refused(&third, &b).await);
            // Preempted is preempted for good, too.
            done(&third, &a, &reserve_out(4), &keys(7, 9)).await;
            let fourth = unit();
            attach(&fourth).await;
            assert!(!refused(&fourth, &a).await && refused(&fourth, &b).await);
            // What cannot be kept is not done.
            std::fs::remove_dir_all(state.path().join("reservations")).unwrap();
            std::fs::write(state.path().join("reservations"), "in the way").unwrap();
            let register = fourth.execute(&b, &reserve_out(0), &Given::new(&aptpl(3), 24)).await;
            assert_eq!(register.sense.map(|sense| sense.key), Some(4));
            assert!(refused(&fourth, &b).await, "it is not registered");
            std::fs::remove_file(state.path().join("reservations")).unwrap();
            done(&fourth, &a, &reserve_out(3), &keys(7, 0)).await;
            assert!(!refused(&unit(), &b).await);
            for nonsense in ["", "thruway reservations 1\nholder 5 iqn.a", "thruway reservations 1\nregistration x y"] {
                std::fs::create_dir_all(state.path().join("reservations")).unwrap();
                std::fs::write(state.path().join("reservations").join("01".repeat(16)), nonsense).unwrap();
                let export = Spec::parse("d=mem:1M").unwrap().open(None).unwrap();
                let refused = Unit::new(Arc::new(export), 512).with_lasting(Lasting::of(state.path(), &[1; 16]));
                assert!(matches!(refused, Err(LastingError::Content { .. })), "{nonsense:?}");
            }
        });
    }

    /// RESERVE(6), RESERVE(10), PERSISTENT RESERVE OUT, and MODE SELECT, which causes unit attentions for others.
    #[test]
    fn who_may_only_read_a_disk_keeps_nobody_from_it() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let unit = Unit::new(Arc::new(Spec::parse("d=mem:1M,ro").unwrap().open(None).unwrap()), 512);
            let nexus = |id, port: &str| Nexus { id, port: port.into(), owner: port.into() };
            let (a, b) = (nexus(1, "a"), nexus(2, "b"));
            let (ours, others) = (unit.attach(&a), unit.attach(&b));
            for nexus in [&a, &b] {
                unit.execute(nexus, &[0; 16], &Given::new(&[], 0)).await;
            }
            let of = |code| {
                let mut cdb = [0; 16];
                cdb[0] = code;
                cdb
            };
            let persistent = (0..8).map(reserve_out);
            for cdb in [0x16, 0x56, 0x15, 0x55].map(of).into_iter().chain(persistent) {
                let outcome = unit.execute(&a, &cdb, &Given::new(&keys(0, 7), 24)).await;
                assert_eq!(outcome.sense, Some(Sense::WRITE_PROTECTED), "{cdb:x?}");
            }
            let mut read_keys = of(0x5e);
            read_keys[8] = 8;
            let outcome = unit.execute(&b, &read_keys, &Given::new(&[], 8)).await;
            assert_eq!((outcome.status, &outcome.data[..]), (Status::Good, &[0; 8][..]), "nobody is registered");
            assert!(unit.export.fence.read().is_ok());
            // A reset ends only the commands of the initiator that asks for it.
            let (its, their) = (ours.begin(), others.begin());
            let mut reset = Box::pin(unit.reset(&a));
            assert!((&mut reset).now_or_never().is_none());
            assert!(its.is_draining() && !their.is_draining());
            drop(its);
            assert!(reset.now_or_never().is_some());
            assert!(unit.clear_all(&a).now_or_never().is_some() && !their.is_draining());
            done(&unit, &b, &of(0), &[]).await;
            let told = unit.execute(&a, &of(0), &Given::new(&[], 0)).await;
            assert_eq!(told.sense.map(|sense| sense.code), Some(0x2900));
        });
    }

    #[test]
    fn kept_reservations_are_not_in_force_while_all_may_only_read() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let state = tempfile::tempdir().unwrap();
            let unit = |spec: &str| {
                let export = Spec::parse(spec).unwrap().open(None).unwrap();
                Unit::new(Arc::new(export), 512).with_lasting(Lasting::of(state.path(), &[1; 16])).unwrap()
            };
            let a = Nexus { id: 1, port: "iqn.a,i,0x1".into(), owner: "a".into() };
            let first = unit("d=mem:1M");
            first.attach(&a);
            first.execute(&a, &[0; 16], &Given::new(&[], 0)).await;
            let mut aptpl = keys(0, 7);
            aptpl[20] = 1;
            done(&first, &a, &reserve_out(0), &aptpl).await;
            // Exclusive access.
            let mut reserve = reserve_out(1);
            reserve[2] = 3;
            done(&first, &a, &reserve, &keys(7, 0)).await;
            let file = state.path().join(Lasting::DIRECTORY).join("01".repeat(16));
            let kept = std::fs::read(&file).unwrap();
            let second = unit("d=mem:1M,ro");
            assert!(second.export.fence.read().is_ok());
            second.attach(&a);
            second.detach(&a);
            assert_eq!(std::fs::read(&file).unwrap(), kept);
            assert!(unit("d=mem:1M").export.fence.read().is_err(), "as before");
        });
    }

    /// Data that is promised and never sent.
    struct Owed(Given<'static>);

    impl Transfer for Owed {
        fn expected(&self) -> u64 {
            self.0.expected()
        }

        fn send(&self, offset: u64, body: thruway_server::Body) -> crate::scsi::Step<'_, std::io::Result<()>> {
            self.0.send(offset, body)
        }

        fn receive(&self) -> crate::scsi::Step<'_, Option<std::io::Result<(u64, Segment)>>> {
            Box::pin(std::future::pending())
        }

        fn buffers(&self) -> &thruway_server::Buffers {
            self.0.buffers()
        }

        fn can_lend(&self) -> bool {
            false
        }

        fn aborted(&self) -> crate::scsi::Step<'_, ()> {
            Box::pin(std::future::pending())
        }
    }

    /// The initiator does not read: all blocks that data is sent from are on their way to it.
    struct Full<'a> {
        given: Given<'a>,
        buffers: thruway_server::Buffers,
        aborted: tokio::sync::Notify,
        _on_their_way: Vec<Segment>,
    }

    impl Full<'_> {
        async fn new(data: &[u8]) -> Full<'_> {
            let buffers = thruway_server::Buffers::new(64 << 10);
            let mut on_their_way = Vec::new();
            // Without tokio's budget, which so many would exhaust.
            while let Some(segment) = tokio::task::unconstrained(buffers.segment(512)).now_or_never() {
                on_their_way.push(segment.unwrap());
            }
            let given = Given::new(data, data.len() as u64);
            Full { given, buffers, aborted: tokio::sync::Notify::new(), _on_their_way: on_their_way }
        }
    }

    impl Transfer for Full<'_> {
        fn expected(&self) -> u64 {
            self.given.expected()
        }

        fn send(&self, offset: u64, body: thruway_server::Body) -> crate::scsi::Step<'_, std::io::Result<()>> {
            self.given.send(offset, body)
        }

        fn receive(&self) -> crate::scsi::Step<'_, Option<std::io::Result<(u64, Segment)>>> {
            self.given.receive()
        }

        fn buffers(&self) -> &thruway_server::Buffers {
            &self.buffers
        }

        fn can_lend(&self) -> bool {
            false
        }

        fn aborted(&self) -> crate::scsi::Step<'_, ()> {
            Box::pin(self.aborted.notified())
        }
    }

    #[test]
    fn who_does_not_read_holds_up_nobody_and_can_be_cleared() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let unit = Unit::new(Arc::new(Spec::parse("d=mem:1M").unwrap().open(None).unwrap()), 512);
            let nexus = |id, port: &str| Nexus { id, port: port.into(), owner: port.into() };
            let (a, b) = (nexus(1, "a"), nexus(2, "b"));
            let (_a, _b) = (unit.attach(&a), unit.attach(&b));
            for nexus in [&a, &b] {
                unit.execute(nexus, &[0; 16], &Given::new(&[], 0)).await;
            }
            // Compare and write, or-write (16), write same (16), write and verify (16).
            for code in [0x89, 0x8b, 0x93, 0x8e] {
                let mut cdb = [0; 16];
                cdb[0] = code;
                cdb[13] = 1;
                // Something that WRITE SAME does not take for zeroes.
                let data = [if code == 0x93 { 1 } else { 0 }; 1024];
                let full = Full::new(&data[..if code == 0x89 { 1024 } else { 512 }]).await;
                let mut waiting = Box::pin(unit.execute(&a, &cdb, &full));
                assert!((&mut waiting).now_or_never().is_none(), "{code:#x} waits for room");
                let (compare, zeroes) = (compare_and_write(), [0; 1024]);
                let given = Given::new(&zeroes, 1024);
                let other = unit.execute(&b, &compare, &given).now_or_never();
                assert_eq!(other.expect("it need not wait").status, Status::Good, "beside {code:#x}");
                full.aborted.notify_one();
                let ended = waiting.now_or_never().expect("whoever clears it does not wait for its initiator");
                assert_ne!(ended.status, Status::Good);
            }
        });
    }

    #[test]
    fn who_owes_its_data_holds_up_nobody() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let unit = Unit::new(Arc::new(Spec::parse("d=mem:1M").unwrap().open(None).unwrap()), 512);
            let nexus = |id, port: &str| Nexus { id, port: port.into(), owner: port.into() };
            let (a, b) = (nexus(1, "a"), nexus(2, "b"));
            let (_a, _b) = (unit.attach(&a), unit.attach(&b));
            for nexus in [&a, &b] {
                unit.execute(nexus, &[0; 16], &Given::new(&[], 0)).await;
            }
            // Compare and write, or-write (16), write same (16), write (16).
            for code in [0x89, 0x8b, 0x93, 0x8a] {
                let mut cdb = [0; 16];
                cdb[0] = code;
                cdb[13] = 1;
                let owed = Owed(Given::new(&[], if code == 0x89 { 1024 } else { 512 }));
                let mut waiting = Box::pin(unit.execute(&a, &cdb, &owed));
                assert!((&mut waiting).now_or_never().is_none(), "{code:#x} waits for its data");
                let (compare, data) = (compare_and_write(), [0; 1024]);
                let given = Given::new(&data, 1024);
                let other = unit.execute(&b, &compare, &given).now_or_never();
                assert_eq!(other.expect("it need not wait").status, Status::Good, "beside {code:#x}");
            }
        });
    }

    fn compare_and_write() -> [u8; 16] {
        let mut cdb = [0; 16];
        (cdb[0], cdb[13]) = (0x89, 1);
        cdb
    }

    /// A unit with one session, whose port has registered the key 7.
    async fn registered() -> (Unit, Nexus) {
        let unit = Unit::new(Arc::new(Spec::parse("d=mem:1M").unwrap().open(None).unwrap()), 512);
        let a = Nexus { id: 1, port: "a".into(), owner: "a".into() };
        unit.attach(&a);
        unit.execute(&a, &[0; 16], &Given::new(&[], 0)).await;
        done(&unit, &a, &reserve_out(0), &keys(0, 7)).await;
        (unit, a)
    }

    #[test]
    fn a_reservation_shuts_out_clients_that_know_none_once_what_they_have_begun_is_done() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (unit, a) = registered().await;
            let fence = &unit.export.fence;
            assert!(fence.change().await.is_ok(), "nobody holds it yet");
            let passing = fence.change().await.unwrap();
            // Write exclusive, registrants only.
            let list = keys(7, 0);
            let (cdb, given) = (reserve_out(1), Given::new(&list, 24));
            let mut reserving = Box::pin(unit.execute(&a, &cdb, &given));
            assert!((&mut reserving).now_or_never().is_none(), "a write is under way");
            drop(passing);
            assert_eq!(reserving.await.status, Status::Good);
            assert_eq!(fence.change().await.unwrap_err().raw_os_error(), Some(libc::EPERM));
            assert!(fence.read().is_ok());
            done(&unit, &a, &reserve_out(2), &keys(7, 0)).await;
            assert!(fence.change().await.is_ok());
            // RESERVE(6) is for one session alone; a reset ends it.
            done(&unit, &a, &reserve_out(3), &keys(7, 0)).await;
            let mut reserve = [0; 16];
            reserve[0] = 0x16;
            done(&unit, &a, &reserve, &[]).await;
            assert!(fence.read().is_err() && fence.change().await.is_err());
            unit.detach(&a);
            assert!(fence.read().is_ok() && fence.change().await.is_ok());
        });
    }

    #[test]
    fn what_the_type_of_a_reservation_lets_clients_do_that_know_none() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (unit, a) = registered().await;
            let fence = &unit.export.fence;
            // SPC-4 5.12.7: write exclusive, exclusive access; for registrants only; for all registrants.
            for (kind, may_read) in [(1, true), (3, false), (5, true), (6, false), (7, true), (8, false)] {
                let mut reserve = reserve_out(1);
                reserve[2] = kind;
                done(&unit, &a, &reserve, &keys(7, 0)).await;
                assert_eq!(fence.read().is_ok(), may_read, "type {kind}");
                assert!(fence.change().await.is_err(), "type {kind}");
                let mut release = reserve_out(2);
                release[2] = kind;
                done(&unit, &a, &release, &keys(7, 0)).await;
                assert!(fence.read().is_ok() && fence.change().await.is_ok(), "type {kind}");
            }
        });
    }

    #[test]
    fn actions_that_there_are_not_are_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let unit = Unit::new(Arc::new(Spec::parse("d=mem:1M").unwrap().open(None).unwrap()), 512);
            let a = Nexus { id: 1, port: "a".into(), owner: "a".into() };
            let _a = unit.attach(&a);
            unit.execute(&a, &[0; 16], &Given::new(&[], 0)).await;
            // REGISTER AND IGNORE EXISTING KEY is the last that there is.
            done(&unit, &a, &reserve_out(6), &keys(0, 7)).await;
            for action in 7..32 {
                let outcome = unit.execute(&a, &reserve_out(action), &Given::new(&keys(7, 7), 24)).await;
                assert_eq!(outcome.sense, Some(Sense::invalid_field(1)), "{action}");
            }
        });
    }

    #[test]
    fn a_reset_waits_for_what_sessions_have_left_behind() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let unit = Unit::new(Arc::new(Spec::parse("d=mem:1M").unwrap().open(None).unwrap()), 512);
            let nexus = |id, port: &str| Nexus { id, port: port.into(), owner: port.into() };
            let (a, b) = (nexus(1, "a"), nexus(2, "b"));
            let (attached, _) = (unit.attach(&a), unit.attach(&b));
            let under_way = attached.begin();
            unit.detach(&a);
            let mut reset = Box::pin(unit.reset(&b));
            assert!((&mut reset).now_or_never().is_none());
            drop(under_way);
            assert!((&mut reset).now_or_never().is_some());
        });
    }
}
