"""What `make test` does where a program that the tests need is not there."""

import subprocess

import pytest

from tests import tools


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A function that makes these the only programs there are; what is run is recorded."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(tools.BROWSER_VARIABLE, raising=False)
    started = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: started.append(command))
    allocator = tmp_path / "libjemalloc.so.2"
    allocator.touch()
    monkeypatch.setattr(tools, "ALLOCATOR", str(allocator))

    def make(*names):
        for name in names:
            path = tmp_path / name
            path.touch()
            path.chmod(0o755)
        return started

    return make


@pytest.mark.parametrize("name", tools.BROWSERS)
def test_a_browser_that_is_there_is_used(programs, tmp_path, name):
    started = programs(name, "curl", "openssl", "apt-get")
    assert tools.browser() == str(tmp_path / name)
    assert tools.main() == 0 and started == []


def test_a_browser_that_is_named(programs, tmp_path, monkeypatch, capsys):
    started = programs("chromium", "mine", "curl", "openssl", "apt-get")
    monkeypatch.setenv(tools.BROWSER_VARIABLE, str(tmp_path / "mine"))
    assert tools.browser() == str(tmp_path / "mine")
    monkeypatch.setenv(tools.BROWSER_VARIABLE, "/nowhere/chrome")
    assert tools.main() == 1 and started == []
    assert "SD_TF_BROWSER=/nowhere/chrome, which is no program" in capsys.readouterr().err
    with pytest.raises(tools.ToolError, match="SD_TF_BROWSER=/nowhere/chrome"):
        tools.browser()


@pytest.mark.parametrize(("user", "there"), [(1000, ["apt-get"]), (0, [])])
def test_without_root_or_off_debian_it_says_what_is_needed(
    programs, monkeypatch, capsys, user, there
):
    started = programs("openssl", *there)
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert tools.main() == 1 and started == []
    assert capsys.readouterr().err == (
        "The tests need what is not here: a browser (chromium, chromium-browser, google-chrome, "
        "google-chrome-stable, or the path of another Chromium in the variable SD_TF_BROWSER); "
        "curl. On Debian, as root: apt-get install --yes --no-install-recommends chromium "
        "fonts-dejavu-core curl\n"
    )


def test_root_on_debian_installs_what_is_missing_alone(programs, monkeypatch):
    started = programs("chromium-browser", "curl", "apt-get")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert tools.main() == 0
    assert started == [["apt-get", "update"], tools.install_command(["openssl"])]


def test_the_allocator_is_installed_but_not_needed(programs, monkeypatch):
    started = programs("chromium", "curl", "openssl", "apt-get")
    monkeypatch.setattr(tools, "ALLOCATOR", "/nowhere/*.so")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert tools.main() == 0 and started == []
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert tools.main() == 0
    assert started == [["apt-get", "update"], tools.install_command([], "libjemalloc2")]
