# title: on a machine with two memory nodes each session's threads and blocks are on one, and sessions take turns
# backend: qemu
# nodes: 2
# limit: 120
mkdir /tmp/served
head -c 8M /dev/urandom >/tmp/large
"$THRUWAY" serve --quiet --listen 127.0.0.1:7117 --export e=/tmp/served &
daemon=$!
until_listening - 7117
for n in 1 2; do
    "$THRUWAY" cp --quiet --bwlimit 1M /tmp/large tw://127.0.0.1/e/copy$n & clients[n]=$!
done
# Both sessions are in progress, and their pools have been touched.
bound() { grep -ch "Cpus_allowed_list:[[:space:]]*$1\$" $(grep -l "^session" /proc/$daemon/task/*/comm | sed 's/comm/status/') /dev/null | grep -c 1; }
are_apart() {
    [[ $(bound 0) == 1 && $(bound 1) == 1 ]] && grep -q "prefer.*:0 " /proc/$daemon/numa_maps && grep -q "prefer.*:1 " /proc/$daemon/numa_maps
}
if ! wait_until 60 are_apart; then
    grep Cpus_allowed_list /proc/$daemon/task/*/status >&2
    grep -v default /proc/$daemon/numa_maps >&2
    exit 1
fi
wait "${clients[@]}"
same /tmp/large /tmp/served/copy1
same /tmp/large /tmp/served/copy2
"$THRUWAY" cp --stats /tmp/large tw://127.0.0.1/e/copy3 2>&1 | grep "on node 1"
