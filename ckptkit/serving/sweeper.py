"""Remove a folder as soon as ckptkit ends, however it ends: a program beside it, as :mod:`.keeper` is for servers.

    python -P sweeper.py FOLDER

Its stdin ends with ckptkit. ``keep`` before that leaves the folder. Standard library only.
"""

from __future__ import annotations

import shutil
import signal
import sys


def main(folder: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.stdin.buffer.read() != b"keep":
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
