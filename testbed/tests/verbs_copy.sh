# title: trees travel over siw, over rxe, and between siw and our user-space iWARP, both ways
# limit: 150
hosts ours
kernel_end siw
cp -r /etc /tmp/tree 2>/dev/null || true
head -c 20M /dev/urandom >/tmp/tree/large
port=7200

# serve NAME [HOST] [OPTION...]: a daemon of its own export, ready when this returns.
serve() {
    local name=$1 host=$2 address=10.0.0.254
    shift 2
    [[ $host == - ]] || address=10.0.0.1
    port=$((port + 1))
    url=tw://$address:$port/e
    mkdir "/tmp/$name"
    set -- "$THRUWAY" serve --json --anonymous --listen "$address:$port" --export "e=/tmp/$name" "$@"
    [[ $host == - ]] || set -- ip netns exec "$host" "$@"
    "$@" >"/tmp/$name.json" &
    daemon=$!
    until_written "/tmp/$name.json"
}

# there_and_back NAME HOST PROVIDER: pushes the tree, pulls it back, compares.
there_and_back() {
    local run=("$THRUWAY")
    [[ $2 == - ]] || run=(ip netns exec "$2" "$THRUWAY")
    "${run[@]}" cp -rp --quiet --provider "$3" /tmp/tree "$url/"
    same /tmp/tree "/tmp/$1/tree"
    "${run[@]}" cp -rp --quiet --provider "$3" "$url/tree" "/tmp/back-$1"
    same /tmp/tree "/tmp/back-$1"
    kill $daemon
    wait $daemon || true
    echo "$1: done"
}

serve siw-to-siw - --provider verbs
there_and_back siw-to-siw - verbs
serve user-to-siw - --provider verbs
there_and_back user-to-siw ours iwarp
serve siw-to-user ours
there_and_back siw-to-user - verbs
rdma link del siw0
rdma link add rxe0 type rxe netdev eth0
serve rxe-to-rxe - --provider verbs
there_and_back rxe-to-rxe - verbs
