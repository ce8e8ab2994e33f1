#!/usr/bin/env bash
# In the guest, by `cargo xtask posix`: the file systems that Linux's NFS clients make of Thruway's, by fsx and by pjdfstest.
# posix.sh TOOLS, the directory with the two programs.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
tools=$1
export THRUWAY=${THRUWAY:-$(dirname "$0")/../target/release/thruway}
hosts ours a
share_directory
SHARES=(--share data=/tmp/served/data,squash=none --nfs-lease 30)
serve_shares
told_apart a
cat >/tmp/pjdfstest.toml <<'T'
[features]
utimensat = {}
utime_now = {}
rename_ctime = {}
[settings]
naptime = 0.02
allow_remount = false
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"], ["bin", "bin"]]
T
for version in 4.2 4.0 3; do
    options=vers=$version,proto=tcp,port=2049
    [[ $version != 3 ]] || options+=,mountproto=tcp,mountport=2049,nolock
    nsenter --net=/run/netns/a mount -t nfs -o "$options" 10.0.0.1:/data /mnt/a
    echo "--- version $version: fsx"
    "$tools/bin/fsx" -q -N 10000 -S 7 /mnt/a/fsx
    rm -f /mnt/a/fsx*
    echo "--- version $version: pjdfstest"
    mkdir -m 777 /mnt/a/pjdfstest
    "$tools/bin/pjdfstest" -c /tmp/pjdfstest.toml -p /mnt/a/pjdfstest >/tmp/pjdfstest || true
    # A client of NFS renames a file that is open instead of removing it, so that it has a name still; and version 3 has 32 bits for
    # seconds.
    expected=unlink::open_file_not_freed
    [[ $version != 3 ]] || expected+=' utimensat::y2038'
    grep '^Summary' /tmp/pjdfstest
    failed=$(awk '$NF == "FAILED" { print $1 }' /tmp/pjdfstest | sort | xargs)
    [[ $failed == "$expected" ]] || { grep -A4 FAILED /tmp/pjdfstest; exit 1; }
    rm -rf /mnt/a/pjdfstest
    umount /mnt/a
done
