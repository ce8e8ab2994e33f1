"""A member of a group that lies to another one, whose program has a connection to a third. It knows what every user of the host can, and
writes on the group's board. Says in one line what has come of that.

    member.py BOARD be-found PORT          on the board, the connection is to be met at a Unix socket of this process
    member.py BOARD be-found-as PID PORT   at that of another process of this user's
    member.py BOARD offer PORT             offers memory to who can be met there
"""
import fcntl
import os
import re
import socket
import struct
import subprocess
import sys
import termios
import time

MASK = (1 << 64) - 1
ENTRIES, WAYS, ENTRY = 16 << 10, 4, 128
SO_NETNS_COOKIE = 71
F_ADD_SEALS, SEALS = 1033, 1 | 2 | 4
RING = 256 << 10


def fold(words):
    total = 0xCBF29CE484222325
    for word in words:
        total = ((total ^ word) * 0x9E3779B97F4A7C15) & MASK
        total ^= total >> 29
    return total


class Connection:
    """The program's, with the server at a port, as the kernel's socket diagnostics show it to everybody."""

    def __init__(self, port):
        deadline = time.monotonic() + 30
        while True:
            command = ["ss", "-Htne", "state", "established", "sport", "=", f":{port}"]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found = re.search(r":(\d+)\s+\S+:(\d+)\s.*\bsk:([0-9a-f]+)", told)
            if found:
                break
            assert time.monotonic() < deadline, "no connection"
        server, client = int(found[1]), int(found[2])
        self.cookie = int(found[3], 16)
        with socket.socket() as sock:
            (namespace,) = struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8))
        here = 0xFFFF << 32 | 0x7F000001
        low, high = sorted((server, client))
        self.key = [namespace, 0, here, 0, here, low << 16 | high]

    def bucket(self):
        return fold(self.key) % (ENTRIES // WAYS) * WAYS


def write(board, connection, service):
    words = [*connection.key, service, connection.cookie]
    version = 1 << 32 | 12345
    entry = struct.pack("=11Q", version, 0, *words, fold([version, *words]))
    with open(board, "r+b") as file:
        file.seek(connection.bucket() * ENTRY)
        file.write(entry.ljust(ENTRY, b"\0"))


def read(board, connection):
    """The entry of the program's: where, its version, its service."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with open(board, "rb") as file:
            for place in range(connection.bucket(), connection.bucket() + WAYS):
                file.seek(place * ENTRY)
                version, _, *words = struct.unpack("=10Q", file.read(80))
                if words[:6] == connection.key:
                    return place, version, words[6]
        time.sleep(0.001)
    sys.exit("the program has written nothing")


def name(service):
    return b"\0thruway/sockets/2/%016x" % service


def be_found(board, port):
    connection = Connection(port)
    service = int.from_bytes(os.urandom(8), "little")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(name(service))
    listener.listen()
    write(board, connection, service)
    listener.settimeout(30)
    caller, _ = listener.accept()
    print("met", flush=True)
    # A program that refuses may keep it open to its end.
    message, files, _, _ = socket.recv_fds(caller, 100, 4)
    print(f"{len(message)} bytes, {len(files)} files", flush=True)


def be_found_as(board, pid, port):
    told = subprocess.run(["ss", "-Hxlp"], capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in told.splitlines() if "@thruway/sockets/2/" in line and f"pid={pid}," in line]
    service = int(re.search(r"@thruway/sockets/2/([0-9a-f]{16})", line)[1], 16)
    write(board, Connection(port), service)
    print("written", flush=True)


def offer(board, port):
    connection = Connection(port)
    place, version, service = read(board, connection)
    memory = os.memfd_create("offer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, 4096 + 2 * RING)
    fcntl.fcntl(memory, F_ADD_SEALS, SEALS)
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.settimeout(30)
    caller.connect(name(service))
    message = b"thruway2" + struct.pack("=6Q", *connection.key) + struct.pack("=Q", connection.cookie)
    socket.send_fds(caller, [message], [memory])
    with open(board, "r+b") as file:
        file.seek(place * ENTRY + 8)
        file.write(struct.pack("=Q", version))
    # Until the program has taken it. It may keep the connection open to its end, or close it.
    while struct.unpack("i", fcntl.ioctl(caller, termios.TIOCOUTQ, b"\0" * 4))[0] > 0:
        time.sleep(0.001)
    print("taken", flush=True)


board, what, *args = sys.argv[1:]
{"be-found": be_found, "be-found-as": be_found_as, "offer": offer}[what](board, *args)
