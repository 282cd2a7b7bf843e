"""Builds deploy/Dockerfile without Docker and without a container registry, and tries the image.

The base is a Debian root that mmdebstrap makes; buildah runs the Dockerfile's own steps on it. A
step that this machine refuses is named. The files, 5 GB, are in build/image and may be deleted.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "image"
BASE, IMAGE = "localhost/chorale-base", "localhost/chorale"
# What python:3.12-slim has, as Debian's packages; the version of Python is the release's own.
PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
BUILDAH = ("buildah", f"--root={FOLDER}/store", f"--runroot={FOLDER}/run", "--storage-driver=vfs")
# A process of a step has a changed root and this machine's network: that needs the fewest rights.
ISOLATION = "--isolation=chroot"
TRIAL = "chorale serve --help && python -c 'import kernels.cpu.compiler as c; c.build_library()'"

_STEP = re.compile(r"^(?:\[\d+/\d+\] )?STEP \d+/\d+: .*")


class Refused(Exception):
    """A command that failed; the message is the step that it was at."""


def main() -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    # pip's settings of this machine, such as a mirror or a folder of wheels, hold in the build too.
    settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    paths = [value for value in settings.values() if value.startswith("/")]
    options = (ISOLATION, "--format=docker", *(f"--volume={path}:{path}:ro" for path in paths))
    try:
        make_base(settings)
        source = ("--file=deploy/Dockerfile", f"--build-arg=BASE={BASE}", f"--tag={IMAGE}", ".")
        run("build", *BUILDAH, "build", *options, *source)
        container = run("trial", *BUILDAH, "from", IMAGE)
        run("trial", *BUILDAH, "run", ISOLATION, container, "--", "sh", "-c", TRIAL)
    except Refused as refused:
        sys.stderr.write(f"This machine refused the step: {refused}\n")
        return 1
    sys.stderr.write("Every step of deploy/Dockerfile ran, and the image's command starts.\n")
    return 0


def make_base(settings: dict[str, str]) -> None:
    """Import a Debian root of this machine's release as the base, with these variables."""
    release, root = platform.freedesktop_os_release()["VERSION_CODENAME"], FOLDER / "root.tar"
    run("root", "mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", release, str(root))
    container = run("base", *BUILDAH, "from", "scratch")
    run("base", *BUILDAH, "add", "--quiet", container, str(root), "/")
    variables = [f"--env={name}={value}" for name, value in settings.items()]
    path = "--env=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    run("base", *BUILDAH, "config", path, *variables, container)
    run("base", *BUILDAH, "commit", "--rm", "--quiet", container, BASE)


def run(step: str, *command: str) -> str:
    """Run a command, show what it says, and return its last line. Raises Refused."""
    last, pipe = "", subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            sys.stderr.write(line)
            last = line.strip() or last
            step = last if _STEP.match(last) else step
    if process.returncode:
        raise Refused(step)
    return last


if __name__ == "__main__":
    sys.exit(main())
