# title: our iWARP, in user space, serves and calls Linux's siw: rping's protocol, every byte checked by both ends
# limit: 120
hosts ours
kernel_end siw
port=7100
# rping's thread for events may fail when all is done, because its main thread has closed what that waits for; nothing else may.
is_done_but_for_its_thread() {
    grep -q 'rdma_get_cm_event: Bad file descriptor' /tmp/log
}
for size in 64 4096 65000; do
    for crc in on off; do
        port=$((port + 1))
        rping -s -a 10.0.0.254 -p $port -C 20 -S $size -V >/dev/null 2>/tmp/log & server=$!
        until_listening - $port
        on ours "$THRUWAY" bench rping --connect 10.0.0.254:$port --count 20 --size $size --crc $crc
        wait $server || is_done_but_for_its_thread || { cat /tmp/log; exit 1; }
        port=$((port + 1))
        on ours "$THRUWAY" bench rping --listen 10.0.0.1:$port --once --crc $crc --quiet & server=$!
        until_listening ours $port
        rping -c -a 10.0.0.1 -p $port -C 20 -S $size -V -v >/tmp/pings 2>/tmp/log ||
            is_done_but_for_its_thread || { cat /tmp/log; exit 1; }
        [[ $(grep -ac '^ping data' /tmp/pings) == 20 ]]
        wait $server
    done
done
