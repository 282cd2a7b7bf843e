"""The pages' example of a tool, run as it stands on the demo's model and adapters."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import DEMO
from tests.e2e.stack import Stack, Tenant


def test_the_example_of_the_pages_executes_the_tool_that_the_demo_calls(
    demo_stack: Stack, tenant: Tenant, agent: None, tmp_path: Path
) -> None:
    pages = [(DEMO.parent / page).read_text() for page in ("README.md", "docs/tenant/tools.md")]
    (example,) = {
        re.search(r"```python\n(import json.*?)```", page, re.DOTALL)[1] for page in pages
    }
    keys = {"CHORALE_URL": demo_stack.base_url, "CHORALE_API_KEY": tenant.api_key}
    done = subprocess.run(
        [sys.executable, "-c", example], env=os.environ | keys, cwd=tmp_path, timeout=60,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    (said,) = re.findall(r"print\(.*\)  # (.*)", example)
    assert done.stdout == f"{said}\n"
