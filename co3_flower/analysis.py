"""What a gradient's laws and codes are worth: tensors in, fits and sizes out.

Two kinds of size stand side by side and are never added or compared: *paper accounting* is the bits
of the codes alone, a code table for each tensor, nothing else counted; *true bits* are 8 *
len(payload) of payloads that decode, everything counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from co3_flower.codec import encode_update
from co3_flower.config import CodecConfig
from co3_flower.errors import ConfigError
from co3_flower.gennorm import GenNorm, fit_gennorm, fit_laplace, fit_norm
from co3_flower.goodness import divergence_bits, law_kurtosis, sample_kurtosis, w2_distance
from co3_flower.lz78 import lz78_bit_string_bits, lz78_bits, parse_lz78
from co3_flower.quantize import quantize

ZSTD_LEVEL = 19
LAWS = {"gennorm": fit_gennorm, "norm": fit_norm, "laplace": fit_laplace}

# Codes that travel in payloads: key -> the settings that make them.
CODERS: dict[str, dict[str, Any]] = {
    "huffman_gennorm": {"coder": "huffman", "prior": "gennorm", "structure": "none"},
    "huffman_norm": {"coder": "huffman", "prior": "norm", "structure": "none"},
    "huffman_laplace": {"coder": "huffman", "prior": "laplace", "structure": "none"},
    "huffman_empirical": {"coder": "huffman", "prior": "empirical", "structure": "none"},
    "rans": {"coder": "rans", "prior": "empirical", "structure": "none"},
    "huffman_structure": {"coder": "huffman", "prior": "auto", "structure": "auto"},
    "rans_structure": {"coder": "rans", "prior": "auto", "structure": "auto"},
}


@dataclass(frozen=True)
class TensorFit:
    """How well the laws fit one tensor; see `goodness` for the measures.

    Attributes
    ----------
    name : str
        The tensor.
    numel : int
        Entries.
    kurtosis : float
        Of the entries.
    laws : dict of str to GenNorm
        The fitted laws: ``gennorm``, ``norm``, ``laplace``.
    w2 : dict of str to float
        W2 distance of the standardised entries from each law.
    law_kurtosis : dict of str to float
        Of each law.
    """

    name: str
    numel: int
    kurtosis: float
    laws: dict[str, GenNorm]
    w2: dict[str, float]
    law_kurtosis: dict[str, float]


@dataclass(frozen=True)
class Sizes:
    """What one tensor or a group of tensors takes in one format, code by code.

    Attributes
    ----------
    name : str
        The tensor or group.
    num_tensors, numel : int
        Tensors and entries.
    entropy_bits : float
        Empirical entropy of the symbols, tensor by tensor: theory, not a size.
    code_bits : dict of str to int
        Paper accounting. ``lz78``, ``lz78_bit_string`` and ``zstd`` run through the symbols of all
        tensors of a group as one sequence, the others add up the tensors' own codes; codes without
        a table per tensor are not here.
    payload_bits : dict of str to int
        True bits: of a payload that holds these tensors and no others. For ``zstd`` that is its
        frame and 4 bytes of scale per tensor.
    divergence_bits : dict of str to float
        Kullback-Leibler divergence of the symbols' counts from each law, times the entries.
    """

    name: str
    num_tensors: int
    numel: int
    entropy_bits: float
    code_bits: dict[str, int]
    payload_bits: dict[str, int]
    divergence_bits: dict[str, float]


@dataclass(frozen=True)
class Converted:
    """One tensor with what all its codes need.

    Attributes
    ----------
    tensor : float array
        The entries.
    symbols : uint8 [n]
        In C order.
    scale : float32
        Of the conversion.
    sizes : Sizes
        Of the tensor.
    """

    tensor: NDArray[Any]
    symbols: NDArray[np.uint8]
    scale: np.float32
    sizes: Sizes


def available_coders() -> tuple[str, ...]:
    """Return the keys of `CODERS` that this version of the codec has."""
    return tuple(key for key, settings in CODERS.items() if _is_available(settings["coder"]))


def zstd() -> ModuleType | None:
    """Return the optional package zstandard, or None where it is not installed."""
    try:
        return import_module("zstandard")
    except ImportError:
        return None


def fit_tensor(name: str, x: NDArray[Any]) -> TensorFit:
    """Fit the three laws to one tensor and measure how well they do.

    Parameters
    ----------
    name : str
        The tensor's name.
    x : array of floats
        Its entries, finite.

    Raises
    ------
    ValueError
        If an entry is NaN or infinite.

    Examples
    --------
    >>> fit = fit_tensor("w", np.random.default_rng(0).laplace(size=50_000))
    >>> fit.w2["laplace"] < 0.05 < 0.15 < fit.w2["norm"]
    True
    """
    if bad := int((~np.isfinite(x)).sum()):
        raise ValueError(f"gradient must be finite, got {bad} NaN or infinite entries in {name!r}")
    laws = {key: fit(x) for key, fit in LAWS.items()}
    return TensorFit(
        name,
        x.size,
        sample_kurtosis(x),
        laws,
        {key: w2_distance(x, law) for key, law in laws.items()},
        {key: law_kurtosis(law) for key, law in laws.items()},
    )


def measure_tensor(
    name: str, x: NDArray[Any], config: CodecConfig, fit: TensorFit | None = None
) -> Converted:
    """Convert one tensor as the codec does and measure all its codes.

    Parameters
    ----------
    name : str
        The tensor's name.
    x : array of floats
        Its entries, finite; at least one.
    config : CodecConfig
        Format and scale; prior, coder and structure are gone through.
    fit : TensorFit, optional
        Its laws, where they are known.

    Returns
    -------
    Converted
        Symbols and sizes.

    Raises
    ------
    ValueError
        If the tensor is empty, or an entry is NaN or infinite.

    Examples
    --------
    >>> x = np.random.default_rng(0).laplace(size=(64, 64)).astype(np.float32)
    >>> sizes = measure_tensor("w", x, CodecConfig(format="e2m1")).sizes
    >>> sizes.entropy_bits < sizes.code_bits["huffman_empirical"] < sizes.code_bits["lz78"]
    True
    >>> sizes.payload_bits["huffman_empirical"] > sizes.code_bits["huffman_empirical"]
    True
    """
    if x.size == 0:
        raise ValueError(f"a tensor must have entries, got shape {x.shape} in {name!r}")
    fmt = config.float_format
    # min_numel 1: a table of its own, however small it is
    alone = replace(config, min_numel=1, raw=(), buffers=())
    encoded = {
        coder: encode_update({name: x}, None, replace(alone, **CODERS[coder]))
        for coder in available_coders()
    }
    payload_bits = {coder: 8 * len(each.payload) for coder, each in encoded.items()}
    code_bits = {coder: encoded[coder].stats.tensors[0].code_bits for coder in _paper_coders()}
    row = encoded["huffman_gennorm"].stats.tensors[0]
    scale = np.float32(row.scale)
    symbols = quantize(x, float(scale), fmt).reshape(-1)
    counts = np.bincount(symbols, minlength=fmt.num_values)
    laws = fit.laws if fit is not None else {key: law(x) for key, law in LAWS.items()}
    divergences = {
        key: x.size * divergence_bits(counts, law, fmt, float(scale)) for key, law in laws.items()
    }
    streams = _stream_bits(symbols, np.array([scale]), config)
    sizes = Sizes(
        name,
        1,
        x.size,
        row.entropy_bits,
        code_bits | streams[0],
        payload_bits | streams[1],
        divergences,
    )
    return Converted(x, symbols, scale, sizes)


def measure_group(name: str, members: Mapping[str, Converted], config: CodecConfig) -> Sizes:
    """Measure some tensors together, as one update.

    Parameters
    ----------
    name : str
        Of the group.
    members : mapping of str to Converted
        Its tensors by name, measured alone with the same config; at least one.
    config : CodecConfig
        As for `measure_tensor`; `min_numel` counts here.

    Returns
    -------
    Sizes
        Paper accounting and entropy are the tensors' sums, but for LZ78 and zstd, which get one
        sequence; true bits are those of one payload.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> config = CodecConfig(format="e2m1")
    >>> one = measure_tensor("a", rng.laplace(size=2000), config)
    >>> two = measure_tensor("b", rng.laplace(size=3000), config)
    >>> group = measure_group("both", {"a": one, "b": two}, config)
    >>> group.numel, group.payload_bits["huffman_gennorm"] < sum(
    ...     each.sizes.payload_bits["huffman_gennorm"] for each in (one, two))
    (5000, True)
    """
    rows = [member.sizes for member in members.values()]
    update = {key: member.tensor for key, member in members.items()}
    payload_bits = {}
    for coder in available_coders():
        settings = replace(config, **CODERS[coder], raw=(), buffers=())
        payload_bits[coder] = 8 * len(encode_update(update, None, settings).payload)
    symbols = np.concatenate([member.symbols for member in members.values()])
    scales = np.array([member.scale for member in members.values()])
    streams = _stream_bits(symbols, scales, config)
    return Sizes(
        name,
        len(rows),
        symbols.size,
        sum(row.entropy_bits for row in rows),
        {key: sum(row.code_bits[key] for row in rows) for key in _paper_coders()} | streams[0],
        payload_bits | streams[1],
        {key: sum(row.divergence_bits[key] for row in rows) for key in LAWS},
    )


def _stream_bits(
    symbols: NDArray[np.uint8], scales: NDArray[np.float32], config: CodecConfig
) -> tuple[dict[str, int], dict[str, int]]:
    """Code bits, and true bits, of the codes that take a sequence as a whole."""
    fmt = config.float_format
    code_bits = {
        "lz78": lz78_bits(len(parse_lz78(symbols)), fmt.num_values),
        "lz78_bit_string": lz78_bit_string_bits(symbols, fmt),
    }
    payload_bits = {}
    if (package := zstd()) is not None:
        frame = package.ZstdCompressor(level=ZSTD_LEVEL).compress(symbols.tobytes())
        code_bits["zstd"] = 8 * len(frame)
        payload_bits["zstd"] = 8 * len(scales.astype("<f4").tobytes() + frame)
    return code_bits, payload_bits


def _paper_coders() -> tuple[str, ...]:
    """Codes with a table per tensor; row and column scales are no code bits, but not free."""
    return tuple(key for key in available_coders() if CODERS[key]["structure"] == "none")


@lru_cache
def _is_available(coder: str) -> bool:
    try:
        CodecConfig(coder=coder)
    except ConfigError:
        return False
    return True
