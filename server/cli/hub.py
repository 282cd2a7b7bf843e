"""Adapters of the Hugging Face Hub, downloaded by the command: the server never talks to a hub.

Only an adapter's files are downloaded. huggingface_hub keeps them in its cache, resumes an
interrupted download, and takes HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE from the
environment.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.cli.adapter_folder import AdapterFolder, locate
from server.cli.terminal import CommandFailed
from server.client.files import CONFIG_FILE

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)((?:/[\w.-]+)*)")


def is_hub_id(text: str) -> bool:
    """Whether the text is org/name, or a folder in it: org/name/checkpoint-100."""
    return _HUB_ID.fullmatch(text) is not None


def download(source: str, revision: str | None = None) -> AdapterFolder:
    """The adapter in the cache, whose files are of one commit.   source: see is_hub_id.

    Raises CommandFailed, NotAnAdapter, NotSendable.
    """
    # The import is here because it takes a second.
    from huggingface_hub import HfApi, errors, hf_hub_download, try_to_load_from_cache

    match = _HUB_ID.fullmatch(source)
    assert match is not None
    hub_id, start = match[1], f"{match[2]}/".removeprefix("/")
    # Errors are reported once, by this module.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    with _one_line(source, revision):
        try:
            files = HfApi().model_info(hub_id, revision=revision).siblings or []
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            raise
        except _faults() as error:
            cached = try_to_load_from_cache(hub_id, start + CONFIG_FILE, revision=revision)
            if not isinstance(cached, str):
                raise errors.LocalEntryNotFoundError(source) from error
            return AdapterFolder.find(Path(cached).parent)
    names = [file.rfilename for file in files if file.rfilename.startswith(start)]
    layout = locate([name.removeprefix(start) for name in names], source)
    folder = start + (f"{layout.folder}/" if layout.folder else "")
    for name in layout.used:
        with _one_line(source, revision):
            path = Path(hf_hub_download(hub_id, folder + name, revision=revision))
        # The snapshot's folder is named after its commit, of which the next file is taken as well.
        revision = path.parents[folder.count("/")].name
    return AdapterFolder(path.parent, layout)


def _faults() -> tuple[type[Exception], ...]:
    """Errors of a hub that does not answer, or not in full."""
    from huggingface_hub import errors

    # Their base is httpx's HTTPError, or in later releases that of httpx2.
    return (errors.HfHubHTTPError.__bases__[0], OSError, ValueError)


@contextmanager
def _one_line(source: str, revision: str | None) -> Iterator[None]:
    """Turn the hub's errors into a CommandFailed that says what can be done."""
    from huggingface_hub import errors

    # The first that matches counts: a gated repository is one that is not found as well.
    reasons: dict[type[Exception], str] = {
        errors.GatedRepoError: f"{source} is gated: ask for access on its page on the hub, then "
        "set HF_TOKEN to a token of that account.",
        errors.RepositoryNotFoundError: f"There is no folder {source}, and the hub has none of "
        "this name either; for a private one set HF_TOKEN.",
        errors.RevisionNotFoundError: f"{source} has no revision {revision}.",
        errors.LocalEntryNotFoundError: f"The hub does not answer, and {source} is not in its "
        "cache; check the network, HF_ENDPOINT and HF_HUB_OFFLINE.",
    }
    try:
        yield
    except (*reasons, *_faults()) as error:
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        other = f"The hub did not give the files of {source}: {first_line}."
        said = (reason for kind, reason in reasons.items() if isinstance(error, kind))
        raise CommandFailed(next(said, other)) from error
