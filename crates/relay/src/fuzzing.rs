//! For fuzz targets: what another relay says.

use crate::link::{Message, split};
use thruway_sockets::{Inlet, Outlet, RING_MIN, Segment};

/// A bundle of messages to a connection that is being carried.
pub fn messages(data: &[u8]) {
    let (Ok((here, _)), Ok((there, _))) = (Segment::create(RING_MIN), Segment::create(RING_MIN)) else { return };
    let (mut outlet, mut inlet) = (Outlet::default(), Inlet::default());
    let mut rest = data;
    while let Ok((message, more)) = split(rest) {
        rest = more;
        let heard = match Message::decode(message) {
            Ok(Message::Update { update, bytes, .. }) => inlet.apply(&here, &update, bytes),
            Ok(Message::Feedback { feedback, .. }) => outlet.receive(&there, &feedback),
            _ => Ok(()),
        };
        inlet.wake(&here, || true);
        outlet.serve(&there, || true);
        let mut out = Vec::new();
        if heard.is_err() || outlet.take(&there, 1 << 16, &mut out).is_err() || inlet.feedback(&here, true).is_err() {
            break;
        }
    }
    let _ = crate::meet::invitation(data);
    // SAFETY: they were the only values.
    unsafe { (here.unmap(), there.unmap()) };
}

#[cfg(test)]
#[path = "../../../fuzz/seeds.rs"]
mod seeds;

#[cfg(test)]
mod tests {
    use super::*;
    use thruway_sockets::{Feedback, Update};

    #[test]
    fn seeds() {
        let update =
            Update { tail: 3, end: 0, run: None, closed: None, ended: false, for_good: false, call: false, ringing: 0 };
        let talks = [
            // Bytes by the ring, a doorbell, then by TCP, then the end.
            vec![
                Message::Update { id: 1, update, bytes: b"abc" },
                Message::Update { id: 1, update: Update { tail: 5, ringing: 1, ..update }, bytes: b"de" },
                Message::Update {
                    id: 1,
                    update: Update { tail: 5, run: Some((5, 1)), ringing: 1, ..update },
                    bytes: b"",
                },
                Message::Update {
                    id: 1,
                    update: Update { tail: 5, end: 9, ended: true, ringing: 1, ..update },
                    bytes: b"",
                },
                Message::Finish { id: 1 },
            ],
            vec![
                Message::Feedback { id: 1, feedback: Feedback { head: 0, is_armed: true, ..Feedback::default() } },
                Message::Feedback { id: 1, feedback: Feedback { head: 9, ..Feedback::default() } },
                Message::Abort { id: 1 },
            ],
            vec![
                Message::Find { id: 1, ring: 4096, addresses: [4; 40] },
                Message::Found { id: 2, own: 3, ring: 1 << 22 },
                Message::Ping,
            ],
        ];
        for (number, talk) in talks.iter().enumerate() {
            let seed: Vec<u8> = talk
                .iter()
                .flat_map(|message| {
                    let mut bytes = Vec::new();
                    message.encode(&mut bytes);
                    [&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat()
                })
                .collect();
            messages(&seed);
            super::seeds::check("relay_messages", number, &seed);
        }
    }
}
