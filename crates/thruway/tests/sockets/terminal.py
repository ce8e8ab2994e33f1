"""Starts a program in a terminal of its own, and presses ^C when it says that it is ready. Prints what it prints, and how it ends."""

import os
import pty
import sys

child, terminal = pty.fork()
if child == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
out, pressed = b"", False
while True:
    try:
        part = os.read(terminal, 4096)
    except OSError:
        break
    if not part:
        break
    out += part
    if b"ready" in out and not pressed:
        pressed = True
        os.write(terminal, b"\x03")
_, status = os.waitpid(child, 0)
print(out.decode().replace("\r", ""), end="")
print(f"status {os.WEXITSTATUS(status)}" if os.WIFEXITED(status) else f"signal {os.WTERMSIG(status)}")
