# title: Linux's NFS/RDMA client over siw, every version, with a server that is iWARP in user space
# limit: 600
hosts ours
kernel_end siw
share_directory
ip netns exec ours "$THRUWAY" -v serve --json --anonymous --share data=/tmp/served/data,squash=none --nfs 10.0.0.1:2049 \
    --nfs-rdma 10.0.0.1:20049 --state /tmp/state >/tmp/serve.json 2>/tmp/serve.log &
until_written /tmp/serve.json
every_version_over_rdma 10.0.0.1
# Each version used one connection: nothing had to be recovered.
[[ $(grep -c 'connection accepted' /tmp/serve.log) == 4 ]]
