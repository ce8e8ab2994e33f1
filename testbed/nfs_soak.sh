#!/usr/bin/env bash
# In the guest, by `cargo xtask soak-nfs`: files in use by Linux's NFS clients of all versions, over TCP and RDMA, while the server is
# killed again and again. nfs_soak.sh SECONDS SEED
set -euo pipefail
here=$(dirname "$0")
. "$here/lib.sh"
seconds=$1 RANDOM=$2
export THRUWAY=${THRUWAY:-$here/../target/release/thruway}
hosts ours a b c
kernel_end siw
told_apart a b c
share_directory
mkdir -p /mnt/r
# Long enough for every client to come back, and short enough for work between two ends of the server.
SHARES=(--share data=/tmp/served/data,squash=none --nfs-lease 5 --nfs-rdma 10.0.0.1:20049)
serve_shares
mount_as a 4.2 /data /mnt/a
mount_as b 4.0 /data /mnt/b
nsenter --net=/run/netns/c mount -t nfs -o vers=3,proto=tcp,nolock,port=2049,mountport=2049,mountproto=tcp 10.0.0.1:/data /mnt/c
mount -t nfs -o vers=4.1,proto=rdma,port=20049 10.0.0.1:/data /mnt/r
printf '%020d' 0 >/mnt/a/counter
workers=()
for host in a b c r; do
    counter=/mnt/$host/counter
    [[ $host != c ]] || counter=
    for n in 1 2; do
        python3 "$here/soak_worker.py" "/mnt/$host/$host$n" $RANDOM /tmp/end "/tmp/result.$host$n" ${counter:+"$counter"} &
        workers+=($!)
    done
done
kills=0
while ((SECONDS < seconds)); do
    # Now and then before the clients have had back what they had.
    sleep $((RANDOM % 5 == 0 ? 2 : 8 + RANDOM % 8))
    for worker in "${workers[@]}"; do
        kill -0 "$worker" || { wait "$worker"; exit 1; }
    done
    restart_shares
    kills=$((kills + 1))
done
touch /tmp/end
for worker in "${workers[@]}"; do wait "$worker"; done
raised=0
for host in a b c r; do
    for n in 1 2; do
        raised=$((raised + $(awk '$1 == "raised" { print $2 }' "/tmp/result.$host$n")))
        (cd "/tmp/served/data/$host$n" && grep -v ^raised "/tmp/result.$host$n" | sed 's/ /  /' | sha256sum --quiet -c)
    done
done
[[ $((10#$(cat /tmp/served/data/counter))) == "$raised" ]] ||
    { echo "raised $raised times, and is $(cat /tmp/served/data/counter)"; exit 1; }
echo "$kills kills; a number raised $raised times under a lock; no wrong byte"
umount /mnt/a /mnt/b /mnt/c /mnt/r
kill $daemon
wait $daemon
