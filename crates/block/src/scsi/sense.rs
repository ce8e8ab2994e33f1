//! Statuses and sense data (SAM-5, SPC-4 4.5).

/// Status of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// GOOD
    Good = 0x00,
    /// CHECK CONDITION
    CheckCondition = 0x02,
    /// RESERVATION CONFLICT
    ReservationConflict = 0x18,
    /// TASK SET FULL
    TaskSetFull = 0x28,
}

/// What went wrong: sense key, additional code and qualifier, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sense {
    /// Sense key.
    pub key: u8,
    /// Additional sense code and qualifier.
    pub code: u16,
    /// The field of the command (or, if it is of the data, `true`) that is wrong.
    field: Option<(u16, bool)>,
    /// A block, or an offset.
    information: Option<u64>,
}

macro_rules! senses {
    ($($(#[$doc:meta])* $name:ident = $key:literal, $code:literal;)*) => {
        impl Sense { $($(#[$doc])* pub const $name: Sense = Sense::new($key, $code);)* }
    };
}

senses! {
    /// INVALID COMMAND OPERATION CODE
    INVALID_OPCODE = 0x05, 0x2000;
    /// LOGICAL BLOCK ADDRESS OUT OF RANGE
    OUT_OF_RANGE = 0x05, 0x2100;
    /// INVALID FIELD IN CDB
    INVALID_FIELD = 0x05, 0x2400;
    /// LOGICAL UNIT NOT SUPPORTED
    NO_UNIT = 0x05, 0x2500;
    /// INVALID FIELD IN PARAMETER LIST
    INVALID_PARAMETER = 0x05, 0x2600;
    /// PARAMETER LIST LENGTH ERROR
    PARAMETER_LENGTH = 0x05, 0x1a00;
    /// INVALID RELEASE OF PERSISTENT RESERVATION
    INVALID_RELEASE = 0x05, 0x2604;
    /// SAVING PARAMETERS NOT SUPPORTED
    NO_SAVING = 0x05, 0x3900;
    /// INSUFFICIENT REGISTRATION RESOURCES
    NO_REGISTRATIONS = 0x05, 0x5504;
    /// WRITE PROTECTED
    WRITE_PROTECTED = 0x07, 0x2700;
    /// SPACE ALLOCATION FAILED WRITE PROTECT
    NO_SPACE = 0x07, 0x2707;
    /// UNRECOVERED READ ERROR
    READ_ERROR = 0x03, 0x1100;
    /// LOGICAL UNIT NOT READY, CAUSE NOT REPORTABLE
    NOT_READY = 0x02, 0x0400;
    /// WRITE ERROR
    WRITE_ERROR = 0x03, 0x0c00;
    /// INTERNAL TARGET FAILURE
    TARGET_FAILURE = 0x04, 0x4400;
    /// MISCOMPARE DURING VERIFY OPERATION
    MISCOMPARE = 0x0e, 0x1d00;
    /// DATA PHASE ERROR
    DATA_PHASE = 0x0b, 0x4b00;
    /// MEDIUM REMOVAL PREVENTED
    REMOVAL_PREVENTED = 0x05, 0x5302;
}

impl Sense {
    /// A sense key with an additional code and qualifier.
    pub const fn new(key: u8, code: u16) -> Sense {
        Sense { key, code, field: None, information: None }
    }

    /// INVALID FIELD IN CDB, in this byte.
    pub const fn invalid_field(byte: u16) -> Sense {
        Sense { field: Some((byte, true)), ..Sense::INVALID_FIELD }
    }

    /// INVALID FIELD IN PARAMETER LIST, in this byte.
    pub const fn invalid_parameter(byte: u16) -> Sense {
        Sense { field: Some((byte, false)), ..Sense::INVALID_PARAMETER }
    }

    /// With the INFORMATION field.
    pub const fn about(self, information: u64) -> Sense {
        Sense { information: Some(information), ..self }
    }

    /// Fixed format (SPC-4 4.5.3).
    pub fn encode(&self) -> [u8; 18] {
        let mut out = [0; 18];
        out[0] = 0x70;
        out[2] = self.key;
        if let Some(information) = self.information.and_then(|i| u32::try_from(i).ok()) {
            out[0] |= 0x80;
            out[3..7].copy_from_slice(&information.to_be_bytes());
        }
        out[7] = 10;
        out[12..14].copy_from_slice(&self.code.to_be_bytes());
        if let Some((byte, in_command)) = self.field {
            out[15] = if in_command { 0xc0 } else { 0x80 };
            out[16..18].copy_from_slice(&byte.to_be_bytes());
        }
        out
    }

    /// Descriptor format (SPC-4 4.5.2).
    pub fn encode_descriptors(&self) -> Vec<u8> {
        let mut out = vec![0x72, self.key, (self.code >> 8) as u8, self.code as u8, 0, 0, 0, 0];
        if let Some(information) = self.information {
            out.extend_from_slice(&[0, 10, 0x80, 0]);
            out.extend_from_slice(&information.to_be_bytes());
        }
        if let Some((byte, in_command)) = self.field {
            let kind = if in_command { 0xc0 } else { 0x80 };
            out.extend_from_slice(&[2, 6, 0, 0, kind, (byte >> 8) as u8, byte as u8, 0]);
        }
        out[7] = out.len() as u8 - 8;
        out
    }
}
