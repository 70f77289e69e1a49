"""The whole analysis of one gradient: all its tensors, in several formats; also as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from co3_flower.analysis import Sizes, TensorFit, fit_tensor, measure_group, measure_tensor
from co3_flower.config import CodecConfig
from co3_flower.errors import ConfigError

ALL = "all tensors"


@dataclass(frozen=True)
class FormatSizes:
    """Sizes in one format: of each tensor, of the groups, and of all tensors together."""

    config: CodecConfig
    tensors: tuple[Sizes, ...]
    groups: tuple[Sizes, ...]
    whole: Sizes


@dataclass(frozen=True)
class Analysis:
    """Fits and sizes of one gradient.

    Attributes
    ----------
    fits : tuple of TensorFit
        In model order.
    groups : dict of str to list of str
        Tensors of each named group.
    formats : tuple of FormatSizes
        One per format.
    skipped : tuple of str
        Tensors without float entries.
    """

    fits: tuple[TensorFit, ...]
    groups: dict[str, list[str]]
    formats: tuple[FormatSizes, ...]
    skipped: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Entries of all analysed tensors."""
        return sum(fit.numel for fit in self.fits)


def analyze(
    update: Mapping[str, NDArray[Any]],
    configs: Sequence[CodecConfig],
    layers: Sequence[str] = (),
    progress: Callable[[str, int], None] = lambda what, entries: None,
) -> Analysis:
    """Fit the laws to every tensor and measure every code in every format.

    Parameters
    ----------
    update : mapping of str to array
        A gradient, tensor by tensor.
    configs : sequence of CodecConfig
        One per format.
    layers : sequence of str
        Groups, as `choose_groups` takes them.
    progress : callable
        Told what was done, and with how many entries: of each tensor once for the laws, and of each
        tensor and once more of all in each format.

    Raises
    ------
    ConfigError
        If a layer is in no tensor's name.
    ValueError
        If no tensor has float entries, or an entry is NaN or infinite.

    Examples
    --------
    >>> gradient = {"fc.weight": np.random.default_rng(0).laplace(size=(10, 64))}
    >>> result = analyze(gradient, [CodecConfig(format="e2m1")])
    >>> result.numel, len(result.formats[0].tensors)
    (640, 1)
    """
    tensors = {k: x for k, x in update.items() if np.issubdtype(x.dtype, np.floating) and x.size}
    if not tensors:
        raise ValueError(f"a gradient must have float entries, got {len(update)} tensors without")
    groups = choose_groups({name: x.shape for name, x in tensors.items()}, layers)
    fits = {}
    for name, x in tensors.items():
        fits[name] = fit_tensor(name, x)
        progress(f"laws: {name}", x.size)
    formats = []
    for config in configs:
        converted = {}
        for name, x in tensors.items():
            converted[name] = measure_tensor(name, x, config, fits[name])
            progress(f"{config.format}: {name}", x.size)
        parts = [
            measure_group(title, {name: converted[name] for name in names}, config)
            for title, names in groups.items()
        ]
        whole = measure_group(ALL, converted, config)
        progress(f"{config.format}: {ALL}", whole.numel)
        alone = tuple(member.sizes for member in converted.values())
        formats.append(FormatSizes(config, alone, tuple(parts), whole))
    skipped = tuple(name for name in update if name not in tensors)
    return Analysis(tuple(fits.values()), groups, tuple(formats), skipped)


def choose_groups(
    names: Mapping[str, tuple[int, ...]], wanted: Iterable[str]
) -> dict[str, list[str]]:
    """Choose the tensors of named groups.

    Parameters
    ----------
    names : mapping of str to tuple of int
        Names and shapes of all tensors, in model order.
    wanted : iterable of str
        A group for each: the tensors whose names contain it. If empty, the groups are an upper, a
        middle and a lower convolution layer: of a torchvision DenseNet the first of dense blocks 1,
        2 and 4, else the first, middle and last tensor of four axes.

    Returns
    -------
    dict of str to list of str
        Names of the tensors of each group; empty where a network has no convolutions.

    Raises
    ------
    ConfigError
        If a wanted text is in no name.

    Examples
    --------
    >>> shapes = {"conv1.weight": (8, 3, 3, 3), "conv2.weight": (8, 8, 3, 3), "fc.bias": (10,)}
    >>> choose_groups(shapes, ["fc"])
    {'fc': ['fc.bias']}
    >>> choose_groups(shapes, [])["lower conv"]
    ['conv2.weight']
    """
    groups = {text: [name for name in names if text in name] for text in wanted}
    for text, members in groups.items():
        if not members:
            raise ConfigError(
                f"layers must be parts of tensors' names, got {text!r}; "
                f"names look like {', '.join(map(repr, list(names)[:4]))}"
            )
    if groups:
        return groups
    parts = [f"denseblock{i}.denselayer1.conv1." for i in (1, 2, 4)]
    chosen = [next((name for name in names if part in name), None) for part in parts]
    if None in chosen:
        kernels = [name for name, shape in names.items() if len(shape) == 4]
        chosen = [kernels[0], kernels[len(kernels) // 2], kernels[-1]] if kernels else []
    titles = ("upper conv", "middle conv", "lower conv")
    return {title: [name] for title, name in zip(titles, chosen, strict=False) if name is not None}


def to_json(analysis: Analysis) -> dict[str, Any]:
    """Return an analysis as plain values; NaN becomes None."""
    formats = [
        {
            "format": sizes.config.format,
            "scale": sizes.config.scale,
            "scale_multiplier": sizes.config.scale_multiplier,
            "all": asdict(sizes.whole),
            "groups": [asdict(row) for row in sizes.groups],
            "tensors": [asdict(row) for row in sizes.tensors],
        }
        for sizes in analysis.formats
    ]
    result = {
        "num_tensors": len(analysis.fits),
        "numel": analysis.numel,
        "skipped": list(analysis.skipped),
        "groups": analysis.groups,
        "fits": [asdict(fit) for fit in analysis.fits],
        "formats": formats,
    }
    plain: dict[str, Any] = _plain(result)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
