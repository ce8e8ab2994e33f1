//! Integration tests of the crate as one program, which is linked once. `leaks` is separate: it counts descriptors of the whole process.

mod conformance;
mod hostile;
mod iwarp;
mod shm;
mod verbs;
mod verbs_layout;
