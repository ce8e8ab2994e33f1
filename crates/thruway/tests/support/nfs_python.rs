//! NFS clients in Python, for scripts of tests.

use crate::support::disks::ok;

/// Runs a Python script after `from client import *`. Its variables `at` and `args` are the server's address and the further arguments.
/// Returns its output.
pub(crate) fn python(at: &str, script: &str, args: &[&str]) -> String {
    let here = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nfs");
    let script = format!(
        "import sys\nsys.path.insert(0, sys.argv[1])\nfrom client import *\nat, *args = sys.argv[2:]\n{script}"
    );
    ok("/usr/bin/python3", &[&["-B", "-c", &script, here, at], args].concat())
}
