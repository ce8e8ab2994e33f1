//! All integration tests of the crate, as one program: it is linked once. `leaks` counts what the whole process has.

mod conformance;
mod hostile;
mod iwarp;
mod shm;
mod verbs;
mod verbs_layout;
