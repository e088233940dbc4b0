"""One address in the spellings of those who listen at it: with IPv6 each has its own."""

from __future__ import annotations


def is_ipv6(address: str) -> bool:
    """Whether it is an IPv6 address in figures; a name or an IPv4 address has no colon."""
    return ":" in address


def in_url(address: str) -> str:
    """The address in front of a port: in a URL, and at gRPC, which joins the two itself."""
    return f"[{address}]" if is_ipv6(address) else address


def at_triton_http(address: str) -> str:
    """The address for Triton's HTTP and metrics, which have libevhtp's spelling."""
    return f"ipv6:{address}" if is_ipv6(address) else address


def to_reach(address: str) -> str:
    """In a URL, an address to ask when a server listens at `address`."""
    return in_url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address))
