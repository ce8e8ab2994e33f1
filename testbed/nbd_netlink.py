"""Gives sockets that are in NBD transmission to Linux's client: nbd_netlink.py connect|reconnect|disconnect INDEX [EXPORT PORT COUNT].

nbd-client cannot replace the connections of a device that is in use; the kernel can, when it is told to by netlink, and
lets requests wait meanwhile.
"""

import socket
import struct
import sys

CONNECT, DISCONNECT, RECONFIGURE = 1, 2, 3
INDEX, SIZE, BLOCK, TIMEOUT, SERVER_FLAGS, CLIENT_FLAGS, SOCKETS, DEAD_CONN = 1, 2, 3, 4, 5, 6, 7, 8
NESTED = 0x8000


def handshake(export, port):
    """A connection in transmission; the size and flags of the export."""
    s = socket.create_connection(("127.0.0.1", port))
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    take = lambda n: s.recv(n, socket.MSG_WAITALL)
    take(18)
    name = export.encode()
    data = struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
    s.sendall(struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 7, len(data)) + data)
    size = flags = None
    while True:
        _, _, kind, length = struct.unpack(">QIII", take(20))
        body = take(length) if length else b""
        if kind == 1:
            return s, size, flags
        if kind & 0x80000000:
            sys.exit(f"refused: {kind:#x} {body}")
        if body[:2] == b"\0\0":
            size, flags = struct.unpack(">QH", body[2:12])


def attr(kind, data):
    return struct.pack("=HH", 4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


class Netlink:
    def __init__(self):
        self.s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 16)
        self.s.bind((0, 0))
        answer = self.send(0x10, 3, attr(2, b"nbd\0"))
        self.family = None
        while answer:
            length, kind = struct.unpack("=HH", answer[:4])
            if kind == 1:
                self.family = struct.unpack("=H", answer[4:6])[0]
            answer = answer[(length + 3) // 4 * 4:]

    def send(self, family, command, attributes):
        """Asks, and returns the attributes of the answer, if there is one before the acknowledgement."""
        body = struct.pack("=BBH", command, 1, 0) + attributes
        self.s.send(struct.pack("=IHHII", 16 + len(body), family, 1 | 4, 1, 0) + body)
        answer = b""
        while True:
            data = self.s.recv(65536)
            while data:
                length, kind = struct.unpack("=IH", data[:6])
                if kind == 2:
                    error = struct.unpack("=i", data[16:20])[0]
                    if error:
                        sys.exit(f"netlink: error {-error}")
                    return answer
                answer = data[20:length]
                data = data[(length + 3) // 4 * 4:]


def main():
    verb, index = sys.argv[1], int(sys.argv[2])
    netlink = Netlink()
    which = attr(INDEX, struct.pack("=I", index))
    if verb == "disconnect":
        netlink.send(netlink.family, DISCONNECT, which)
        return
    export, port, count = sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    made = [handshake(export, port) for _ in range(count)]
    items = b"".join(attr(1 | NESTED, attr(1, struct.pack("=I", s.fileno()))) for s, _, _ in made)
    sockets = attr(SOCKETS | NESTED, items)
    if verb == "reconnect":
        netlink.send(netlink.family, RECONFIGURE, which + sockets)
        return
    _, size, flags = made[0]
    u64 = lambda kind, value: attr(kind, struct.pack("=Q", value))
    # A connection that has died is waited for for a minute.
    netlink.send(netlink.family, CONNECT, which + u64(SIZE, size) + u64(BLOCK, 4096) + u64(TIMEOUT, 30) + u64(SERVER_FLAGS, flags)
                 + u64(DEAD_CONN, 60) + sockets)


main()
