# title: on a long path data channels are many from the start, and more where the system keeps their buffers small; both directions, both transports
# alone: it measures its path
# limit: 120
hosts a b
for host in a b; do
    on $host tc qdisc add dev eth0 root netem delay 10ms limit 20000
    # With these a channel carries some 25 Mbit/s on this path.
    on $host sysctl -qw net.ipv4.tcp_wmem="4096 16384 65536" net.ipv4.tcp_rmem="4096 65536 65536"
done
mkdir /tmp/served
head -c 64M /dev/urandom >/tmp/large
on b "$THRUWAY" serve --quiet --anonymous --listen 10.0.0.2:7117 --export e=/tmp/served &
until_listening b 7117
for provider in iwarp tcp; do
    on a "$THRUWAY" cp -vvv --progress never --provider $provider /tmp/large tw://10.0.0.2:7117/e/$provider 2>/tmp/push
    same /tmp/large /tmp/served/$provider
    on a "$THRUWAY" cp -vvv --progress never --provider $provider tw://10.0.0.2:7117/e/$provider /tmp/back 2>/tmp/pull
    same /tmp/large /tmp/back
    grep -q "8 data channels" /tmp/push && grep -q "8 data channels" /tmp/pull || { cat /tmp/push /tmp/pull >&2; exit 1; }
    grep -q "more data channels" /tmp/push || { echo "none were added ($provider):" >&2; cat /tmp/push >&2; exit 1; }
    rm /tmp/back
done
