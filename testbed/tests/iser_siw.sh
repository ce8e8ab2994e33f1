# title: Linux's iSER initiator over siw, to a target that is iWARP in user space
# limit: 240
hosts ours
kernel_end siw
mkdir -p /tmp/disk
truncate -s 400M /tmp/disk/a.img
ip netns exec ours "$THRUWAY" -v serve --json --anonymous --block a=/tmp/disk/a.img,target=t --block m=mem:400M,target=t \
    --iser 10.0.0.1:3260 >/tmp/serve.json 2>/tmp/serve.log &
until_written /tmp/serve.json
initiator_start
iscsiadm -m node -T $iqn -p 10.0.0.1:3260 --interface iser -o new >/dev/null
iscsiadm -m node -T $iqn -p 10.0.0.1:3260 --login
file_systems
iscsiadm -m node -T $iqn -p 10.0.0.1:3260 --logout
# One session, from beginning to end: nothing had to be recovered.
[[ $(grep -c 'iSCSI initiator logged in' /tmp/serve.log) == 1 ]]
