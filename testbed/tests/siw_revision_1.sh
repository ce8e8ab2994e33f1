# title: a connection of MPA revision 1 to Linux's siw carries sends, writes and reads
# limit: 60
# Revision 1 tells no read depths: siw then grants itself no reads, so rping, whose server reads, cannot work over it; and as
# the initiator it always asks for revision 2.
hosts ours
kernel_end siw
"$THRUWAY" bench bw --provider verbs --quiet --listen 10.0.0.254:7118 &
until_listening - 7118
for crc in on off; do
    on ours "$THRUWAY" bench bw --revision 1 --crc $crc --connect 10.0.0.254:7118 --op send,write --seconds 0.5
    on ours "$THRUWAY" bench bw --revision 1 --crc $crc --connect 10.0.0.254:7118 --op read --depth 1 --seconds 0.5
    on ours "$THRUWAY" bench lat --revision 1 --crc $crc --connect 10.0.0.254:7118 --op send,write,read --seconds 0.5
done
