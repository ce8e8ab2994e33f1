# title: a full ext4 is reported, nothing half done appears, and the same command goes on when there is room
hosts a
mkdir /tmp/served
head -c 40M /dev/urandom >/tmp/large
truncate -s 32M /tmp/disk
mkfs.ext4 -q -m 0 /tmp/disk
mount -o loop /tmp/disk /tmp/served
"$THRUWAY" serve --quiet --listen 127.0.0.1:7117 --export e=/tmp/served &
until_listening - 7117
fails "$THRUWAY" cp --quiet /tmp/large tw://127.0.0.1:7117/e/copy 2>/tmp/said
grep -q "No space left on device" /tmp/said
[[ ! -e /tmp/served/copy ]]
truncate -s 80M /tmp/disk
losetup -c "$(losetup -nO NAME -j /tmp/disk)"
resize2fs "$(losetup -nO NAME -j /tmp/disk)" 2>/dev/null
"$THRUWAY" cp --json /tmp/large tw://127.0.0.1:7117/e/copy >/tmp/result
same /tmp/large /tmp/served/copy
resumed=$(grep -o '"resumed_bytes":[0-9]*' /tmp/result | cut -d: -f2)
((resumed > 10000000)) || { echo "only $resumed bytes were resumed"; exit 1; }
