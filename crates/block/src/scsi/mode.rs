//! MODE SENSE and MODE SELECT (SPC-4 6.11 and 7.5, SBC-3 6.5).

use super::unit::Attention;
use super::{Nexus, Outcome, Sense, Unit, be16};

/// SWP, in byte 4 of the control page.
const SWP: u8 = 0x08;

fn caching(changeable: bool) -> Vec<u8> {
    let mut page = vec![0; 20];
    (page[0], page[1]) = (0x08, 18);
    if !changeable {
        page[2] = 0x04; // WCE: a flush makes it durable
    }
    page
}

fn control(unit: &Unit, changeable: bool) -> Vec<u8> {
    let mut page = vec![0; 12];
    (page[0], page[1]) = (0x0a, 10);
    if changeable {
        page[4] = SWP;
    } else {
        page[2] = 0x02; // fixed sense, tasks of all initiators in one set
        page[3] = 0x10; // reordering allowed
        page[4] = if unit.with_state(|state| state.swp) { SWP } else { 0 };
        (page[8], page[9]) = (0xff, 0xff); // busy for as long as it takes
    }
    page
}

/// Error recovery, disconnection and informational exceptions: as they are by default.
fn plain(code: u8, len: u8) -> Vec<u8> {
    let mut page = vec![0; len as usize + 2];
    (page[0], page[1]) = (code, len);
    page
}

fn pages(unit: &Unit, code: u8, changeable: bool) -> Option<Vec<u8>> {
    let page = |code| match code {
        0x01 => Some(plain(0x01, 10)),
        0x02 => Some(plain(0x02, 14)),
        0x08 => Some(caching(changeable)),
        0x0a => Some(control(unit, changeable)),
        0x1c => Some(plain(0x1c, 10)),
        _ => None,
    };
    if code == 0x3f {
        return Some([0x01, 0x02, 0x08, 0x0a, 0x1c].into_iter().filter_map(page).flatten().collect());
    }
    page(code)
}

pub(super) fn sense(unit: &Unit, cdb: &[u8; 16]) -> Outcome {
    let ten = cdb[0] == 0x5a;
    let (no_descriptor, control, code, subpage) = (cdb[1] & 8 != 0, cdb[2] >> 6, cdb[2] & 0x3f, cdb[3]);
    if subpage != 0 && subpage != 0xff {
        return Sense::invalid_field(3).into();
    }
    if control == 3 {
        return Sense::NO_SAVING.into();
    }
    let Some(pages) = pages(unit, code, control == 1) else { return Sense::invalid_field(2).into() };
    let mut descriptor = Vec::new();
    if !no_descriptor {
        let blocks = unit.blocks().min(u32::MAX.into()) as u32;
        descriptor.extend_from_slice(&blocks.to_be_bytes());
        descriptor.extend_from_slice(&unit.block_len.to_be_bytes());
    }
    // DPOFUA, and whether the medium is protected.
    let device = 0x10 | if unit.read_only() { 0x80 } else { 0 };
    let rest = descriptor.len() + pages.len();
    let mut data = if ten {
        let len = (rest + 6) as u16;
        vec![(len >> 8) as u8, len as u8, 0, device, 0, 0, 0, descriptor.len() as u8]
    } else {
        vec![(rest + 3) as u8, 0, device, descriptor.len() as u8]
    };
    data.extend(descriptor);
    data.extend(pages);
    Outcome::data(data, if ten { be16(cdb, 7).into() } else { cdb[4].into() })
}

/// Bytes of the parameter list of MODE SELECT.
pub(super) fn list_len(cdb: &[u8; 16]) -> usize {
    if cdb[0] == 0x55 { be16(cdb, 7).into() } else { cdb[4].into() }
}

pub(super) fn select(unit: &Unit, nexus: &Nexus, cdb: &[u8; 16], list: &[u8]) -> Outcome {
    if cdb[1] & 0x01 != 0 {
        return Sense::invalid_field(1).into(); // SP: nothing is saved
    }
    if list.is_empty() {
        return Outcome::good();
    }
    let header = if cdb[0] == 0x55 { 8 } else { 4 };
    if list.len() < header {
        return Sense::PARAMETER_LENGTH.into();
    }
    let descriptors = if header == 8 { be16(list, 6).into() } else { usize::from(list[3]) };
    let Some(mut rest) = list.get(header + descriptors..) else { return Sense::PARAMETER_LENGTH.into() };
    let mut swp = None;
    while !rest.is_empty() {
        if rest.len() < 2 || rest.len() < rest[1] as usize + 2 {
            return Sense::PARAMETER_LENGTH.into();
        }
        let (page, later) = rest.split_at(rest[1] as usize + 2);
        rest = later;
        let code = page[0] & 0x3f;
        let (Some(now), Some(mask)) = (pages(unit, code, false), pages(unit, code, true)) else {
            return Sense::invalid_parameter(0).into();
        };
        if code == 0x3f || now.len() != page.len() {
            return Sense::invalid_parameter(1).into();
        }
        // What cannot be changed must be as it is.
        if (2..page.len()).any(|i| (page[i] ^ now[i]) & !mask[i] != 0) {
            return Sense::invalid_parameter(2).into();
        }
        if code == 0x0a {
            swp = Some(page[4] & SWP != 0);
        }
    }
    if let Some(swp) = swp {
        unit.with_state(|state| {
            if state.swp != swp {
                state.swp = swp;
                state.tell_others(nexus.id, Attention::ModeChanged);
            }
        });
    }
    Outcome::good()
}
