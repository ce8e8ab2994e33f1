#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| thruway_iwarp::fuzzing::mpa_frame(data));
