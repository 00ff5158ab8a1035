"""What a tensor's content, and a model's, is called.

A fingerprint is the XXH3-128 hash, as 32 hex digits, of the text ``DTYPE|d0,d1|`` followed by the raw little-endian
bytes. It names content, so the same model in other shards or in another key order has the same fingerprint. It
guards against accidents, not against an adversary.
"""

from __future__ import annotations

from collections.abc import Mapping

import xxhash


class Fingerprint:
    """The running fingerprint of one or of several arrays, fed in order.

    >>> print_ = Fingerprint()
    >>> print_.array("F32", (2,))
    >>> print_.update(bytes(8))
    >>> len(print_.hex())
    32
    """

    __slots__ = ("_hash", "update")

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.update = self._hash.update  # bound once: it is called for every block

    def array(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Begin an array; its bytes follow through `update`."""
        self.update(f"{dtype}|{','.join(map(str, shape))}|".encode())

    def hex(self) -> str:
        """Return the fingerprint of everything fed so far, 32 hex digits."""
        digest: str = self._hash.hexdigest()
        return digest


def of_bytes(data: bytes) -> str:
    """Return the fingerprint of plain bytes, such as a side file or a header's text."""
    digest: str = xxhash.xxh3_128_hexdigest(data)
    return digest


def of_model(tensors: Mapping[str, str]) -> str:
    """Return the fingerprint of a model from those of its tensors (NAME -> fingerprint, aliases left out)."""
    lines = sorted(f"{name}\t{value}\n" for name, value in tensors.items())
    return of_bytes("".join(lines).encode())
