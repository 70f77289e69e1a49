"""Errors raised by co3_flower; each message is a sentence: what must hold and what was got."""


class Co3Error(Exception):
    """Base class of every error that co3_flower raises on its own account."""


class ConfigError(Co3Error, ValueError):
    """A setting has an impossible or unavailable value; the message lists the valid choices."""


class PayloadError(Co3Error, ValueError):
    """Foreign bytes are no payload of the expected layout; decoding them changed nothing."""
