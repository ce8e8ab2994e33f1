//! INQUIRY and vital product data (SPC-4 6.6 and 7.8, SBC-3 6.6).

use super::{Outcome, Sense, Unit, be16, ports};

/// Blocks of one COMPARE AND WRITE.
pub(super) const COMPARE_MAX: u8 = 255;
/// Blocks of one UNMAP.
pub(super) const UNMAP_MAX: u32 = 1 << 20;
/// Ranges of one UNMAP.
pub(super) const UNMAP_RANGES_MAX: u32 = 256;
/// Blocks of one WRITE SAME: few enough to be written, if they have to be, in an initiator's time limit.
pub(super) const WRITE_SAME_MAX: u64 = 1 << 16;
/// Bytes moved by one command.
pub(super) const TRANSFER_MAX: u64 = 32 << 20;

pub(super) fn inquiry(unit: &Unit, cdb: &[u8; 16]) -> Outcome {
    let allocated = be16(cdb, 3).into();
    if cdb[1] & 1 == 0 {
        if cdb[2] != 0 {
            return Sense::invalid_field(2).into();
        }
        return Outcome::data(standard(&unit.export.name), allocated);
    }
    let page = match cdb[2] {
        0x00 => vec![0x00, 0x80, 0x83, 0x86, 0x88, 0xb0, 0xb1, 0xb2],
        0x80 => serial(unit).into_bytes(),
        0x83 => identification(unit),
        0x86 => extended(),
        0x88 => ports::page(),
        0xb0 => block_limits(unit),
        0xb1 => characteristics(),
        0xb2 => provisioning(unit),
        _ => return Sense::invalid_field(2).into(),
    };
    let mut data = vec![0, cdb[2]];
    data.extend_from_slice(&(page.len() as u16).to_be_bytes());
    data.extend(page);
    Outcome::data(data, allocated)
}

/// The standard data of a LUN that is not there.
pub fn absent(cdb: &[u8; 16]) -> Outcome {
    let mut data = standard("");
    data[0] = 0x7f;
    Outcome::data(data, be16(cdb, 3).into())
}

fn standard(name: &str) -> Vec<u8> {
    let mut data = vec![0; 96];
    data[2] = 6; // SPC-4
    data[3] = 0x12; // HISUP, response data format 2
    data[4] = 91;
    data[5] = ports::TPGS;
    data[7] = 0x02; // CMDQUE
    data[8..16].copy_from_slice(b"THRUWAY ");
    data[16..32].copy_from_slice(&padded::<16>(name));
    data[32..36].copy_from_slice(b"0001");
    // SAM-5, iSCSI, SPC-4, SBC-3
    for (i, version) in [0x00a0u16, 0x0960, 0x0460, 0x04c0].into_iter().enumerate() {
        data[58 + 2 * i..60 + 2 * i].copy_from_slice(&version.to_be_bytes());
    }
    data
}

fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut out = [b' '; N];
    let printable = text.bytes().map(|b| if (0x20..0x7f).contains(&b) { b } else { b'_' });
    for (place, byte) in out.iter_mut().zip(printable) {
        *place = byte;
    }
    out
}

fn serial(unit: &Unit) -> String {
    data_encoding::HEXLOWER.encode(&unit.export.identity)
}

fn identification(unit: &Unit) -> Vec<u8> {
    let mut page = Vec::new();
    // NAA, locally assigned: associated with the logical unit.
    page.extend_from_slice(&[0x01, 0x03, 0, 8]);
    let id = &unit.export.identity;
    let number = u64::from_be_bytes(id[..8].try_into().expect("8 of 16"))
        ^ u64::from_be_bytes(id[8..].try_into().expect("8 of 16"));
    page.extend_from_slice(&(number >> 4 | 3 << 60).to_be_bytes());
    // UUID (SPC-5).
    page.extend_from_slice(&[0x01, 0x0a, 0, 18, 0x10, 0]);
    page.extend_from_slice(id);
    // T10 vendor identification.
    let text = format!("THRUWAY {}", serial(unit));
    page.extend_from_slice(&[0x02, 0x01, 0, text.len() as u8]);
    page.extend_from_slice(text.as_bytes());
    // Relative target port, and its group.
    for designator in [0x94, 0x95] {
        page.extend_from_slice(&[0x51, designator, 0, 4, 0, 0]);
        page.extend_from_slice(&ports::PORT);
    }
    page
}

/// Extended INQUIRY data.
fn extended() -> Vec<u8> {
    let mut page = vec![0; 60];
    page[1] = 0x01; // SIMPSUP
    page[2] = 0x01; // V_SUP: a flush is worth asking for
    page[3] = 0x01; // LUICLR: attentions are each initiator's own
    page
}

fn block_limits(unit: &Unit) -> Vec<u8> {
    let mut page = vec![0; 60];
    let geometry = unit.export.geometry();
    let block = u64::from(unit.block_len);
    page[0] = 0; // WSNZ
    page[1] = COMPARE_MAX;
    let preferred = u64::from(geometry.preferred.max(unit.block_len));
    page[2..4].copy_from_slice(&((preferred / block) as u16).to_be_bytes());
    page[4..8].copy_from_slice(&((TRANSFER_MAX / block) as u32).to_be_bytes());
    page[8..12].copy_from_slice(&((u64::from(unit.export.chunk) * 4 / block) as u32).to_be_bytes());
    if geometry.discard {
        page[16..20].copy_from_slice(&UNMAP_MAX.to_be_bytes());
        page[20..24].copy_from_slice(&UNMAP_RANGES_MAX.to_be_bytes());
        page[24..28].copy_from_slice(&((preferred / block) as u32).to_be_bytes());
        page[28] = 0x80; // UGAVALID, aligned at 0
    }
    page[32..40].copy_from_slice(&WRITE_SAME_MAX.to_be_bytes());
    page
}

fn characteristics() -> Vec<u8> {
    let mut page = vec![0; 60];
    page[1] = 1; // not rotating
    page
}

fn provisioning(unit: &Unit) -> Vec<u8> {
    let geometry = unit.export.geometry();
    match (geometry.discard, geometry.discard_zeroes) {
        // LBPU, LBPWS, LBPWS10, LBPRZ; thin provisioned.
        (true, true) => vec![0, 0xe4, 2, 0],
        // LBPU only: what is unmapped may read as anything.
        (true, false) => vec![0, 0x80, 2, 0],
        (false, _) => vec![0, 0, 0, 0],
    }
}
