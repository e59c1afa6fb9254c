"""The exports of a soak: two of the same architecture, whose every component draws otherwise."""

import itertools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sd_tf.bench.peers import apart
from sd_tf.bench.peers.folders import export
from sd_tf.bench.plan import BenchError
from sd_tf.files import atomic
from sd_tf.runtime.manifest import FILE_NAME, Manifest
from sd_tf.serving.load import is_same

NAMES = ("first", "second")
FLAGS = {"batch_size": 4, "max_steps": 8}
# A tensor of each component that draws, and what it is multiplied by.
CHANGED = {
    "text_encoder/model.safetensors": ("text_model.final_layer_norm.weight", 1.5),
    "unet/diffusion_pytorch_model.safetensors": ("conv_out.weight", 1.1),
    "vae/diffusion_pytorch_model.safetensors": ("decoder.conv_out.weight", 0.8),
}
COMPONENTS = ("text_encoder", "diffusion_model", "decoder")
PROMPTS = ("a large red star on a dark blue background", "a small green ring on a gray background")
GUIDANCE = 4.0


@dataclass(frozen=True)
class Ask:
    """One picture that clients ask for."""

    prompt: str
    num_steps: int
    seed: int

    def call(self) -> dict:
        return {
            "prompt": self.prompt,
            "num_steps": self.num_steps,
            "guidance_scale": GUIDANCE,
            "seed": self.seed,
        }


# Two numbers of steps, so that batches form of some callers and not of others.
ASKS = tuple(Ask(*one) for one in itertools.product(PROMPTS, (4, 6), range(4)))
Pictures = dict[Ask, np.ndarray]


def make(work: Path) -> dict[str, Path]:
    """Return the folders of both exports by name; they are made on first use."""
    checkpoints = work / "checkpoints"
    if not checkpoints.is_dir():
        apart(make_checkpoints, checkpoints)
    exports = {name: work / "exports" / name for name in NAMES}
    for name, folder in exports.items():
        export(checkpoints / name, folder, FLAGS)
    return exports


def make_checkpoints(target: Path) -> None:
    """Copy the embedded checkpoint twice, the second time with a tensor of each component changed.

    Call it in a process of its own, as the package of checkpoints imports TensorFlow.
    """
    from safetensors.numpy import load_file, save_file

    from sd_tf.checkpoints import TINY_FOLDER

    with atomic.new_folder(target) as made:
        for name in NAMES:
            shutil.copytree(TINY_FOLDER, made / name)
        folder = made / NAMES[1]
        for place, (tensor, factor) in CHANGED.items():
            tensors = load_file(folder / place)
            tensors[tensor] *= np.asarray(factor, tensors[tensor].dtype)
            save_file(tensors, folder / place, {"format": "pt"})


def put(export_dir: Path, served: Path, damaged: bool = False) -> None:
    """Replace the served folder in one step, by a copy of an export.

    A damaged one has half of its decoder's weights, and is an export that was never seen.
    """
    with atomic.new_folder(served) as folder:
        shutil.copytree(export_dir, folder, dirs_exist_ok=True)
        if damaged:
            manifest = folder / FILE_NAME
            atomic.write(manifest, manifest.read_text(encoding="utf-8") + "\n")
            (weights,) = (folder / "decoder").rglob("variables.data-*")
            atomic.write(weights, weights.read_bytes()[: weights.stat().st_size // 2])


def expected(exports: Mapping[str, Path], compile_cache: Path) -> dict[str, Pictures]:
    """Draw every picture with each export in this process, as `Pipeline` does.

    One picture is also drawn by the components of two exports, in each way to mix them, to be sure
    that such a mixture can be told from what one export draws.
    """
    from sd_tf.runtime.chain import Chain, open_export
    from sd_tf.runtime.pipeline import SavedModelRunner, set_compile_cache
    from sd_tf.runtime.runner import Runner

    set_compile_cache(compile_cache)
    manifest, tokenizers = open_export(next(iter(exports.values())))
    runners = {
        name: SavedModelRunner(folder, Manifest.read(folder), True, None)
        for name, folder in exports.items()
    }

    class Mixed(Runner):
        def __init__(self, names):
            super().__init__(manifest, True)
            self.chosen = {
                component: runners[name] for component, name in zip(COMPONENTS, names, strict=True)
            }

        def call(self, component, endpoint, shape, **inputs):
            return self.chosen[component].call(component, endpoint, shape, **inputs)

    drawn, firsts = {}, []
    for names in itertools.product(exports, repeat=len(COMPONENTS)):
        chain = Chain(manifest, [Mixed(names)], tokenizers, 0.0)
        if len(set(names)) == 1:
            drawn[names[0]] = _draw(chain)
            firsts.append(drawn[names[0]][ASKS[0]])
        else:
            firsts.append(chain(**ASKS[0].call()).images[0])
    if any(is_same(one, other) for one, other in itertools.combinations(firsts, 2)):
        raise BenchError("The exports draw alike, so that their mixtures would not show.")
    return drawn


def _draw(chain) -> Pictures:
    pictures = {}
    for steps in sorted({ask.num_steps for ask in ASKS}):
        asks = [ask for ask in ASKS if ask.num_steps == steps]
        made = chain(
            [ask.prompt for ask in asks],
            seed=[ask.seed for ask in asks],
            num_steps=steps,
            guidance_scale=GUIDANCE,
        )
        pictures.update(zip(asks, made.images, strict=True))
    return pictures
