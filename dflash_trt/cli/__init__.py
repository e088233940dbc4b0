"""The command line: `dflash-trt VERB`. One file per verb: parse, one library call, print."""

from dflash_trt.cli.entry import main

__all__ = ["main"]
