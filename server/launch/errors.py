"""Reasons why `chorale serve` does not start.

ServeError
├── ModelNotFound         the model is neither a folder nor available from the hub
└── AddressInUse          another process listens on the address
"""


class ServeError(Exception):
    """The reason why nothing was started; str() is for the operator."""


class ModelNotFound(ServeError):
    def __init__(self, model: str, reason: str) -> None:
        self.model = model
        super().__init__(f"There is no model {model!r}: {reason}.")


class AddressInUse(ServeError):
    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host, self.port = host, port
        super().__init__(f"Cannot listen on {host}:{port} ({reason}); choose another --port.")
