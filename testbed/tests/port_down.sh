# title: a transfer whose RDMA port goes down is told so at once at both ends, and over siw goes on when it is up again
# limit: 150
hosts ours
mkdir /tmp/served
head -c 24M /dev/urandom >/tmp/large

# until_said TEXT FILE: waits until a log has it.
until_said() {
    wait_until 60 grep -q "$1" "$2" || { echo "$2 does not say: $1" >&2; cat "$2" >&2; return 1; }
}

# down_and_up KIND PORT: a transfer over that kind of device, both ends of which are on it, loses its port in the middle.
down_and_up() {
    rm -f /tmp/served/* /tmp/report /tmp/said /tmp/daemon
    "$THRUWAY" serve --json --anonymous --provider verbs --listen 10.0.0.254:72"$2" --export e=/tmp/served \
        >/tmp/daemon 2>/tmp/daemon.log & daemon=$!
    until_written /tmp/daemon
    "$THRUWAY" cp -v --json --provider verbs --bwlimit 8M --retries 30 /tmp/large tw://10.0.0.254:72"$2"/e/copy \
        >/tmp/report 2>/tmp/said & client=$!
    # Some of it has been written when the port goes.
    has_some() { (($(du -sk /tmp/served | cut -f1) > 4000)); }
    wait_until 60 has_some
    ip link set eth0 down
    # The connection's error is the port's, not that of a retransmission that was given up later.
    until_said "port 1 of ${1}0 went down" /tmp/said
    # Over siw the end that is told first can close the connection before the other is told.
    told="port 1 of ${1}0 went down"
    [[ $1 != siw ]] || told="$told\|the peer closed the connection"
    until_said "$told" /tmp/daemon.log
    # No call is made through a port that is down.
    until_said "port 1 of ${1}0 is down" /tmp/said
    ip link set eth0 up
    [[ $1 == siw ]] || return 0
    wait $client || { cat /tmp/said >&2; return 1; }
    same /tmp/large /tmp/served/copy
    grep -q '"retries":0' /tmp/report && return 1
    kill $daemon
    wait $daemon || true
    echo "$1: done"
}

kernel_end siw
down_and_up siw 01
rdma link del siw0
rdma link add rxe0 type rxe netdev eth0
# rxe (Linux 7.3) never sends another message of its connection manager once one could not be sent, and ending a connection
# sends one: until the device is made again, nobody connects through it.
down_and_up rxe 02
