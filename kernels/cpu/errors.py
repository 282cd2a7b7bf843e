"""Why a way of computing cannot be used here."""


class Unavailable(Exception):
    """These kernels do not work on this machine, or for this model; the sentence says why."""
