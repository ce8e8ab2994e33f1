# title: unmodified programs between two hosts over relays: in user space, siw to user space, siw, rxe; relays that are killed, or not trusted
# limit: 500
hosts a b
kernel_end siw
peers=$PEERS_PY
export SLOW=1
mkdir /tmp/keys
for name in a b; do
    "$THRUWAY" keygen --quiet --output /tmp/keys/$name
done
cat /tmp/keys/*.pub >/tmp/keys/peers

# start NAME HOST PROVIDER: a relay with a key of its own (HOST `-`: this namespace).
start() {
    local try=()
    [[ $2 == - ]] || try=(ip netns exec "$2")
    # The log of an earlier relay says "relay at", too.
    rm -f "/tmp/relay-$1-$3"
    "${try[@]}" "$THRUWAY" -v relay --key /tmp/keys/"$1" --peers /tmp/keys/peers --provider "$3" 2>"/tmp/relay-$1-$3" &
    relay=$!
    wait_until 30 grep -q 'relay at' "/tmp/relay-$1-$3"
}

# run HOST OPTION... -- PROGRAM...: by thruway run there.
run() {
    local try=()
    [[ $1 == - ]] || try=(ip netns exec "$1")
    shift
    "${try[@]}" "$THRUWAY" run --remote --after-calls 1 "$@"
}

# counted NAME FILE: a number of --stats --json.
counted() {
    sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p" "$2" | tail -n 1
}

# talk WHAT SERVER_HOST SERVER_ADDRESS CLIENT_HOST: bytes there and back, in several kinds of servers.
talk() {
    local kind port server
    for kind in echo_server epoll_server; do
        rm -f /tmp/port
        ADDRESS=$3 run "$2" -- /usr/bin/python3 "$peers" $kind >/tmp/port &
        server=$!
        until_written /tmp/port
        ADDRESS=$3 run "$4" --stats --json -- /usr/bin/python3 "$peers" echo_client "$(cat /tmp/port)" 3 12 >/tmp/counted
        echo "$1, $kind: $(counted relayed /tmp/counted) relayed, $(counted ring_bytes /tmp/counted) bytes by RDMA, $(counted overflow_bytes /tmp/counted) by TCP"
        # On a busy machine one may be over before the relay has come to it.
        (($(counted relayed /tmp/counted) >= 1 && $(counted ring_bytes /tmp/counted) > 10000))
        kill $server
        pkill -P $server || true
        wait $server || true
    done
}

# Two hosts, both in user space.
start a a iwarp
relay_a=$relay
start b b iwarp
relay_b=$relay
talk "user space" a 10.0.0.1 b

# victims HOW: what a program learns whose way to the other host goes, while it waits.
victims() {
    local how
    for how in recv epoll; do
        rm -f /tmp/port /tmp/said
        ADDRESS=10.0.0.1 run a -- /usr/bin/python3 "$peers" silent_server >/tmp/port &
        local server=$!
        until_written /tmp/port
        ADDRESS=10.0.0.1 run b -- /usr/bin/python3 -u "$peers" victim "$(cat /tmp/port)" $how >/tmp/said &
        local victim=$!
        wait_until 60 grep -q ready /tmp/said
        "$@"
        wait_until 60 grep -q over /tmp/said
        wait $victim || true
        kill $server
        wait $server || true
    done
}
lose_there() { kill -9 $relay_a; wait $relay_a || true; start a a iwarp; relay_a=$relay; }
lose_here() { kill -9 $relay_b; wait $relay_b || true; start b b iwarp; relay_b=$relay; }
victims lose_there
victims lose_here
echo "relays that were killed: both ends learned it"
# And what comes afterwards finds the new ones, some seconds after the old ones were missed.
rm -f /tmp/port
ADDRESS=10.0.0.2 run b -- /usr/bin/python3 "$peers" echo_server >/tmp/port &
server=$!
until_written /tmp/port
is_relayed() {
    ADDRESS=10.0.0.2 run a --stats --json -- /usr/bin/python3 "$peers" echo_client "$(cat /tmp/port)" 1 12 >/tmp/counted
    (($(counted relayed /tmp/counted) >= 1))
}
wait_until 60 is_relayed
kill $server
pkill -P $server || true
wait $server || true
talk "after that" b 10.0.0.2 a
kill $relay_b
wait $relay_b || true

# A relay that is not trusted: connections stay with TCP.
head -n 1 /tmp/keys/b.pub >/tmp/keys/only-b
ip netns exec b "$THRUWAY" relay --key /tmp/keys/b --peers /tmp/keys/only-b --provider iwarp 2>/tmp/relay-distrust &
relay_b=$!
wait_until 30 grep -q 'relay at' /tmp/relay-distrust
rm -f /tmp/port
ADDRESS=10.0.0.1 run a -- /usr/bin/python3 "$peers" echo_server >/tmp/port &
server=$!
until_written /tmp/port
ADDRESS=10.0.0.1 run b --stats --json -- /usr/bin/python3 "$peers" echo_client "$(cat /tmp/port)" 2 5 >/tmp/counted
[[ $(counted relayed /tmp/counted) == 0 && $(counted relay_not_found /tmp/counted) == 2 ]]
grep -q 'not in /tmp/keys/only-b' /tmp/relay-distrust
kill $server $relay_b
wait $server $relay_b || true

# A kernel's RDMA device at one end.
start b - verbs
relay_b=$relay
talk "siw and user space" - 10.0.0.254 a
talk "user space and siw" a 10.0.0.1 -
kill $relay_a $relay_b
wait $relay_a $relay_b || true

# And at both: one address leads to one device, so both ends are on one host.
printf '[[rule]]\nports = "1-65535"\nmode = "relay"\n' >/tmp/policy.toml
run() { shift; "$THRUWAY" run --remote --policy /tmp/policy.toml --after-calls 1 "$@"; }
start b - verbs
relay_b=$relay
talk "siw" - 10.0.0.254 -
kill $relay_b
wait $relay_b || true
rdma link del siw0
rdma link add rxe0 type rxe netdev eth0
start b - verbs
talk "rxe" - 10.0.0.254 -
