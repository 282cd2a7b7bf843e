"""Builds wheels that carry the C kernels, one library for each level of the wheel's processors.

Without a C compiler the wheel is pure. The rest of the package is described by pyproject.toml.
"""

import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from kernels.cpu.compiler import compile_library, find_compiler, levels_of
from kernels.cpu.errors import Unavailable


class BuildWithKernels(build_py):
    """Puts the libraries beside the modules of a wheel; an editable installation has none."""

    has_kernels = False

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / "kernels" / "cpu" / "lib"
        folder.mkdir(parents=True, exist_ok=True)
        machine = sysconfig.get_platform().rpartition("-")[2]
        try:
            for name, features in levels_of(machine).items():
                compile_library(find_compiler(), features, folder / f"kernels-{name}.so")
                self.has_kernels = True
        except Unavailable as reason:
            self.warn(f"the wheel carries no more C kernels: {reason}")


class WheelOfAnyPython(bdist_wheel):
    """Tags a wheel with libraries by its platform alone: they know nothing of Python."""

    def run(self) -> None:
        self.run_command("build_py")
        if self.get_finalized_command("build_py").has_kernels:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return self.python_tag, "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython})
