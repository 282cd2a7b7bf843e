"""Reasons why `chorale serve` does not start.

ServeError
├── ModelNotFound         the model is neither a folder nor available from the hub
├── ModelNotServed        the model exists, but cannot be served with these settings
├── TooFewGpus            fewer GPUs are free on the machine than the engines need
├── AddressInUse          another process listens on the address
└── DataDirTooLong        the path is too long for the Unix sockets in the data directory
"""

from pathlib import Path


class ServeError(Exception):
    """The reason why nothing was started; str() is for the operator."""


class ModelNotFound(ServeError):
    def __init__(self, model: str, reason: str) -> None:
        self.model = model
        super().__init__(f"There is no model {model!r}: {reason}.")


class ModelNotServed(ServeError):
    pass


class TooFewGpus(ServeError):
    def __init__(self, num_engines: int, size: int, num_gpus: int) -> None:
        self.num_needed, self.num_gpus = num_engines * size, num_gpus
        super().__init__(
            f"{num_engines} engines of {size} GPUs need {self.num_needed}, and there are {num_gpus}"
            " free here; choose fewer --engines and --max-engines, or --device cpu."
        )


class AddressInUse(ServeError):
    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host, self.port = host, port
        super().__init__(f"Cannot listen on {host}:{port} ({reason}); choose another --port.")


class DataDirTooLong(ServeError):
    def __init__(self, data_dir: Path) -> None:
        super().__init__(
            f"The path {data_dir} is too long for the sockets in it; choose a shorter --data-dir."
        )
