"""Make pictures from prompts: divide a call into batches, and have runners make them.

Runners decide where the models run: as SavedModels in this process (`pipeline`), or behind a server
(`serving.client`). So nothing here needs TensorFlow.
"""

import inspect
import itertools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from PIL import Image

from sd_tf.adapters import Adapter
from sd_tf.runtime import call as calls
from sd_tf.runtime.adapters import (
    Layers,
    SwitchLock,
    check_switchable,
    opened,
    rows_of,
    with_adapter,
    without_adapter,
)
from sd_tf.runtime.call import Call
from sd_tf.runtime.capabilities import WEIGHTED, check_image_encoder
from sd_tf.runtime.manifest import ExportError, Manifest
from sd_tf.runtime.needed_pictures import blank_pictures
from sd_tf.runtime.parameter import CallError
from sd_tf.runtime.pictures import to_model
from sd_tf.runtime.request import Request, read_request
from sd_tf.runtime.runner import Callback, Runner, Watch
from sd_tf.runtime.shapes import Shape
from sd_tf.runtime.text_inputs import text_inputs
from sd_tf.tokenizer.open import Tokenizer, open_tokenizer

NEEDED = ("text_encoder", "diffusion_model", "decoder")


@dataclass(frozen=True)
class Result:
    """The pictures of a call, and how they were made."""

    images: np.ndarray  # uint8 (N, H, W, 3)
    each: Sequence[Call]  # the complete call that made each picture
    timings: dict[str, float]  # seconds: text_encoder, diffusion_model, decoder, …, total

    @property
    def seeds(self) -> list[int]:
        return [call.seed for call in self.each]

    def pil(self) -> list[Image.Image]:
        return [Image.fromarray(image) for image in self.images]


class Chain:
    """The components of an export as one function; see `__call__`."""

    def __init__(
        self,
        manifest: Manifest,
        replicas: Sequence[Runner],
        tokenizers,
        load_seconds,
        layers: Mapping[str, Layers] = MappingProxyType({}),
    ):
        """Put the parts together; `layers` are those that adapters may change."""
        self.manifest = manifest
        self.load_seconds = load_seconds
        self._replicas = replicas
        self._tokenizers = tokenizers
        self._layers, self._switch = layers, SwitchLock()

    def __call__(
        self, *values, callback: Callback | None = None, callback_every: int = 1, **parameters
    ) -> Result:
        start = time.perf_counter()
        if callback_every < 1:
            raise CallError(
                "callback_every", f"callback_every is at least 1. Received: {callback_every}"
            )
        with self._switch.calling():
            request = read_request(self.manifest, Call.of(*values, **parameters))
            images, timings = self._make(request, Watch(callback, callback_every))
        timings["total"] = time.perf_counter() - start
        return Result(images, request.each, timings)

    __call__.__signature__ = calls.signature(
        inspect.Parameter("callback", inspect.Parameter.KEYWORD_ONLY, default=None),
        inspect.Parameter("callback_every", inspect.Parameter.KEYWORD_ONLY, default=1),
    )
    __call__.__doc__ = f"""Make one picture for each prompt, in those batches that cost least.

        Pictures are PIL images or uint8 (H, W, 3), masks PIL images or uint8 (H, W). The result's
        `each` has the complete parameters of each picture, its `seeds` the seeds.

        Args:
{calls.documentation()}
            callback: called with (done, calls, latents) after every `callback_every` model calls
                and the last one; False ends the batch as it is then.
            callback_every: model calls between two calls of `callback`.
        """

    def _make(self, request: Request, watch: Watch) -> tuple[np.ndarray, dict[str, float]]:
        """Divide the batches among the replicas; return all pictures and each stage's seconds."""
        count = len(request.each)
        batches = self.manifest.shapes.divided(count)
        ends = list(itertools.accumulate(batches))
        chunks = [range(end - batch, end) for end, batch in zip(ends, batches, strict=True)]
        jobs = [(chunk, self._tokens(request, chunk)) for chunk in chunks]
        shares = [jobs[i :: len(self._replicas)] for i in range(len(self._replicas))]

        def work(replica, share):
            return [(chunk, replica.run(request, chunk, ids, watch)) for chunk, ids in share]

        if len(self._replicas) == 1:
            done = work(self._replicas[0], shares[0])
        else:
            with ThreadPoolExecutor(len(self._replicas)) as pool:
                done = [out for part in pool.map(work, self._replicas, shares) for out in part]
        done.sort(key=lambda item: item[0].start)
        timings = {}
        for _, (_, seconds) in done:
            _add(timings, seconds)
        return np.concatenate([images for _, (images, _) in done])[:count], timings

    def warm_up(self, shapes: Sequence[Shape] | None = None) -> dict[str, float]:
        """Compile everything that calls of these shapes need; return the seconds of each stage.

        `shapes` None: the export's first.
        """
        total: dict[str, float] = {}
        for shape in [self.manifest.shapes.first] if shapes is None else shapes:
            blank = blank_pictures(self.manifest, self.manifest.shapes.checked(shape).size)
            call = Call(
                [""] * shape.batch_size,
                height=shape.height,
                width=shape.width,
                num_steps=self.manifest.schedulers[self.manifest.default_sampler].least_steps,
                seed=0,
                **blank,
            )
            request = read_request(self.manifest, call)
            for replica in self._replicas:
                chunk = range(shape.batch_size)
                tokens = self._tokens(request, chunk)
                _, seconds = replica.run(request, chunk, tokens, Watch(None, 1))
                _add(total, seconds)
        return {**total, "total": sum(total.values())}

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that a call may use."""
        return self.manifest.adapters.names

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Put an adapter's file into a free place, or into its own place anew.

        Calls that run end before; nothing is compiled.
        """
        adapter = opened(path, self._layers, self.manifest.adapters)
        rows = self._rows(adapter)  # reads the file: if that fails, nothing was changed
        with self._switch.changing():
            places = with_adapter(self.manifest.adapters, name, adapter)
            self._fill(places.loaded[name].slot, rows)
            self.manifest = replace(self.manifest, adapters=places)

    def unload_adapter(self, name: str) -> None:
        """Free an adapter's place."""
        check_switchable(self._layers, self.manifest.adapters)
        with self._switch.changing():
            before = self.manifest.adapters
            places = without_adapter(before, name)
            self._fill(before.loaded[name].slot, self._rows(None))
            self.manifest = replace(self.manifest, adapters=places)

    def _rows(self, adapter: Adapter | None) -> dict[str, dict[str, np.ndarray]]:
        """Return what each component's places hold of an adapter, or zeros."""
        places = self.manifest.adapters
        return {name: rows_of(adapter, layers, places) for name, layers in self._layers.items()}

    def _fill(self, slot: int, rows: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Write each component's rows into a slot of all replicas."""
        first = slot * self.manifest.adapters.rank
        for component, own in rows.items():
            for replica in self._replicas:
                replica.put(component, own, first)

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """Decode latents (B, h, w, C), as a callback gets them, into uint8 pictures."""
        return self._replicas[0].decode(latents)

    def preview(self, latents: np.ndarray) -> np.ndarray:
        """Decode latents as `decode` does, by the small decoder where the export has one."""
        return self._replicas[0].preview(latents)

    def encode(self, pictures: np.ndarray) -> np.ndarray:
        """Encode uint8 pictures (B, H, W, 3) as the latents that `decode` takes."""
        check_image_encoder(self.manifest)
        return self._replicas[0].encode(to_model(pictures))

    def count_tokens(self, text: str) -> int:
        """Count a text's tokens, as the first text encoder's tokenizer divides it."""
        return next(iter(self._tokenizers.values())).count(text)

    def _tokens(self, request: Request, chunk: range) -> dict[str, np.ndarray]:
        """Tokenize a chunk's prompts, and its negative prompts where there are any."""
        negative = None
        if request.shared.negative_prompt is not None:
            negative = request.chunk("negative_prompt", chunk)
        return text_inputs(
            self.manifest,
            list(self._tokenizers.values()),
            request.chunk("prompt", chunk),
            negative,
            weighted=request.shared.prompt_syntax == WEIGHTED,
        )


def _add(total: dict[str, float], seconds: dict[str, float]) -> None:
    for name, value in seconds.items():
        total[name] = total.get(name, 0.0) + value


def open_export(folder: Path) -> tuple[Manifest, dict[str, Tokenizer]]:
    """Read an export's manifest and tokenizers; runners load its models."""
    manifest = Manifest.read(folder)
    if missing := [name for name in NEEDED if name not in manifest.components]:
        raise ExportError(
            f"{folder} holds no {', '.join(missing)}, which a pipeline needs. Export the missing "
            f"components: {', '.join(missing)}."
        )
    tokenizers = {
        name: open_tokenizer(folder / place) for name, place in manifest.tokenizers.items()
    }
    return manifest, tokenizers
