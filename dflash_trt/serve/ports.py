"""Ports that a server listens at: looked at before an engine is loaded, which may take minutes."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from dflash_trt.errors import ConfigError
from dflash_trt.serve.addresses import is_ipv6


def check_ports(address: str, ports: Mapping[str, int]) -> None:
    """Bind each port and let it go. `ports`: flag -> port.

    Raises `ConfigError` that names the flag, for a port that is none, given twice, or taken.
    """
    flags: dict[int, str] = {}
    for flag, port in ports.items():
        if not 1 <= port <= 65535:
            raise ConfigError(f"{flag} is {port}, allowed are 1 to 65535")
        if port in flags:
            raise ConfigError(
                f"{flags[port]} and {flag} are both {port}", hint=f"choose another {flag}"
            )
        flags[port] = flag
    for flag, port in ports.items():
        bind(address, port, flag).close()


def in_figures(address: str) -> str:
    """An address without names. Triton reads none: it listens at another address, and says nothing.

    Raises `ConfigError` when it is not one to listen at.
    """
    with bind(address, 0, "--address") as made:
        found: str = made.getsockname()[0]
    return found


def bind(address: str, port: int, flag: str) -> socket.socket:
    """A bound socket. Raises `ConfigError`, naming the flag, when address or port cannot be had."""
    family = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
    # With the protocol named, asyncio switches Nagle's delay off: it costs a stream 40 ms.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((address, port))
    except (OSError, ValueError, TypeError) as error:  # not an OSError: no name of a host at all
        made.close()
        number = error.errno if isinstance(error, OSError) else None
        if number not in (errno.EADDRINUSE, errno.EACCES):
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"--address {address!r} is not one to listen at: {reason}",
                hint="0.0.0.0 is every IPv4 address of this machine, :: every IPv6 one, "
                "127.0.0.1 and ::1 only itself",
            ) from error
        raise ConfigError(
            f"{flag} {port}: the port cannot be had at {address}: {error.strerror}",  # type: ignore[union-attr]
            hint=f"another server may run there; choose another {flag}"
            if number == errno.EADDRINUSE
            else f"ports below 1024 need a right that this user lacks; choose another {flag}",
        ) from error
    return made
