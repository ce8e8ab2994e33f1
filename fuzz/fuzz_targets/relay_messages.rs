//! What a relay hears from another one.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| thruway_relay::fuzzing::messages(data));
