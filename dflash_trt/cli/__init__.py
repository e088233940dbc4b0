"""The command line: `dflash-trt VERB`. One file per verb: parse, one library call, print."""

from dflash_trt.cli.app import main

__all__ = ["main"]
