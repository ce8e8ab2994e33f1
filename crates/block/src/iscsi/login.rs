//! Login (RFC 7143 sections 6 and 7.2, keys of section 13; RFC 7145 section 6 for iSER).

use super::chap::{Chap, Refused, Secrets};
use super::pdu::{Header, op};
use super::text::{Keys, number};

/// Bytes of text of one login, over all its PDUs.
const TEXT_MAX: usize = 64 << 10;
/// PDUs of one login.
const PDUS_MAX: u32 = 64;
/// Largest data segment that is received.
pub const RECEIVE_MAX: u32 = 256 << 10;
/// Largest data segment of a control message of iSER, both ways: what its buffers are made for.
pub const ISER_DATA_MAX: u32 = 8192;
/// Largest burst that is solicited.
const BURST_MAX: u32 = 1 << 20;
/// Most unsolicited data of a command.
const FIRST_BURST_MAX: u32 = 256 << 10;
/// Outstanding solicitations of a command.
const R2T_MAX: u32 = 8;

/// Which transport a login is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// RDMA: iSER.
    Iser,
}

/// What a session agreed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Params {
    /// CRC32C over headers.
    pub header_digest: bool,
    /// CRC32C over data.
    pub data_digest: bool,
    /// Largest data segment that the initiator receives.
    pub send_max: u32,
    /// Longest solicited burst.
    pub max_burst: u32,
    /// Most unsolicited data.
    pub first_burst: u32,
    /// No unsolicited Data-Out PDUs.
    pub initial_r2t: bool,
    /// Data may come with the command.
    pub immediate_data: bool,
    /// Solicitations at a time.
    pub max_r2t: u32,
    /// iSER is in use from here on.
    pub rdma: bool,
    /// Seconds that a session may be missed for.
    pub time2retain: u16,
}

impl Default for Params {
    /// The values that count if nothing is said.
    fn default() -> Params {
        Params {
            header_digest: false,
            data_digest: false,
            send_max: 8192,
            max_burst: 262_144,
            first_burst: 65536,
            initial_r2t: true,
            immediate_data: true,
            max_r2t: 1,
            rdma: false,
            time2retain: 20,
        }
    }
}

/// Who logs in, and for what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// iSCSI name.
    pub initiator: String,
    /// Initiator session identifier.
    pub isid: [u8; 6],
    /// The session that is meant; 0 for a new one.
    pub tsih: u16,
    /// Connection identifier.
    pub cid: u16,
    /// Which target; `None` for discovery.
    pub target: Option<String>,
    /// The CHAP name whose secret it knows.
    pub proved: Option<String>,
}

/// Statuses of a login response: class and detail.
#[allow(missing_docs)]
pub mod status {
    pub const INITIATOR_ERROR: u16 = 0x0200;
    pub const AUTHENTICATION: u16 = 0x0201;
    pub const AUTHORIZATION: u16 = 0x0202;
    pub const NOT_FOUND: u16 = 0x0203;
    pub const VERSION: u16 = 0x0205;
    pub const TOO_MANY_CONNECTIONS: u16 = 0x0206;
    pub const MISSING_PARAMETER: u16 = 0x0207;
    pub const SESSION_TYPE: u16 = 0x0209;
    pub const NO_SESSION: u16 = 0x020a;
    pub const INVALID: u16 = 0x020b;
    pub const OUT_OF_RESOURCES: u16 = 0x0302;
}

/// What the negotiation asks its surroundings.
pub trait Directory {
    /// The secrets for a target, or for discovery; `None` if nothing need be proved.
    fn secrets(&self, target: Option<&str>) -> Option<&Secrets>;

    /// Whether an initiator may use a target, or discover any.
    ///
    /// # Errors
    /// The status to refuse with.
    fn admit(&self, initiator: &str, target: Option<&str>) -> Result<(), u16>;
}

/// What to do with a login request.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Answer, and wait for the next.
    Continue(Vec<u8>, Header),
    /// Answer, after a session has been made of it; then it is in full feature phase.
    Done(Vec<u8>, Header, Box<(Identity, Params)>),
    /// Answer and close.
    Refuse(Header),
}

/// A login.
pub struct Login {
    transport: Transport,
    identity: Option<Identity>,
    discovery: bool,
    params: Params,
    chap: Chap,
    method_chosen: bool,
    authenticated: bool,
    /// Current stage of the last answer.
    stage: u8,
    text: Vec<u8>,
    total: usize,
    pdus: u32,
    declared: bool,
}

const SECURITY: u8 = 0;
const OPERATIONAL: u8 = 1;
const FULL_FEATURE: u8 = 3;

impl Login {
    /// A login over this transport.
    pub fn new(transport: Transport) -> Login {
        Login {
            transport,
            identity: None,
            discovery: false,
            params: Params::default(),
            chap: Chap::default(),
            method_chosen: false,
            authenticated: false,
            stage: SECURITY,
            text: Vec::new(),
            total: 0,
            pdus: 0,
            declared: false,
        }
    }

    /// A request and its data; the answer, but for the serial numbers and the session's handle.
    pub fn request(&mut self, header: &Header, data: &[u8], directory: &dyn Directory) -> Next {
        let mut answer = Header::new(op::LOGIN_RESPONSE);
        answer.0[8..16].copy_from_slice(&header.0[8..16]);
        answer.set_tag(header.tag());
        match self.step(header, data, directory) {
            Ok((keys, transit, stage, next)) => {
                answer.0[1] = stage << 2 | if transit { 0x80 | next } else { 0 };
                let text = keys.encode();
                if transit && next == FULL_FEATURE {
                    let identity = self.identity.clone().expect("named before it goes on");
                    return Next::Done(text, answer, Box::new((identity, self.params.clone())));
                }
                Next::Continue(text, answer)
            }
            Err(status) => Next::Refuse(refusal(header, status)),
        }
    }

    fn step(&mut self, header: &Header, data: &[u8], directory: &dyn Directory) -> Result<(Keys, bool, u8, u8), u16> {
        let (transit, more) = (header.is_final(), header.0[1] & 0x40 != 0);
        let (stage, next) = (header.0[1] >> 2 & 3, header.0[1] & 3);
        self.pdus += 1;
        self.total += data.len();
        if self.pdus > PDUS_MAX || self.total > TEXT_MAX {
            return Err(status::OUT_OF_RESOURCES);
        }
        // Version-min: there is only version 0.
        if header.0[3] != 0 {
            return Err(status::VERSION);
        }
        if header.op() != op::LOGIN || (transit && more) || (transit && next <= stage) || stage == 2 || stage == 3 {
            return Err(status::INITIATOR_ERROR);
        }
        if stage < self.stage || (transit && next == 2) {
            return Err(status::INVALID);
        }
        self.text.extend_from_slice(data);
        if more {
            return Ok((Keys::default(), false, stage, 0));
        }
        let keys = Keys::decode(&std::mem::take(&mut self.text)).ok_or(status::INITIATOR_ERROR)?;
        let mut answer = Keys::default();
        if self.identity.is_none() {
            self.identify(header, &keys, directory)?;
            if !self.discovery {
                answer.push("TargetPortalGroupTag", 1);
            }
        }
        self.stage = stage;
        let mut transit = transit;
        if stage == SECURITY {
            transit &= self.security(&keys, &mut answer, directory)?;
        } else if !self.proved(directory) {
            return Err(status::AUTHENTICATION);
        }
        self.operational(&keys, &mut answer, stage)?;
        if transit && next == FULL_FEATURE && !self.proved(directory) {
            return Err(status::AUTHENTICATION);
        }
        if transit && next == FULL_FEATURE && self.transport == Transport::Iser && !self.params.rdma {
            return Err(status::INITIATOR_ERROR);
        }
        if stage == OPERATIONAL && !self.declared && !self.discovery {
            let max = if self.transport == Transport::Iser { ISER_DATA_MAX } else { RECEIVE_MAX };
            answer.push(self.receive_key(), max);
            self.declared = true;
        }
        if transit {
            self.stage = next;
        }
        Ok((answer, transit, stage, next))
    }

    /// The key by which we say how much we receive.
    fn receive_key(&self) -> &'static str {
        match self.transport {
            Transport::Tcp => "MaxRecvDataSegmentLength",
            Transport::Iser => "TargetRecvDataSegmentLength",
        }
    }

    fn proved(&self, directory: &dyn Directory) -> bool {
        let target = self.identity.as_ref().and_then(|i| i.target.as_deref());
        self.authenticated || directory.secrets(target).is_none()
    }

    fn identify(&mut self, header: &Header, keys: &Keys, directory: &dyn Directory) -> Result<(), u16> {
        let name = keys.get("InitiatorName").filter(|n| !n.is_empty()).ok_or(status::MISSING_PARAMETER)?;
        // Names have neither blanks nor control characters (RFC 3722).
        if name.len() > 223 || name.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(status::INITIATOR_ERROR);
        }
        self.discovery = match keys.get("SessionType") {
            Some("Discovery") => true,
            Some("Normal") | None => false,
            Some(_) => return Err(status::SESSION_TYPE),
        };
        let target = match keys.get("TargetName") {
            _ if self.discovery => None,
            Some(target) => Some(target.to_ascii_lowercase()),
            None => return Err(status::MISSING_PARAMETER),
        };
        directory.admit(name, target.as_deref())?;
        let mut isid = [0; 6];
        isid.copy_from_slice(&header.0[8..14]);
        self.identity = Some(Identity {
            initiator: name.to_owned(),
            isid,
            tsih: header.get16(14),
            cid: header.get16(20),
            target,
            proved: None,
        });
        Ok(())
    }

    /// Security negotiation; true if the initiator may go on.
    fn security(&mut self, keys: &Keys, answer: &mut Keys, directory: &dyn Directory) -> Result<bool, u16> {
        let target = self.identity.as_ref().and_then(|i| i.target.as_deref());
        let secrets = directory.secrets(target);
        if let Some(methods) = keys.get("AuthMethod") {
            let offers = |wanted| methods.split(',').any(|m| m == wanted);
            let method = if secrets.is_some() { "CHAP" } else { "None" };
            if !offers(method) {
                return Err(status::AUTHENTICATION);
            }
            answer.push("AuthMethod", method);
            self.method_chosen = true;
        }
        let Some(secrets) = secrets else { return Ok(true) };
        if keys.get("CHAP_A").is_some() || keys.get("CHAP_R").is_some() {
            if !self.method_chosen {
                return Err(status::INITIATOR_ERROR);
            }
            match self.chap.step(secrets, keys, answer) {
                Ok(()) => {
                    if let (Chap::Done(name), Some(identity)) = (&self.chap, &mut self.identity) {
                        identity.proved = Some(name.clone());
                        self.authenticated = true;
                    }
                }
                Err(Refused::Malformed) => return Err(status::INITIATOR_ERROR),
                Err(Refused::Failed) => return Err(status::AUTHENTICATION),
            }
        }
        Ok(self.authenticated)
    }

    /// Answers the operational keys.
    fn operational(&mut self, keys: &Keys, answer: &mut Keys, stage: u8) -> Result<(), u16> {
        for (key, value) in &keys.0 {
            let known = self.key(key, value)?;
            match known {
                Answer::None => {}
                Answer::Value(text) => answer.push(key, text),
                Answer::Security if stage == SECURITY => {}
                Answer::Security => return Err(status::INITIATOR_ERROR),
                Answer::NotUnderstood => answer.push(key, "NotUnderstood"),
            }
        }
        // FirstBurstLength is never above MaxBurstLength (13.14).
        self.params.first_burst = self.params.first_burst.min(self.params.max_burst);
        Ok(())
    }

    fn key(&mut self, key: &str, value: &str) -> Result<Answer, u16> {
        let wrong = status::INITIATOR_ERROR;
        let within = |min, max| number(value).filter(|n| (min..=max).contains(n)).map(|n| n as u32).ok_or(wrong);
        let yes = match value {
            "Yes" => Some(true),
            "No" => Some(false),
            _ => None,
        };
        let flag = || yes.ok_or(wrong);
        let spell = |yes| if yes { "Yes" } else { "No" };
        let said = |value: u32| Ok(Answer::Value(value.to_string()));
        let send_max = if self.transport == Transport::Iser { ISER_DATA_MAX } else { 0xff_ffff };
        let p = &mut self.params;
        match key {
            "InitiatorName" | "InitiatorAlias" | "TargetName" | "SessionType" | "TargetAlias" => Ok(Answer::None),
            "AuthMethod" | "CHAP_A" | "CHAP_I" | "CHAP_C" | "CHAP_N" | "CHAP_R" => Ok(Answer::Security),
            "HeaderDigest" | "DataDigest" => {
                let iser = self.transport == Transport::Iser;
                // The initiator's order counts; iSER has no digests (RFC 7145 6.1).
                let choice = value.split(',').find(|v| *v == "None" || (*v == "CRC32C" && !iser)).ok_or(wrong)?;
                let on = choice == "CRC32C";
                if key == "HeaderDigest" {
                    p.header_digest = on
                } else {
                    p.data_digest = on
                }
                Ok(Answer::Value(choice.into()))
            }
            "MaxConnections" => within(1, 65535).and_then(|_| said(1)),
            "InitialR2T" => {
                // Unsolicited data beyond what comes with the command saves iSER nothing.
                p.initial_r2t = flag()? || self.transport == Transport::Iser;
                Ok(Answer::Value(spell(p.initial_r2t).into()))
            }
            "ImmediateData" => {
                p.immediate_data = flag()?;
                Ok(Answer::Value(spell(p.immediate_data).into()))
            }
            "MaxRecvDataSegmentLength" => {
                p.send_max = within(512, 0xff_ffff)?.min(send_max);
                Ok(Answer::None)
            }
            "InitiatorRecvDataSegmentLength" => {
                p.send_max = within(512, 0xff_ffff)?.min(send_max);
                said(p.send_max)
            }
            "TargetRecvDataSegmentLength" => {
                self.declared = true;
                said(within(512, 0xff_ffff)?.min(ISER_DATA_MAX))
            }
            "MaxBurstLength" => {
                p.max_burst = within(512, 0xff_ffff)?.min(BURST_MAX);
                said(p.max_burst)
            }
            "FirstBurstLength" => {
                p.first_burst = within(512, 0xff_ffff)?.min(FIRST_BURST_MAX);
                said(p.first_burst)
            }
            "DefaultTime2Wait" => within(0, 3600).and_then(|n| said(n.max(2))),
            "DefaultTime2Retain" => {
                p.time2retain = within(0, 3600)?.min(20) as u16;
                said(p.time2retain.into())
            }
            "MaxOutstandingR2T" => {
                p.max_r2t = within(1, 65535)?.min(R2T_MAX);
                said(p.max_r2t)
            }
            "DataPDUInOrder" | "DataSequenceInOrder" => flag().map(|_| Answer::Value("Yes".into())),
            "ErrorRecoveryLevel" => within(0, 2).and_then(|_| said(0)),
            "IFMarker" | "OFMarker" => Ok(Answer::Value("No".into())),
            "IFMarkInt" | "OFMarkInt" => Ok(Answer::Value("Irrelevant".into())),
            "RDMAExtensions" => {
                p.rdma = flag()? && self.transport == Transport::Iser;
                Ok(Answer::Value(spell(p.rdma).into()))
            }
            "MaxOutstandingUnexpectedPDUs" => within(0, u64::from(u32::MAX)).and_then(said),
            "MaxAHSLength" => within(0, 65535).and_then(|_| said(0)),
            "iSERHelloRequired" => Ok(Answer::Value("No".into())),
            "TaskReporting" => Ok(Answer::Value("RFC3720".into())),
            "iSCSIProtocolLevel" => within(0, 31).and_then(|n| said(n.min(1))),
            _ => Ok(Answer::NotUnderstood),
        }
    }
}

enum Answer {
    None,
    Value(String),
    /// Belongs to the security stage, which answers it.
    Security,
    NotUnderstood,
}

/// The response that refuses a login.
pub fn refusal(request: &Header, status: u16) -> Header {
    let mut answer = Header::new(op::LOGIN_RESPONSE);
    answer.0[1] = 0;
    answer.0[8..16].copy_from_slice(&request.0[8..16]);
    answer.set_tag(request.tag());
    answer.set16(36, status);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Open;

    impl Directory for Open {
        fn secrets(&self, _: Option<&str>) -> Option<&Secrets> {
            None
        }

        fn admit(&self, _: &str, target: Option<&str>) -> Result<(), u16> {
            match target {
                None | Some("iqn.x:t") => Ok(()),
                Some(_) => Err(status::NOT_FOUND),
            }
        }
    }

    fn header(stage: u8, next: Option<u8>) -> Header {
        let mut header = Header::new(op::LOGIN);
        header.0[0] |= 0x40;
        header.0[1] = stage << 2 | next.map_or(0, |n| 0x80 | n);
        header
    }

    fn text(pairs: &[(&str, &str)]) -> Vec<u8> {
        Keys(pairs.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect()).encode()
    }

    const NAMES: [(&str, &str); 2] = [("InitiatorName", "iqn.x:i"), ("TargetName", "iqn.x:t")];

    #[test]
    fn an_initiator_goes_straight_to_the_full_feature_phase() {
        let mut data = text(&NAMES);
        data.extend(text(&[("HeaderDigest", "CRC32C,None"), ("MaxBurstLength", "16776192"), ("X-new", "1")]));
        let next = Login::new(Transport::Tcp).request(&header(OPERATIONAL, Some(FULL_FEATURE)), &data, &Open);
        let Next::Done(answer, header, session) = next else { panic!("{next:?}") };
        let keys = Keys::decode(&answer).unwrap();
        assert_eq!(keys.get("HeaderDigest"), Some("CRC32C"));
        assert_eq!(keys.get("MaxBurstLength"), Some("1048576"));
        assert_eq!(keys.get("X-new"), Some("NotUnderstood"));
        assert_eq!(header.0[1], 0x87);
        assert!(session.1.header_digest && session.0.target.as_deref() == Some("iqn.x:t"));
    }

    #[test]
    fn refusals_say_why() {
        let refused =
            |stage, next, data: &[u8]| match Login::new(Transport::Tcp).request(&header(stage, next), data, &Open) {
                Next::Refuse(answer) => answer.get16(36),
                other => panic!("{other:?}"),
            };
        assert_eq!(refused(1, Some(3), &text(&[])), status::MISSING_PARAMETER);
        assert_eq!(refused(1, Some(3), &text(&NAMES[..1])), status::MISSING_PARAMETER);
        let other = [NAMES[0], ("TargetName", "iqn.x:u")];
        assert_eq!(refused(1, Some(3), &text(&other)), status::NOT_FOUND);
        assert_eq!(refused(1, Some(1), &text(&NAMES)), status::INITIATOR_ERROR);
        assert_eq!(refused(1, Some(3), b"junk\0"), status::INITIATOR_ERROR);
        let burst = [NAMES[0], NAMES[1], ("MaxBurstLength", "12")];
        assert_eq!(refused(1, Some(3), &text(&burst)), status::INITIATOR_ERROR);
        assert_eq!(refused(0, Some(1), &text(&[NAMES[0], NAMES[1], ("AuthMethod", "CHAP")])), status::AUTHENTICATION);
    }

    #[test]
    fn text_may_be_spread_over_requests() {
        let mut login = Login::new(Transport::Tcp);
        let data = text(&NAMES);
        let (first, second) = data.split_at(9);
        let mut part = header(1, None);
        part.0[1] |= 0x40;
        assert!(matches!(login.request(&part, first, &Open), Next::Continue(text, _) if text.is_empty()));
        assert!(matches!(login.request(&header(1, Some(3)), second, &Open), Next::Done(..)));
    }
}
