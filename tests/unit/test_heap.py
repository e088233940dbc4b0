"""Large blocks that are freed go back to the system while an engine is built."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A freed block that was the largest so far raises glibc's limit; the next one of its size then
# lies in the heap, below a small block that keeps it there.
PROGRAM = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
SIZE = 16 << 20

def resident():
    return 1024 * int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])

if sys.argv[1] == "ours":
    from dflash_trt.build.heap import return_large_blocks
    return_large_blocks()
libc.free(libc.malloc(SIZE))
block, above = libc.malloc(SIZE), None
ctypes.memset(block, 1, SIZE)
above = libc.malloc(1000)
before = resident()
libc.free(block)
print((before - resident()) / SIZE)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_freed_block_goes_back_to_the_system() -> None:
    returned = {
        way: float(subprocess.check_output([sys.executable, "-c", PROGRAM, way], text=True))
        for way in ("ours", "default")
    }
    assert returned["ours"] > 0.9
    assert returned["default"] < 0.1  # else glibc has changed, and there is nothing to set
