"""How Flower's privacy tools go with compressed updates: what works, what would protect nothing.

A wrapper inside CO3Strategy sees decoded weights and clips those. Clipping on a client comes before
the residual is added and before rounding, so that what arrives may be longer: the server has to
clip again. A wrapper around CO3Strategy sees no weights at all.
"""

from __future__ import annotations

import inspect
from typing import Any

from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)

from co3_flower.errors import ConfigError

CLIPPING_NORM = "clipping_norm"  # Flower's key in a message's config: clients clip to this norm
_CLIENT_SIDE = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
)
_SERVER_SIDE = (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)


def client_clipping_norm(inner: Strategy | None) -> float | None:
    """Return the norm to which clients clip in this round, None where the inner asks for none.

    Examples
    --------
    >>> client_clipping_norm(None) is None
    True
    """
    strategy: Any = inner
    while strategy is not None:
        if isinstance(strategy, _CLIENT_SIDE):
            return float(strategy.clipping_norm)
        strategy = getattr(strategy, "strategy", None)
    return None


def is_private(inner: Strategy | None) -> bool:
    """Tell whether a differential-privacy wrapper is among the inner strategies."""
    strategy: Any = inner
    while strategy is not None:
        if isinstance(strategy, _CLIENT_SIDE + _SERVER_SIDE):
            return True
        strategy = getattr(strategy, "strategy", None)
    return False


def check_client_clipping(
    norm: float | None, payload: str, reclip: bool, max_update_norm: float | None
) -> None:
    """Raise ConfigError where clients clip to ``norm`` and the server does not clip to the same.

    Parameters
    ----------
    norm : float or None
        The clients' clipping norm.
    payload : str
        "update" or "gradient": Flower's mods clip a difference of weights.
    reclip : bool
        Whether the server clips what it decoded.
    max_update_norm : float or None
        To which norm; None for the clients'.
    """
    if norm is None:
        return
    if not reclip:
        raise ConfigError(
            f"reclip must be True where clients clip to a norm of {norm:g}, got False; the "
            "residual and rounding come after their clip, so the server must clip again"
        )
    if max_update_norm not in (None, norm):
        raise ConfigError(
            f"max_update_norm must be None or the clients' clipping norm {norm:g}, got "
            f"{max_update_norm:g}"
        )
    if payload != "update":
        raise ConfigError(
            f"payload must be 'update' where clients clip, got {payload!r}; Flower's mods clip a "
            "difference of weights"
        )


def refuse_wrappers() -> None:
    """Raise ConfigError when a differential-privacy wrapper is among the callers.

    Such a wrapper clips the dense weights of replies; these hold a payload instead, so it would
    clip nothing and add noise of the wrong size.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, _CLIENT_SIDE + _SERVER_SIDE):
            raise ConfigError(
                f"CO3Strategy must be outermost, got {type(caller).__name__} around it, which "
                "would clip nothing; use CO3Strategy(config, inner=<that wrapper>(FedAvg(), ...))"
            )
        frame = frame.f_back
