"""The error of kernels that cannot be used."""


class Unavailable(Exception):
    """Kernels do not work on this machine, or for this model; the message says why."""
