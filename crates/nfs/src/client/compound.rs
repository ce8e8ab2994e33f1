//! Compounds of version 4, built and taken apart.

use super::{ClientError, Result, UserCredential};
use crate::status::Status;
use crate::v4::PROGRAM;
use thruway_rpc::client::{Arguments, Client, Procedure, Reply};
use thruway_rpc::xdr::{Decoder, Encoder};

const COMPOUND: Procedure = Procedure { program: PROGRAM, version: 4, procedure: 1 };

/// Operations that are asked for together.
pub(super) struct Compound {
    count: u32,
    operations: Encoder,
    /// Longest data in the results, in bytes.
    data_max: usize,
    /// Longest results beside, if they may be long.
    rest_max: usize,
    changes: bool,
}

impl Compound {
    pub(super) fn new() -> Compound {
        Compound { count: 0, operations: Encoder::new(), data_max: 0, rest_max: 0, changes: false }
    }

    /// Adds an operation, whose arguments are appended by this.
    pub(super) fn then(mut self, number: u32, arguments: impl FnOnce(&mut Encoder)) -> Compound {
        self.count += 1;
        self.operations.u32(number);
        arguments(&mut self.operations);
        self
    }

    /// Says that there is data among the results, at most so many bytes.
    pub(super) fn with_data(mut self, max: usize) -> Compound {
        self.data_max = max;
        self
    }

    /// Says that the results may be long: at most so many bytes.
    pub(super) fn with_long_results(mut self, max: usize) -> Compound {
        self.rest_max = max;
        self
    }

    /// Says that the operations change something: executing them twice is not the same as executing them once.
    pub(super) fn that_changes(mut self) -> Compound {
        self.changes = true;
        self
    }

    /// Whether the operations change something.
    pub(super) fn changes(&self) -> bool {
        self.changes
    }

    /// A copy, to be sent once more.
    pub(super) fn again(&mut self) -> Compound {
        Compound { operations: self.operations.again(), ..*self }
    }

    /// Both, one behind the other.
    pub(super) fn and(mut self, other: Compound) -> Compound {
        self.count += other.count;
        self.data_max += other.data_max;
        self.rest_max += other.rest_max;
        self.changes |= other.changes;
        self.operations.append(other.operations);
        self
    }

    /// Asks for them.
    pub(super) async fn call(self, rpc: &Client, minor: u32, user: &UserCredential) -> Result<Reply> {
        let mut call = Encoder::new();
        call.opaque(b"");
        call.u32(minor);
        call.u32(self.count);
        call.append(self.operations);
        let call = Arguments { bytes: call, item_max: self.data_max, reply_max: self.rest_max };
        Ok(user.call(rpc, COMPOUND, call).await?)
    }
}

/// The results of a compound, one after the other.
pub(super) struct Results<'a>(Decoder<'a>, Status);

impl<'a> Results<'a> {
    pub(super) fn of(reply: &'a Reply) -> Result<Results<'a>> {
        Results::begin(reply.results())
    }

    /// As [`Results::of`], without data that is not among the bytes of the reply, any number of times.
    pub(super) fn peek(reply: &'a Reply) -> Result<Results<'a>> {
        Results::begin(reply.peek())
    }

    fn begin(mut d: Decoder<'a>) -> Result<Results<'a>> {
        let status = d.u32()?;
        let _tag = d.opaque(1024)?;
        if d.u32()? == 0 && status != 0 {
            return Err(ClientError::Status { operation: "COMPOUND", status });
        }
        Ok(Results(d, Status(status)))
    }

    /// Status of the compound: that of its last operation.
    pub(super) fn status(&self) -> Status {
        self.1
    }

    /// The result of the next operation, if that has succeeded.
    pub(super) fn next(&mut self, operation: &'static str) -> Result<&mut Decoder<'a>> {
        let _number = self.0.u32()?;
        match self.0.u32()? {
            0 => Ok(&mut self.0),
            status => Err(ClientError::Status { operation, status }),
        }
    }
}
