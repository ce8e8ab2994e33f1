# title: `bench devices` lists what the kernel has, with its state, and what the provider can do with it
hosts nobody
kernel_end rxe
"$THRUWAY" bench devices --json >/tmp/devices
grep -q '"provider":"iwarp"' /tmp/devices
grep -q '"device":"rxe0"' /tmp/devices
grep -q '"state":"ACTIVE"' /tmp/devices
"$THRUWAY" bench devices | grep -q 'rxe0'
