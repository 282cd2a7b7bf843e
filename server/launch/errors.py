"""Reasons why `chorale serve` does not start.

ServeError
├── AddressInUse          another process listens on the address
├── ChildCannotStart      a process ended and must not be started again (`supervisor`)
└── SecretError           a secret cannot be used (`secrets`)
    └── SecretMissing     the operator must give the secret
"""


class ServeError(Exception):
    """The reason why nothing was started; str() is for the operator."""


class AddressInUse(ServeError):
    """Another process listens on the address."""
