//! SCSI commands of a hostile initiator, and their data.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| thruway_block::scsi::fuzzing::initiator(data));
