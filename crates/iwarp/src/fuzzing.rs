//! Entry points for the fuzz targets; not part of the interface.

use crate::IoVecs;
use crate::connection::{Connection, ConnectionConfig, SharedReceives};
use crate::crc::RunningCrc;
use crate::mpa::Agreement;
use crate::regions::RegionTable;
use std::sync::Arc;
use thruway_memory::Buffer;
use thruway_rdma_types::{Access, Owner};
use thruway_rdma_types::{Payload, QueuePairCaps, RecvRequest, RemoteAddr, SendFlags, SendOp, SendRequest, Sge};

/// Decodes a request or reply frame.
pub fn mpa_frame(data: &[u8]) {
    let Some((&which, rest)) = data.split_first() else { return };
    if let Ok(Some((frame, used))) = crate::mpa::Frame::decode(rest, which & 1 != 0) {
        assert!(used <= rest.len());
        let again = frame.encode();
        assert_eq!(crate::mpa::Frame::decode(&again, frame.reply), Ok(Some((frame, again.len()))));
    }
}

/// Feeds a connection in full operation with ULPDUs from the fuzzer, correctly framed so that
/// they get past the CRC, in pieces of sizes from the fuzzer, and checks that no byte lands
/// outside the region that is exposed.
pub fn receive(data: &[u8]) {
    let Some((&[flags, chunk, ..], mut rest)) = data.split_first_chunk::<4>() else { return };
    let mut ulpdus = Vec::new();
    while let Some((len, after)) = rest.split_first_chunk::<2>() {
        let len = usize::from(u16::from_le_bytes(*len) & 0x0fff).min(after.len());
        let (ulpdu, after) = after.split_at(len);
        rest = after;
        ulpdus.push(ulpdu.to_vec());
    }
    feed(flags, chunk, &ulpdus);
}

/// As [`receive`], with messages that are right but for what the fuzzer adds to a field here and there: queue, sequence and
/// offset as they are expected, keys and addresses that are good. Eight bytes each: kind, length (two), what is added to
/// sequence number, offset, address and key, and whether it is the last segment.
pub fn dialogue(data: &[u8]) {
    let Some((&[flags, chunk], rest)) = data.split_first_chunk::<2>() else { return };
    // Of each untagged queue, the sequence number of the next message and its offset so far.
    let mut next = [(1_u32, 0_u32); 4];
    let mut ulpdus = Vec::new();
    for step in rest.chunks_exact(8) {
        let &[kind, low, high, seq, offset, addr, key, last] = step else { unreachable!("chunks of eight") };
        let len = usize::from(u16::from_le_bytes([low, high])) % 4000;
        // Mostly nothing: a difference of 0 is what half of the values mean.
        let wrong = |by: u8| if by < 128 { 0 } else { u32::from(by - 127).wrapping_sub(64) };
        let stag = 0x101_u32.wrapping_add(wrong(key));
        let to = (u64::from(wrong(addr)) << 6) as i32 as u64;
        let opcode = kind % 16;
        let last = last % 4 != 0;
        let mut ulpdu = Vec::new();
        // Writes and read responses are tagged.
        if matches!(opcode, 0 | 2) {
            ulpdu.extend([0x81 | u8::from(last) << 6, 0x40 | opcode]);
            ulpdu.extend(stag.to_be_bytes());
            ulpdu.extend(to.to_be_bytes());
            ulpdu.resize(ulpdu.len() + len, 0x5a);
        } else {
            let queue = match opcode {
                1 | 10 => 1,
                7 => 2,
                11 => 3,
                _ => 0,
            };
            let (msn, mo) = next[queue];
            ulpdu.extend([0x01 | u8::from(last) << 6, 0x40 | opcode]);
            ulpdu.extend(stag.to_be_bytes());
            for field in [queue as u32, msn.wrapping_add(wrong(seq)), mo.wrapping_add(wrong(offset))] {
                ulpdu.extend(field.to_be_bytes());
            }
            match opcode {
                // A read: where to, how much, of what.
                1 => {
                    ulpdu.extend(stag.to_be_bytes());
                    ulpdu.extend(to.to_be_bytes());
                    ulpdu.extend((len as u32).to_be_bytes());
                    ulpdu.extend(0x101_u32.to_be_bytes());
                    ulpdu.extend(to.to_be_bytes());
                }
                _ => ulpdu.resize(ulpdu.len() + len, kind),
            }
            let grown = mo.wrapping_add((ulpdu.len() - 18) as u32);
            next[queue] = if last { (msn.wrapping_add(1), 0) } else { (msn, grown) };
        }
        ulpdus.push(ulpdu);
    }
    feed(flags, chunk, &ulpdus);
}

fn feed(flags: u8, chunk: u8, ulpdus: &[Vec<u8>]) {
    const LEN: usize = 8192;
    let crc = flags & 1 != 0;
    let agreement = Agreement {
        send_markers: false,
        receive_markers: flags & 2 != 0,
        crc,
        ird: 4,
        ord: 4,
        large_fpdu: true,
        extensions: flags & 4 != 0,
        rtr: None,
        revision: 2,
    };
    let table = Arc::new(RegionTable::deterministic());
    let buffer = Arc::new(Buffer::new(3 * LEN).expect("memory"));
    buffer.write(0, &[0xa5; 3 * LEN]);
    let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    // SAFETY: the middle third of the buffer, which is the owner.
    let region = unsafe {
        table.register(1, buffer.as_ptr().add(LEN), LEN, 0, all, Arc::clone(&buffer) as Owner).expect("a key")
    };
    let caps = QueuePairCaps { max_send_wr: 16, max_recv_wr: 16, max_sge: 4 };
    let sge = Sge { addr: 100, len: 3000, lkey: region.stag() };
    let receive = |wr_id| RecvRequest { wr_id, sges: std::slice::from_ref(&sge) };
    let shared = (flags & 16 != 0).then(|| {
        let shared = Arc::new(SharedReceives::new(1, 16, 4));
        (0..4).for_each(|wr_id| shared.post(&table, &receive(wr_id)).expect("room"));
        shared
    });
    let mut connection = Connection::new(ConnectionConfig {
        qp_num: 1,
        pd: 1,
        table,
        agreement,
        caps,
        initiator: flags & 8 != 0,
        shared: shared.clone(),
        max_ulpdu: 1442,
    });
    for wr_id in 0..4 {
        if shared.is_none() {
            let _ = connection.post_recv(&receive(wr_id));
        }
        let remote = RemoteAddr { addr: 0, rkey: 1 };
        let payload = Payload::Sges(&[sge]);
        let _ = connection.post_send(&SendRequest {
            wr_id,
            op: SendOp::Read { remote },
            payload,
            flags: SendFlags::SIGNALED,
        });
    }
    transmit(&mut connection);
    let mut wire = Vec::new();
    for ulpdu in ulpdus {
        let start = wire.len();
        wire.extend_from_slice(&(ulpdu.len() as u16).to_be_bytes());
        wire.extend_from_slice(ulpdu);
        wire.resize(wire.len().next_multiple_of(4), 0);
        let mut sum = RunningCrc::new(crc);
        sum.update(&wire[start..]);
        wire.extend_from_slice(&sum.take());
    }
    let mut left = wire.as_slice();
    while !left.is_empty() && connection.failure.is_none() {
        let mut iov = IoVecs::default();
        if !connection.rx_iovecs(&mut iov) {
            break;
        }
        let mut given = 0;
        for v in iov.iter() {
            let n = v.iov_len.min(left.len()).min((usize::from(chunk) + 1) * 7 - given);
            // SAFETY: the connection vouches for its iovecs.
            unsafe { std::ptr::copy_nonoverlapping(left.as_ptr(), v.iov_base.cast(), n) };
            left = &left[n..];
            given += n;
            if n < v.iov_len {
                break;
            }
        }
        connection.rx_received(given);
        transmit(&mut connection);
        connection.completions.clear();
    }
    let mut bytes = vec![0; 3 * LEN];
    buffer.read(0, &mut bytes);
    assert!(bytes[..LEN].iter().chain(&bytes[2 * LEN..]).all(|b| *b == 0xa5), "outside the region");
}

fn transmit(connection: &mut Connection) {
    let mut iov = IoVecs::default();
    for _ in 0..64 {
        if !connection.tx_fill() {
            return;
        }
        connection.tx_iovecs(&mut iov);
        let n = iov.iter().map(|v| v.iov_len).sum();
        connection.tx_advance(n);
    }
}

#[cfg(test)]
#[path = "../../../fuzz/seeds.rs"]
mod seeds;

#[cfg(test)]
mod tests {
    use super::seeds::check;
    use super::*;

    /// What the fuzzer begins with (`fuzz/seeds`): each gets somewhere, and is what is there.
    #[test]
    fn the_fuzzers_seeds_are_there() {
        use crate::mpa::{Preferences, accept, request};
        let prefs = Preferences::default();
        let asked = request(&prefs, b"private");
        let frames = [asked.encode(), accept(&prefs, &asked, b"").0.encode()];
        let step = |kind: u8, len: u16| [&[kind][..], &len.to_le_bytes(), &[0, 0, 0, 0, 1]].concat();
        // A write and a send; a send in two segments; a read; an atomic; an immediate.
        let half = [&step(3, 1000)[..7], &[0]].concat();
        let dialogues = [
            [step(0, 3000), step(3, 20)].concat(),
            [half, step(3, 1000)].concat(),
            step(1, 4000),
            step(10, 52),
            [step(0, 8), step(8, 8)].concat(),
        ];
        let dialogues = dialogues.map(|steps| [&[0x05, 0x30][..], &steps].concat());
        for (index, frame) in frames.iter().enumerate() {
            let seed = [&[index as u8][..], frame].concat();
            mpa_frame(&seed);
            check("mpa_frame", index, &seed);
        }
        for (index, seed) in dialogues.iter().enumerate() {
            dialogue(seed);
            check("iwarp_dialogue", index, seed);
        }
    }
}
