//! MPA connection set-up (RFC 5044 §7, RFC 6581): the request and reply frames and the rules by
//! which two ends agree on markers, CRC, read resources and who may speak first.
//!
//! Pure: bytes in, decisions out. The driver moves the bytes.

use crate::terminate::{Mpa, TerminateCode};

const REQUEST_KEY: &[u8; 16] = b"MPA ID Req Frame";
const REPLY_KEY: &[u8; 16] = b"MPA ID Rep Frame";
/// Bytes of a frame before its private data.
pub const FRAME_HEADER_LEN: usize = 20;
/// Private data limit of RFC 5044 §7.1.1, the four RFC 6581 bytes included.
pub const MAX_PRIVATE_DATA: usize = 512;
/// Bytes RFC 6581 takes from the front of the private data.
const ENHANCED_LEN: usize = 4;

const FLAG_MARKERS: u8 = 0x80;
const FLAG_CRC: u8 = 0x40;
const FLAG_REJECT: u8 = 0x20;
const FLAG_ENHANCED: u8 = 0x10;
/// Reserved bit by which Linux siw says "I take FPDUs larger than a segment"; used likewise here.
const FLAG_LARGE_FPDU: u8 = 0x08;
/// Reserved bits by which Thruway says "I speak RFC 7306": one in a request, the other in a reply,
/// because responders that do not know them send back what they were sent (Linux siw does).
const FLAG_EXTENSIONS_REQUEST: u8 = 0x04;
const FLAG_EXTENSIONS_REPLY: u8 = 0x02;

const IRD_PEER_TO_PEER: u16 = 0x8000;
const IRD_RTR_SEND: u16 = 0x4000;
const ORD_RTR_WRITE: u16 = 0x8000;
const ORD_RTR_READ: u16 = 0x4000;
const DEPTH_MASK: u16 = 0x3fff;

/// The zero-length message by which an initiator tells a responder that it may send
/// (RFC 6581 §9.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadyToReceive {
    /// Zero-length Send. Consumes no receive buffer when used as the ready indication.
    Send,
    /// Zero-length RDMA Write.
    Write,
    /// Zero-length RDMA Read.
    Read,
}

/// RFC 6581 additions to a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Enhanced {
    /// Inbound reads this end can hold, at most 16383.
    pub ird: u16,
    /// Outbound reads this end wants to have outstanding, at most 16383.
    pub ord: u16,
    /// Peer-to-peer model: either end may send first, after a ready-to-receive message.
    pub peer_to_peer: bool,
    /// Ready-to-receive options offered (request) or chosen (reply).
    pub rtr_send: bool,
    /// See `rtr_send`.
    pub rtr_write: bool,
    /// See `rtr_send`.
    pub rtr_read: bool,
}

/// A request or a reply frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Reply rather than request.
    pub reply: bool,
    /// The sender wants markers in what it receives.
    pub markers: bool,
    /// The sender wants CRCs.
    pub crc: bool,
    /// Connection refused (replies only).
    pub reject: bool,
    /// The sender takes FPDUs of up to 65535 bytes of ULPDU whatever the segment size.
    pub large_fpdu: bool,
    /// The sender speaks RFC 7306.
    pub extensions: bool,
    /// 1 or 2.
    pub revision: u8,
    /// Present in revision 2 frames that set the S bit.
    pub enhanced: Option<Enhanced>,
    /// The consumer's private data.
    pub private_data: Vec<u8>,
}

fn extensions_flag(reply: bool) -> u8 {
    if reply { FLAG_EXTENSIONS_REPLY } else { FLAG_EXTENSIONS_REQUEST }
}

impl Frame {
    /// The frame's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let pd_len = self.private_data.len() + if self.enhanced.is_some() { ENHANCED_LEN } else { 0 };
        debug_assert!(pd_len <= MAX_PRIVATE_DATA);
        let mut out = Vec::with_capacity(FRAME_HEADER_LEN + pd_len);
        out.extend_from_slice(if self.reply { REPLY_KEY } else { REQUEST_KEY });
        let mut flags = 0;
        for (set, bit) in [
            (self.markers, FLAG_MARKERS),
            (self.crc, FLAG_CRC),
            (self.reject, FLAG_REJECT),
            (self.enhanced.is_some(), FLAG_ENHANCED),
            (self.large_fpdu, FLAG_LARGE_FPDU),
            (self.extensions, extensions_flag(self.reply)),
        ] {
            if set {
                flags |= bit;
            }
        }
        out.push(flags);
        out.push(self.revision);
        out.extend_from_slice(&(pd_len as u16).to_be_bytes());
        if let Some(e) = &self.enhanced {
            let mut ird = e.ird & DEPTH_MASK;
            let mut ord = e.ord & DEPTH_MASK;
            if e.peer_to_peer {
                ird |= IRD_PEER_TO_PEER;
            }
            if e.rtr_send {
                ird |= IRD_RTR_SEND;
            }
            if e.rtr_write {
                ord |= ORD_RTR_WRITE;
            }
            if e.rtr_read {
                ord |= ORD_RTR_READ;
            }
            out.extend_from_slice(&ird.to_be_bytes());
            out.extend_from_slice(&ord.to_be_bytes());
        }
        out.extend_from_slice(&self.private_data);
        out
    }

    /// Decodes a frame from the front of `bytes`: `Ok(None)` while bytes are missing, the frame
    /// and its length when it is whole.
    ///
    /// # Errors
    /// [`Mpa::InvalidFrame`] as soon as the bytes cannot begin a valid frame.
    pub fn decode(bytes: &[u8], reply: bool) -> Result<Option<(Frame, usize)>, TerminateCode> {
        let key = if reply { REPLY_KEY } else { REQUEST_KEY };
        let seen = bytes.len().min(key.len());
        if bytes[..seen] != key[..seen] {
            return Err(Mpa::InvalidFrame.into());
        }
        if bytes.len() < FRAME_HEADER_LEN {
            return Ok(None);
        }
        let flags = bytes[16];
        let revision = bytes[17];
        let pd_len = usize::from(u16::from_be_bytes([bytes[18], bytes[19]]));
        if !(1..=2).contains(&revision) || pd_len > MAX_PRIVATE_DATA {
            return Err(Mpa::InvalidFrame.into());
        }
        if !reply && flags & FLAG_REJECT != 0 {
            return Err(Mpa::InvalidFrame.into());
        }
        let has_enhanced = revision == 2 && flags & FLAG_ENHANCED != 0;
        if has_enhanced && pd_len < ENHANCED_LEN {
            return Err(Mpa::InvalidFrame.into());
        }
        let len = FRAME_HEADER_LEN + pd_len;
        if bytes.len() < len {
            return Ok(None);
        }
        let mut private_data = &bytes[FRAME_HEADER_LEN..len];
        let enhanced = has_enhanced.then(|| {
            let ird = u16::from_be_bytes([private_data[0], private_data[1]]);
            let ord = u16::from_be_bytes([private_data[2], private_data[3]]);
            private_data = &private_data[ENHANCED_LEN..];
            Enhanced {
                ird: ird & DEPTH_MASK,
                ord: ord & DEPTH_MASK,
                peer_to_peer: ird & IRD_PEER_TO_PEER != 0,
                rtr_send: ird & IRD_RTR_SEND != 0,
                rtr_write: ord & ORD_RTR_WRITE != 0,
                rtr_read: ord & ORD_RTR_READ != 0,
            }
        });
        Ok(Some((
            Frame {
                reply,
                markers: flags & FLAG_MARKERS != 0,
                crc: flags & FLAG_CRC != 0,
                reject: flags & FLAG_REJECT != 0,
                large_fpdu: flags & FLAG_LARGE_FPDU != 0,
                extensions: flags & extensions_flag(reply) != 0,
                revision,
                enhanced,
                private_data: private_data.to_vec(),
            },
            len,
        )))
    }
}

/// What one end would like; the reply settles it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preferences {
    /// Ask for markers in what this end receives.
    pub markers: bool,
    /// Ask for CRCs (in force in both directions if either end asks; RFC 5044 §7.1).
    pub crc: bool,
    /// Highest MPA revision to speak: 1 or 2.
    pub revision: u8,
    /// Inbound read resources.
    pub ird: u16,
    /// Outbound reads wanted.
    pub ord: u16,
    /// Ask for the peer-to-peer model (revision 2 only).
    pub peer_to_peer: bool,
    /// Ready-to-receive message to offer first.
    pub rtr: ReadyToReceive,
    /// Tell the peer that large FPDUs and RFC 7306 are understood, in reserved flag bits.
    pub announce: bool,
}

impl Default for Preferences {
    fn default() -> Preferences {
        Preferences {
            markers: false,
            crc: true,
            revision: 2,
            ird: 32,
            ord: 32,
            peer_to_peer: true,
            rtr: ReadyToReceive::Write,
            announce: true,
        }
    }
}

/// What both ends agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreement {
    /// This end inserts markers.
    pub send_markers: bool,
    /// This end expects markers.
    pub receive_markers: bool,
    /// CRCs are generated and checked. Otherwise the field is zero and ignored.
    pub crc: bool,
    /// Inbound reads this end must hold.
    pub ird: u16,
    /// Outbound reads this end may have outstanding.
    pub ord: u16,
    /// The peer takes FPDUs larger than a segment.
    pub large_fpdu: bool,
    /// The peer speaks RFC 7306.
    pub extensions: bool,
    /// Initiator: send this first. Responder: hold back until the peer's first FPDU, which is
    /// this message if `Some` and any message if `None`.
    pub rtr: Option<ReadyToReceive>,
    /// Revision spoken.
    pub revision: u8,
}

/// The initiator's request.
pub fn request(prefs: &Preferences, private_data: &[u8]) -> Frame {
    Frame {
        reply: false,
        markers: prefs.markers,
        crc: prefs.crc,
        reject: false,
        large_fpdu: prefs.announce,
        extensions: prefs.announce,
        revision: prefs.revision,
        enhanced: (prefs.revision >= 2).then_some(Enhanced {
            ird: prefs.ird,
            ord: prefs.ord,
            peer_to_peer: prefs.peer_to_peer,
            rtr_send: prefs.peer_to_peer,
            rtr_write: prefs.peer_to_peer,
            rtr_read: prefs.peer_to_peer && prefs.ord > 0,
        }),
        private_data: private_data.to_vec(),
    }
}

/// The responder's reply to `request` and what it makes binding.
pub fn accept(prefs: &Preferences, request: &Frame, private_data: &[u8]) -> (Frame, Agreement) {
    let revision = request.revision.min(prefs.revision);
    let mut rtr = None;
    // Without the peer's figures (revision 1) each end keeps its own; consumers agree by other means.
    let (mut ird, mut ord) = (prefs.ird, prefs.ord);
    let enhanced = (revision >= 2).then_some(request.enhanced).flatten().map(|asked| {
        ird = prefs.ird.min(asked.ord.max(1));
        ord = prefs.ord.min(asked.ird);
        if asked.peer_to_peer {
            let offers = [
                (asked.rtr_write, ReadyToReceive::Write),
                (asked.rtr_send, ReadyToReceive::Send),
                (asked.rtr_read, ReadyToReceive::Read),
            ];
            let preferred = offers.iter().find(|(on, kind)| *on && *kind == prefs.rtr);
            rtr = preferred.or(offers.iter().find(|(on, _)| *on)).map(|(_, kind)| *kind);
        }
        Enhanced {
            ird,
            ord,
            peer_to_peer: asked.peer_to_peer,
            rtr_send: rtr == Some(ReadyToReceive::Send),
            rtr_write: rtr == Some(ReadyToReceive::Write),
            rtr_read: rtr == Some(ReadyToReceive::Read),
        }
    });
    let reply = Frame {
        reply: true,
        markers: prefs.markers,
        crc: prefs.crc || request.crc,
        reject: false,
        large_fpdu: prefs.announce && request.large_fpdu,
        extensions: prefs.announce && request.extensions,
        revision,
        enhanced,
        private_data: private_data.to_vec(),
    };
    let agreement = Agreement {
        send_markers: request.markers,
        receive_markers: prefs.markers,
        crc: reply.crc,
        ird,
        ord,
        large_fpdu: reply.large_fpdu,
        extensions: reply.extensions,
        rtr,
        revision,
    };
    (reply, agreement)
}

/// The responder's refusal.
pub fn reject(request: &Frame, private_data: &[u8]) -> Frame {
    Frame {
        reply: true,
        markers: false,
        crc: request.crc,
        reject: true,
        large_fpdu: false,
        extensions: false,
        revision: request.revision,
        enhanced: request.enhanced,
        private_data: private_data.to_vec(),
    }
}

/// What the initiator makes of the responder's (accepting) reply.
///
/// # Errors
/// [`Mpa::InvalidFrame`] if the reply switches off a CRC that was asked for or speaks a newer
/// revision than the request; [`Mpa::InsufficientIrd`] if the responder wants more reads
/// outstanding than this end can hold; [`Mpa::NoMatchingRtr`] if it picked none of the offered
/// ready-to-receive messages.
pub fn conclude(prefs: &Preferences, reply: &Frame) -> Result<Agreement, TerminateCode> {
    if reply.revision > prefs.revision || (prefs.crc && !reply.crc) {
        return Err(Mpa::InvalidFrame.into());
    }
    let (mut ird, mut ord, mut rtr) = (prefs.ird, prefs.ord, None);
    if let Some(e) = &reply.enhanced {
        if e.ord > prefs.ird && e.ord != DEPTH_MASK {
            return Err(Mpa::InsufficientIrd.into());
        }
        ord = prefs.ord.min(e.ird);
        ird = prefs.ird;
        if prefs.peer_to_peer && e.peer_to_peer {
            let chosen = [
                (e.rtr_write, ReadyToReceive::Write),
                (e.rtr_send, ReadyToReceive::Send),
                (e.rtr_read, ReadyToReceive::Read),
            ];
            let found = chosen.iter().find(|(on, _)| *on).map(|(_, kind)| *kind);
            rtr = Some(found.ok_or(TerminateCode::from(Mpa::NoMatchingRtr))?);
        }
    }
    Ok(Agreement {
        send_markers: reply.markers,
        receive_markers: prefs.markers,
        crc: reply.crc,
        ird,
        ord,
        large_fpdu: prefs.announce && reply.large_fpdu,
        extensions: prefs.announce && reply.extensions,
        rtr,
        revision: reply.revision,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_prefs() -> impl Strategy<Value = Preferences> {
        (any::<bool>(), any::<bool>(), 1u8..3, 1u16..100, 1u16..100, any::<bool>(), 0usize..3, any::<bool>()).prop_map(
            |(markers, crc, revision, ird, ord, peer_to_peer, rtr, announce)| Preferences {
                markers,
                crc,
                revision,
                ird,
                ord,
                peer_to_peer,
                rtr: [ReadyToReceive::Send, ReadyToReceive::Write, ReadyToReceive::Read][rtr],
                announce,
            },
        )
    }

    proptest! {
        #[test]
        fn both_ends_reach_the_same_agreement(a in any_prefs(), b in any_prefs(), pd in prop::collection::vec(any::<u8>(), 0..400)) {
            let sent = request(&a, &pd).encode();
            let (seen, n) = Frame::decode(&sent, false).unwrap().unwrap();
            prop_assert_eq!(n, sent.len());
            prop_assert_eq!(&seen.private_data, &pd);
            let (reply, theirs) = accept(&b, &seen, b"ok");
            let (reply, _) = Frame::decode(&reply.encode(), true).unwrap().unwrap();
            let ours = conclude(&a, &reply).unwrap();
            prop_assert_eq!(ours.crc, theirs.crc);
            prop_assert_eq!(ours.crc, a.crc || b.crc);
            prop_assert_eq!(ours.send_markers, theirs.receive_markers);
            prop_assert_eq!(ours.receive_markers, theirs.send_markers);
            prop_assert_eq!(ours.rtr, theirs.rtr);
            prop_assert_eq!(ours.large_fpdu, theirs.large_fpdu);
            prop_assert_eq!(ours.extensions, a.announce && b.announce);
            prop_assert_eq!(ours.extensions, theirs.extensions);
            if ours.revision == 2 {
                prop_assert!(ours.ord <= theirs.ird, "reads outstanding must fit the peer");
                prop_assert!(theirs.ord <= ours.ird);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..600), reply: bool, keyed: bool) {
            if keyed && bytes.len() >= 16 {
                bytes[..16].copy_from_slice(if reply { REPLY_KEY } else { REQUEST_KEY });
            }
            let _ = Frame::decode(&bytes, reply);
        }

        #[test]
        fn a_frame_is_whole_only_at_its_last_byte(cut in 0usize..64) {
            let all = request(&Preferences::default(), b"hello").encode();
            let cut = cut.min(all.len() - 1);
            prop_assert_eq!(Frame::decode(&all[..cut], false), Ok(None));
        }
    }

    #[test]
    fn a_peer_that_echoes_our_flags_is_not_taken_to_speak_rfc_7306() {
        let prefs = Preferences::default();
        let mut bytes = request(&prefs, b"").encode();
        bytes[..16].copy_from_slice(REPLY_KEY);
        let (echo, _) = Frame::decode(&bytes, true).unwrap().unwrap();
        assert!(!conclude(&prefs, &echo).unwrap().extensions);
    }

    #[test]
    fn a_depth_of_all_ones_says_nothing() {
        // RFC 6581 section 9.1: the consumers agree by other means.
        let prefs = Preferences::default();
        let (mut reply, _) = accept(&prefs, &request(&prefs, b""), b"");
        let depths = reply.enhanced.as_mut().unwrap();
        (depths.ird, depths.ord) = (DEPTH_MASK, DEPTH_MASK);
        let agreement = conclude(&prefs, &reply).unwrap();
        assert_eq!((agreement.ird, agreement.ord), (prefs.ird, prefs.ord));
        reply.enhanced.as_mut().unwrap().ord = prefs.ird + 1;
        assert_eq!(conclude(&prefs, &reply), Err(Mpa::InsufficientIrd.into()));
    }

    #[test]
    fn a_reply_that_drops_a_wanted_crc_is_refused() {
        let prefs = Preferences::default();
        let (mut reply, _) = accept(&prefs, &request(&prefs, b""), b"");
        reply.crc = false;
        assert_eq!(conclude(&prefs, &reply), Err(Mpa::InvalidFrame.into()));
    }

    #[test]
    fn the_reply_echoes_the_peer_to_peer_flag() {
        // Hardware terminates the connection when this echo is missing.
        let prefs = Preferences::default();
        let (reply, _) = accept(&prefs, &request(&prefs, b""), b"");
        assert!(reply.enhanced.unwrap().peer_to_peer);
    }
}
