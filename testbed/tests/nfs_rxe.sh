# title: Linux's NFS/RDMA client over rxe, every version, with a server that uses rxe through rdma-core
# limit: 600
hosts other
kernel_end rxe
share_directory
"$THRUWAY" -v serve --json --anonymous --provider verbs --share data=/tmp/served/data,squash=none --nfs 10.0.0.254:2049 \
    --nfs-rdma 10.0.0.254:20049 --state /tmp/state >/tmp/serve.json 2>/tmp/serve.log &
until_written /tmp/serve.json
# A client in user space, by the same device: what it reads is what it has written.
for registration in windows dynamic all; do
    "$THRUWAY" bench nfs --rdma --provider verbs --registration $registration --connect 10.0.0.254:20049 --share data --op read,write \
        --size 16K --depth 4 --file-size 256K --seconds 0.3 >/dev/null
done
accepted=$(grep -c 'connection accepted' /tmp/serve.log)
every_version_over_rdma 10.0.0.254
# Each version used one connection: nothing had to be recovered.
[[ $(grep -c 'connection accepted' /tmp/serve.log) == $((accepted + 4)) ]]
