//! Our declarations of rdma-core's structures against its own headers.

use std::fmt::Write;
use std::process::Command;

#[test]
fn every_structure_of_rdma_core_is_laid_out_as_its_headers_say() {
    let mut program = String::from("#include <stddef.h>\n#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n");
    for (what, ours) in thruway_fabric::verbs::layouts() {
        writeln!(program, "_Static_assert({what} == {ours}, \"{what} is not {ours}\");").unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("layout.c");
    std::fs::write(&source, program).unwrap();
    let out =
        Command::new("cc").arg("-fsyntax-only").arg(&source).output().expect("a C compiler, from build-essential");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}
