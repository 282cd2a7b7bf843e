"""An S3 store that checks signatures: moto accepts any, the proxy in front of it checks each one.

    with signed_s3() as (s3, signatures):       # a faulty_s3 that refuses as S3 does
        store = open_storage(f"s3://bucket?endpoint_url={s3.url}")
        signatures.ahead_s = 3600               # its clock: URLs presigned for less have expired

The proxy has botocore compute the signature again, from the request as it arrived and the secret
that the store knows. So URL, headers, length and body are checked in the same way as by S3.
"""

import contextlib
import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl, urlsplit

from botocore.auth import SIGV4_TIMESTAMP, UNSIGNED_PAYLOAD, S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.faulty_s3 import CREDENTIALS, FaultyS3, Refusal, faulty_s3

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^,]+), ?SignedHeaders=([^,]+), ?Signature=([0-9a-f]+)"
)
_CREDENTIAL = re.compile(r"([^/]+)/(\d{8})/([^/]+)/s3/aws4_request")
_MAX_SKEW_S = 15 * 60
_MAX_EXPIRES_S = 7 * 24 * 3600


@dataclass(frozen=True)
class _Claim:
    """The signature of a request, and the parameters that it was made with.

    target: path and query, without the signature.   expires_s: None for a signature in a header.
    """

    credential: str
    signed_headers: frozenset[str]
    signature: str
    timestamp: str
    target: str
    expires_s: int | None


class Signatures:
    """The gate of a store that knows one user. ahead_s: how far its clock is ahead of ours."""

    def __init__(self, access_key: str, secret_key: str) -> None:
        self._credentials = Credentials(access_key, secret_key)
        self.ahead_s = 0.0

    def __call__(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Refusal | None:
        claim = _claim(target, headers)
        scope = _CREDENTIAL.fullmatch(claim.credential) if claim else None
        signed_at_s = _seconds(claim.timestamp) if claim else None
        if claim is None or scope is None or signed_at_s is None:
            return Refusal(403, "AccessDenied")
        access_key, date, region = scope.groups()
        if access_key != self._credentials.access_key:
            return Refusal(403, "InvalidAccessKeyId")
        if not self._is_now(signed_at_s, claim.expires_s):
            code = "RequestTimeTooSkewed" if claim.expires_s is None else "AccessDenied"
            return Refusal(403, code)
        if not _signs_enough(claim, headers) or not claim.timestamp.startswith(date):
            return Refusal(403, "AccessDenied")
        if claim.signature != self._sign(claim, region, method, headers):
            return Refusal(403, "SignatureDoesNotMatch")
        declared = headers.get("x-amz-content-sha256", UNSIGNED_PAYLOAD)
        if declared not in (UNSIGNED_PAYLOAD, hashlib.sha256(body).hexdigest()):
            return Refusal(400, "XAmzContentSHA256Mismatch")
        return None

    def _is_now(self, signed_at_s: float, expires_s: int | None) -> bool:
        age_s = time.time() + self.ahead_s - signed_at_s
        lasts_s = _MAX_SKEW_S if expires_s is None else expires_s
        return -_MAX_SKEW_S <= age_s <= lasts_s <= _MAX_EXPIRES_S

    def _sign(self, claim: _Claim, region: str, method: str, headers: Mapping[str, str]) -> str:
        """Return the correct signature."""
        signer = S3SigV4Auth if claim.expires_s is None else S3SigV4QueryAuth
        auth = signer(self._credentials, "s3", region)
        request = AWSRequest(
            method=method,
            url=f"http://{headers['host']}{claim.target}",
            headers={name: headers[name] for name in claim.signed_headers},
        )
        request.context["timestamp"] = claim.timestamp
        canonical = auth.canonical_request(request)
        return str(auth.signature(auth.string_to_sign(request, canonical), request))


def _claim(target: str, headers: Mapping[str, str]) -> _Claim | None:
    if match := _AUTHORIZATION.fullmatch(headers.get("authorization", "")):
        credential, signed, signature = match.groups()
        timestamp = headers.get("x-amz-date", "")
        return _Claim(credential, _names(signed), signature, timestamp, target, None)
    query = dict(parse_qsl(urlsplit(target).query, keep_blank_values=True))
    signature, expires = query.get("X-Amz-Signature", ""), query.get("X-Amz-Expires", "")
    if query.get("X-Amz-Algorithm") != "AWS4-HMAC-SHA256" or not expires.isdecimal():
        return None
    return _Claim(
        credential=query.get("X-Amz-Credential", ""),
        signed_headers=_names(query.get("X-Amz-SignedHeaders", "")),
        signature=signature,
        timestamp=query.get("X-Amz-Date", ""),
        target=target.replace(f"&X-Amz-Signature={signature}", ""),
        expires_s=int(expires),
    )


def _seconds(timestamp: str) -> float | None:
    try:
        return datetime.strptime(timestamp, SIGV4_TIMESTAMP).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _names(signed_headers: str) -> frozenset[str]:
    return frozenset(signed_headers.split(";"))


def _signs_enough(claim: _Claim, headers: Mapping[str, str]) -> bool:
    """Whether the host and all of Amazon's headers are signed, and all signed headers have come."""
    must = {name for name in headers if name.startswith("x-amz-")} | {"host"}
    return must <= claim.signed_headers <= headers.keys()


@contextlib.contextmanager
def signed_s3() -> Iterator[tuple[FaultyS3, Signatures]]:
    """Run a faulty_s3 that requires signatures by CREDENTIALS; yield it and its gate."""
    signatures = Signatures(CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"])
    with faulty_s3(gate=signatures) as s3:
        yield s3, signatures
