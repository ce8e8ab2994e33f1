# title: hundreds of connections between our iWARP, in user space, and Linux's siw, both ways, all of them at work
# limit: 150
hosts ours
kernel_end siw
"$THRUWAY" bench bw --provider verbs --quiet --listen 10.0.0.254:7118 & siw=$!
on ours "$THRUWAY" -v bench bw --quiet --listen 10.0.0.1:7118 2>/tmp/user.log & user=$!
# Why connections ended, if it was not that the other end had finished.
trap 'grep -v "the peer closed the connection" /tmp/user.log | tail -n 20 || true' EXIT
until_listening ours 7118
until_listening - 7118
for op in send write read; do
    on ours "$THRUWAY" bench bw --wait event --connect 10.0.0.254:7118 --op $op --size 4K --qps 300 --depth 2 --seconds 2
    "$THRUWAY" bench bw --wait event --provider verbs --connect 10.0.0.1:7118 --op $op --size 4K --qps 320 --depth 2 \
        --seconds 3
done
kill $siw $user
