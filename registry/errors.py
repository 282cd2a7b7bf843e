"""Errors of the registry: data in fields, and a sentence in str() that tells what to do.

RegistryError
├── Invalid                   the caller sent something that cannot be accepted        400
│   ├── InvalidName
│   ├── InvalidCanary
│   ├── InvalidUpload         a declaration or a part that does not fit the protocol
│   ├── UnknownBaseModel      a base model is named that is not served
│   └── InvalidAdapter        the files are no adapter that this base model can serve
├── NotFound                  absent, or another tenant's: the same sentence for both  404
│   ├── AdapterNotFound
│   │   ├── ModelNotFound         an unknown `model` in a request
│   │   └── AdapterNotServable    the caller's own version, made for another base model
│   ├── OfferNotFound
│   └── UploadNotFound
├── Conflict                  a valid request at the wrong moment                      409
│   ├── VersionInUse
│   ├── NothingToRollBack
│   ├── VersionDeleted
│   ├── NotDeleted
│   ├── RetentionOver
│   ├── UploadOffsetMismatch
│   ├── UploadNotComplete
│   ├── UploadNotOpen
│   ├── AlreadyProved
│   ├── UploadIsPresigned
│   └── ProofUnavailable      no engine proved the upload in time
├── ProofFailed               no engine could prove the upload, by an error of ours    500
├── TooLarge                  more bytes than allowed or declared                      413
├── QuotaExceeded             the tenant's own limit                                   429
├── ValidatorUnavailable      the files could not be checked now                       503
├── NoRoom                    the disk's reserve, or the room for pending parts        507
├── UnsupportedBaseModel      the operator's folder cannot be served                   at start
└── StorageError              the object store failed                                  503
    └── ObjectNotFound
"""

from collections.abc import Mapping, Sequence


class RegistryError(Exception):
    """Base class of the registry's errors. `code` is for programs, str() for people."""

    code: str = "registry_error"
    param: str | None = None


class Invalid(RegistryError):
    """The caller sent something that cannot be accepted."""

    code = "invalid_request"


class InvalidName(Invalid):
    """An adapter or alias name that is not allowed. rule: what to use instead."""

    code = "invalid_name"

    def __init__(self, *, param: str, name: str, rule: str) -> None:
        super().__init__(f"{param} {shown(name)} is not allowed; use {rule}.")
        self.param = param
        self.name = name


class InvalidCanary(Invalid):
    """A canary with a percentage outside 1 to 99, or with the same version as the alias."""

    code = "invalid_canary"
    param = "canary"

    def __init__(self, *, version: int, canary_version: int, percent: int) -> None:
        super().__init__(
            f"{percent} % to version {canary_version} beside version {version} is no canary; "
            "use percent from 1 to 99 and another version."
        )
        self.version = version
        self.canary_version = canary_version
        self.percent = percent


class InvalidUpload(Invalid):
    """An upload or a part that does not fit the upload protocol."""

    def __init__(self, *, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class UnknownBaseModel(Invalid):
    """A base model is named that is not served. served: the names that may be given."""

    code = "unknown_base_model"

    def __init__(self, *, name: str, served: Sequence[str], param: str) -> None:
        super().__init__(
            f"{param}: no base model {shown(name)} is served; use one of: {', '.join(served)}."
        )
        self.name = name
        self.served = tuple(served)
        self.param = param


class InvalidAdapter(Invalid):
    """The files are not an adapter that this base model can serve. `code` names the fault.

    param: the file at fault, the key of adapter_config.json, or the field of the upload.
    """

    def __init__(self, *, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class NotFound(RegistryError):
    """The requested adapter or upload does not exist, or belongs to another tenant."""

    code = "not_found"


class AdapterNotFound(NotFound):
    """No adapter of this tenant has this name, alias or version."""

    code = "model_not_found"
    param = "model"

    def __init__(self, *, model: str) -> None:
        super().__init__(
            f"The adapter {shown(model)} does not exist or you do not have access to it; "
            "GET /v1/adapters lists yours."
        )
        self.model = model


class ModelNotFound(AdapterNotFound):
    """A request's `model` is unknown: it names no adapter of the caller's, nor the base model."""

    def __init__(self, *, model: str) -> None:
        NotFound.__init__(
            self,
            f"The model {shown(model)} does not exist or you do not have access to it; "
            "GET /v1/models lists yours.",
        )
        self.model = model


class AdapterNotServable(AdapterNotFound):
    """The caller's own version, proved on a base model that is not served.

    base_model: its name.   alike: names of those served that have its weights, but another chat
    template or precision.   served: names of all.
    """

    code = "model_not_servable"

    def __init__(
        self,
        *,
        model: str,
        version: int,
        base_model: str,
        alike: Sequence[str],
        served: Sequence[str],
    ) -> None:
        same = f" Its weights are served as {', '.join(alike)}, with another template or precision."
        NotFound.__init__(
            self,
            f"Version {version} of {shown(model)} was made for the base model {base_model} that is "
            f"not served now; those served are: {', '.join(served)}.{same if alike else ''} Upload "
            "one that was trained on one of them, or have this one proved there: "
            "chorale adapters prove "
            f"{model.partition('@')[0]} {version} --base-model {(*alike, *served, 'NAME')[0]}",
        )
        self.model = model
        self.version = version


class OfferNotFound(NotFound):
    """No adapter of this owner and name is offered to the tenant, or was accepted by it."""

    code = "offer_not_found"

    def __init__(self) -> None:
        super().__init__("There is no such offer to you; GET /v1/offers lists yours.")


class UploadNotFound(NotFound):
    """No upload of this tenant has this id."""

    code = "upload_not_found"
    param = "upload_id"

    def __init__(self, *, upload_id: str) -> None:
        super().__init__(f"The upload {shown(upload_id)} does not exist; create a new one.")
        self.upload_id = upload_id


class Conflict(RegistryError):
    """The request is valid but cannot be carried out in the current state."""

    code = "conflict"


class VersionInUse(Conflict):
    """A version that an alias means, alone or as its canary, cannot be deleted."""

    code = "version_in_use"

    def __init__(self, *, name: str, version: int, aliases: Sequence[str]) -> None:
        super().__init__(
            f"Version {version} of {shown(name)} is in use by {', '.join(aliases)}; "
            "move the alias to another version, or delete the adapter."
        )
        self.name = name
        self.version = version
        self.aliases = tuple(aliases)


class NothingToRollBack(Conflict):
    """The alias had no meaning before its last move, or the earlier meaning is not known."""

    code = "nothing_to_roll_back"

    def __init__(self, *, name: str, alias: str) -> None:
        super().__init__(
            f"{shown(name)} has no earlier meaning of {alias}; set the alias to a version."
        )
        self.name = name
        self.alias = alias


class VersionDeleted(Conflict):
    """The version that an alias should be rolled back to was deleted meanwhile."""

    code = "version_deleted"

    def __init__(self, *, name: str, version: int) -> None:
        super().__init__(
            f"Version {version} of {shown(name)}, which the alias meant before, is deleted; "
            "restore it, or set the alias to another version."
        )
        self.name = name
        self.version = version


class NotDeleted(Conflict):
    """There is nothing to restore. what: an adapter's name, or a version as name@3."""

    code = "not_deleted"

    def __init__(self, *, what: str) -> None:
        super().__init__(
            f"{shown(what)} is not deleted; "
            "versions deleted on their own are restored one by one, by number."
        )
        self.what = what


class RetentionOver(Conflict):
    """The adapter or version was deleted too long ago to be restored. what: name or name@3."""

    code = "retention_over"

    def __init__(self, *, what: str, retention_s: int) -> None:
        super().__init__(
            f"{shown(what)} was deleted more than {retention_s} s ago and is not kept any more; "
            "upload it again."
        )
        self.what = what
        self.retention_s = retention_s


class AlreadyProved(Conflict):
    """The version to be proved again is for the base model that it would be proved on."""

    code = "already_proved"

    def __init__(self, *, name: str, version: int) -> None:
        super().__init__(f"Version {version} of {shown(name)} is for this base model; use it.")
        self.name = name
        self.version = version


class UploadOffsetMismatch(Conflict):
    """A part does not start where the received bytes end."""

    code = "upload_offset_mismatch"

    def __init__(self, *, filename: str, start: int, received_bytes: int) -> None:
        super().__init__(
            f"{filename} has {received_bytes} bytes, the part starts at {start}; "
            f"send the part that starts at {received_bytes}."
        )
        self.param = filename
        self.start = start
        self.received_bytes = received_bytes


class UploadNotComplete(Conflict):
    """The caller completed an upload before every declared byte had arrived."""

    code = "upload_not_complete"

    def __init__(self, *, missing_bytes: Mapping[str, int]) -> None:
        missing = ", ".join(f"{count} bytes of {name}" for name, count in missing_bytes.items())
        super().__init__(f"The upload is not complete; send the missing {missing}.")
        self.missing_bytes = dict(missing_bytes)


class UploadNotOpen(Conflict):
    """The upload takes no more bytes: it is proving, complete, failed, expired or cancelled."""

    code = "upload_not_open"

    def __init__(self, *, upload_id: str, state: str) -> None:
        super().__init__(f"The upload {upload_id} is {state}; create a new one.")
        self.upload_id = upload_id
        self.state = state


class UploadIsPresigned(Conflict):
    """A part of a presigned upload was sent to the gateway instead of the object store."""

    code = "upload_is_presigned"

    def __init__(self, *, upload_id: str) -> None:
        super().__init__(
            f"The parts of the upload {upload_id} go to the object store; "
            f"PUT them to the URLs that GET /v1/uploads/{upload_id} lists."
        )
        self.upload_id = upload_id


class ProofUnavailable(Conflict):
    """No engine proved the upload in time; its files are not at fault."""

    code = "unavailable"

    def __init__(self, *, message: str) -> None:
        super().__init__(message)


class ProofFailed(RegistryError):
    """The proof of the upload failed by an error of the server; its files are not at fault."""

    code = "proof_failed"


class TooLarge(RegistryError):
    """A file or part has more bytes than the limit, or than were declared."""

    code = "too_large"

    def __init__(self, *, what: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{what} is {size_bytes} bytes; the limit is {limit_bytes}.")
        self.param = what
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class QuotaExceeded(RegistryError):
    """A tenant's limit on adapters, versions, aliases, bytes, pins, grants or uploads is reached.

    retry_after_s: seconds after which the request may succeed; None if waiting does not help.
    """

    code = "quota_exceeded"
    retry_after_s: float | None = None

    def __init__(
        self, *, quota: str, limit: int, remedy: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(f"The limit {quota} of {limit} is reached; {remedy}.")
        self.quota = quota
        self.limit = limit
        self.retry_after_s = retry_after_s


class UnsupportedBaseModel(RegistryError):
    """The folder given as base model cannot be served. reason: a clause for the message."""

    code = "unsupported_base_model"

    def __init__(self, *, path: object, reason: str) -> None:
        super().__init__(f"{path} cannot be served as a base model: {reason}.")
        self.path = str(path)
        self.reason = reason


class ValidatorUnavailable(RegistryError):
    """The files could not be checked for want of a process, a turn or disk space.

    reason: a text for the log.
    """

    code = "validator_unavailable"

    def __init__(self, *, reason: str) -> None:
        super().__init__("The files cannot be checked at the moment; ask to complete again later.")
        self.reason = reason


class NoRoom(RegistryError):
    """Bytes would take the disk's reserve, or more than pending parts may take."""

    code = "no_room"

    def __init__(
        self,
        message: str = "The server's disk has no room for this now. Send the same request again "
        "after the time in Retry-After, or ask the operator for room.",
    ) -> None:
        super().__init__(message)


class StorageError(RegistryError):
    """The object store failed; trying again later may help."""

    code = "storage_unavailable"

    def __init__(self, *, key: str, reason: str) -> None:
        super().__init__(f"The object store failed on {key}: {reason}; try again later.")
        self.key = key
        self.reason = reason


class ObjectNotFound(StorageError):
    """The store has no object under this key."""

    code = "object_not_found"

    def __init__(self, *, key: str) -> None:
        super().__init__(key=key, reason="there is no such object")


def shown(text: str) -> str:
    """Quote a caller's text, cut to 100 characters and escaped: no control codes get through."""
    return ascii(text if len(text) <= 100 else text[:97] + "...")
