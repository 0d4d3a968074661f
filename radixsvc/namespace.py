"""Namespaces: who sees whose prefixes. Derived by the server, never taken from a client."""

from __future__ import annotations


def namespace_key(name: str, salt: str = "") -> str:
    """A namespace for a configured key's name and a client's salt; no two pairs share one."""
    return f"{len(name)}:{name}{salt}"


def account_name(namespace: str) -> str:
    """The key's name in a namespace made by `namespace_key`; any other namespace as it is."""
    length, colon, rest = namespace.partition(":")
    return rest[: int(length)] if colon and length.isdecimal() else namespace
