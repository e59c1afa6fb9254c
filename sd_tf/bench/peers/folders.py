"""The work folder: checkpoint, exports and OpenVINO's files, reused while they are still the same.

    sd15/             the random checkpoint
    exports/SIZE…/    our SavedModels       openvino/    the converted models
    run/SIZE/         inputs and outputs    logs/        what each worker printed

Beside what was made lies a `.key`: a hash of all that it was made from.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import sd_tf
from sd_tf.bench import LOG_LINES, BenchError
from sd_tf.bench.peers import apart
from sd_tf.bench.peers.process import HOME

RANDOM = "sd15"
NOT_EXPORTED = ("bench", "serving", "training", "checkpoints")  # code that no export depends on


def checkpoint(given: str | None, work: Path) -> Path:
    """The one that was given, or a random SD1.5, made once."""
    if given is not None:
        if not (Path(given) / "model_index.json").is_file():
            raise BenchError(f"--checkpoint is a diffusers folder. Received: {given!r}")
        return Path(given)
    folder = work / RANDOM
    if not folder.is_dir():
        partial = work / f"{RANDOM}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        apart(_random_checkpoint, partial)
        partial.rename(folder)
    return folder


def export(source: Path, folder: Path, flags: dict[str, object]) -> float | None:
    """Our SavedModels, by the command that users run; its seconds, None where nothing was done."""
    content = [_state_of(source), _code(), sorted(flags.items())]
    command = [sys.executable, str(HOME / "serialize_savedmodels.py"), f"--checkpoint={source}"]
    command += [f"--output_dir={folder}", "--verify=off", "--overwrite"]
    command += [f"--{name}={value}" for name, value in flags.items()]

    def make():
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": ""},
        )
        if result.returncode:
            tail = "\n".join(result.stderr.splitlines()[-LOG_LINES:])
            raise BenchError(f"serialize_savedmodels.py failed:\n{tail}")

    return _once(folder, content, make)


def convert(source: Path, folder: Path) -> float:
    """OpenVINO's models of any size; the seconds are kept with them."""
    from sd_tf.bench.peers.engines.openvino_ir import convert as make

    libraries = [importlib.metadata.version(name) for name in ("openvino", "diffusers", "torch")]
    seconds = _once(folder, [_state_of(source), libraries], lambda: apart(make, source, folder))
    record = folder / "seconds.json"
    if seconds is not None:
        record.write_text(json.dumps(seconds), encoding="utf-8")
    return json.loads(record.read_text(encoding="utf-8"))


def _once(folder: Path, content, make: Callable[[], None]) -> float | None:
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    file = folder.with_name(folder.name + ".key")
    if folder.is_dir() and file.is_file() and file.read_text(encoding="utf-8") == key:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    make()
    seconds = time.perf_counter() - start
    file.write_text(key, encoding="utf-8")
    return seconds


def _state_of(folder: Path) -> list:
    """Sizes and times instead of gigabytes of contents."""
    files = sorted(path for path in folder.resolve().rglob("*") if path.is_file())
    return [str(folder.resolve())] + [
        [str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files
    ]


def _code() -> str:
    """Of what an export is made by: an export of older code is not what is to be measured."""
    package = Path(sd_tf.__file__).parent
    found = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).parts[0] not in NOT_EXPORTED:
            found.update(file.read_bytes())
    return found.hexdigest()


# The random SD1.5


def _random_checkpoint(folder: Path) -> None:
    """As diffusers builds and saves it; the published configurations."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    from sd_tf.tokenizer import ClipTokenizer

    ClipTokenizer.clip(49407).save(folder / "clip")
    text = CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(128, 256, 512, 512),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
    )
    unet = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    scheduler = diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        steps_offset=1,
        clip_sample=False,
        set_alpha_to_one=False,
    )
    diffusers.StableDiffusionPipeline(
        vae=_randomized(vae, 1),
        text_encoder=_randomized(CLIPTextModel(text), 2),
        tokenizer=CLIPTokenizer.from_pretrained(folder / "clip"),
        unet=_randomized(unet, 3),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    shutil.rmtree(folder / "clip")


def _randomized(module, seed: int):
    """Scaled so that activations keep their size: of flat outputs all would seem to agree."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.1 * noise + (1.0 if name.endswith("weight") else 0.0))
            elif "embedding" in name.split(".")[-2]:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
    return module.eval()
