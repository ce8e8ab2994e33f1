#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| thruway_transfer::fuzzing::pack(data));
