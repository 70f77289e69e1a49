"""Which tensor is trained, which is a buffer, which travels raw: one answer for both ends.

The server finds the roles from names and dtypes; a client, which may know no names, from the
positions it is sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from co3_flower.compressors import Compressor
from co3_flower.config import CodecConfig
from co3_flower.errors import ConfigError
from co3_flower.layout import FLOAT_DTYPES, Layout

BUFFER_ENDINGS = (
    "running_mean",
    "running_var",
    "num_batches_tracked",
)  # BatchNorm, as torch names it


@dataclasses.dataclass(frozen=True)
class TensorRoles:
    """The tensors of a model in order, and what each of them is.

    Parameters
    ----------
    layout : Layout
        Names, shapes and dtypes of the whole model.
    raw : tuple of int
        Positions of the float tensors that travel losslessly.
    buffers : tuple of int
        Positions of the buffers, integer and bool tensors included.
    buffers_kind : str
        "coded", "raw" or "local" (buffers are not sent at all).
    """

    layout: Layout
    raw: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()
    buffers_kind: str = "coded"

    def __post_init__(self) -> None:
        for key in ("raw", "buffers"):
            if bad := [i for i in getattr(self, key) if not 0 <= i < len(self.layout)]:
                raise ConfigError(f"{key} must be positions below {len(self.layout)}, got {bad}")

    @cached_property
    def floats(self) -> frozenset[str]:
        """Names of all float tensors."""
        layout = self.layout
        return frozenset(
            n for n, d in zip(layout.names, layout.dtypes, strict=True) if d in FLOAT_DTYPES
        )

    @cached_property
    def buffer_names(self) -> tuple[str, ...]:
        """Names of the buffers in order."""
        chosen = set(self.buffers)
        return tuple(name for i, name in enumerate(self.layout.names) if i in chosen)

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Names of the float tensors that are not buffers, in order."""
        buffers = set(self.buffer_names)
        return tuple(n for n in self.layout.names if n in self.floats and n not in buffers)

    @cached_property
    def like(self) -> Layout:
        """Layout of what is sent: floats as float32, others in their dtype, no local buffers."""
        local = set(self.buffer_names) if self.buffers_kind == "local" else set()
        layout = self.layout
        rows = [
            (name, shape, np.dtype(np.float32) if name in self.floats else dtype)
            for name, shape, dtype in zip(layout.names, layout.shapes, layout.dtypes, strict=True)
            if name not in local
        ]
        return Layout(
            names=tuple(row[0] for row in rows),
            shapes=tuple(row[1] for row in rows),
            dtypes=tuple(row[2] for row in rows),
        )

    @cached_property
    def num_parameters(self) -> int:
        """Entries of the trainable tensors: what bits per parameter are counted over."""
        trainable = set(self.trainable)
        return sum(
            n
            for name, n in zip(self.layout.names, self.layout.numels, strict=True)
            if name in trainable
        )

    @cached_property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """Names of the float tensors that are sent raw, and of those sent as coded buffers."""
        raw = {self.layout.names[i] for i in self.raw} & self.floats
        buffers = [name for name in self.buffer_names if name in self.floats]
        if self.buffers_kind == "raw":
            raw |= set(buffers)
        sent = self.like.names
        return {
            "raw": tuple(name for name in sent if name in raw),
            "buffers": tuple(name for name in sent if name in buffers and name not in raw),
        }

    def compressor(self, compressor: Compressor) -> Compressor:
        """Return a rival of the codec for this model: raw tensors and float buffers by name."""
        return dataclasses.replace(compressor, **self.kinds)

    def codec_config(self, config: CodecConfig, num_threads: int) -> CodecConfig:
        """Return the codec's settings for this model: raw tensors and float buffers by name."""
        raw, buffers = self.kinds["raw"], self.kinds["buffers"]
        return dataclasses.replace(config, raw=raw, buffers=buffers, num_threads=num_threads)


def find_roles(
    layout: Layout, config: CodecConfig, buffers_kind: str, buffer_keys: Iterable[str] | None = None
) -> TensorRoles:
    """Return the roles of a model's tensors as the server sees them.

    Parameters
    ----------
    layout : Layout
        The whole model.
    config : CodecConfig
        Its ``raw`` and ``buffers`` (names or positions) are honoured.
    buffers_kind : str
        "coded", "raw" or "local".
    buffer_keys : iterable of str, optional
        Names of the float buffers, whole or from a dot on ("running_mean" finds
        "bn1.running_mean"); without it every key that ends in running_mean, running_var or
        num_batches_tracked. Integer and bool tensors are buffers in any case.

    Returns
    -------
    TensorRoles
        Positions in ascending order.

    Raises
    ------
    ConfigError
        When a name, position or key finds no tensor.
    """
    buffers = {i for i, dtype in enumerate(layout.dtypes) if dtype not in FLOAT_DTYPES}
    buffers |= _select(layout, config.buffers, "buffers")
    if buffer_keys is None:
        buffers |= {i for i, name in enumerate(layout.names) if name.endswith(BUFFER_ENDINGS)}
    else:
        for key in buffer_keys:
            found = {
                i for i, name in enumerate(layout.names) if name == key or name.endswith(f".{key}")
            }
            if not found:
                raise ConfigError(f"buffer_keys must name tensors of the model, got {key!r}")
            buffers |= found
    raw = _select(layout, config.raw, "raw") - (set() if buffers_kind == "raw" else buffers)
    raw |= {i for i in buffers if buffers_kind == "raw" and layout.dtypes[i] in FLOAT_DTYPES}
    return TensorRoles(layout, tuple(sorted(raw)), tuple(sorted(buffers)), buffers_kind)


def _select(layout: Layout, chosen: Iterable[int | str], setting: str) -> set[int]:
    try:
        return set(layout.select(tuple(chosen), setting))
    except ValueError as error:
        raise ConfigError(str(error)) from None
