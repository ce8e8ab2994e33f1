# title: a user of this host who has no key and opens thousands of sessions does not keep the daemon's own user out
# limit: 120
# capture FILE: the first bytes that a client sends on its control connection.
capture() {
    timeout 20 /usr/bin/python3 -c '
import socket, sys
with socket.create_server(("127.0.0.1", 10800)) as server:
    connection, _ = server.accept()
    open(sys.argv[1], "wb").write(connection.recv(1 << 16))' "$1" &
    until_listening - 10800
    fails "$THRUWAY" --quiet ls tw://127.0.0.1:10800/ 2>/dev/null
    wait $!
}

mkdir -p /tmp/served /tmp/tree
head -c 1M /dev/urandom >/tmp/tree/file
capture /tmp/one
capture /tmp/other
THRUWAY_LOG=warn "$THRUWAY" serve --listen 127.0.0.1:0 --export x=/tmp/served --json >/tmp/serve.json 2>/tmp/served.log &
daemon=$!
until_written /tmp/serve.json
port=$(sed -n 's/.*127\.0\.0\.1:\([0-9]*\)".*/\1/p' /tmp/serve.json | head -1)
ulimit -n 8192
# Where the stranger can read it.
cp "$(dirname "${BASH_SOURCE[0]}")/../flood.py" /tmp/flood.py
chmod 644 /tmp/flood.py /tmp/one /tmp/other
setpriv --reuid=65534 --regid=65534 --clear-groups \
    /usr/bin/python3 /tmp/flood.py "$port" /tmp/one /tmp/other >/tmp/flood 2>/tmp/flooded &
stranger=$!
wait_until 60 test -s /tmp/flood || { echo "the flood does not get going"; cat /tmp/served.log /tmp/flooded; exit 1; }
for i in {1..10}; do
    timeout 10 "$THRUWAY" --quiet cp -r /tmp/tree "tw://127.0.0.1:$port/x/$i"
    same /tmp/tree "/tmp/served/$i"
done
kill -0 $stranger
kill $stranger $daemon
