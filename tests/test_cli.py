"""The command line as a whole: its flags, its messages, and what it prints of other libraries."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from absl import flags

from sd_tf.cli import dispatch, main, options
from sd_tf.cli.quiet import noise_held_back
from sd_tf.errors import SdTfError
from tests.exports import micro_export, micro_folder

ROOT = Path(__file__).parent.parent
NOISE = (
    *("absl::InitializeLog", "oneDNN", "cuda", "CUDA", "cuInit", "cpu_feature_guard"),
    *("custom gradients", "XLA service", "Compiled cluster", "MLIR"),
)
NORMAL = {k: v for k, v in os.environ.items() if k not in ("TF_CPP_MIN_LOG_LEVEL", "SD_TF_LOG")}
NORMAL["KERAS_BACKEND"] = "tensorflow"


def run(*command, cwd, **environment):
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**NORMAL, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


def sd_tf(*arguments, cwd=ROOT, **environment):
    return run(sys.executable, "-m", "sd_tf", *arguments, cwd=cwd, **environment)


# Flags


def by_absl(described, arguments):
    """What a top-level script makes of the arguments."""
    own = flags.FlagValues()
    options.define_flags(described, own)
    own(["script", *arguments])
    return options.parsed_flags(described, own)


def by_argparse(described, arguments):
    parser = argparse.ArgumentParser()
    options.add_arguments(parser, described)
    return parser.parse_args(arguments)


EXPORTING = (
    *("--checkpoint=a/b", "--out=x", "--batch_size=2", "--height=64", "--width=96"),
    *("--precision=float16", "--max_steps=7", "--scheduler=euler", "--guidance=none"),
    *("--guidance_rescale=0.5", "--jit_compile_text_encoder", "--target=tpu"),
    *("--disable_rewrites=a,b", "--components=decoder,text_encoder", "--verify=off"),
    *("--batch_sizes=1,4", "--sizes=64x64,64x96", "--prompt_chunks=2", "--text_to_image"),
    *("--overwrite", "--family=sd2-v", "--variant=fp16", "--revision=main", "--noema"),
    *("--adapter_slots=2", "--adapter_rank=4", "--adapter_layers=all"),
    *("--without=text_encoder_3", "--max_sequence_length=77", "--t5_tokenizer=t5"),
    "--storage=int8",
    *("--lora=a.safetensors@0.5", "--lora=b@c"),
    *("--controlnet=a", "--controlnet=b/c", "--ip_adapter=x.safetensors", "--image_encoder=y"),
    *("--image_prompts=2", "--reuse=3", "--tile=128", "--decoder=small", "--preview_decoder=a/b"),
    *("--embedding=<a>=a.safetensors", "--embeddings=b.safetensors"),
)
MEASURING = (
    *("--export_dir=a", "--jit_compile", "--nokerascv", "--all", "--random_weights"),
    *("--prompt=a cat", "--num_steps=3", "--repeat=2", "--scheduler=x", "--guidance_scale=2"),
    *("--seed=5", "--batch_size=2", "--height=128", "--width=128", "--compile_cache=c"),
    "--out=report",
)


@pytest.mark.parametrize(
    ("described", "arguments"),
    [
        (options.EXPORT, ()),
        (options.EXPORT, EXPORTING),
        (options.EXPORT, ("--output_dir=x",)),
        (options.BENCHMARK, ()),
        (options.BENCHMARK, MEASURING),
        (options.BENCHMARK, ("--output=x",)),
    ],
)
def test_the_scripts_take_what_the_commands_take(described, arguments):
    found = by_argparse(described, arguments)
    assert vars(by_absl(described, arguments)) == vars(found)
    if len(arguments) > 1:
        given = {argument.partition("=")[0].removeprefix("--") for argument in arguments}
        names = [{option.name, option.spelling, f"no{option.name}"} for option in described]
        assert all(given & spellings for spellings in names), "every option is tried"


def leaves(commands, words=()):
    for name, entry in commands.items():
        if isinstance(entry, dispatch.Group):
            yield from leaves(entry.commands, (*words, name))
        else:
            yield (*words, name), entry


def test_flags_are_spelled_one_way():
    """Words with underscores, each with a help; results go to --out, figures to --json, XLA is
    --jit_compile.
    """
    for words, entry in leaves(main.COMMANDS):
        if words[0] == "jax" or words[1:] == ("memory",):
            continue  # they choose Keras's other backend
        parser = argparse.ArgumentParser(prog=" ".join(words))
        __import__(entry.module, fromlist=["add_arguments"]).add_arguments(parser)
        for action in parser._actions[1:]:
            first = (action.option_strings or ["--positional"])[0]
            assert first.startswith("--") and "-" not in first[2:], (words, first)
            assert first not in ("--output", "--output_dir", "--no_xla"), words
            assert action.help, (words, first)


DOCUMENTED = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", DOCUMENTED, ids=lambda page: page.name)
def test_documented_commands_are_accepted(page):
    """Each `sd-tf` line of a code block parses; lines with … or [ ] show a form, not a command."""
    entries = dict(leaves(main.COMMANDS))
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^ {4,}(?:\.venv/bin/)?sd-tf (.*)", text, re.MULTILINE):
        words = shlex.split(line, comments=True)
        if words == ["--help"] or set("…[") & set(line):
            continue
        name = next(tuple(words[:n]) for n in (1, 2) if tuple(words[:n]) in entries)
        parser = argparse.ArgumentParser(prog=line, allow_abbrev=False)
        __import__(entries[name].module, fromlist=["add_arguments"]).add_arguments(parser)
        parser.parse_args(words[len(name) :])


@pytest.mark.parametrize("words", [("export", "--size=64x64"), ("serve", "load", "--client=1")])
def test_flags_are_not_abbreviated(words, capsys):
    """`--size` stays wrong when a flag that begins so is added."""
    with pytest.raises(SystemExit):
        main.main(list(words))
    command = " ".join(words[:-1])
    assert f"sd-tf {command}: error: unrecognized arguments: {words[-1]}" in capsys.readouterr().err


# Messages


def test_a_message_names_the_flag(capsys):
    assert dispatch.message(SdTfError("Set `overwrite`, or `other`."), {"overwrite": "--o"}) == (
        "Set --o, or `other`."
    )


def test_a_missing_package_is_named_with_what_installs_it(capsys, monkeypatch):
    def missing(name, extra):
        command = dispatch.Command("sd_tf.cli.weights", "a command", extra=extra)
        group = dispatch.Group("a group", {"one": command}, "serve")

        def absent(module):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(dispatch.importlib, "import_module", absent)
        status = dispatch.dispatch("prog", "about", {"group": group}, ["group", "one"])
        return status, capsys.readouterr().err

    assert missing("ray", None) == (1, "prog: ray is not installed: pip install 'sd_tf[serve]'\n")
    assert missing("scipy", "train")[1].endswith(": pip install 'sd_tf[train]'\n")
    assert missing("jax", "train")[1].endswith(": pip install 'sd_tf[jax]'\n")
    assert missing("jax", "tpu")[1].endswith(": pip install 'sd_tf[tpu]'\n")
    with pytest.raises(ModuleNotFoundError):  # a fault of this package is no advice
        missing("sd_tf.nowhere", None)


def test_a_command_s_backend_wins(monkeypatch):
    """Users of JAX may have chosen it for all programs."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    seen = []
    command = SimpleNamespace(
        add_arguments=lambda parser: seen.append(os.environ["KERAS_BACKEND"]),
        run=lambda options: 0,
    )
    monkeypatch.setattr(dispatch.importlib, "import_module", lambda module: command)
    entry = dispatch.Command("a.module", "a command", main.TENSORFLOW)
    assert dispatch.dispatch("prog", "about", {"one": entry}, ["one"]) == 0
    assert seen == ["tensorflow"]


def test_messages_of_the_library_and_of_its_commands(tmp_path, monkeypatch, capsys):
    """A parameter is called by the name that the reader typed."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    there = f"{tmp_path}/mine exists. Choose another {{}}, or set {{}}."
    assert main.main(["export", "--out", f"{tmp_path}/mine"]) == 1
    error = capsys.readouterr().err
    assert error == f"sd-tf export: {there.format('--out', '--overwrite')}\n"

    result = run(
        *(sys.executable, ROOT / "serialize_savedmodels.py", f"--output_dir={tmp_path}/mine"),
        cwd=tmp_path,
    )
    assert result.returncode == 1
    expected = there.format("--output_dir", "--overwrite")
    assert result.stderr == f"serialize_savedmodels.py: {expected}\n"

    # An export in the way of the embedded one is no matter of --out, which is for pictures.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exports").write_text("a file")
    assert main.main(["generate", "a red star", "--out", "pictures"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("sd-tf generate: ") and "--out" not in error


def test_a_wrong_call_is_told_before_tensorflow_is_imported(tmp_path):
    code = (
        "import sys\n"
        "from sd_tf.cli.main import main\n"
        "heavy = ('tensorflow', 'keras')\n"
        "print(main(sys.argv[1:]), [name for name in heavy if name in sys.modules])"
    )
    flags = [f"--export_dir={micro_export()}", "--reuse=2", f"--out={tmp_path / 'out'}"]
    result = run(sys.executable, "-c", code, "generate", "a cat", *flags, cwd=tmp_path)
    assert result.stdout == "1 []\n"
    assert result.stderr.startswith("sd-tf generate: --reuse")
    assert not (tmp_path / "out").exists()


# Quiet


@pytest.mark.long
def test_no_lines_of_libraries(tmp_path):
    """An export traces, compiles, saves and loads in silence; a real error still appears.

    The wheel's test watches the other commands.
    """
    export = tmp_path / "export"
    small = ["--height", "16", "--width", "16", "--max_steps", "2"]
    result = sd_tf("export", "--checkpoint", micro_folder(), "--out", export, *small, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert not [word for word in NOISE if word in result.stdout]
    (export / "text_encoder" / "1" / "saved_model.pb").write_bytes(b"broken")
    result = sd_tf("generate", "a", "--export_dir", export, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("sd-tf generate: ")


@pytest.mark.long
def test_debug_shows_all(tmp_path):
    flags = ["generate", "a", "--export_dir", micro_export(), "--num_steps", "1"]
    result = sd_tf(*flags, cwd=tmp_path, SD_TF_LOG="debug")
    assert result.returncode == 0
    assert "cpu_feature_guard" in result.stderr
    result = sd_tf("generate", "a", "--export_dir", "/none", cwd=tmp_path, SD_TF_LOG="debug")
    assert "Traceback" in result.stderr and "/none is not an export" in result.stderr


def test_what_is_held_back(capfd):
    def lines():
        os.write(2, b"I0000 00:00:1 port.cc:153] oneDNN\nE0000 00:00:1 x.cc:1] a true error\n")

    with noise_held_back():
        lines()
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "E0000 00:00:1 x.cc:1] a true error\n"
    with pytest.raises(ImportError), noise_held_back():
        lines()
        raise ImportError
    assert "oneDNN" in capfd.readouterr().err


def test_a_crash_is_reported():
    code = "import os\nfrom sd_tf.cli.quiet import noise_held_back\nwith noise_held_back():\n"
    result = run(sys.executable, "-c", f"{code}    os.abort()", cwd=ROOT)
    assert "Fatal Python error: Aborted" in result.stderr
