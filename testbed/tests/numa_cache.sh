# title: the block cache on two memory nodes hands requests to the node that holds most of them
# nodes: 2
# limit: 240
# Pieces are as long as what lies on one node: whatever reactor has a connection, half of them are the other's.
head -c 24M /dev/urandom >/tmp/disk.img
"$THRUWAY" -v serve --json --block d=/tmp/disk.img,cache=16M --nbd 127.0.0.1:10809 >/tmp/serve.json 2>/tmp/serve.log &
daemon=$!
until_written /tmp/serve.json
nbdcopy nbd://127.0.0.1/d /tmp/first.img
nbdcopy nbd://127.0.0.1/d /tmp/second.img
same /tmp/disk.img /tmp/first.img
same /tmp/disk.img /tmp/second.img
head -c 24M /dev/urandom >/tmp/other.img
nbdcopy --flush /tmp/other.img nbd://127.0.0.1/d
kill $daemon
wait $daemon
same /tmp/disk.img /tmp/other.img
grep 'requests forwarded' /tmp/serve.log
fails grep -q ' 0 requests forwarded' /tmp/serve.log
