"""Extended sockets on a connection that thruway run may have accelerated: LIBRARY server | client PORT."""

import ctypes
import socket
import sys

tw = ctypes.CDLL(sys.argv[1])
for name in ("tw_connect", "tw_accept"):
    getattr(tw, name).restype = ctypes.c_void_p
    getattr(tw, name).argtypes = [ctypes.c_int, ctypes.c_void_p]
tw.tw_error.restype = ctypes.c_char_p
for name in ("tw_send", "tw_recv"):
    getattr(tw, name).restype = ctypes.c_ssize_t
    getattr(tw, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
tw.tw_close.argtypes = [ctypes.c_void_p, ctypes.c_int]

ROUNDS = 200


def ping(tcp, first):
    """Enough calls that the connection is accelerated, if it can be."""
    for n in range(ROUNDS):
        if first:
            tcp.sendall(b"%08d" % n)
        got = b""
        while len(got) < 8:
            part = tcp.recv(8 - len(got))
            assert part, "the end of the connection"
            got += part
        assert got == b"%08d" % n, got
        if not first:
            tcp.sendall(got)


def talk(tcp, meet, first):
    ping(tcp, first)
    extended = meet(tcp.fileno(), None)
    assert extended, tw.tw_error().decode()
    bytes_in = ctypes.create_string_buffer(5)
    if first:
        assert tw.tw_send(extended, b"hello", 5, 0) == 5
        assert tw.tw_recv(extended, bytes_in, 5, 0) == 5 and bytes_in.raw == b"world"
    else:
        assert tw.tw_recv(extended, bytes_in, 5, 0) == 5 and bytes_in.raw == b"hello"
        assert tw.tw_send(extended, b"world", 5, 0) == 5
    assert tw.tw_close(extended, 10000) == 0, tw.tw_error().decode()
    # The connection is what it was.
    ping(tcp, first)


if sys.argv[2] == "server":
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    talk(connection, tw.tw_accept, False)
else:
    talk(socket.create_connection(("127.0.0.1", int(sys.argv[3]))), tw.tw_connect, True)
print("ok", flush=True)
