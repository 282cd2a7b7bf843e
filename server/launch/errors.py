"""Reasons why `chorale serve` does not start.

ServeError
└── AddressInUse          another process listens on the address
"""


class ServeError(Exception):
    """The reason why nothing was started; str() is for the operator."""


class AddressInUse(ServeError):
    """Another process listens on the address."""
