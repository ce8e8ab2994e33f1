# title: a transfer whose RDMA device is removed in the middle goes on when the device is back, and sends nothing twice
# limit: 120
hosts ours
kernel_end siw
mkdir /tmp/served
head -c 48M /dev/urandom >/tmp/large
on ours "$THRUWAY" serve --quiet --anonymous --listen 10.0.0.1:7117 --export e=/tmp/served &
until_listening ours 7117
"$THRUWAY" cp -v --json --provider verbs --bwlimit 16M --retries 30 /tmp/large tw://10.0.0.1:7117/e/copy \
    >/tmp/report 2>/tmp/said & client=$!
# Some of it has been written when the device goes.
has_some() { (($(du -sk /tmp/served | cut -f1) > 8000)); }
wait_until 60 has_some
rdma link del siw0
rdma link | grep siw0 && exit 1
# The client has seen it go.
lost() { grep -q "trying again" /tmp/said; }
wait_until 60 lost
rdma link add siw0 type siw netdev eth0
wait $client || { cat /tmp/said >&2; exit 1; }
same /tmp/large /tmp/served/copy
cat /tmp/report
grep -q '"retries":0' /tmp/report && exit 1
grep -q '"resumed_bytes":0' /tmp/report && { cat /tmp/said >&2; exit 1; }
true
