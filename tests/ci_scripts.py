"""Loads scripts of .ci/ as modules: the folder is not a package."""

import importlib.util
import sys
from types import ModuleType

from tests.deployment_files import ROOT


def load_script(name: str) -> ModuleType:
    """Load .ci/<name>.py as a new module, without calling its `main`."""
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module in sys.modules.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
