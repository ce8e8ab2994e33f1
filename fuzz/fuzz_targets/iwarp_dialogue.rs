//! Messages of a peer that are right but for a field here and there.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| thruway_iwarp::fuzzing::dialogue(data));
