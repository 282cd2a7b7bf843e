"""The system's limit of the files that a process may open; each connection is one."""

import resource

OTHER_FILES = 512
"""Files of a gateway besides connections: database, engines, parts of uploads, logs."""


def allow_open_files(wanted: int) -> int:
    """Raise this process's limit to `wanted`, or as far as the system lets it.

    Returns how many files it may open, at most `wanted`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, most = (wanted if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    allowed = min(wanted, most)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
