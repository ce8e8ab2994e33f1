//! What an epoll instance has of one connection.

use crate::slots::{self, Slot};
use crate::tcp::Connection;
use crate::{data, real, room, wait};
use libc::{c_int, epoll_event};
use std::sync::atomic::Ordering;
use thruway_sockets::{Reader, Segment};

pub(super) const READABLE: u32 = (libc::EPOLLIN | libc::EPOLLRDNORM) as u32;
pub(super) const WRITABLE: u32 = (libc::EPOLLOUT | libc::EPOLLWRNORM) as u32;
pub(super) const PRIORITY: u32 = libc::EPOLLPRI as u32;
pub(super) const ENDS: u32 = (libc::EPOLLHUP | libc::EPOLLRDHUP | libc::EPOLLERR) as u32;
pub(super) const EDGE: u32 = libc::EPOLLET as u32;
pub(super) const ONE_SHOT: u32 = libc::EPOLLONESHOT as u32;
/// The kernel reports these without a request.
pub(super) const ALWAYS: u32 = (libc::EPOLLHUP | libc::EPOLLERR) as u32;
/// Bits that are not events.
pub(super) const FLAGS: u32 = EDGE | ONE_SHOT | (libc::EPOLLEXCLUSIVE | libc::EPOLLWAKEUP) as u32;
/// With these, the kernel's own bookkeeping counts.
pub(super) const SPECIAL: u32 = ONE_SHOT | libc::EPOLLEXCLUSIVE as u32;

/// What the program has registered.
pub(super) struct Registration {
    /// The connection, and one of its descriptors: the one that was registered.
    pub(super) number: u32,
    pub(super) fd: c_int,
    pub(super) events: u32,
    pub(super) data: u64,
    pub(super) is_hot: bool,
    pub(super) idle: u32,
    /// What the peer's position was when the program was last told, for edges.
    pub(super) told: u64,
    /// Edges: number of bytes that the TCP connection had brought when an event was last taken for that of a doorbell.
    pub(super) explained: u64,
    /// The list of events from the kernel in which this registration has one because of a doorbell that was already discarded; 0 if there is none.
    pub(super) doorbell_in: u64,
    /// Exclusive: the ring had something that no doorbell has rung for.
    pub(super) is_owed: bool,
    /// The kernel's registration was changed here.
    pub(super) is_renewed: bool,
    /// There is no room to send, and the kernel, for which there always is, is not asked for it ([`crate::room`]).
    pub(super) is_muted: bool,
    /// It is asked again, and the program has not been told since.
    pub(super) is_owed_room: bool,
    /// Its descriptor is closed, or about to be, and the kernel's registration cannot be changed.
    pub(super) is_leaving: bool,
    /// In a child: the ring had bytes before the fork that no doorbell has announced, and has not been seen empty since.
    pub(super) is_inherited: bool,
}

/// What a registration counts for: a connection with one that counts for one is looked at, any other rings.
pub(super) fn weight(events: u32) -> u32 {
    if events & SPECIAL != 0 { 2 } else { 1 }
}

/// The data of the descriptor that a connection's relay writes to when there is room; the connection's number is in the lowest bits.
pub(super) const ROOM: u64 = 0x7468_7275_7772_0000;

/// The connection that an event with this data is of, if it is such a descriptor's.
pub(super) fn with_room(data: u64) -> Option<u32> {
    let number = (data ^ ROOM) as u32;
    (data & !0xffff == ROOM && number < slots::SLOTS as u32).then_some(number)
}

/// Has what waits for an instance wake, once, when a connection has room.
pub(super) fn wait_for_room(ep: c_int, descriptor: c_int, number: u32) -> bool {
    let events = libc::EPOLLIN as u32 | ONE_SHOT;
    let mut event = epoll_event { events, u64: ROOM | u64::from(number) };
    // SAFETY: one event.
    let mut control = |operation| unsafe { real::epoll_ctl(ep, operation, descriptor, &raw mut event) == 0 };
    control(libc::EPOLL_CTL_MOD) || control(libc::EPOLL_CTL_ADD)
}

impl Registration {
    /// A new registration of the program.
    pub(super) fn new(number: u32, fd: c_int, event: epoll_event) -> Registration {
        Registration {
            number,
            fd,
            events: event.events,
            data: event.u64,
            is_hot: false,
            idle: 0,
            told: u64::MAX,
            explained: 0,
            doorbell_in: 0,
            is_owed: false,
            is_renewed: false,
            is_muted: false,
            is_owed_room: false,
            is_leaving: false,
            is_inherited: false,
        }
    }

    /// A descriptor of the connection: the one that was registered may be another file by now.
    pub(super) fn descriptor(&self) -> c_int {
        slots::local(self.number).fd.load(Ordering::Relaxed)
    }

    /// True if events of the kernel with its data can be of its connection, and the connection is accelerated. The descriptor may be another
    /// connection's by now.
    pub(super) fn is_carried(&self) -> bool {
        let slot = slots::slot(self.number);
        self.is_known() && slot.is_accelerated()
    }

    /// As [`Registration::is_carried`], for any connection that is not left to the kernel. After the descriptor was closed, the registration ends
    /// with the connection.
    pub(super) fn is_known(&self) -> bool {
        let is_its = self.is_leaving || slots::find(self.fd) == Some(self.number);
        is_its && !slots::slot(self.number).is_left_to_kernel.load(Ordering::SeqCst)
    }

    /// Changes the kernel's registration. False if the program has just taken it out, or has closed the descriptor while the connection
    /// has others.
    pub(super) fn renew(&self, ep: c_int, events: u32) -> bool {
        let mut event = epoll_event { events, u64: self.data };
        // Its number may be another connection's by now.
        let is_it = slots::find(self.fd) == Some(self.number);
        // SAFETY: one event.
        is_it && unsafe { real::epoll_ctl(ep, libc::EPOLL_CTL_MOD, self.fd, &raw mut event) == 0 }
    }

    /// Its descriptor is about to be closed.
    pub(super) fn leave(&mut self, ep: c_int) {
        if std::mem::take(&mut self.is_muted) {
            self.is_owed_room = true;
            self.renew(ep, self.events);
        }
        self.is_leaving = true;
    }

    /// Does not ask the kernel whether something can be sent, because there was no room just now: it waits for that to come, also if it has
    /// come already, because the program is to be told of it. False if it cannot.
    pub(super) fn mute(&mut self, ep: c_int) -> bool {
        if self.events & WRITABLE == 0 {
            return true;
        }
        let Some(descriptor) = room::of(self.number) else { return false };
        let can_change = self.events & SPECIAL == 0 && !self.is_leaving;
        if !can_change || !self.is_muted && !self.renew(ep, self.events & !WRITABLE) {
            return false;
        }
        (self.is_muted, self.is_renewed) = (true, true);
        let is_waited_for = wait_for_room(ep, descriptor, self.number);
        if !is_waited_for {
            self.is_muted = false;
            self.renew(ep, self.events);
        }
        is_waited_for
    }

    /// Asks it again, if there is room: it says so at once. True if it is.
    pub(super) fn unmute(&mut self, ep: c_int) -> bool {
        let has_room = self.is_muted && !room::is_wanted(self.number);
        if has_room {
            (self.is_muted, self.is_owed_room) = (false, true);
            self.renew(ep, self.events);
        }
        has_room
    }

    /// What it waits for in place of room has come, or has been there before: waits for it again, or asks the kernel.
    pub(super) fn look_for_room(&mut self, ep: c_int) {
        if self.is_muted && room::ask_for(self.number) {
            let is_waited_for = room::of(self.number).is_some_and(|fd| wait_for_room(ep, fd, self.number));
            if !is_waited_for {
                self.is_muted = false;
                self.renew(ep, self.events);
            }
        } else {
            self.unmute(ep);
        }
    }

    /// Whether the program has been told of all that the ring has.
    pub(super) fn is_told(&self, slot: &Slot) -> bool {
        match slot.receiving() {
            Ok(Some(receiving)) => receiving.reader.tail(&receiving.segment).load(Ordering::Acquire) == self.told,
            _ => true,
        }
    }

    /// After an event of an edge that left bytes in the ring: asks for a doorbell with the next bytes. True if some have come already.
    pub(super) fn ask_for_next(&self) -> bool {
        if self.events & EDGE == 0 {
            return false;
        }
        arm_connection(self.number);
        let slot = slots::slot(self.number);
        self.has_bytes(slot) && !self.is_told(slot)
    }

    /// After an event for unread bytes of the ring. True if the program has been told of all, and a doorbell has come since for them.
    pub(super) fn is_told_again(&mut self, slot: &Slot) -> bool {
        let Some(mut receiving) = slot.try_receiving() else { return false };
        let slots::Receiving { segment, reader, .. } = &mut receiving;
        let tail = reader.tail(segment).load(Ordering::Acquire);
        let is_told = std::mem::replace(&mut self.told, tail) == tail;
        let connection = Connection::new(self.descriptor());
        // The end of the stream is an event of its own.
        if !is_told || self.events & EDGE == 0 || reader.has_run(segment) || connection.ends() != 0 {
            return false;
        }
        let arrived = reader.arrived(segment, &connection);
        std::mem::replace(&mut self.explained, arrived) != arrived
    }

    /// True if its ring has bytes to report. Each arrival is an event of an edge, also behind unread bytes of the TCP connection.
    fn has_bytes_in(&self, segment: &Segment, reader: &mut Reader) -> bool {
        reader.ring_len(segment) != Ok(0) || self.events & EDGE != 0 && reader.has_unread_in_ring(segment)
    }

    /// As [`Registration::has_bytes_in`].
    pub(super) fn has_bytes(&self, slot: &Slot) -> bool {
        match slot.receiving() {
            Ok(Some(mut receiving)) => {
                let slots::Receiving { segment, reader, .. } = &mut receiving;
                self.has_bytes_in(segment, reader)
            }
            _ => false,
        }
    }

    /// True if its ring has unread bytes to report, without a doorbell.
    pub(super) fn is_unannounced(&self) -> bool {
        if self.fd < 0 || self.events & READABLE == 0 || self.events & SPECIAL != 0 {
            return false;
        }
        // If another thread reads, that finds what there is.
        slots::slot(self.number).try_receiving().is_some_and(|mut receiving| {
            let slots::Receiving { segment, reader, .. } = &mut receiving;
            let is_told = self.events & EDGE != 0 && reader.tail(segment).load(Ordering::Acquire) == self.told;
            !is_told && self.has_bytes_in(segment, reader) && !reader.has_doorbells(segment)
        })
    }

    /// True if the kernel does not report its unread bytes, and another thread may wait for them.
    pub(super) fn is_left(&self) -> bool {
        let is_owed = || self.fd >= 0 && self.is_owed && data::is_readable(slots::slot(self.number));
        self.is_unannounced() || is_owed()
    }

    /// Events that are known without the kernel.
    pub(super) fn ready(&mut self) -> u32 {
        let slot = slots::slot(self.number);
        let is_exclusive = self.events & libc::EPOLLEXCLUSIVE as u32 != 0;
        if self.events & SPECIAL != 0 && !(is_exclusive && self.is_owed) || !slot.is_accelerated() {
            return 0;
        }
        // If another thread reads, that finds what there is.
        let Some(mut receiving) = slot.try_receiving() else { return 0 };
        let slots::Receiving { segment, reader, .. } = &mut receiving;
        let segment = &*segment;
        let is_edge = self.events & EDGE != 0;
        let mut readable = self.has_bytes_in(segment, reader);
        if is_exclusive {
            self.is_owed = readable && !is_edge;
            return if readable { READABLE & self.events } else { 0 };
        }
        if is_edge && readable {
            let tail = reader.tail(segment).load(Ordering::Acquire);
            readable = self.told != tail;
            // The bytes before those of the ring cause the first event, and may still be on their way.
            if readable && reader.ring_len(segment) == Ok(0) {
                readable = self.told != u64::MAX && Connection::new(self.descriptor()).poll() & READABLE != 0;
            }
            if readable {
                self.told = tail;
            }
        }
        // From another host, the end of the connection comes before it is said.
        let is_late = readable && segment.is_relayed();
        let is_shut = slot.shut.load(Ordering::Relaxed) != 0;
        let is_kernels =
            is_late || is_shut || self.events & PRIORITY != 0 || reader.is_ended(segment) || reader.has_run(segment);
        drop(receiving);
        if is_edge && !readable {
            return 0;
        }
        // While a level tells that something can be sent, that needs no look at the kernel: what the ring has no room for, TCP has.
        let mut events = if readable { READABLE } else { 0 };
        let has_no_room = self.is_muted;
        let may_have_blocked = !has_no_room && self.events & WRITABLE != 0 && data::may_have_blocked(slot);
        if !may_have_blocked && !has_no_room {
            events |= WRITABLE;
        }
        if is_kernels || may_have_blocked {
            let said = Connection::new(self.descriptor()).poll();
            let is_spurious = said & READABLE != 0 && !readable && wait::is_doorbell(self.number, self.descriptor());
            events |= if is_spurious { said & !READABLE } else { said };
            events &= if has_no_room { !WRITABLE } else { u32::MAX };
            if slot.error.load(Ordering::Relaxed) != 0 {
                events |= libc::EPOLLERR as u32;
            }
            if events & (READABLE | ENDS) == 0 && !readable {
                return 0;
            }
        }
        if is_edge && self.events & events & READABLE == 0 && events & ENDS == 0 {
            return 0;
        }
        events & (self.events | ALWAYS)
    }
}

/// Has whatever sleeps be woken by what comes next. False if something has come already.
pub(super) fn arm_connection(number: u32) -> bool {
    data::rearm(slots::slot(number), number)
}
