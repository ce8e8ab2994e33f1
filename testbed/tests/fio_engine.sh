# title: fio verifies what it wrote by RDMA with our engine: user space to user space, siw to siw, user space to siw, rxe to rxe
# limit: 150
hosts ours
kernel_end siw

# lend HOST PORT [OPTION...]: memory for fio, ready when this returns.
lend() {
    local host=$1 port=$2 address=10.0.0.254 run=()
    shift 2
    [[ $host == - ]] || { address=10.0.0.1; run=(ip netns exec "$host"); }
    "${run[@]}" "$THRUWAY" bench region --json --listen "$address:$port" --size 16M "$@" >"/tmp/region-$port" &
    region=$!
    until_written "/tmp/region-$port"
}

# drive HOST ADDRESS PORT PROVIDER: writes all of it in random order from two jobs, and verifies it; then a mixture.
drive() {
    local run=()
    [[ $1 == - ]] || run=(ip netns exec "$1")
    run+=(fio --minimal "--ioengine=external:$FIO_ENGINE" "--hostname=$2" "--port=$3" "--provider=$4" --exitall_on_error)
    "${run[@]}" --name=verify --rw=randwrite --bsrange=512-64k --bs_unaligned=0 --iodepth=16 --numjobs=2 --size=8M \
        --offset_increment=8M --verify=crc32c --verify_fatal=1 --do_verify=1 --fsync=64 >/dev/null
    "${run[@]}" --name=mixed --rw=randrw --bs=16k --iodepth=8 --size=16M --number_ios=2000 >/dev/null
    kill $region
    wait $region || true
    echo "$1 to $2 by $4: done"
}

lend ours 7301
drive ours 10.0.0.1 7301 iwarp
lend - 7302 --provider verbs
drive - 10.0.0.254 7302 verbs
lend - 7303 --provider verbs
drive ours 10.0.0.254 7303 iwarp
rdma link del siw0
rdma link add rxe0 type rxe netdev eth0
lend - 7304 --provider verbs
drive - 10.0.0.254 7304 verbs
# Nobody there, and somebody who lends nothing: said, not waited for.
fails fio --name=nobody "--ioengine=external:$FIO_ENGINE" --hostname=10.0.0.1 --port=7309 --rw=read >/tmp/said 2>&1
grep -q "Connection refused" /tmp/said || { cat /tmp/said; exit 1; }
