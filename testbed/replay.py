#!/usr/bin/env python3
"""Reads the log of a dm-log-writes device, in the order in which writes became durable.

The device logs a write when a flush, or its own FUA, has made it durable; a mark stands where `dmsetup message DEVICE 0
mark NAME` put it. What comes before an entry is what a disk with a volatile cache has when the power fails there.

    replay.py points LOG                   a line for each entry after which the power may fail: number, mark or `-`
    replay.py apply LOG IMAGE FROM TO      does the entries FROM to TO (without it) to an image

The format is that of drivers/md/dm-log-writes.c, version 1.
"""

import os
import struct
import sys

MAGIC = 0x6A736677736872
FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8


def entries(log):
    """Yields offset and length on the device, flags, the mark, and where in the log the data are."""
    magic, version, count, sector = struct.unpack("<QQQI", log.read(28))
    if (magic, version) != (MAGIC, 1):
        sys.exit("replay.py: this is no log of dm-log-writes")
    place = sector
    for _ in range(count):
        log.seek(place)
        head = log.read(sector)
        at, length, flags, data_len = struct.unpack("<QQQQ", head[:32])
        mark = head[32 : 32 + data_len].decode() if flags & MARK else None
        place += sector
        yield at * sector, length * sector, flags, mark, place
        if not flags & (DISCARD | MARK):
            place += length * sector


def points(log):
    for number, (_, _, flags, mark, _) in enumerate(entries(log)):
        if flags & (FLUSH | FUA | MARK):
            print(number + 1, mark or "-")


def apply(log, image, first, last):
    for number, (at, length, flags, mark, place) in enumerate(entries(log)):
        if number < first or number >= last or mark is not None or length == 0:
            continue
        if flags & DISCARD:
            # Some disks keep what is discarded and some do not; these do not.
            os.pwrite(image, bytes(length), at)
            continue
        log.seek(place)
        os.pwrite(image, log.read(length), at)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    with open(sys.argv[2], "rb") as log:
        if sys.argv[1] == "points":
            points(log)
        else:
            image = os.open(sys.argv[3], os.O_RDWR)
            apply(log, image, int(sys.argv[4]), int(sys.argv[5]))


main()
