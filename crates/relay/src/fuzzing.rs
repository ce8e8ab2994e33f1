//! For fuzz targets: what another relay says.

use crate::link::Message;
use thruway_sockets::{Inlet, Outlet, RING_MIN, Segment};

/// Messages, each behind its length of two bytes, to a connection that is being carried.
pub fn messages(data: &[u8]) {
    let (Ok((here, _)), Ok((there, _))) = (Segment::create(RING_MIN), Segment::create(RING_MIN)) else { return };
    let (mut outlet, mut inlet) = (Outlet::default(), Inlet::default());
    let mut rest = data;
    while let Some((len, more)) = rest.split_first_chunk::<2>() {
        let len = usize::from(u16::from_le_bytes(*len)).min(more.len());
        let (message, more) = more.split_at(len);
        rest = more;
        let heard = match Message::decode(message) {
            Ok(Message::Update { update, bytes, .. }) => inlet.apply(&here, &update, bytes),
            Ok(Message::Feedback { feedback, .. }) => outlet.receive(&there, &feedback),
            _ => Ok(()),
        };
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
