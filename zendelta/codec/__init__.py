"""One tensor's delta as a few arrays, and back. Knows nothing of files.

A new codec is a new module that fulfils `Codec`, and a line in `CODECS`.
"""

from __future__ import annotations

from zendelta.codec.dense import DENSE, NEW
from zendelta.codec.protocol import Codec
from zendelta.codec.sign import SIGN

CODECS: dict[str, Codec] = {codec.name: codec for codec in (SIGN, DENSE, NEW)}
"""Every codec by the name that ``.bd`` files use. A tensor without terms (``same``) needs none."""

__all__ = ["CODECS", "Codec"]
