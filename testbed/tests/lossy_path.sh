# title: a tree arrives whole over a path that delays, loses and reorders packets, by both transports
# limit: 180
hosts a b
on a tc qdisc add dev eth0 root netem delay 5ms 2ms loss 1% reorder 5%
on b tc qdisc add dev eth0 root netem delay 5ms loss 1%
mkdir /tmp/served
cp -r /etc /tmp/tree 2>/dev/null || true
head -c 8M /dev/urandom >/tmp/tree/large
on b "$THRUWAY" serve --quiet --anonymous --listen 10.0.0.2:7117 --export e=/tmp/served &
until_listening b 7117
for provider in iwarp tcp; do
    on a "$THRUWAY" cp -rp --quiet --provider $provider /tmp/tree tw://10.0.0.2:7117/e/$provider
    same /tmp/tree /tmp/served/$provider
done
