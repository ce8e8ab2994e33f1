# title: Linux's iSER initiator over rxe, to a target that uses the RDMA device
# limit: 300
hosts other
kernel_end rxe
mkdir -p /tmp/disk
truncate -s 400M /tmp/disk/a.img
"$THRUWAY" -v serve --json --anonymous --provider verbs --block a=/tmp/disk/a.img,target=t --block m=mem:400M,target=t \
    --iser 10.0.0.254:3260 >/tmp/serve.json 2>/tmp/serve.log &
until_written /tmp/serve.json
initiator_start
iscsiadm -m node -T $iqn -p 10.0.0.254:3260 --interface iser -o new >/dev/null
iscsiadm -m node -T $iqn -p 10.0.0.254:3260 --login
file_systems
iscsiadm -m node -T $iqn -p 10.0.0.254:3260 --logout
[[ $(grep -c 'iSCSI initiator logged in' /tmp/serve.log) == 1 ]]
