"""Flower's Array around a torch tensor that stays where it is, until somebody wants its bytes.

An app's reply goes to ``co3_mod`` in the same process: what is coded on a device need not become
bytes on the host first. Whoever else reads such an Array finds an ordinary one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from co3_flower import dense
from co3_flower.layout import as_arrays, check_tensor, dense_tensor, tensor_dtype
from co3_flower.records import values_of


class DeviceArray(Array):
    """An Array whose bytes are made when they are first asked for.

    Parameters
    ----------
    tensor : torch.Tensor
        Not copied: it must keep its values until the reply has gone.
    name : str
        For messages.

    Raises
    ------
    TypeError
        If it holds no data, or its dtype is none that NumPy has (bfloat16 becomes float32).
    """

    def __init__(self, tensor: Any, name: str = "") -> None:
        check_tensor(name, tensor)
        self.dtype = tensor_dtype(name, tensor).name
        self.tensor = dense_tensor(tensor)
        self.shape = tuple(tensor.shape)
        self.stype = "numpy.ndarray"

    @cached_property
    def data(self) -> bytes:  # type: ignore[override]
        """The bytes of a .npy file, as in any Array."""
        return Array(self._on_host()).data

    def numpy(self) -> NDArray[Any]:
        """Return a copy of the values on the host."""
        return self._on_host().copy()

    def deflate(self) -> bytes:
        """Return what an ordinary Array of these values does."""
        return Array(self.dtype, self.shape, self.stype, self.data).deflate()

    def __reduce__(self) -> tuple[Any, ...]:
        return Array, (self.dtype, self.shape, self.stype, self.data)

    def held(self) -> Any:
        """Return the tensor where it is on a device, else a NumPy array of the same memory."""
        return self.tensor if dense.is_on_device(self.tensor) else self._on_host()

    def _on_host(self) -> NDArray[Any]:
        return as_arrays({"": self.tensor})[""]


def device_record(tensors: Mapping[str, Any]) -> ArrayRecord:
    """Return an ArrayRecord for a reply that `co3_mod` compresses; tensors stay on their device.

    Everything with an entry per parameter is then done there, and only histograms, the payload and
    the residual, which Flower's context keeps, come to the host. On the CPU it saves a copy.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        Such as a gradient, or ``net.state_dict()``; not copied, so they must not change before the
        app has replied.

    Raises
    ------
    TypeError
        As for `DeviceArray`.

    Examples
    --------
    >>> import torch
    >>> record = device_record({"weight": torch.tensor([1.0, 2.0])})
    >>> record["weight"].numpy().tolist()
    [1.0, 2.0]
    """
    record = ArrayRecord()  # whose constructor would make bytes of what it is given
    for name, tensor in tensors.items():
        record[name] = DeviceArray(tensor, name)
    return record


def held_values(array: Array) -> Any:
    """Return an Array's values where they are: a torch tensor on a device, else as `values_of`.

    Examples
    --------
    >>> import torch
    >>> type(held_values(device_record({"w": torch.zeros(3)})["w"])).__name__
    'ndarray'
    """
    return array.held() if isinstance(array, DeviceArray) else values_of(array)
