"""Adapters of the Hugging Face Hub, downloaded by the command: the server never talks to a hub.

Only an adapter's two files are downloaded. huggingface_hub keeps them in its cache, resumes an
interrupted download, and takes HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE from the
environment.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.cli.terminal import CommandFailed
from server.client.files import ADAPTER_FILES, PICKLED_FILE, WEIGHTS_FILE, NotAnAdapter

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(text: str) -> bool:
    return _HUB_ID.fullmatch(text) is not None


def download(hub_id: str, revision: str | None = None) -> Path:
    """The folder in the cache with both files, which are of one commit. Raises CommandFailed."""
    # The import is here because it takes a second.
    from huggingface_hub import hf_hub_download

    # Errors are reported once, by this module.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    for filename in ADAPTER_FILES:
        with _one_line(hub_id, revision, filename):
            path = Path(hf_hub_download(hub_id, filename, revision=revision))
        # The file's folder is named after its commit; the next file is taken from the same commit.
        revision = path.parent.name
    return path.parent


@contextmanager
def _one_line(hub_id: str, revision: str | None, filename: str) -> Iterator[None]:
    """Turn the hub's errors into a CommandFailed that says what can be done."""
    from httpx import HTTPError
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise CommandFailed(
            f"{hub_id} is gated: ask for access on its page on the hub, then set HF_TOKEN to a "
            "token of that account."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CommandFailed(
            f"There is no folder {hub_id}, and the hub has none of this name either; "
            "for a private one set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CommandFailed(f"{hub_id} has no revision {revision}.") from error
    except errors.LocalEntryNotFoundError as error:
        raise CommandFailed(
            f"The hub does not answer, and {filename} of {hub_id} is not in its cache; "
            "check the network, HF_ENDPOINT and HF_HUB_OFFLINE."
        ) from error
    except errors.EntryNotFoundError as error:
        is_pickled = filename == WEIGHTS_FILE and _exists(hub_id, PICKLED_FILE, revision)
        raise CommandFailed(str(NotAnAdapter(hub_id, filename, is_pickled=is_pickled))) from error
    except (HTTPError, OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        raise CommandFailed(
            f"The hub did not give {filename} of {hub_id}: {first_line}."
        ) from error


def _exists(hub_id: str, filename: str, revision: str | None) -> bool:
    from httpx import HTTPError
    from huggingface_hub import file_exists

    try:
        return file_exists(hub_id, filename, revision=revision)
    except (HTTPError, OSError):
        return False
