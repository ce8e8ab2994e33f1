# title: streams and one-sided operations over siw, over rxe, and between siw and our user-space iWARP in both directions
# limit: 400
hosts nobody
kernel_end siw
export THRUWAY_VERBS_ADDRESS=10.0.0.254
# one_way SERVER CLIENT [OPTION...]
one_way() {
    echo "$1 <- $2"
    THRUWAY_STREAMS_SERVER=$1 THRUWAY_STREAMS_CLIENT=$2 "$STREAM_TESTS" --test-threads=1 "${@:3}"
}
one_way siw0 siw0
# The guest's kernel has crashed when siw refused one user-space client after the other.
one_way siw0 iwarp --skip requests_that_are_not_expected
one_way iwarp siw0
# One address leads to one device.
rdma link del siw0
rdma link add rxe0 type rxe netdev eth0
one_way rxe0 rxe0
