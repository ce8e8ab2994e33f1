//! Target ports as initiators see them (SPC-4 5.8, 6.27 and 7.8).
//!
//! A target has one port, however many portals lead to it (RFC 7143 section 4.4: they are one portal group), and the port is
//! always in the best of states. So it is said by the implicit kind of asymmetric access: initiators that go by it, and
//! multipath software that asks before it fails over, find an answer instead of a guess.

use super::{Outcome, Sense, be32};

/// The port's number, and its group's.
pub(super) const PORT: [u8; 2] = [0, 1];
/// INQUIRY: implicit asymmetric access (TPGS).
pub(super) const TPGS: u8 = 0x10;

/// REPORT TARGET PORT GROUPS.
pub(super) fn groups(cdb: &[u8; 16]) -> Outcome {
    // Active and optimized, the only state it can be in; its number; no reason, since it never changes; one port.
    let group = [0x00, 0x01, PORT[0], PORT[1], 0, 0, 0, 1, 0, 0, PORT[0], PORT[1]];
    let data = match cdb[1] >> 5 {
        0 => [&(group.len() as u32).to_be_bytes()[..], &group].concat(),
        // With the time that a transition may take: there is none.
        1 => [&(group.len() as u32 + 4).to_be_bytes()[..], &[0x10, 0, 0, 0], &group].concat(),
        _ => return Sense::invalid_field(1).into(),
    };
    Outcome::data(data, be32(cdb, 6) as usize)
}

/// The SCSI Ports page (88h): each port's number and no transport's name, of which iSCSI has one for each session.
pub(super) fn page() -> Vec<u8> {
    vec![0, 0, PORT[0], PORT[1], 0, 0, 0, 0, 0, 0, 0, 0]
}

/// REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS.
pub(super) fn task_management(cdb: &[u8; 16]) -> Outcome {
    // ABORT TASK, ABORT TASK SET, CLEAR TASK SET, LOGICAL UNIT RESET.
    let mut data = vec![0xd8, 0, 0, 0];
    if cdb[2] & 0x80 != 0 {
        // The extended form, whose timeouts say nothing.
        data[3] = 0x0c;
        data.resize(16, 0);
    }
    Outcome::data(data, be32(cdb, 6) as usize)
}
