//! Login requests and text keys of a hostile iSCSI initiator.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| thruway_block::iscsi::fuzzing::login(data));
