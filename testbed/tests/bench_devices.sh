# title: `bench devices` lists what the kernel has, with its state, and what the provider can do with it
hosts nobody
kernel_end rxe
"$THRUWAY" bench devices --json >/tmp/devices
grep -q '"provider":"iwarp"' /tmp/devices
grep -q '"device":"rxe0"' /tmp/devices
grep -q '"state":"ACTIVE"' /tmp/devices
"$THRUWAY" bench devices >/tmp/text
grep -q 'rxe0' /tmp/text
grep -q '"auto_progress":true' /tmp/devices
# A write tells nobody at a device that serves by itself; waiting for it would be for ever.
if "$THRUWAY" bench lat --provider verbs --op write --wait event --connect 10.0.0.254:1 2>/tmp/refused; then exit 1; fi
grep -q 'with --wait poll' /tmp/refused
