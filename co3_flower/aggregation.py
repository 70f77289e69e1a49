"""The parameter server's arithmetic: decode each reply into one float32 accumulator, then step.

In come well-formed replies in client-id order, out goes the new model. Each operation rounds to
float32 as written, so that a plain NumPy reference gives the same bits:

    acc = f32(acc + f32(f32(n_u) * y_u));   w <- f32(w -+ f32(f32(server_lr / N) * acc))
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from co3_flower.codec import accumulate_update, decode_update
from co3_flower.compressors import Compressor
from co3_flower.dense import Dense, bring_to_host, dense_for
from co3_flower.errors import PayloadError
from co3_flower.layout import sub_layout
from co3_flower.limits import NormLimit, limit_arrays
from co3_flower.nodes import RoundError
from co3_flower.records import derive_seed, values_of
from co3_flower.replies import TrainReply
from co3_flower.roles import TensorRoles

Arrays = dict[str, NDArray[Any]]
Float32s = dict[str, NDArray[np.float32]]

_MAX_ENTRY = 2.0**90  # of a decoded update: no honest one comes near
_MAX_WEIGHTED = 2.0**110  # times its weight: 2**17 replies still add up to a float32


def largest_entry(weight: int) -> float:
    """Return the magnitude beyond which an entry of a reply of this weight is refused.

    Examples
    --------
    >>> largest_entry(1) == 2.0**90, largest_entry(2**40) == 2.0**70
    (True, True)
    """
    return min(_MAX_ENTRY, _MAX_WEIGHTED / weight)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """What the replies of a round are decoded by.

    Parameters
    ----------
    roles : TensorRoles
        The model.
    server_round, seed : int
        The round, and the seed of the run: what a rival of the codec drew by.
    rival : Compressor, optional
        Reads the payloads in place of the codec.
    num_threads : int
        Threads of the codec.
    norm_limit : NormLimit, optional
        Bound on each update.
    device : str, optional
        Where `sum_updates` lets the codec decode and add, as torch names it; None for the host.
    """

    roles: TensorRoles
    server_round: int
    seed: int = 0
    rival: Compressor | None = None
    num_threads: int = 1
    norm_limit: NormLimit | None = None
    device: str | None = None

    @cached_property
    def dense(self) -> Dense:
        """Where sums are made: on the device, for the codec."""
        return dense_for({}, self.device if self.rival is None else None, self.num_threads)

    def add(self, reply: TrainReply, total: Mapping[str, Any], weight: int) -> Arrays:
        """Decode a reply into a weighted sum, and return what was not added to it.

        Raises
        ------
        PayloadError
            If it does not decode; the sum is then as it was.
        """
        if self.rival is not None:
            return self.decode(reply, weight)
        return accumulate_update(
            reply.payload,
            total,
            weight,
            like=self.roles.like,
            num_threads=self.num_threads,
            max_magnitude=largest_entry(weight),
            norm_limit=self.norm_limit,
            device=self.device,
        )

    def decode(self, reply: TrainReply, weight: int) -> Arrays:
        """Return the tensors of a reply, or a sketch of them; PayloadError as for `add`."""
        if self.rival is None:
            return decode_update(
                reply.payload,
                self.roles.like,
                num_threads=self.num_threads,
                max_magnitude=largest_entry(weight),
                norm_limit=self.norm_limit,
            )
        seed = derive_seed(self.seed, self.server_round, reply.client_id)
        arrays = self.rival.decode(reply.payload, self.roles.like, seed)
        limit_arrays(arrays, largest_entry(weight), self.norm_limit)
        return arrays


@dataclasses.dataclass
class UpdateSum:
    """Weighted sum of the good updates of a round.

    Parameters
    ----------
    decoder : Decoder
        What they are decoded by; `bring_home` ends what it does on a device.
    names : tuple of str
        The float tensors that are summed.
    """

    decoder: Decoder
    names: tuple[str, ...]
    total: dict[str, Any] = dataclasses.field(init=False)
    weight: int = 0
    used: list[TrainReply] = dataclasses.field(default_factory=list)
    refused: list[tuple[TrainReply, str]] = dataclasses.field(default_factory=list)
    others: Arrays = dataclasses.field(default_factory=dict)
    decode_seconds: float = 0.0
    _most_examples: int = 0

    def __post_init__(self) -> None:
        like, dense = self.decoder.roles.like, self.decoder.dense
        shapes = dict(zip(like.names, like.shapes, strict=True))
        self.total = {
            name: dense.zeros(math.prod(shapes[name])).reshape(shapes[name]) for name in self.names
        }

    @property
    def roles(self) -> TensorRoles:
        """The model."""
        return self.decoder.roles

    def add(self, reply: TrainReply, weight: int) -> None:
        """Decode a reply into the sum; one that does not decode changes nothing and is refused."""
        if (rest := self._try(reply, lambda: self.decoder.add(reply, self.total, weight))) is None:
            return
        if self.decoder.rival is not None and self.decoder.rival.is_sketch:
            for name in rest.keys() - set(self.roles.like.names) - self.total.keys():
                self.total[name] = np.zeros_like(rest[name])
        self._take(reply, rest, weight)

    def add_dense(self, reply: TrainReply, weight: int) -> Arrays | None:
        """Decode a reply by itself, and add the tensors of ``names``; None where it is refused."""
        decoded = self._try(reply, lambda: self.decoder.decode(reply, weight))
        if decoded is not None:
            self._take(reply, decoded, weight)
        return decoded

    def bring_home(self) -> None:
        """Bring sums on a device to the host; nothing is added after that."""
        self.total = bring_to_host(self.total)

    def finish(self, server_state: Mapping[str, NDArray[np.float32]]) -> Float32s:
        """Replace the sums by their means, and a sketch by the update that it stands for.

        Parameters
        ----------
        server_state : mapping of str to float32 array
            What the last call returned; empty at first.
        """
        rival, like = self.decoder.rival, self.roles.like
        assert rival is not None
        coded = set(self.roles.trainable) - set(self.roles.kinds["raw"])
        layout = sub_layout(like, [i for i, name in enumerate(like.names) if name in coded])
        with np.errstate(over="ignore", invalid="ignore"):
            means = {k: v * np.float32(1.0 / self.weight) for k, v in self.total.items()}
        sketch = {name: mean for name, mean in means.items() if name not in like.names}
        update, state = rival.finish(sketch, server_state, layout)
        others = {name: means[name] for name in means.keys() - coded - sketch.keys()}
        self.total, self.weight = {**update, **others}, 1
        return state

    def _try(self, reply: TrainReply, decode: Callable[[], Arrays]) -> Arrays | None:
        start = time.perf_counter()
        try:
            return decode()
        except PayloadError as error:
            self.refused.append((reply, str(error)))
            return None
        finally:
            self.decode_seconds += time.perf_counter() - start

    def _take(self, reply: TrainReply, arrays: Mapping[str, NDArray[Any]], weight: int) -> None:
        for name, value in arrays.items():
            if name in self.total:
                self.decoder.dense.add_weighted(self.total[name], value, weight)
        if reply.num_examples > self._most_examples:
            self._most_examples = reply.num_examples
            self.others = {
                name: value for name, value in arrays.items() if name not in self.roles.floats
            }
        self.weight += weight
        self.used.append(reply)


def sum_updates(
    decoder: Decoder, replies: Sequence[TrainReply], weights: Sequence[int]
) -> UpdateSum:
    """Return the weighted sum of all float tensors over the replies, in the order given.

    Parameters
    ----------
    decoder : Decoder
        What they are decoded by.
    replies : sequence of TrainReply
        In client-id order.
    weights : sequence of int
        Weight of each reply.
    """
    roles = decoder.roles
    result = UpdateSum(decoder, tuple(name for name in roles.like.names if name in roles.floats))
    for reply, weight in zip(replies, weights, strict=True):
        result.add(reply, weight)
    result.bring_home()
    return result


def decode_replies(
    decoder: Decoder, replies: Sequence[TrainReply], weights: Sequence[int]
) -> tuple[UpdateSum, list[Float32s]]:
    """Return the sum over the float buffers, and each good reply's trainable tensors.

    Parameters are those of `sum_updates`.
    """
    roles = decoder.roles
    buffers = (n for n in roles.buffer_names if n in roles.floats and n in roles.like.names)
    result = UpdateSum(decoder, tuple(buffers))
    updates = []
    for reply, weight in zip(replies, weights, strict=True):
        if (decoded := result.add_dense(reply, weight)) is not None:
            updates.append({n: np.asarray(decoded[n], np.float32) for n in roles.trainable})
    return result, updates


def apply_step(
    weights: NDArray[Any], direction: NDArray[np.float32], step: np.float32
) -> NDArray[np.float32]:
    """Return ``f32(w + f32(step * direction))``, written over ``direction``.

    Examples
    --------
    >>> apply_step(np.float32([1.0, 2.0]), np.float32([4.0, -4.0]), np.float32(-0.25))
    array([0., 3.], dtype=float32)
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        np.multiply(direction, step, out=direction)
        np.add(np.asarray(weights, np.float32), direction, out=direction)
    return direction


def find_nonnegative(arrays: ArrayRecord, roles: TensorRoles) -> frozenset[str]:
    """Return the float buffers that start at 0 or above: variances, not means (all 0 at first)."""
    floats = {n: values_of(arrays[n]) for n in roles.buffer_names if n in roles.floats}
    return frozenset(n for n, value in floats.items() if (value >= 0).all() and (value > 0).any())


def next_model(
    arrays: ArrayRecord,
    total: UpdateSum,
    step: np.float32,
    nonnegative: frozenset[str],
    trained: Mapping[str, NDArray[Any]] | None = None,
) -> ArrayRecord:
    """Return the model of the next round, in the layout's dtypes.

    Trainable tensors step along the sum, or are taken from ``trained`` (an inner strategy's). Float
    buffers move by the mean. Integer and bool tensors take the value of the reply with the most
    examples.

    Parameters
    ----------
    arrays : ArrayRecord
        The model that was sent out.
    total : UpdateSum
        Sum of the updates; its arrays are used up.
    step : float32
        What the sum of trainable tensors is multiplied with.
    nonnegative : frozenset of str
        Buffers clamped at 0: a coding error must not make a variance negative.
    trained : mapping, optional
        New values of the trainable tensors.

    Raises
    ------
    RoundError
        When a value is NaN or infinite.
    """
    roles = total.roles
    trainable = set(roles.trainable)
    mean_step = np.float32(1.0 / total.weight)
    result: dict[str, Array] = {}
    for name, dtype in zip(roles.layout.names, roles.layout.dtypes, strict=True):
        if trained is not None and name in trainable:
            value = trained[name]
        elif name in trainable:
            value = apply_step(values_of(arrays[name]), total.total.pop(name), step)
        elif name in total.total:
            value = apply_step(values_of(arrays[name]), total.total.pop(name), mean_step)
            if name in nonnegative:
                np.maximum(value, 0, out=value)
        elif name in total.others:
            value = total.others[name]
        else:  # a local buffer
            result[name] = arrays[name]
            continue
        result[name] = _finite_array(name, value, dtype)
    return ArrayRecord(result)


def _finite_array(name: str, value: NDArray[Any], dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        cast = np.asarray(value).astype(dtype, copy=False)
    if np.issubdtype(dtype, np.floating) and not (finite := np.isfinite(cast)).all():
        bad = cast.size - int(np.count_nonzero(finite))
        raise RoundError(
            f"aggregate must be finite, got {bad} NaN or infinite values in {name!r}; lower "
            "server_lr or the clients' lr"
        )
    return Array(cast)
