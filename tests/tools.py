"""The programs that tests take from the system: find them, and install or name what is missing.

`python -m tests.tools` is run by `make test`, before the tests.
"""

import glob
import os
import shutil
import subprocess
import sys

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER_VARIABLE = "SD_TF_BROWSER"
PACKAGES = {  # a program → Debian's packages for it
    "browser": ("chromium", "fonts-dejavu-core"),
    "curl": ("curl",),
    "openssl": ("openssl",),
}
# Not needed: where it is, `make test` has its libraries allocate by it, and ends sooner.
ALLOCATOR, ALLOCATORS_PACKAGE = "/usr/lib/*/libjemalloc.so.2", "libjemalloc2"


class ToolError(Exception):
    """A program that is not there: which, and how to get it."""


def find(program: str) -> str | None:
    """Return the path of a program of PACKAGES, or None."""
    names = (program,)
    if program == "browser":
        chosen = os.environ.get(BROWSER_VARIABLE)
        names = (chosen,) if chosen else BROWSERS
    return next(filter(None, map(shutil.which, names)), None)


def browser() -> str:
    """Return the path of the browser that the page's tests drive."""
    path = find("browser")
    if path is None:
        raise ToolError(needed(["browser"]))
    return path


def missing() -> list[str]:
    return [program for program in PACKAGES if find(program) is None]


def needed(programs: list[str]) -> str:
    """Say which programs are missing, and how to get them."""
    chosen = os.environ.get(BROWSER_VARIABLE)
    described = {program: program for program in PACKAGES}
    described["browser"] = (
        f"{BROWSER_VARIABLE}={chosen}, which is no program"
        if chosen
        else f"a browser ({', '.join(BROWSERS)}, or the path of another Chromium in the variable "
        f"{BROWSER_VARIABLE})"
    )
    return (
        f"The tests need what is not here: {'; '.join(described[name] for name in programs)}. "
        f"On Debian, as root: {' '.join(install_command(programs))}"
    )


def install_command(programs: list[str], *packages: str) -> list[str]:
    packages = [*(package for program in programs for package in PACKAGES[program]), *packages]
    return ["apt-get", "install", "--yes", "--no-install-recommends", *packages]


def main() -> int:
    """Install what is missing where this user can; else say what it is, with exit status 1."""
    programs = missing()
    libraries = [] if glob.glob(ALLOCATOR) else [ALLOCATORS_PACKAGE]
    installs = os.geteuid() == 0 and shutil.which("apt-get") is not None
    is_chosen = "browser" in programs and BROWSER_VARIABLE in os.environ
    if programs and (is_chosen or not installs):
        print(needed(programs), file=sys.stderr)
        return 1
    if not installs or not programs + libraries:
        return 0
    for command in (["apt-get", "update"], install_command(programs, *libraries)):
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
