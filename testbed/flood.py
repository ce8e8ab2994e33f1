#!/usr/bin/env python3
"""A client that opens sessions and says no more: flood.py PORT CAPTURED CAPTURED

Each of the files has the first bytes of a client's control connection; where they differ is the token, which is another
one in every session here. Keeps up to 5,000 connections open,
opens another for each that the daemon closes, and prints a line when it has opened as many.
"""

import os
import select
import socket
import sys

CONNECTIONS = 5000


def main():
    port = int(sys.argv[1])
    one, other = (open(path, "rb").read() for path in sys.argv[2:4])
    differing = [at for at, (a, b) in enumerate(zip(one, other)) if a != b]
    token = differing[0]
    held, polled, opened = {}, select.poll(), 0
    while True:
        while len(held) < CONNECTIONS:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(one[:token] + os.urandom(16) + one[token + 16 :])
            held[connection.fileno()] = connection
            polled.register(connection, select.POLLRDHUP)
            # Also while it fills up: the daemon closes some at once.
            for number, _ in polled.poll(0):
                polled.unregister(number)
                held.pop(number).close()
            opened += 1
            if opened == CONNECTIONS:
                print("opened", flush=True)
        for number, _ in polled.poll():
            polled.unregister(number)
            held.pop(number).close()


main()
