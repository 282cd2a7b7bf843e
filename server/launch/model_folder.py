"""The folder of a base model: a local one, or one downloaded from the hub."""

import re
from pathlib import Path

from server.launch.errors import ServeError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
# Mistral's repositories have the weights twice, in a form of their own as well.
_HUB_COPIES = ["consolidated*.safetensors"]


def find_model(model: str) -> Path:
    """The folder `model`, or the one downloaded for the hub id `model`. Raises ServeError."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if not _HUB_ID.fullmatch(model):
        raise ServeError(f"There is no model {model!r}: no such folder, and no hub id either.")
    # The import is here because it takes longer than all the rest of a start from a folder.
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(
            huggingface_hub.snapshot_download(
                model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_COPIES
            )
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0].rstrip(".")
        reason = f"no such folder, and the hub does not give it ({first_line})"
        raise ServeError(f"There is no model {model!r}: {reason}.") from error
