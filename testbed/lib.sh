# What tests in the guest share. A test is a script in tests/ that sources nothing: this is sourced for it, with
# `set -euo pipefail`. It fails by ending with a status other than 0.

# A test that ends early names the command that failed.
set -o errtrace
trap 'echo "--- failed with status $?, line $LINENO of $(basename "${BASH_SOURCE[0]}"): $BASH_COMMAND" >&2' ERR

# One that comes near its limit of time tells what runs, and what daemons have logged.
if [[ -n ${LIMIT:-} ]]; then
    (
        sleep $((LIMIT > 80 ? LIMIT - 40 : LIMIT))
        echo "--- the limit of $LIMIT s is near"
        ps -eo pid,ppid,stat,wchan:30,args | grep -v '\]$'
        tail -n 30 /tmp/said /tmp/served /tmp/*.log 2>/dev/null || true
    ) </dev/null >&2 &
    disown
fi

# fails CMD...: runs what must fail. (`! CMD` cannot: the shell's -e passes over whatever is negated.)
fails() {
    if "$@"; then
        echo "this should have failed: $*" >&2
        exit 1
    fi
}

# wait_until SECONDS CMD...: tries a command until it succeeds; fails after so many seconds.
wait_until() {
    local limit=$1 end=$((SECONDS + $1))
    shift
    until "$@"; do
        ((SECONDS < end)) || { echo "after $limit s, still not: $*" >&2; return 1; }
        sleep 0.02
    done
}

# hosts NAME...: a network namespace for each, all on one Ethernet segment; the first is 10.0.0.1, and so on.
hosts() {
    local n=0 name
    ip link add segment type bridge
    ip link set segment up
    for name; do
        n=$((n + 1))
        ip netns add "$name"
        ip link add "p-$name" type veth peer name eth0 netns "$name"
        ip link set "p-$name" master segment up
        ip -n "$name" addr add "10.0.0.$n/24" dev eth0
        ip -n "$name" link set eth0 up
        ip -n "$name" link set lo up
    done
}

# on NAME CMD...: runs a command on a host.
on() { ip netns exec "$@"; }

# kernel_end KIND: this namespace becomes a host too, 10.0.0.254, with an RDMA device of that kind (siw or rxe).
kernel_end() {
    ip link add eth0 type veth peer name p-kernel
    ip link set p-kernel master segment up
    ip addr add 10.0.0.254/24 dev eth0
    ip link set eth0 up
    rdma link add "$1"0 type "$1" netdev eth0
}

# until_listening NAME PORT: waits for a server on a host (`-`: this namespace).
until_listening() {
    local try=()
    [[ $1 == - ]] || try=(ip netns exec "$1")
    is_listening() { "${try[@]}" ss -Hltn "sport = :$1" | grep -q .; }
    wait_until 60 is_listening "$2" || { echo "no server listens at port $2" >&2; return 1; }
}

# until_written FILE: waits until there is something in a file.
until_written() {
    wait_until 60 test -s "$1" || { echo "$1 stays empty" >&2; return 1; }
}

# serve_disk WHAT: a daemon ($daemon) that serves a disk as `d` by NBD, at port 10809.
serve_disk() {
    : >/tmp/serve.json
    "$THRUWAY" serve --json --block "d=$1" --nbd 127.0.0.1:10809 >/tmp/serve.json 2>>/tmp/served &
    daemon=$!
    until_written /tmp/serve.json
}

# same A B: two files or trees are alike.
same() { diff -r --no-dereference "$1" "$2" >/dev/null || { echo "$1 and $2 differ" >&2; return 1; }; }

# until_there FILE: waits for a file, of another guest's for example.
until_there() {
    wait_until 120 test -e "$1" || { echo "$1 does not appear" >&2; return 1; }
}

# The target that tests of Linux's iSCSI initiator use.
iqn=iqn.2026-11.org.thruway:t

# initiator_start: the initiator's daemon, ready when this returns.
initiator_start() {
    mkdir -p /run/lock/iscsi /etc/iscsi
    echo "InitiatorName=iqn.2026-11.org.example:guest" >/etc/iscsi/initiatorname.iscsi
    sed -i 's/^node.startup.*/node.startup = manual/' /etc/iscsi/iscsid.conf
    # A busy machine is no dead target: five seconds without an answer are not yet an error.
    sed -i 's/^\(node.conn\[0\].timeo.noop_out_timeout\) = .*/\1 = 60/' /etc/iscsi/iscsid.conf
    iscsid -f >/tmp/iscsid.log 2>&1 &
    # No sessions: it answers.
    answers() { local status=0; iscsiadm -m session >/dev/null 2>&1 || status=$?; ((status == 21)); }
    wait_until 60 answers || { echo "iscsid does not answer" >&2; return 1; }
}

# until_readable NAME: waits until a disk that sysfs names has a device file and can be read: it is named before it is complete.
until_readable() {
    is_readable() {
        [[ -b /dev/$1 ]] || mknod "/dev/$1" b $(tr : ' ' <"/sys/block/$1/dev") 2>/dev/null || true
        dd if="/dev/$1" of=/dev/null bs=4096 count=1 iflag=direct status=none 2>/dev/null
    }
    wait_until 60 is_readable "$1" || { echo "/dev/$1 cannot be read" >&2; return 1; }
}

# disk LUN: the block device of a unit of the only session, when it is there.
disk() {
    local d
    has_unit() { compgen -G "/sys/class/iscsi_session/session*/device/target*/*:$1/block/*" >/dev/null; }
    wait_until 60 has_unit "$1" || { echo "no disk with LUN $1 appears" >&2; return 1; }
    d=$(compgen -G "/sys/class/iscsi_session/session*/device/target*/*:$1/block/*" | head -n 1)
    d=${d##*/}
    until_readable "$d" || return
    echo "/dev/$d"
}

# file_systems ADDRESS: uses both disks through file systems, and compares what comes back from the storage.
file_systems() {
    local a m
    a=$(disk 0)
    m=$(disk 1)
    mkfs.ext4 -qF "$a"
    mkfs.xfs -qf "$m" 2>/dev/null
    mkdir -p /mnt/a /mnt/m
    [[ -e /tmp/random ]] || head -c 100M /dev/urandom >/tmp/random
    for pair in "$a a" "$m m"; do
        set -- $pair
        mount "$1" "/mnt/$2"
        cp /tmp/random "/mnt/$2/random"
        cp -r /usr/share/zoneinfo "/mnt/$2/" 2>/dev/null || true
        umount "/mnt/$2"
        mount "$1" "/mnt/$2"
        same /tmp/random "/mnt/$2/random"
        fstrim "/mnt/$2"
        umount "/mnt/$2"
    done
}

# share_directory: /tmp/served/data, a directory of an ext4 file system, and what a client of it needs.
share_directory() {
    mkdir -p /tmp/served /tmp/state /mnt/n
    truncate -s 400M /tmp/served.ext4
    mkfs.ext4 -q /tmp/served.ext4
    mount -o loop /tmp/served.ext4 /tmp/served
    mkdir -m 755 /tmp/served/data
}

# use_share MOUNTED SERVED: trees, large and small files, long directories, long links, and verified load on a mounted share.
use_share() {
    local mounted=$1 served=$2 size
    cp -a /usr/share/zoneinfo/America "$mounted/tree"
    echo 3 >/proc/sys/vm/drop_caches
    same /usr/share/zoneinfo/America "$mounted/tree"
    same /usr/share/zoneinfo/America "$served/tree"
    for size in 0 1 3 4095 4096 4097 65537 1048575 3000001; do
        head -c $size /dev/urandom >/tmp/random
        cp /tmp/random "$mounted/file$size"
        cmp /tmp/random "$served/file$size"
        echo 3 >/proc/sys/vm/drop_caches
        cmp /tmp/random "$mounted/file$size"
    done
    mkdir "$served/many"
    (cd "$served/many" && seq 2000 | xargs touch)
    [[ $(ls -f "$mounted/many" | sort -u | wc -l) == 2002 && $(ls -f "$mounted/many" | wc -l) == 2002 ]]
    [[ $(ls -l "$mounted/many" | wc -l) == 2001 ]]
    ln -s "$(printf '/long%.0s' {1..200})" "$mounted/link"
    [[ $(readlink "$mounted/link") == "$(readlink "$served/link")" && -n $(readlink "$mounted/link") ]]
    fio --name=v --directory="$mounted" --size=4M --bsrange=512-256k --rw=randrw --verify=crc32c --verify_fatal=1 \
        --ioengine=psync --numjobs=2 --fsync=50 --output=/tmp/fio || { cat /tmp/fio; return 1; }
    # Buffers of which neither beginning nor end is at a page.
    fio --name=d --directory="$mounted" --size=4M --bsrange=4k-1m --rw=randwrite --verify=crc32c --verify_fatal=1 \
        --ioengine=libaio --iodepth=16 --direct=1 --iomem_align=512 --output=/tmp/fio || { cat /tmp/fio; return 1; }
    rm -r "$mounted"/*
    [[ -z $(ls -A "$served") ]]
}

# serve_shares: serves SHARES from the host `ours`, 10.0.0.1; what the daemon says goes to /tmp/said. It has none of what it serves
# mounted (as by ip netns exec) or open: when it is killed, it would wait for itself.
serve_shares() {
    : >/tmp/serve.json
    nsenter --net=/run/netns/ours "$THRUWAY" -v serve --json --anonymous "${SHARES[@]}" --nfs 10.0.0.1:2049 \
        --state /tmp/state >/tmp/serve.json 2>>/tmp/said 7<&- 8<&- &
    daemon=$!
    until_written /tmp/serve.json
}

# restart_shares: the daemon is killed, and another one started.
restart_shares() {
    kill -9 $daemon
    wait $daemon || true
    serve_shares
}

# told_apart HOST...: NFS clients of the same kernel have names of their own, as those of several hosts; and /mnt/HOST is there.
told_apart() {
    local client
    for client in "$@"; do
        ip netns exec "$client" sh -c "echo $client >/sys/fs/nfs/net/nfs_client/identifier"
        mkdir "/mnt/$client"
    done
}

# mount_as HOST VERSION SHARE DIR: mounts by TCP from a host.
mount_as() { nsenter --net="/run/netns/$1" mount -t nfs -o "vers=$2,proto=tcp" "10.0.0.1:$3" "$4"; }

# opens MOUNTED: how often its client has asked the server to open a file.
opens() { awk -v at="$1" '$5 == at { on = 1 } on && $1 == "OPEN:" { print $2; exit }' /proc/self/mountstats; }

# is_delegated MOUNTED SERVED LOG: a file that the client reads is not asked for again, until a program of the server's host has
# changed it, which the client hears of in time.
is_delegated() {
    local before
    echo one >"$2/kept"
    [[ $(cat "$1/kept") == one ]]
    before=$(opens "$1")
    [[ $(cat "$1/kept" "$1/kept" "$1/kept" | sort -u) == one && $(opens "$1") == "$before" ]]
    echo two >"$2/kept"
    [[ $(cat "$1/kept") == two ]]
    fails grep 'not given back in time' "$3"
    rm "$1/kept"
}

# every_version_over_rdma ADDRESS: mounts /data by RDMA, once by each version of NFS, and uses it; the daemon logs to /tmp/serve.log.
every_version_over_rdma() {
    local version options
    for version in 3 4.0 4.1 4.2; do
        options=vers=$version,proto=rdma,port=20049
        [[ $version != 3 ]] || options+=,mountproto=tcp,mountport=2049,nolock
        mount -t nfs -o "$options" "$1:/data" /mnt/n
        use_share /mnt/n /tmp/served/data
        case $version in 4.[12]) is_delegated /mnt/n /tmp/served/data /tmp/serve.log ;; esac
        umount /mnt/n
    done
}

# A disk that logs what becomes durable, so that a test can have the power fail at any point of it afterwards.
replay() { /usr/bin/python3 "$(dirname "${BASH_SOURCE[0]}")/replay.py" "$@"; }

# log_on: everything that becomes durable on /dev/mapper/d is logged from now on.
log_on() {
    rm -f /tmp/disk /tmp/log
    truncate -s 400M /tmp/disk
    truncate -s 2G /tmp/log
    loop=$(losetup --find --show /tmp/disk)
    log=$(losetup --find --show /tmp/log)
    dmsetup create d --table "0 $(blockdev --getsz "$loop") log-writes $loop $log"
    dmsetup mknodes
}
log_off() {
    dmsetup remove d
    losetup -d "$loop" "$log"
    replay points /tmp/log >/tmp/points
}
mark() { dmsetup message d 0 mark "$1"; }

# power_fails POINT: /tmp/image is as a disk is if the power fails there. Points ascend.
done_until=0
power_fails() {
    replay apply /tmp/log /tmp/image "$done_until" "$1"
    done_until=$1
}
# A new disk, before everything.
new_image() {
    rm -f /tmp/image
    truncate -s 400M /tmp/image
    done_until=0
}

# realm_start: a realm TEST of Kerberos, whose key distribution centre is on the host `ours`; users alice (1000) and bob (1001), and
# carol (1002), who has no key. /tmp/realm/NAME.keytab has the keys of each, and of the service, whose host is server.test.
realm_start() {
    mkdir -p /tmp/realm
    printf '%s\n' '10.0.0.1 server.test' '10.0.0.254 client.test' >>/etc/hosts
    hostname client.test
    printf '%s\n' alice:x:1000:1000::/: bob:x:1001:1001::/: carol:x:1002:1002::/: >>/etc/passwd
    cat >/etc/krb5.conf <<'EOF'
[libdefaults]
    default_realm = TEST
    dns_lookup_kdc = false
    dns_canonicalize_hostname = false
    rdns = false
[realms]
    TEST = {
        kdc = 10.0.0.1:88
    }
[domain_realm]
    .test = TEST
EOF
    cat >/tmp/realm/kdc.conf <<'EOF'
[kdcdefaults]
    kdc_listen = 10.0.0.1:88
    kdc_tcp_listen = 10.0.0.1:88
[realms]
    TEST = {
        database_name = /tmp/realm/principal
        key_stash_file = /tmp/realm/stash
        acl_file = /tmp/realm/acl
    }
EOF
    export KRB5_KDC_PROFILE=/tmp/realm/kdc.conf
    kdb5_util create -s -r TEST -P master >/dev/null 2>&1
    local name
    for name in nfs/server.test nfs/client.test alice bob; do
        kadmin.local -q "addprinc -randkey $name" >/dev/null
    done
    kadmin.local -q 'ktadd -k /tmp/realm/nfs.keytab nfs/server.test' >/dev/null
    kadmin.local -q 'ktadd -k /etc/krb5.keytab nfs/client.test' >/dev/null
    for name in alice bob; do
        kadmin.local -q "ktadd -k /tmp/realm/$name.keytab $name" >/dev/null
        chmod 644 "/tmp/realm/$name.keytab"
    done
    chmod 755 /tmp/realm
    nsenter --net=/run/netns/ours krb5kdc -n >/tmp/realm/kdc.log 2>&1 &
    is_bound() { ip netns exec ours ss -Hlun 'sport = :88' | grep -q .; }
    wait_until 60 is_bound
}
