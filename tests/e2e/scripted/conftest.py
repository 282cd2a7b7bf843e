"""A gateway before an engine without a model, on a store that checks signatures.

All but the model is real. The files of this folder share it: each test has a tenant of its own.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.folder_fixture import folder_fixture
from tests.e2e.stack import Stack, running
from tests.faulty_s3 import CREDENTIALS
from tests.signed_s3 import signed_s3


@folder_fixture
def scripted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack. A token takes 8 ms, and a gateway that is asked to end waits for 2 s."""
    with (
        signed_s3() as (s3, _),
        running(
            tmp_path_factory.mktemp("scripted"), tiny_model, fake_engine=True,
            storage=f"s3://bucket?endpoint_url={s3.url}", max_model_len=512,
            metrics_aliases="vllm", drain_timeout_s=2.0,
            environment=CREDENTIALS | {"FAKE_STEP_S": "0.008"},
        ) as stack,
    ):  # fmt: skip
        yield stack
