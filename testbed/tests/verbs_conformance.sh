# title: the conformance suite over siw, over rxe, and between siw and our user-space iWARP in both directions
# limit: 240
hosts nobody
kernel_end siw
export THRUWAY_VERBS_ADDRESS=10.0.0.254
THRUWAY_VERBS_DEVICE=siw0 "$VERBS_TESTS" --ignored --test-threads=1 verbs::
# One address leads to one device.
rdma link del siw0
rdma link add rxe0 type rxe netdev eth0
THRUWAY_VERBS_DEVICE=rxe0 "$VERBS_TESTS" --ignored --test-threads=1 verbs::both_ends
