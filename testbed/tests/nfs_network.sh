# title: NFS over a network that is cut for longer than a lease, and over a slow one; qemu's own client of NFS
# limit: 240
hosts ours a b
told_apart a b
share_directory
SHARES=(--share data=/tmp/served/data,squash=none --nfs-rpcbind own --nfs-lease 5)
serve_shares
mount_as a 4.2 /data /mnt/a
mount_as b 4.2 /data /mnt/b
nsenter --net=/run/netns/a mount -t nfs -o vers=3,proto=tcp,nolock 10.0.0.1:/data /mnt/n

echo '--- a cut network'
head -c 40M /dev/urandom >/tmp/random
exec 7>/mnt/a/locked
flock -n 7
for at in /mnt/a/four /mnt/n/three; do
    dd if=/tmp/random of=$at bs=64k conv=fsync status=none &
    copies+=($!)
done
has_begun() { [[ -s /tmp/served/data/four && -s /tmp/served/data/three ]]; }
wait_until 60 has_begun
ip link set p-a down
# Others are served meanwhile.
end=$((SECONDS + 15))
while ((SECONDS < end)); do
    dd if=/tmp/random of=/mnt/b/other bs=1M count=4 conv=fsync status=none
    cmp -n 4M /tmp/random /mnt/b/other
done
ip link set p-a up
wait "${copies[@]}"
echo 3 >/proc/sys/vm/drop_caches
for at in /mnt/a/four /mnt/n/three /tmp/served/data/four /tmp/served/data/three /mnt/b/three; do
    cmp /tmp/random $at
done
# The lease was over, and no other client wanted what it had.
fails flock -n /mnt/b/locked true
exec 7>&-
flock -n /mnt/b/locked true
rm /mnt/a/*

echo '--- a slow network'
for delay in 25; do
    for host in ours a; do
        on $host tc qdisc replace dev eth0 root netem delay ${delay}ms
    done
    for at in /mnt/a /mnt/n; do
        cp -a /usr/share/zoneinfo/America/Argentina $at/tree
        echo 3 >/proc/sys/vm/drop_caches
        same /usr/share/zoneinfo/America/Argentina $at/tree
        rm -r $at/tree
        fio --name=v --directory=$at --size=4M --bsrange=4k-256k --rw=randrw --verify=crc32c --verify_fatal=1 \
            --ioengine=psync --numjobs=2 --output=/tmp/fio || { cat /tmp/fio; exit 1; }
        rm $at/*
    done
done
for host in ours a; do on $host tc qdisc del dev eth0 root; done

echo "--- qemu's client"
head -c 5M /dev/urandom >/tmp/image
qemu() { on a "$@" >/tmp/qemu 2>&1 || { cat /tmp/qemu; return 1; }; }
qemu qemu-img convert -f raw -O qcow2 /tmp/image nfs://10.0.0.1/data/image
qemu qemu-img compare -f raw -F qcow2 /tmp/image nfs://10.0.0.1/data/image
qemu qemu-io -f qcow2 -c 'write -P 7 1M 300K' -c flush -c 'read -P 7 1M 300K' nfs://10.0.0.1/data/image
fails grep -i 'fail' /tmp/qemu
qemu qemu-img check nfs://10.0.0.1/data/image
[[ $(qemu-img info --output=json /tmp/served/data/image | grep -c '"format": "qcow2"') == 1 ]]

umount /mnt/n /mnt/a /mnt/b
kill $daemon
wait $daemon
fails grep -E 'WARN|ERROR' /tmp/said
umount /tmp/served
