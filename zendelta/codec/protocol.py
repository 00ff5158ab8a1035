"""What a codec is: how many bytes it takes where, and how a block becomes its arrays and comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from zendelta.codec.block import Block
from zendelta.codec.kernels.protocol import Array, Counts, Kernels
from zendelta.codec.stats import DeltaStats

Rows = tuple[int, int]


class Values(NamedTuple):
    """A block's raw bytes (uint8) and their safetensors dtype."""

    data: Array
    dtype: str


class Piece(NamedTuple):
    """Bytes for an array: `role` names it, `offset` counts from its start."""

    role: str
    offset: int
    data: memoryview


class Encoder(Protocol):
    """Turns one term's rows into arrays. `encode` may run in any thread; `fold` and `finish` in block order.

    `encode` returns a tuple, of which the second is the block's sums (float64 [rows, 3]) or None. `stats` are complete
    after `finish`.
    """

    stats: DeltaStats

    def encode(self, kernels: Kernels, base: Values | None, ft: Values, block: Block) -> Any:
        """Do a block's work and return what `fold` needs."""
        ...

    def fold(self, block: Block, done: Any) -> Iterator[Piece]:
        """Take a block's result in order, and give the bytes that are now certain."""
        ...

    def finish(self) -> Iterator[Piece]:
        """Give the bytes that only the end decides."""
        ...


class Codec(Protocol):
    """One way to store rows of a tensor.

    Attributes:
        name: as it stands in ``.bd`` files.
        roles: its arrays, in the order of the payload fingerprint.
        adds: whether it adds to the base's values or replaces them.
    """

    @property
    def name(self) -> str: ...

    @property
    def roles(self) -> tuple[str, ...]: ...

    @property
    def adds(self) -> bool: ...

    def knows(self, parameters: Mapping[str, Any]) -> bool:
        """Say whether these are parameters of a term that this version can read."""
        ...

    def arrays(
        self, dtype: str, shape: tuple[int, ...], rows: Rows, parameters: Mapping[str, Any]
    ) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the dtype and shape of each role's array for rows [from, to) of a tensor."""
        ...

    def encoder(self, dtype: str, shape: tuple[int, ...], rows: Rows, parameters: Mapping[str, Any]) -> Encoder:
        """Begin to encode rows [from, to) of a tensor."""
        ...

    def needs(
        self, dtype: str, shape: tuple[int, ...], rows: Rows, parameters: Mapping[str, Any], block: Block
    ) -> dict[str, tuple[int, int]]:
        """Return the byte range [from, to) of each role's array that restoring `block` takes."""
        ...

    def decode(
        self,
        kernels: Kernels,
        base: Values | None,
        parts: Mapping[str, Array],
        shape: tuple[int, ...],
        parameters: Mapping[str, Any],
        block: Block,
        stored: str,
        out: Values,
    ) -> Counts:
        """Write the restored values of `block` to `out`.

        `parts` holds the bytes that `needs` asked for (each followed by a spare byte); `stored` is the dtype of the
        fine-tuned tensor.
        """
        ...
